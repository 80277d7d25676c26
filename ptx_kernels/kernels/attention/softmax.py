"""The softmax of attention: scale, window, soft cap and sinks of its scores."""

from __future__ import annotations

from dataclasses import dataclass

from ...ptx import Builder, Group, KernelError, Pointer, Value, f32
from ..activation import LOG2_E, tanh


@dataclass(frozen=True, kw_only=True)
class Softmax(Group):
    """Softmax of attention scores.

    Attributes:
      scale: factor of the scores.
      window: a token attends to the last `window` tokens, including itself; None means to all.
      soft_cap: scores become soft_cap * tanh(score / soft_cap); None leaves them unchanged.
      sinks: whether there is an extra logit per query head in the denominator, with no value.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise KernelError(f"soft_cap={self.soft_cap} must be positive")

    @property
    def factor(self) -> float:
        """Factor applied to q, so that scores are exponents of 2, or arguments of the soft cap."""
        return self.scale * LOG2_E if self.soft_cap is None else self.scale / self.soft_cap

    def capped(self, k: Builder, score: Value) -> Value:
        """Emits the conversion of a dot product of scaled q and a key to an exponent of 2.

        Applies the soft cap.
        """
        return score if self.soft_cap is None else tanh(k, score) * (self.soft_cap * LOG2_E)

    def input_sinks(self, k: Builder, num_heads: int) -> Pointer | None:
        """Declares the operand `sinks`, f32 (num_heads,); None if there are no sinks."""
        return k.input("sinks", f32, (num_heads,)) if self.sinks else None
