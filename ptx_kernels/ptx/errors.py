"""Errors of the kernel language, which name the Python line of the kernel that caused them."""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path
from types import CodeType, FrameType

_PACKAGE = Path(__file__).parents[1]
# `with k.when(...)` passes through contextlib, `k.lane_id` through functools
_LANGUAGE = (str(Path(__file__).parent), contextlib.__file__, functools.__file__)

Line = tuple[str, int]  # file, relative to the package, and line number


@functools.cache
def _is_language(file: str) -> bool:
    return file.startswith(_LANGUAGE)


@functools.cache
def _shown(file: str) -> str:
    """Returns the path relative to the package, or the bare file name for code elsewhere."""
    path = Path(file)
    return path.relative_to(_PACKAGE).as_posix() if path.is_relative_to(_PACKAGE) else path.name


#: (id of a code object, position in it) -> the code, which keeps its id alive, and the line
_LINES: dict[tuple[int, int], tuple[CodeType, Line]] = {}


def _line(frame: FrameType) -> Line:
    """Returns a frame's (file, line); cached, because Python counts lines from the code's start."""
    code = frame.f_code
    place = id(code), frame.f_lasti
    found = _LINES.get(place)
    if found is None:
        found = _LINES[place] = code, (_shown(code.co_filename), frame.f_lineno)
    return found[1]


def caller() -> Line:
    """Returns the innermost (file, line) of the call stack outside the kernel language."""
    return call_path(None)[0]


def call_path(kernel: CodeType | None) -> tuple[Line, ...]:
    """Returns the (file, line) outside the kernel language that emits, then the kernel's own.

    The second is omitted unless the first is in a helper of the kernel.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_language(frame.f_code.co_filename):
        frame = frame.f_back
    innermost = _line(frame)
    outer: FrameType | None = frame
    while outer is not None and outer.f_code is not kernel:
        outer = outer.f_back
    if outer is None or outer is frame:
        return (innermost,)
    return innermost, _line(outer)


class KernelError(TypeError):
    """An error in a kernel's source, such as mismatched types or a value instead of a variable."""

    def __init__(self, message: str) -> None:
        file, line = caller()
        super().__init__(f"{Path(file).name}:{line}: {message}")
