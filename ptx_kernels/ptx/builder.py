"""Kernel builder, passed to kernel functions as `k`: buffers, launch, instructions, control flow.

`with k.when(...)` and `with k.loop(...)` become control flow on the GPU; Python's own `for` and
`if` run while the kernel is built.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from types import CodeType

from . import mbarrier, older, values, warp
from .errors import KernelError, Line
from .instructions import CLUSTER_BARRIERS, CLUSTERS
from .issue import issue
from .module import MAX_CLUSTER, Buffer, Kernel
from .oldest import COMMON, block_shared_bytes
from .pointer import Pointer
from .split import split_bytes
from .text import Text
from .types import Type, f32, u32, u64
from .values import Operand, Value, Var, apply, emit, guard, immediate, instruction, operand, spell
from .warp import WARP

STATIC_SHARED_BYTES = 48 << 10
_DYNAMIC_SHARED = "dynamic_shared"


class Branch:
    """A branch emitted by `k.when`; `otherwise()` emits its else branch."""

    def __init__(self, builder: Builder, condition: Value) -> None:
        self._builder = builder
        self._condition = condition

    def otherwise(self) -> contextlib.AbstractContextManager[Branch]:
        return self._builder.when(~self._condition)


class Builder(Text):
    """A kernel under construction: its methods emit PTX and declare buffers.

    `name` is the entry's name, which profiles show. It is the function's name unless the function
    sets another.
    """

    def __init__(self, name: str, code: CodeType | None = None, oldest: int = COMMON) -> None:
        super().__init__(name, code, oldest)
        self._buffers: list[Buffer] = []
        self._pointers: list[tuple[str, Value, tuple[Line, ...]]] = []
        self._shared: list[str] = []
        self._tables: dict[str, Pointer] = {}
        self._table_lines: list[str] = []
        self._static_bytes = 0
        # size of the one extern array that holds all dynamic shared memory: now, and at most
        self._dynamic_bytes = self._most_dynamic_bytes = 0
        self._geometry: tuple[tuple[int, int, int], tuple[int, int, int]] | None = None
        self._resident_blocks: int | None = None
        self._cluster = (1, 1, 1)
        self._special: dict[str, Value] = {}
        self._directives: list[str] = []
        #: Function that writes the prefetches after the kernel's last loads, called once.
        self.behind_loads: Callable[[], None] | None = None

    # --- buffers and launch geometry ---

    def input(
        self,
        name: str,
        type: Type,
        shape: tuple[int, ...],
        *,
        constant: bool = False,
        streamed: bool = False,
        ahead: bool = False,
    ) -> Pointer:
        """Declares a buffer that the kernel only reads; returns its pointer.

        Args:
          constant: no kernel launched shortly before writes the buffer (weights), so loads are
            non-coherent.
          streamed: constant, and read only once; loads bypass L1 (sm_80).
          ahead: the kernel only prefetches bytes of it for the next launch.
        """
        buffer = Buffer(name, type, shape, "in", ahead)
        return self._buffer(buffer, constant or streamed, streamed)

    def output(self, name: str, type: Type, shape: tuple[int, ...]) -> Pointer:
        """Declares a result buffer, all of which the kernel must write; returns its pointer."""
        return self._buffer(Buffer(name, type, shape, "out"))

    def inout(self, name: str, type: Type, shape: tuple[int, ...]) -> Pointer:
        """Declares a buffer that is updated in place; returns its pointer.

        Bytes that the kernel does not write keep their value.
        """
        return self._buffer(Buffer(name, type, shape, "inout"))

    def _buffer(self, buffer: Buffer, constant: bool = False, streamed: bool = False) -> Pointer:
        self._buffers.append(buffer)
        address = self.register(u64)
        name = buffer.name + ("_out" if buffer.role == "inout" else "")
        self._pointers.append((name, address, self.here()))
        return Pointer(
            self,
            buffer.type,
            address,
            constant=constant,
            streamed=streamed,
            shape=buffer.shape,
        )

    def shared(
        self, name: str, type: Type, shape: tuple[int, ...], *, dynamic: bool = False
    ) -> Pointer:
        """Allocates 16-byte aligned shared memory, static or, beyond 48 KB in total, `dynamic`.

        Raises KernelError if the total exceeds `block_shared_bytes`, for any target device.
        """
        nbytes = math.prod(shape) * type.size
        total = self._static_bytes + self._dynamic_bytes + -(-nbytes // 16) * 16
        if total > (most := block_shared_bytes(self.oldest)):
            raise KernelError(
                f"{self.name}: shared {name} and what came before it take {total} bytes of shared"
                f" memory, of {most} that a block can have"
            )
        address = self.register(u32)
        if dynamic:
            offset = self._dynamic_bytes
            self._dynamic_bytes += -(-nbytes // 16) * 16
            self._most_dynamic_bytes = max(self._most_dynamic_bytes, self._dynamic_bytes)
            self.write(f"mov.u32 {address.name}, {_DYNAMIC_SHARED};")
            return Pointer(self, type, address, space="shared", offset=offset, shape=shape)
        self._static_bytes += -(-nbytes // 16) * 16
        if self._static_bytes > STATIC_SHARED_BYTES:
            raise KernelError(
                f"shared {name} of {nbytes} bytes: {self._static_bytes} in all, and"
                f" {STATIC_SHARED_BYTES} may be static"
            )
        self._shared.append(f".shared .align 16 .b8 {name}[{nbytes}];")
        self.write(f"mov.u32 {address.name}, {name};")
        return Pointer(self, type, address, space="shared", shape=shape)

    @contextlib.contextmanager
    def free_shared(self) -> Iterator[None]:
        """Context that frees dynamic shared memory allocated inside; later allocations reuse it.

        A barrier must separate the uses.
        """
        taken = self._dynamic_bytes
        yield
        self._dynamic_bytes = taken

    def table(self, name: str, words: tuple[int, ...]) -> Pointer:
        """Defines a table of u32 constants in global memory; returns its pointer.

        A kernel has one table per name.
        """
        if name not in self._tables:
            values = ", ".join(map(str, words))
            self._table_lines.append(f".global .align 16 .b32 {name}[{len(words)}] = {{{values}}};")
            address = self.register(u64)
            self.write_first(f"mov.u64 {address.name}, {name};")
            self._tables[name] = Pointer(self, u32, address, shape=(len(words),))
        return self._tables[name]

    def launch(
        self,
        grid: tuple[int, ...],
        threads: int,
        *,
        resident_blocks: int | None = None,
        cluster: tuple[int, int, int] = (1, 1, 1),
    ) -> None:
        """Sets the launch geometry: thread blocks along x, y, z, and threads per thread block.

        Args:
          threads: a multiple of 32.
          cluster: extents of a cluster, thread blocks that run at the same time and can access each
            other's shared memory (sm_90), at most 8. The grid must be a multiple of it.
          resident_blocks: minimum thread blocks per multiprocessor that the registers must suffice
            for. ptxas then gives each thread as many registers as that allows, and hoists more
            loads above their uses. None lets ptxas choose an occupancy.
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
        self._resident_blocks = resident_blocks
        if resident_blocks is not None:
            self._directives.append(f".minnctapersm {resident_blocks}")
        self._cluster = cluster
        if cluster != (1, 1, 1):
            self._declare_cluster((x, y, z))

    def _declare_cluster(self, grid: tuple[int, int, int]) -> None:
        cluster = self._cluster
        if min(cluster) < 1 or math.prod(cluster) > MAX_CLUSTER:
            raise KernelError(f"cluster={cluster} must have 1 to {MAX_CLUSTER} blocks")
        if any(extent % of_cluster for extent, of_cluster in zip(grid, cluster, strict=True)):
            raise KernelError(f"grid={grid} must be a multiple of cluster={cluster}")
        self.require(CLUSTERS)
        x, y, z = cluster
        self._directives += [".explicitcluster", f".reqnctapercluster {x}, {y}, {z}"]

    # --- special registers ---

    def _read_special(self, name: str) -> Value:
        if name not in self._special:
            self._special[name] = self._derive(f"mov.u32 {{}}, {name};")
        return self._special[name]

    def _derive(self, line: str) -> Value:
        value = self.register(u32)
        self.write_first(line.format(value.name))
        return value

    def block_id(self, axis: str = "x") -> Value:
        return self._read_special(f"%ctaid.{axis}")

    @property
    def cluster_rank(self) -> Value:
        """Rank of the thread block in its cluster, x fastest (sm_90)."""
        self.require(CLUSTERS)
        return self._read_special("%cluster_ctarank")

    @property
    def thread_id(self) -> Value:
        return self._read_special("%tid.x")

    @functools.cached_property
    def lane_id(self) -> Value:
        return self._derive(f"and.b32 {{}}, {self.thread_id.name}, {WARP - 1};")

    @functools.cached_property
    def warp_id(self) -> Value:
        return self._derive(f"shr.u32 {{}}, {self.thread_id.name}, 5;")

    # --- registers and any instruction ---

    register = values.register
    var = values.variable
    emit = values.emit
    instruction = values.instruction

    def const(self, type: Type, value: int | float) -> Value:
        """Emits a move of a number to a register, for instructions that allow no immediate."""
        result = self.register(type)
        self.write(f"{spell('mov', type)} {result.name}, {immediate(value, type)};")
        return result

    # --- named instructions: each has the type of its first operand ---

    def fma(self, a: Value, b: Operand, c: Operand) -> Value:
        """Emits a * b + c with one rounding; f32, or a pair of f16 or bf16."""
        return apply(self, "fma", a, b, c)

    def accumulate(self, total: Var, a: Value, b: Operand) -> None:
        """Emits total = a * b + total with one rounding, f32."""
        emit(self, "fma.rn.f32", a.name, operand(b, f32, "fma"), total.name, into=total)

    def dp4a(self, a: Value, b: Value, c: Operand, *, unsigned_a: bool = False) -> Value:
        """Emits c + the dot product of four bytes, s32: a's signed or unsigned, b's signed."""
        return instruction(self, "dp4a.u32.s32" if unsigned_a else "dp4a.s32.s32", a, b, c)

    def select(self, condition: Value, a: Value, b: Operand) -> Value:
        """Emits the selection of a where the condition is true, else b."""
        opcode = spell("selp", a.type)
        return emit(self, opcode, a.name, operand(b, a.type, opcode), condition.name, result=a.type)

    def minimum(self, a: Value, b: Operand) -> Value:
        """Emits the minimum; for f32, a NaN operand is dropped."""
        return apply(self, "min", a, b)

    def maximum(self, a: Value, b: Operand, *, keep_nan: bool = False) -> Value:
        """Emits the maximum; for f32, a NaN operand is dropped, or kept (`keep_nan`)."""
        return older.maximum_or_nan(self, a, b) if keep_nan else apply(self, "max", a, b)

    def pair(self, low: Value, high: Value, type: Type) -> Value:
        """Emits the rounding of two f32 to f16 or bf16; returns both in a u32."""
        return older.pair(self, low, high, type)

    def abs(self, x: Value) -> Value:
        """Emits the absolute value."""
        return apply(self, "abs", x)

    def sqrt(self, x: Value) -> Value:
        """Emits the square root, f32, rounded to nearest."""
        return apply(self, "sqrt", x)

    def exp2(self, x: Value) -> Value:
        """Emits 2 to the power of x, f32, within 2 ulps; 0 for minus infinity."""
        return apply(self, "ex2.approx", x)

    def reciprocal(self, x: Value) -> Value:
        """Emits 1 / x, f32, within 1 ulp."""
        return apply(self, "rcp.approx", x)

    def is_nan(self, x: Value) -> Value:
        return emit(self, spell("setp.neu", x.type), x.name, x.name)

    def bit_field(self, x: Value, position: Operand, length: Operand) -> Value:
        """Emits the extraction of `length` bits from bit `position` on, zero- or sign-extended.

        x is u32 or s32.
        """
        opcode = spell("bfe", x.type)
        bits = (operand(number, u32, opcode) for number in (position, length))
        return emit(self, opcode, x.name, *bits)

    def permute(self, a: Value, b: Value, selector: Operand) -> Value:
        """Emits the selection of four of the eight bytes of (b, a), as a u32.

        Nibble i of the selector selects byte i of the result; its bit 3 replicates the selected
        byte's sign instead.
        """
        return instruction(self, "prmt.b32", a, b, selector)

    # --- control flow ---

    @contextlib.contextmanager
    def when(self, condition: Value) -> Iterator[Branch]:
        """Context whose body runs on the threads for which the condition is true.

        After `with k.when(c) as branch: ...`, `with branch.otherwise(): ...` runs on the other
        threads.
        """
        guard(condition)
        end = self.label()
        self.write(f"@!{condition.name} bra {end};")
        yield Branch(self, condition)
        self.mark(end)

    @contextlib.contextmanager
    def loop(
        self, start: Operand, stop: Operand, step: int = 1, *, unroll: bool = True
    ) -> Iterator[Value]:
        """Context whose body is a loop; yields a u32 index counting from `start` to below `stop`.

        The index is read-only in the body. The first test is omitted for two Python ints if the
        loop runs at least once. `unroll`: whether ptxas may unroll the body.
        """
        index = self.var(u32, start)
        limit = operand(stop, u32, "loop")
        top, end = self.label(), self.label()
        if not (isinstance(start, int) and isinstance(stop, int) and start < stop):
            self.write(f"@{self.emit('setp.ge.u32', index.name, limit).name} bra {end};")
        self.mark(top)
        if not unroll:
            self.write('.pragma "nounroll";')
        yield Value(self, u32, index.name)
        index += step
        self.write(f"@{self.emit('setp.lt.u32', index.name, limit).name} bra {top};")
        self.mark(end)

    def jump(self, label: str) -> None:
        """Emits a jump to a label that `mark` places."""
        self.write(f"bra {label};")

    # --- warps and blocks ---

    def barrier(self) -> None:
        """Emits a barrier of the thread block; all its threads must reach it."""
        self.write("bar.sync 0;")

    def warp_barrier(self) -> None:
        """Emits a barrier of the warp; all its lanes must reach it."""
        issue(self, "bar.warp.sync", 0xFFFFFFFF)

    def cluster_barrier(self) -> None:
        """Emits a barrier of the cluster; all its threads must reach it (sm_90)."""
        self.require(CLUSTER_BARRIERS)
        self.write("barrier.cluster.arrive.release.aligned;")
        self.write("barrier.cluster.wait.acquire.aligned;")

    def peer(self, place: Pointer, rank: Operand) -> Pointer:
        """Returns the same address in the shared memory of the cluster's thread block `rank`.

        It needs sm_90. A cluster barrier must precede the first access and follow the last.
        """
        if place.space != "shared":
            raise KernelError(f"a peer has shared memory, not {place.space} memory")
        address = self.register(u32)
        issue(self, "mapa.shared::cluster.u32", address.name, place.address, rank)
        return place._with(address=address, space="shared::cluster", shape=place.shape)

    shuffle = warp.shuffle
    shuffle_xor = warp.shuffle_xor
    warp_reduce = warp.warp_reduce
    warp_sum = warp.warp_sum
    warp_max = warp.warp_max
    warp_any = warp.warp_any
    redux = warp.redux
    mma = warp.mma
    multiplies = warp.multiplies
    ldmatrix = warp.ldmatrix
    cp_async = warp.cp_async
    cp_async_commit = warp.cp_async_commit
    cp_async_wait = warp.cp_async_wait
    mbarrier_init = mbarrier.mbarrier_init
    mbarrier_arrive = mbarrier.mbarrier_arrive
    mbarrier_wait = mbarrier.mbarrier_wait
    bulk_copy = mbarrier.bulk_copy
    fence_async = mbarrier.fence_async
    prefetch_l2 = mbarrier.prefetch_l2

    # --- the end ---

    def loads_end(self) -> None:
        """Marks the point where a thread block has started its last loads from memory.

        The kernel's prefetches for the next launch are written there; by default, at the kernel's
        end. All threads must reach it, once.
        """
        if self.behind_loads is not None:
            write, self.behind_loads = self.behind_loads, None
            write()

    @property
    def geometry(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Grid and block as passed to `launch`."""
        if self._geometry is None:
            raise KernelError(f"kernel {self.name} never called k.launch(grid, threads)")
        return self._geometry

    def _unused_shared(self) -> list[str]:
        """Returns the declaration of shared memory without use (`split.py`), if any is needed."""
        if self._most_dynamic_bytes or self.oldest < COMMON:
            return []
        warps = self.geometry[1][0] // WARP
        unused = split_bytes(warps, self._resident_blocks) - self._static_bytes
        return [f".shared .align 16 .b8 unused_shared[{unused}];"] if unused > 0 else []

    def finish(self) -> Kernel:
        grid, block = self.geometry
        operands = [b.name for b in self._buffers if b.role != "out"]
        results = [
            b.name + ("_out" if b.role == "inout" else "") for b in self._buffers if b.role != "in"
        ]
        parameters = ",\n".join(f"  .param .u64 {name}" for name in operands + results)
        text = [
            *self.target_lines(),
            "",
            *(
                [f".extern .shared .align 16 .b8 {_DYNAMIC_SHARED}[];"]
                if self._most_dynamic_bytes
                else []
            ),
            *self._table_lines,
            f".visible .entry {self.name}(",
            parameters,
            ")",
            *self._directives,
            "{",
        ]
        text += [f"  {line}" for line in (*self._shared, *self._unused_shared())]
        head = "\n".join([*text, *self.register_lines()])
        loads = [
            (f"  ld.param.u64 {address.name}, [{name}];", line)
            for name, address, line in self._pointers
        ]
        body = [*self._first_lines, *loads, *self._lines]
        lines = {number: line for number, (_, line) in enumerate(body, head.count("\n") + 2)}
        whole = "\n".join([head, *(line for line, _ in body), "  ret;", "}", ""])
        return Kernel(
            self.name,
            whole,
            tuple(self._buffers),
            grid,
            block,
            self._most_dynamic_bytes,
            lines,
            self._cluster,
        )


__all__ = ["WARP", "Branch", "Builder"]
