"""Granite 3 and 4 with experts."""

from __future__ import annotations

import dataclasses

from ..architecture_tensors import EXPERTS, SHARED_EXPERT
from . import granite

ARCHITECTURE = dataclasses.replace(
    granite.ARCHITECTURE,
    name="granitemoe",
    experts=EXPERTS + SHARED_EXPERT,
    optional_rope=False,
)
