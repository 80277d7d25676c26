"""Issues warnings that point at the caller's line, outside this library."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable

#: Packages whose frames are skipped: this one, and those that call it on the user's behalf.
_BETWEEN = frozenset({"jax_q4k", "jax", "flax", "contextlib", "functools"})


_SHOWN = 20  # unknown keys that a warning names


def warn_of_keys(file: str, keys: Iterable[str]) -> None:
    """Issues one warning that names all unknown keys of a file, if there are any."""
    if distinct := list(dict.fromkeys(keys)):
        shown = ", ".join(f"{key:.100}" for key in distinct[:_SHOWN])
        more = len(distinct) - _SHOWN
        warn(f"{file}: unknown keys are ignored: {shown}{f' and {more} more' if more > 0 else ''}")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issues a warning at the innermost line outside the library."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
