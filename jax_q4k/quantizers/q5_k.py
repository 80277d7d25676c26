"""Quantizer of Q5_K: like Q4_K, with quants of 0 to 31."""

from __future__ import annotations

import functools

from . import q4_k
from .fit import LARGEST_F16
from .quantizer import Quantizer, searched

QUANTIZER = Quantizer(
    "Q5_K",
    63 * LARGEST_F16,
    searched("Q5_K", (32, 8), functools.partial(q4_k.fields, top=31)),
    native=True,
)
