"""Context of a memory: what all memories of a batch go by."""

from __future__ import annotations

from dataclasses import dataclass

from ..perturbation import Freedom
from ..races.happens_before import HappensBefore
from ..traffic import Traffic


@dataclass(frozen=True)
class Context:
    """`happens_before`: of the batch; `freedom`: of the launch; `traffic`: counts, or None."""

    happens_before: HappensBefore
    freedom: Freedom
    traffic: Traffic | None = None
