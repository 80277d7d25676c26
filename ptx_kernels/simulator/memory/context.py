"""Context shared by all memories of a batch."""

from __future__ import annotations

from dataclasses import dataclass

from ..perturbation import Freedom
from ..races.happens_before import HappensBefore
from ..traffic import Traffic


@dataclass(frozen=True)
class Context:
    """State that all memories of a batch use.

    Attributes:
      happens_before: the relation for the batch.
      freedom: choices of the launch.
      traffic: counts to fill, or None.
    """

    happens_before: HappensBefore
    freedom: Freedom
    traffic: Traffic | None = None
