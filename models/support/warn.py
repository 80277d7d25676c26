"""Warnings at the line of the program that called."""

from __future__ import annotations

import sys
import warnings

#: Packages whose lines a user has not written: ours, and what calls us on his behalf.
_BETWEEN = frozenset({"jax_q4k", "jax", "flax", "contextlib", "functools"})


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issues a warning at the innermost line that is outside the library."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
