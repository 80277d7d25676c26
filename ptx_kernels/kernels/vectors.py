"""Moves runs of floats between memory and registers, 16 bytes at a time if the type allows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..ptx import Builder, KernelError, Pointer, Value, bf16, f16, f32, u16, u32
from ..ptx.types import Type


@dataclass(frozen=True)
class Run:
    """Adjacent values (f32) of a vector that a thread holds, from element `first` (u32) on.

    Attributes:
      inside: whether the values are inside the vector; None means yes. Values outside are zeros.
      offset: elements from the thread's first run to this one, the same for all threads.
    """

    first: Value
    values: Sequence[Value]
    inside: Value | None = None
    offset: Value | int = 0


RUN = 4  # f32 per load of a thread: 16 bytes
FLOATS: dict[str, Type] = {"f32": f32, "f16": f16, "bf16": bf16}


def float_type(name: str) -> Type:
    """Returns the storage type called `f32`, `f16` or `bf16`; KernelError for another name."""
    try:
        return FLOATS[name]
    except KeyError:
        raise KernelError(f"{name!r} must be one of {', '.join(FLOATS)}") from None


def two_floats(word: Value, type: Type) -> tuple[Value, Value]:
    """Emits the unpacking of the two 16-bit floats of a u32 to f32, the low half first."""
    if type is bf16:  # a bf16 is the high 16 bits of an f32
        return (word << 16).bits(f32), (word & 0xFFFF0000).bits(f32)
    low, high = word.to(u16), (word >> 16).to(u16)
    return low.bits(type).to(f32), high.bits(type).to(f32)


def pack_floats(low: Value, high: Value, type: Type) -> Value:
    """Emits the packing of two f32, rounded to the 16-bit `type`, into a u32."""
    a, b = (x.to(type).bits(u16).to(u32) for x in (low, high))
    return a | (b << 16)


def pack_bytes(codes: Sequence[Value]) -> Value:
    """Emits the packing of four u32 below 256 into one u32, the first in the lowest byte."""
    a, b, c, d = codes
    return a | (b << 8) | (c << 16) | (d << 24)


def dot(k: Builder, a: Sequence[Value], b: Sequence[Value]) -> Value:
    """Emits a[0] * b[0] + a[1] * b[1] + ..., from the left, by fma."""
    total = a[0] * b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        total = k.fma(x, y, total)
    return total


def load_floats(pointer: Pointer, count: int, *, where: Value | None = None) -> list[Value]:
    """Loads `count` adjacent floats as f32; zeros if `where` is false.

    The address must be aligned to the width of the loads.
    """
    if pointer.type is f32:
        return pointer.load_run(0, count, where=where)
    words = pointer.cast(u32).load_run(0, count // 2, where=where)
    return [x for word in words for x in two_floats(word, pointer.type)]


def load_runs(
    k: Builder, x: Pointer, columns: int, threads: int, start: Value | int = 0, run: int = RUN
) -> list[Run]:
    """Loads this thread's share of `columns` f32 at `x`, from `start` on, in runs of `run`.

    All loads are issued before the first use.
    """
    runs = []
    for base in range(0, columns, run * threads):
        offset = k.thread_id * run + base
        first = offset if isinstance(start, int) and start == 0 else offset + start
        inside = None if base + run * threads <= columns else offset < columns
        values = load_floats(x.at(first), run, where=inside)
        runs.append(Run(first, values, inside, start + base))
    return runs


def store_floats(pointer: Pointer, values: Sequence[Value], *, where: Value | None = None) -> None:
    """Stores f32 values as adjacent elements of the pointer's type.

    The address must be aligned to the width of the stores.
    """
    if pointer.type is not f32 and len(values) == 1:
        pointer.store(0, values[0].to(pointer.type), where=where)
        return
    if pointer.type is not f32:
        values = [
            pack_floats(a, b, pointer.type) for a, b in zip(values[::2], values[1::2], strict=True)
        ]
        pointer = pointer.cast(u32)
    pointer.store_run(0, values, where=where)
