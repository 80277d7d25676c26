"""Reads and writes the parts of split models, `NAME-00001-of-00003.gguf`, ....

The parts are those of `llama-gguf-split`: the first part has the metadata, and every part has
`split.no`, `split.count` and `split.tensors.count`, and its own tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from .fields import Fields
from .header import MAX_ENTRIES, Header, open_source, parse_source
from .metadata import Metadata
from .source import Source
from .tensors import TensorInfo

NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
#: Limit on the parts of a model: all are open at a time, and systems allow 1024 files.
MAX_PARTS = 512

_ALIGNMENT = "general.alignment"  # may differ between parts
_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def part_names(path: str | os.PathLike[str]) -> list[Path]:
    """Returns the paths of all parts if `path` has the name of a first part, else [path].

    Opens nothing, and the parts need not exist.
    """
    match = _NAME.fullmatch(os.fsdecode(path))
    if match is None or int(match[2]) != 1 or not 1 < int(match[3]) <= MAX_PARTS:
        return [Path(os.fsdecode(path))]
    return [_part(match[1], i, int(match[3])) for i in range(int(match[3]))]


def names_for(path: str | os.PathLike[str], count: int) -> list[Path]:
    """Returns the paths to write a model of `count` parts to; `path` is NAME.gguf or NAME."""
    if count == 1:
        return [Path(os.fsdecode(path))]
    name = os.fsdecode(path).removesuffix(".gguf")
    return [_part(name, i, count) for i in range(count)]


def _part(name: str, number: int, count: int) -> Path:
    return Path(f"{name}-{number + 1:05d}-of-{count:05d}.gguf")


class JoinedSource(Source):
    """A Source that is the concatenation of several, with the name of the first."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = sources
        self.name = sources[0].name
        self.starts = [0, *accumulate(source.size for source in sources)]
        self.size = self.starts.pop()

    def file_at(self, offset: int) -> Source:
        """Returns the Source of the part that contains the byte at `offset`."""
        return self.sources[self._index(offset)]

    def _fill(self, offset: int, target: memoryview, field: str) -> None:
        # A tensor lies in one part, and a read never spans tensors.
        at = self._index(offset)
        self.sources[at].read_into(offset - self.starts[at], target, field)

    def _index(self, offset: int) -> int:
        return bisect_right(self.starts, offset) - 1


@contextlib.contextmanager
def opened(source: Source) -> Iterator[tuple[Source, Header]]:
    """Opens all parts of a model, given the first part; yields the joined source and header.

    Tensor offsets of a split model count from the first byte of the first part.

    Raises:
      GGUFError: a part is missing or malformed, does not match its name, or belongs to another
        model; or `source` is not the first part, which the message then names.
    """
    header = parse_source(source)
    with contextlib.ExitStack() as stack:
        count = _count(source, header.metadata)
        if count <= 1:
            yield source, header
            return
        sources, headers = [source], [header]
        for number, path in enumerate(_others(source, count), 1):
            part = Source(stack.enter_context(open_source(path)), os.fspath(path))
            sources.append(part)
            headers.append(parse_source(part))
            _check_part(part, headers[-1].metadata, number, source.name, header.metadata)
        joined = JoinedSource(sources)
        yield joined, _joined(joined, headers)


def read_header(path: str | os.PathLike[str]) -> Header:
    """Reads the header of a GGUF file without tensor data; raises GGUFError if it is malformed.

    Accepts tensors of unsupported types (`TensorInfo.supported`). For a split model, `path` is the
    first part; the other parts must be in the same folder.
    """
    with open_source(path) as file, opened(Source(file, os.fsdecode(path))) as (_, header):
        return header


def _count(source: Source, metadata: Metadata) -> int:
    """Returns the number of parts by the first part's metadata.

    0 there means one part: llama-gguf-split leaves it in merged files.
    """
    fields = Fields(metadata, source.name)
    count = fields.integer(COUNT, 1, least=0, most=MAX_PARTS)
    if count > 1:
        number = fields.integer(NUMBER, least=0, most=count - 1)
        if number:
            match = _NAME.fullmatch(source.name)
            first = "the first" if match is None else repr(str(_part(match[1], 0, count)))
            source.fail(NUMBER, f"is {number}: this is part {number + 1} of {count}; give {first}")
    return count


