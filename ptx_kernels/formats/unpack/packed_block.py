"""One thread's view of a block to dequantize."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ...ptx import Builder, Pointer, Value


@dataclass(frozen=True)
class DequantizedRun:
    """Adjacent weights of a block: `values` (f32), from weight `first` (u32, or an int) on."""

    first: Value | int
    values: Sequence[Value]


class Dequantize(Protocol):
    """Loads and decodes one thread's share of a block, bit for bit like the NumPy decoder.

    `planes` point to the block; `part` (u32) is below the format's `dequantize_threads`.
    """

    def __call__(
        self, k: Builder, planes: Sequence[Pointer], part: Value
    ) -> list[DequantizedRun]: ...
