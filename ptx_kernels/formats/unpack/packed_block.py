"""Interface for dequantizing blocks to floats, one part of a quantization block per thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ...ptx import Builder, Pointer, Value


@dataclass(frozen=True)
class DequantizedRun:
    """Adjacent weights of a quantization block: `values` (f32), from weight `first` on.

    `first` is a u32 or an int.
    """

    first: Value | int
    values: Sequence[Value]


class Dequantize(Protocol):
    """Emits the loading and decoding of one thread's part of a quantization block.

    Results are bit for bit those of the NumPy decoder. `planes` point to the block; `part` (u32) is
    below the format's `dequantize_threads`.
    """

    def __call__(
        self, k: Builder, planes: Sequence[Pointer], part: Value
    ) -> list[DequantizedRun]: ...
