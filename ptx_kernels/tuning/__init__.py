"""Tuning: chooses a kernel's Config for a shape and device, and reports the source and reason."""

from __future__ import annotations

from ..devices import Target, target
from .choose import (
    VARIABLE,
    Choice,
    choose,
    current_device,
    decide,
    device_of_context,
    on_device,
    recorded,
)
from .tables import TuningTableError

__all__ = [
    "VARIABLE",
    "Choice",
    "Target",
    "TuningTableError",
    "choose",
    "current_device",
    "decide",
    "device_of_context",
    "on_device",
    "recorded",
    "target",
]
