"""Subject: a kernel with operands and expected results."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ptx_kernels import simulator
from ptx_kernels.ptx import Kernel
from support.helpers import nmse
from support.oracles import (
    loaded,
)

_OPEN = re.compile(r"\.approx\.|\bmma\.[^;]*\.f32|\b(?:atom|red)\.[^;]*add\.f32")


@dataclass(frozen=True)
class Subject:
    """A kernel with operands, its exact results, and their tolerance.

    Attributes:
      wants: one per result; a bf16 result as floats. None: not compared, as several answers are
        right.
      finish: converts partial results to those in `wants`.
      tolerance: maximum NMSE of a float result; 0 requires equal bits. Integers and zeros are
        compared exactly, since nothing rounds to them.
    """

    kernel: Kernel
    operands: tuple[np.ndarray, ...]
    wants: tuple[np.ndarray | None, ...]
    tolerance: float
    finish: Callable[..., tuple[np.ndarray, ...]] | None = None

    @property
    def exact(self) -> bool:
        """Whether hardware has no freedom in the results: perturbed runs give the same bits."""
        return _OPEN.search(self.kernel.text) is None

    def run(self, text: str | None = None, **options: Any) -> tuple[np.ndarray, ...]:
        """Runs the kernel, or another text in its place, with `simulator.run`'s options.

        Raises:
          SimulationError: like the simulator.
        """
        kernel = self.kernel if text is None else replace(self.kernel, text=text, lines={})
        return simulator.run(kernel, *self.operands, **options)

    def holds(self, results: tuple[np.ndarray, ...]) -> bool:
        """Whether the results are right."""
        if self.finish is not None:
            finished = zip(self.finish(*results), self.wants, strict=True)
            return all(self._near(got, want) for got, want in finished if want is not None)
        found = zip(results, self.wants, self.kernel.results, strict=True)
        return all(
            self._close(got, want, buffer.type.name)
            for got, want, buffer in found
            if want is not None
        )

    def _close(self, got: np.ndarray, want: np.ndarray, type: str) -> bool:
        if type in ("f32", "f16", "bf16") and self.tolerance:
            return self._near(loaded(got, type), want)
        return np.array_equal(got, want, equal_nan=got.dtype.kind == "f")

    def _near(self, got: np.ndarray, want: np.ndarray) -> bool:
        return nmse(got, want) <= self.tolerance and not np.any(got[want == 0])

    def passes(self, text: str | None = None) -> bool:
        return self.holds(self.run(text))


def rng_of(*seed: int) -> np.random.Generator:
    return np.random.default_rng([len(seed), *seed])
