"""Copies GGUF files with other limits on the size of a file: splits and joins models."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from .header import open_source
from .parts import opened
from .source import Source
from .tensors import TensorInfo
from .write import TensorPieces, write

_PIECE = 1 << 22  # bytes that are copied at a time


def copy(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    max_bytes: int | None = None,
    max_tensors: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> list[Path]:
    """Copies a model into one file, or into several with limits; the bytes of tensors are kept.

    Splitting a file and joining its parts gives the same file, if a writer of version 3 made it
    that aligns tensors without further gaps, like llama.cpp's and this one.

    Args:
      source: a GGUF file, or the first of several, NAME-00001-of-00003.gguf.
      path: the file to write; with limits that it exceeds, NAME-00001-of-00003.gguf, ... instead.
      max_bytes, max_tensors, progress: as in `write`.

    Returns:
      The files that were written.

    Raises:
      GGUFError: the source is malformed, or has tensors of a type that cannot be written.
        ValueError: a limit that is not a positive integer, or that makes too many files. OSError: a
        file cannot be read or written.
    """
    name = os.fsdecode(source)
    with open_source(source) as file, opened(Source(file, name)) as (joined, header):

        def pieces(info: TensorInfo) -> Iterator[Callable[[], bytes]]:
            start = header.data_start + info.offset
            for at in range(0, info.nbytes, _PIECE):
                size = min(_PIECE, info.nbytes - at)
                yield functools.partial(joined.read, start + at, size, f"tensor {info.name!r}")

        tensors = {}
        for info in header.tensors.values():
            if not info.supported or not info.shape:
                joined.fail(f"tensor {info.name!r}", f"of type {info.type.name} cannot be written")
            tensors[info.name] = TensorPieces(
                info.type.name, info.shape, functools.partial(pieces, info)
            )
        if not isinstance(header.metadata.get("general.architecture", ""), str):
            joined.fail("general.architecture", "must be text")
        limits = {"max_bytes": max_bytes, "max_tensors": max_tensors}
        return write(path, header.metadata, tensors, progress=progress, **limits)
