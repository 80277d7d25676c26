"""Emits warp instructions: shuffles and reductions, tensor cores, asynchronous copies.

The public functions are methods of the Builder.

Layouts and rules follow PTX ISA 9.1: mma 9.7.14.5, ldmatrix 9.7.14.5.15, cp.async 9.7.9.25.3. The
instruction table lists the version that each one needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .errors import KernelError
from .issue import issue
from .older import copy_now, has_row, small_mma
from .pointer import Pointer
from .text import Text
from .types import Type, bf16, f16, f32, pred, s8, s32, u8, u32
from .values import Value, apply, register

WARP = 32
_FULL_MASK = "-1"


def shuffle_xor(k: Text, value: Value, mask: int) -> Value:
    """Emits a shuffle: every lane gets the value of lane (lane ^ mask).

    All 32 lanes must take part.
    """
    return _shuffle(k, "bfly", value, mask)


def shuffle(k: Text, value: Value, lane: Value | int, *, lanes: int = WARP) -> Value:
    """Emits a shuffle: every lane gets the value of lane `lane` of its group of `lanes` lanes.

    `lanes` is a power of two. All 32 lanes must take part.
    """
    return _shuffle(k, "idx", value, lane, WARP - lanes)


def _shuffle(k: Text, mode: str, value: Value, lane: Value | int, fixed: int = 0) -> Value:
    """Emits a shuffle of 32 bits. `fixed`: bits of the lane number taken from the reading lane."""
    if value.type.register not in ("b32", "f32"):
        raise KernelError(f"a shuffle moves 32 bits, not {value.type}")
    result = register(k, value.type)
    issue(k, f"shfl.sync.{mode}.b32", result, value, lane, fixed << 8 | 31, _FULL_MASK)
    return result


def warp_reduce(
    k: Text,
    value: Value,
    combine: Callable[[Value, Value], Value],
    *,
    lanes: int = WARP,
    stride: int = 1,
) -> Value:
    """Emits a butterfly reduction over `lanes` lanes, `stride` apart; each lane gets the result."""
    mask = lanes * stride // 2
    while mask >= stride:
        value = combine(value, shuffle_xor(k, value, mask))
        mask //= 2
    return value


def warp_sum(k: Text, value: Value, *, lanes: int = WARP, stride: int = 1) -> Value:
    return warp_reduce(k, value, lambda a, b: a + b, lanes=lanes, stride=stride)


def warp_max(k: Text, value: Value, *, lanes: int = WARP, stride: int = 1) -> Value:
    return warp_reduce(k, value, lambda a, b: apply(k, "max", a, b), lanes=lanes, stride=stride)


def warp_any(k: Text, condition: Value) -> Value:
    """Emits a vote: whether the condition is true in any of the warp's 32 lanes.

    All of them must take part.
    """
    result = register(k, pred)
    issue(k, "vote.sync.any.pred", result, condition, _FULL_MASK)
    return result


def redux(k: Text, value: Value, operation: str) -> Value:
    """Emits a reduction of u32 or s32 over the warp by `add`, `min` or `max`, for every lane.

    It is one instruction on sm_80 and newer; `warp_reduce` takes ten.
    """
    opcode = f"redux.sync.{operation}.{value.type}"
    if not has_row(k, opcode):
        return warp_reduce(k, value, lambda a, b: apply(k, operation, a, b))
    result = register(k, value.type)
    issue(k, opcode, result, value, _FULL_MASK)
    return result


def mma(
    k: Text,
    a: Sequence[Value],
    b: Sequence[Value],
    c: Sequence[Value],
    a_type: Type,
    b_type: Type | None = None,
) -> tuple[Value, ...]:
    """Emits c + A B of one warp: A is 16 x depth, B is depth x 8, c and the result are 16 x 8.

    Let g = lane / 4 and t = lane % 4. Each register of A holds the 4 bytes at depth 4t bytes of row
    g. a = (rows 0 to 7, rows 8 to 15) of the first 16 bytes of depth, then the same for the next
    16. b = (first 16 bytes, next 16) of column g. c = (row g, columns 2t and 2t + 1), then the same
    of row g + 8.

    Args:
      a, b: 4 and 2 registers u32, or 2 and 1 for half the depth (which is 32 int8 or 16 floats).
      c: 4 values, s32 for integers, f32 for floats.
      a_type, b_type: each s8 or u8, or both f16 or both bf16. b_type None means a_type.
    """
    b_type = b_type or a_type
    integer = a_type in (s8, u8) and b_type in (s8, u8)
    if not integer and not (a_type in (f16, bf16) and a_type == b_type):
        raise KernelError(
            f"mma multiplies s8 or u8, or f16 or bf16 by the same, not {a_type} by {b_type}"
        )
    if len(b) not in (1, 2) or len(a) != 2 * len(b) or len(c) != 4:
        raise KernelError(
            f"mma takes 4, 2 and 4 registers, or 2, 1 and 4, not {len(a)}, {len(b)} and {len(c)}"
        )
    accumulator = s32 if integer else f32
    depth = len(b) * 16 // a_type.size
    opcode = f"mma.sync.aligned.m16n8k{depth}.row.col.{accumulator}.{a_type}.{b_type}.{accumulator}"
    if a_type is not bf16 and not has_row(k, opcode):
        return small_mma(k, a, b, c, (a_type, b_type))
    d = tuple(register(k, accumulator) for _ in range(4))
    issue(k, opcode, d, tuple(a), tuple(b), tuple(c))
    return d


def multiplies(k: Text, type: Type) -> bool:
    """Returns whether `mma` takes a type on all architectures that must run the text.

    bf16 needs sm_80.
    """
    return type is not bf16 or has_row(k, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32")


def ldmatrix(
    k: Text, rows: Pointer, count: int = 4, *, transpose: bool = False
) -> tuple[Value, ...]:
    """Emits a load of `count` (1, 2 or 4) matrices of 8 rows of 16 bytes from shared memory.

    Each lane gets one u32 per matrix. `rows`: lane 8i + r points to row r of matrix i (lanes past 8
    * count may point anywhere). Lane 4g + t gets bytes 4t to 4t + 3 of row g; with `transpose`, the
    bytes are of each matrix transposed as 16-bit elements.
    """
    if rows.space != "shared" or count not in (1, 2, 4):
        raise KernelError(
            f"ldmatrix loads 1, 2 or 4 matrices from shared memory, not {count} from {rows.space}"
        )
    words = tuple(register(k, u32) for _ in range(count))
    opcode = f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' if transpose else ''}.shared.b16"
    issue(k, opcode, words, rows)
    return words


def cp_async(
    k: Text,
    target: Pointer,
    source: Pointer,
    nbytes: int,
    *,
    size: Value | None = None,
    where: Value | None = None,
) -> None:
    """Emits an asynchronous copy of 4, 8 or 16 bytes from global to shared memory.

    It is issued where `where` is true. Both addresses must be aligned to the copied size. The
    issuing thread can read the bytes after `cp_async_wait`, other threads after a barrier that
    follows it. `size` (u32): bytes to read; the rest becomes zeros, and with 0 the source may point
    anywhere. It is 0 or `nbytes`, or 2 of 4 bytes. Copies of 16 bytes bypass the L1 cache. On
    architectures without asynchronous copies, the bytes pass through registers here.
    """
    if target.space != "shared" or source.space != "global" or nbytes not in (4, 8, 16):
        raise KernelError(
            f"cp_async copies 4, 8 or 16 bytes from global to shared memory, not {nbytes}"
        )
    opcode = f"cp.async.{'cg' if nbytes == 16 else 'ca'}.shared.global"
    if not has_row(k, opcode):
        copy_now(k, target, source, nbytes, size, where)
        return
    issue(k, opcode, target, source, nbytes, *(() if size is None else (size,)), where=where)


def cp_async_commit(k: Text) -> None:
    """Emits the end of the thread's group of copies issued since the last commit."""
    if has_row(k, "cp.async.commit_group"):
        issue(k, "cp.async.commit_group")


def cp_async_wait(k: Text, pending: int = 0) -> None:
    """Emits a wait until at most the `pending` youngest of the thread's groups are in flight."""
    if has_row(k, "cp.async.wait_group"):
        issue(k, "cp.async.wait_group", pending)
