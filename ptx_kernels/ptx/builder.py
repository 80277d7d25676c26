"""The kernel builder: `with` runs on the GPU, Python's own `for` and `if` run while the kernel is
built.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import CodeType
from typing import Any

from . import mbarrier, tensor
from .arguments import checked
from .errors import KernelError, Line, call_path
from .instructions import BASELINE, INSTRUCTIONS, Version
from .module import MAX_SHARED_BYTES, Buffer, Kernel, Role
from .types import Type, f32, pred, u32, u64
from .values import Operand, Pointer, Value, Var, immediate

WARP = 32
STATIC_SHARED_BYTES = 48 << 10
MAX_LINES = 50_000  # ptxas takes minutes for more, and no instruction cache holds them
_FULL_MASK = "-1"
_DYNAMIC_SHARED = "dynamic_shared"
_PREFIXES = {"pred": "%p", "b16": "%h", "b32": "%r", "b64": "%rd", "f32": "%f"}


class Branch:
    """What `k.when` yields: `otherwise()` is the else of this very branch."""

    def __init__(self, builder: Builder, condition: Value) -> None:
        self._builder = builder
        self._condition = condition

    def otherwise(self) -> contextlib.AbstractContextManager[Branch]:
        return self._builder.when(~self._condition)


class Builder:
    """Collects one kernel's PTX. Kernel functions get it as `k`.

    `name` is the entry's name, as profiles show it: the function's, unless the function sets
    another.
    """

    def __init__(self, name: str, code: CodeType | None = None) -> None:
        self.name = name
        self._code = code  # of the kernel's function, for the table of lines
        self._lines: list[
            tuple[str, tuple[Line, ...]]
        ] = []  # text, and the Python lines that wrote it
        self._registers: dict[str, int] = dict.fromkeys(_PREFIXES, 0)
        self._buffers: list[Buffer] = []
        self._pointers: list[tuple[str, Value, tuple[Line, ...]]] = []
        self._shared: list[str] = []
        self._static_bytes = 0
        self._dynamic_bytes = 0  # of the one extern array that all dynamic shared memory lies in
        self._labels = 0
        self._needs = BASELINE
        self._geometry: tuple[tuple[int, int, int], tuple[int, int, int]] | None = None
        self._prologue: list[
            tuple[str, tuple[Line, ...]]
        ] = []  # runs before everything: what every branch may use
        self._special: dict[str, Value] = {}
        self._directives: list[str] = []

    # --- text ---

    def write(self, line: str) -> None:
        if len(self._lines) >= MAX_LINES:
            raise KernelError(
                f"{self.name} would have more than {MAX_LINES} lines: something is unrolled too often"
            )
        self._lines.append((f"  {line}", call_path(self._code)))

    def require(self, version: Version) -> None:
        """Raises the PTX version and target that the text declares; they stay the lowest that
        serve.
        """
        self._needs = (max(self._needs[0], version[0]), max(self._needs[1], version[1]))

    def register(self, type: Type) -> Value:
        return Value(self, type, self._new_register(type))

    def _new_register(self, type: Type) -> str:
        number = self._registers[type.register]
        self._registers[type.register] += 1
        return f"{_PREFIXES[type.register]}{number}"

    def operand(self, value: Operand, type: Type, what: str) -> str:
        """The text of `value` where `what` needs a `type`; a Python number becomes an immediate."""
        if not isinstance(value, Value):
            return immediate(value, type)
        if value.type != type:
            raise KernelError(f"{what} needs {type}, got {value.type}")
        return value.name

    def emit(
        self, opcode: str, *operands: str, result: Type | None = None, into: Var | None = None
    ) -> Value:
        """Writes an instruction of the table; the result is a new value, or the variable `into`."""
        row = INSTRUCTIONS.get(opcode)
        if row is None:
            raise KernelError(f"{opcode} is not in the instruction table")
        if len(operands) != len(row.operands):
            raise KernelError(f"{opcode} takes {len(row.operands)} operands, got {len(operands)}")
        self.require(row.needs)
        value = into if into is not None else self.register(result or row.result)
        self.write(row.template(value.name, operands))
        return value

    def instruction(self, opcode: str, *operands: Operand) -> Value:
        """Any row of the instruction table with typed operands, for what has no operator."""
        row = INSTRUCTIONS.get(opcode)
        if row is None:
            raise KernelError(f"{opcode} is not in the instruction table")
        return self.emit(
            opcode,
            *(self.operand(o, t, opcode) for o, t in zip(operands, row.operands, strict=True)),
        )

    def guard(self, condition: Value | None) -> str:
        if condition is None:
            return ""
        if condition.type is not pred:
            raise KernelError(f"a condition is a predicate, not {condition.type}")
        return f"@{condition.name} "

    def zero(self, value: Value) -> None:
        register = value.type.register
        number = immediate(0.0, f32) if register == "f32" else "0"
        self.write(f"mov.{register} {value.name}, {number};")

    # --- buffers and launch geometry ---

    def input(
        self, name: str, type: Type, shape: tuple[int, ...], *, constant: bool = False
    ) -> Pointer:
        """A buffer that the kernel only reads.

        `constant`: neither does any kernel launched shortly before write it (weights), so loads are
        non-coherent.
        """
        return self._buffer(name, type, shape, "in", constant)

    def output(self, name: str, type: Type, shape: tuple[int, ...]) -> Pointer:
        """A result of its own; the kernel must write all of it."""
        return self._buffer(name, type, shape, "out")

    def inout(self, name: str, type: Type, shape: tuple[int, ...]) -> Pointer:
        """A buffer updated in place; what the kernel does not write stays."""
        return self._buffer(name, type, shape, "inout")

    def _buffer(
        self, name: str, type: Type, shape: tuple[int, ...], role: Role, constant: bool = False
    ) -> Pointer:
        self._buffers.append(Buffer(name, type, shape, role))
        address = self.register(u64)
        self._pointers.append(
            (name + ("_out" if role == "inout" else ""), address, call_path(self._code))
        )
        return Pointer(self, type, address, constant=constant, shape=shape)

    def shared(
        self, name: str, type: Type, shape: tuple[int, ...], *, dynamic: bool = False
    ) -> Pointer:
        """Shared memory of the block, 16-byte aligned: static, or, for more than 48 KB in all,
        `dynamic`.

        Raises KernelError for more than MAX_SHARED_BYTES in all, whichever device the kernel is
        for.
        """
        nbytes = math.prod(shape) * type.size
        total = self._static_bytes + self._dynamic_bytes + -(-nbytes // 16) * 16
        if total > MAX_SHARED_BYTES:
            raise KernelError(
                f"{self.name}: shared {name} and what came before it take {total} bytes of shared memory, of "
                f"{MAX_SHARED_BYTES} that a block can have"
            )
        address = self.register(u32)
        if dynamic:
            offset = self._dynamic_bytes
            self._dynamic_bytes += -(-nbytes // 16) * 16
            self.write(f"mov.u32 {address.name}, {_DYNAMIC_SHARED};")
            return Pointer(self, type, address, space="shared", offset=offset, shape=shape)
        self._static_bytes += -(-nbytes // 16) * 16
        if self._static_bytes > STATIC_SHARED_BYTES:
            raise KernelError(
                f"shared {name} of {nbytes} bytes: {self._static_bytes} in all, and {STATIC_SHARED_BYTES} may be static"
            )
        self._shared.append(f".shared .align 16 .b8 {name}[{nbytes}];")
        self.write(f"mov.u32 {address.name}, {name};")
        return Pointer(self, type, address, space="shared", shape=shape)

    def launch(
        self, grid: tuple[int, ...], threads: int, *, resident_blocks: int | None = None
    ) -> None:
        """Launch geometry: blocks along x, y, z and threads per block (a multiple of 32).

        `resident_blocks`: how many blocks a multiprocessor's registers must have room for at once.
        ptxas gives each thread as many registers as that allows, and so hoists more loads above
        their uses; without it, ptxas aims at an occupancy of its own choice.
        """
        if threads % WARP or not 0 < threads <= 1024:
            raise KernelError(f"threads={threads} must be a multiple of 32, at most 1024")
        x, y, z = (*grid, 1, 1)[:3]
        if not (0 < x < 1 << 31 and 0 < y < 1 << 16 and 0 < z < 1 << 16):
            raise KernelError(f"grid={grid} is empty or larger than CUDA allows")
        if x * threads >= 1 << 32:
            raise KernelError(
                f"grid={grid} of {threads} threads: a thread's number must fit in 32 bits"
            )
        self._geometry = ((x, y, z), (threads, 1, 1))
        self._directives = [f".reqntid {threads}, 1, 1"]
        if resident_blocks is not None:
            self._directives.append(f".minnctapersm {resident_blocks}")

    # --- who am I
    # -------------------------------------------------------------------------------------------------

    def _read_special(self, name: str) -> Value:
        if name not in self._special:
            self._special[name] = self._derive(f"mov.u32 {{}}, {name};")
        return self._special[name]

    def _derive(self, line: str) -> Value:
        value = self.register(u32)
        self._prologue.append((f"  {line.format(value.name)}", call_path(self._code)))
        return value

    def block_id(self, axis: str = "x") -> Value:
        return self._read_special(f"%ctaid.{axis}")

    @property
    def thread_id(self) -> Value:
        return self._read_special("%tid.x")

    @functools.cached_property
    def lane_id(self) -> Value:
        return self._derive(f"and.b32 {{}}, {self.thread_id.name}, {WARP - 1};")

    @functools.cached_property
    def warp_id(self) -> Value:
        return self._derive(f"shr.u32 {{}}, {self.thread_id.name}, 5;")

    # --- values ---

    def var(self, type: Type, initial: Operand) -> Var:
        """A mutable register, set to `initial`."""
        variable = Var(self, type, self._new_register(type))
        variable.set(initial)
        return variable

    def const(self, type: Type, value: int | float) -> Value:
        """A number in a register, where an instruction allows no immediate."""
        result = self.register(type)
        self.write(f"mov.{type.register} {result.name}, {immediate(value, type)};")
        return result

    def fma(self, a: Value, b: Operand, c: Operand) -> Value:
        """a * b + c with one rounding, f32."""
        return self.instruction("fma.rn.f32", a, b, c)

    def accumulate(self, total: Var, a: Value, b: Operand) -> None:
        """total = a * b + total with one rounding, f32."""
        self.emit("fma.rn.f32", a.name, self.operand(b, f32, "fma"), total.name, into=total)

    def dp4a(self, a: Value, b: Value, c: Operand, *, unsigned_a: bool = False) -> Value:
        """c + the dot product of four bytes: a's signed (or unsigned), b's signed; s32."""
        return self.instruction("dp4a.u32.s32" if unsigned_a else "dp4a.s32.s32", a, b, c)

    def select(self, condition: Value, a: Value, b: Operand) -> Value:
        """a where the condition holds, else b."""
        opcode = {"b32": "selp.b32", "b64": "selp.b64", "f32": "selp.f32"}[a.type.register]
        return self.emit(
            opcode, a.name, self.operand(b, a.type, opcode), condition.name, result=a.type
        )

    def minimum(self, a: Value, b: Operand) -> Value:
        return self.emit(f"min.{a.type}", a.name, self.operand(b, a.type, "min"), result=a.type)

    def maximum(self, a: Value, b: Operand) -> Value:
        """The larger; of f32, a NaN operand is dropped."""
        return self.emit(f"max.{a.type}", a.name, self.operand(b, a.type, "max"), result=a.type)

    # --- control flow ---

    def label(self) -> str:
        self._labels += 1
        return f"$L{self._labels}"

    def mark(self, label: str) -> None:
        self._lines.append((f"{label}:", call_path(self._code)))

    @contextlib.contextmanager
    def when(self, condition: Value) -> Iterator[Branch]:
        """Threads for which the condition holds run the body: `with k.when(c) as branch: ...`,
        then `with branch.otherwise(): ...` runs the others."""
        self.guard(condition)
        end = self.label()
        self.write(f"@!{condition.name} bra {end};")
        yield Branch(self, condition)
        self.mark(end)

    @contextlib.contextmanager
    def loop(self, start: Operand, stop: Operand, step: int = 1) -> Iterator[Value]:
        """Counts a u32 from `start` while it is below `stop`. The index is read-only in the body.

        Two Python ints whose loop runs at least once need no test before the first round.
        """
        index = self.var(u32, start)
        limit = self.operand(stop, u32, "loop")
        top, end = self.label(), self.label()
        if not (isinstance(start, int) and isinstance(stop, int) and start < stop):
            self.write(f"@{self.emit('setp.ge.u32', index.name, limit).name} bra {end};")
        self.mark(top)
        yield Value(self, u32, index.name)
        index += step
        self.write(f"@{self.emit('setp.lt.u32', index.name, limit).name} bra {top};")
        self.mark(end)

    # --- warps and blocks ---

    def barrier(self) -> None:
        """All threads of the block; every one must come here."""
        self.write("bar.sync 0;")

    def warp_barrier(self) -> None:
        """All lanes of the warp; what they did in memory before it is in order with what they do after it."""
        self.write(f"bar.warp.sync {_FULL_MASK};")

    def shuffle_xor(self, value: Value, mask: int) -> Value:
        """The value of lane (lane ^ mask); all 32 lanes must take part."""
        return self._shuffle("bfly", value, mask)

    def shuffle(self, value: Value, lane: int, *, lanes: int = WARP) -> Value:
        """The value of lane `lane` of each group of `lanes`, a power of two; all 32 lanes must take part."""
        return self._shuffle("idx", value, lane, WARP - lanes)

    def _shuffle(self, mode: str, value: Value, lane: int, fixed: int = 0) -> Value:
        """`fixed`: bits of a lane's number that are those of the lane that asks."""
        if value.type.register not in ("b32", "f32"):
            raise KernelError(f"a shuffle moves 32 bits, not {value.type}")
        result = self.register(value.type)
        self.write(
            f"shfl.sync.{mode}.b32 {result.name}, {value.name}, {lane}, {fixed << 8 | 31}, {_FULL_MASK};"
        )
        return result

    def warp_reduce(
        self,
        value: Value,
        combine: Callable[[Value, Value], Value],
        *,
        lanes: int = WARP,
        stride: int = 1,
    ) -> Value:
        """Combines `lanes` lanes that lie `stride` apart by a butterfly; every one of them gets the result."""
        mask = lanes * stride // 2
        while mask >= stride:
            value = combine(value, self.shuffle_xor(value, mask))
            mask //= 2
        return value

    def warp_sum(self, value: Value, *, lanes: int = WARP, stride: int = 1) -> Value:
        return self.warp_reduce(value, lambda a, b: a + b, lanes=lanes, stride=stride)

    def warp_max(self, value: Value, *, lanes: int = WARP, stride: int = 1) -> Value:
        return self.warp_reduce(value, self.maximum, lanes=lanes, stride=stride)

    # --- tensor cores and asynchronous copies ---

    mma = tensor.mma
    ldmatrix = tensor.ldmatrix
    cp_async = tensor.cp_async
    cp_async_commit = tensor.cp_async_commit
    cp_async_wait = tensor.cp_async_wait
    mbarrier_init = mbarrier.mbarrier_init
    mbarrier_arrive = mbarrier.mbarrier_arrive
    mbarrier_wait = mbarrier.mbarrier_wait
    bulk_copy = mbarrier.bulk_copy
    fence_async = mbarrier.fence_async

    # --- the end ---

    def finish(self) -> Kernel:
        if self._geometry is None:
            raise KernelError(f"kernel {self.name} never called k.launch(grid, threads)")
        grid, block = self._geometry
        operands = [b.name for b in self._buffers if b.role != "out"]
        results = [
            b.name + ("_out" if b.role == "inout" else "") for b in self._buffers if b.role != "in"
        ]
        (major, minor), sm = self._needs
        parameters = ",\n".join(f"  .param .u64 {name}" for name in operands + results)
        text = [
            f".version {major}.{minor}",
            f".target sm_{sm}",
            ".address_size 64",
            "",
            *(
                [f".extern .shared .align 16 .b8 {_DYNAMIC_SHARED}[];"]
                if self._dynamic_bytes
                else []
            ),
            f".visible .entry {self.name}(",
            parameters,
            ")",
            *self._directives,
            "{",
        ]
        text += [f"  {line}" for line in self._shared]
        text += [
            f"  .reg .{register} {_PREFIXES[register]}<{count}>;"
            for register, count in self._registers.items()
            if count
        ]
        head = "\n".join(text)
        loads = [
            (f"  ld.param.u64 {address.name}, [{name}];", line)
            for name, address, line in self._pointers
        ]
        body = [*self._prologue, *loads, *self._lines]
        lines = {number: line for number, (_, line) in enumerate(body, head.count("\n") + 2)}
        whole = "\n".join([head, *(line for line, _ in body), "  ret;", "}", ""])
        return Kernel(
            self.name, whole, tuple(self._buffers), grid, block, self._dynamic_bytes, lines
        )


def kernel(function: Callable[..., None]) -> Callable[..., Kernel]:
    """Makes a kernel function `f(k, *, ...)` a builder of kernels: `f(...)` returns the built `Kernel`, cached.

    What it is given must be of the types that the function declares; see `arguments.checked`.
    """

    @functools.cache
    def build(arguments: tuple[tuple[str, Any], ...]) -> Kernel:
        builder = Builder(function.__name__, function.__code__)
        function(builder, **dict(arguments))
        given = (function.__kwdefaults__ or {}) | dict(arguments)
        return replace(builder.finish(), family=function.__name__, arguments=given)

    @functools.wraps(function)
    def wrapper(**arguments: Any) -> Kernel:
        return build(tuple(sorted(checked(function, arguments).items())))

    return wrapper


__all__ = ["WARP", "Branch", "Builder", "kernel"]