def _others(source: Source, count: int) -> list[Path]:
    """Returns the paths of the other parts, in the folder of the first."""
    match = _NAME.fullmatch(source.name)
    if match is None or (int(match[2]), int(match[3])) != (1, count):
        expected = f"NAME-00001-of-{count:05d}.gguf"
        problem = f"is {count}, but the file is not named {expected}, next to the others"
        source.fail(COUNT, problem)
    others = [_part(match[1], i, count) for i in range(1, count)]
    missing = [path.name for path in others if not path.exists()]
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        some = f"{len(missing)} of them are" if len(missing) > 1 else "one of them is"
        source.fail(COUNT, f"is {count} parts, but {some} missing next to the first: {shown}")
    return others


def _check_part(
    part: Source, metadata: Metadata, number: int, first: str, firsts: Mapping[str, Any]
) -> None:
    """Raises GGUFError for a part with another number than in its name, or of another model."""
    fields = Fields(metadata, part.name)
    if fields.integer(NUMBER) != number:
        found = metadata[NUMBER]
        part.fail(NUMBER, f"is {found}, expected {number} for part {number + 1}: misnamed file")
    for key in dict.fromkeys((COUNT, TENSORS, *metadata)):
        if key in (NUMBER, _ALIGNMENT):
            continue
        fields.value(key)  # raises if it is missing
        if key not in firsts or not np.array_equal(metadata[key], firsts[key]):
            what = f"differs from that of {os.path.basename(first)!r}"
            part.fail(key, f"{what}: these are parts of different models")


def _joined(joined: JoinedSource, headers: Sequence[Header]) -> Header:
    """Joins the headers of all parts into one Header, without the `split.*` metadata."""
    first = headers[0]
    tensors: dict[str, TensorInfo] = {}
    for source, header, start in zip(joined.sources, headers, joined.starts, strict=True):
        for name, info in header.tensors.items():
            if name in tensors:
                source.fail(f"tensor {name!r}", "is also in an earlier part")
            offset = start + header.data_start + info.offset
            tensors[name] = dataclasses.replace(info, offset=offset)
        if len(tensors) > MAX_ENTRIES:
            source.fail("tensor count", f"of this part and the earlier ones exceeds {MAX_ENTRIES}")
    said = Fields(first.metadata, joined.name).integer(TENSORS)
    if said != len(tensors):
        joined.fail(TENSORS, f"is {said}, but the {len(headers)} parts hold {len(tensors)}")
    return dataclasses.replace(
        first,
        metadata=without_parts(first.metadata),
        tensors=tensors,
        data_start=0,
        file_size=joined.size,
        parts=tuple(source.name for source in joined.sources),
    )


def without_parts(metadata: Mapping[str, Any]) -> Metadata:
    """Returns the metadata without the `split.*` keys, for a model in one file."""
    remaining = Metadata(metadata)
    for key in (NUMBER, COUNT, TENSORS):
        remaining.pop(key, None)
        remaining.types.pop(key, None)
    return remaining


def metadata_of_part(
    metadata: Mapping[str, Any], number: int, count: int, tensors: int
) -> Metadata:
    """Returns the metadata of part `number` of `count`.

    tensors: number of tensors in the whole model.
    """
    part = Metadata() if number else without_parts(metadata)
    if number and _ALIGNMENT in metadata:
        part[_ALIGNMENT] = metadata[_ALIGNMENT]
    part[NUMBER], part[TENSORS] = np.uint16(number), np.int32(tensors)
    part[COUNT] = np.uint16(count)  # the last entry, as in files of llama-gguf-split
    return part


def grouped(
    sizes: Mapping[str, int], max_bytes: int | None, max_tensors: int | None = None
) -> list[list[str]]:
    """Divides tensors over parts; returns each part's tensor names.

    A part has up to `max_tensors` consecutive tensors of up to `max_bytes` in total, but at least
    one.

    sizes: tensor name -> bytes in the file. Raises ValueError for more parts than can be read.
    """
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        too_large = max_bytes is not None and filled + size > max_bytes
        if groups[-1] and (too_large or len(groups[-1]) == max_tensors):
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) > MAX_PARTS:
        made = f"makes {len(groups)} parts; the maximum is {MAX_PARTS}"
        limits = {"max_bytes": max_bytes, "max_tensors": max_tensors}
        named = ", ".join(f"{name}={limit}" for name, limit in limits.items() if limit is not None)
        raise ValueError(f"{named} {made}")
    return groups
