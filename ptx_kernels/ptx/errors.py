"""Errors of the kernel language; each names the line of the kernel's Python that caused it."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

_LANGUAGE = (str(Path(__file__).parent), contextlib.__file__)  # `with k.when(...)` passes through contextlib


def caller() -> str:
    """`file.py:line` of the innermost frame outside the kernel language itself."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LANGUAGE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


class KernelError(TypeError):
    """A kernel was written wrongly: types that differ, a value where a variable is needed, ..."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{caller()}: {message}")
