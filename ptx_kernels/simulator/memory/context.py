"""State that the memory spaces share while a batch of thread blocks is simulated."""

from __future__ import annotations

from dataclasses import dataclass

from ..perturbation import Freedom
from ..races.happens_before import HappensBefore
from ..traffic import Traffic


@dataclass(frozen=True)
class Context:
    """State that all memories of a batch use.

    Attributes:
      happens_before: the happens-before relation of the batch.
      freedom: the launch's random or fixed choices.
      traffic: traffic counts to fill; None if absent.
    """

    happens_before: HappensBefore
    freedom: Freedom
    traffic: Traffic | None = None
