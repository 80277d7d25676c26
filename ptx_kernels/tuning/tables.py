"""Tuning tables: JSON files with kernel Configs for shapes on one device.

    {"device": "NVIDIA H200", "multiprocessors": 132, "source": "measured",
     "rows": [{"kernel": "matvec", "format": "Q4_K", "n": 4096, "columns": 14336, "m": 1,
               "config": {"warps": 4, ...}, "seconds": 1.0e-05}, ...]}

A row is keyed by the arguments of the rule that it overrules, which `kernel` names. Its `config`
holds some fields of the kernel's Config; the others keep their defaults. `why` is optional: what
binds the launch by the cost model, and what excluded faster Configs. `multiprocessors` is optional
if `devices` knows the device. Everything except `device`, `multiprocessors`, `source` and
`rows` (driver, versions, commit, date) is provenance and not read.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import reprlib
import sys
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..devices import find_device
from ..kernels import FAMILIES
from ..kernels.family import Match, Rule, TableRows
from ..ptx import KernelError
from ..regular_files import read_regular

SOURCES = ("measured", "model")
FOLDER = Path(__file__).with_name("tuned")

_LARGEST_FILE = 1 << 26  # bytes
_LARGEST = 1 << 40  # limit of every number of a shape
#: Maximum distance in octaves, summed over all sizes, at which a row serves another shape.
_FARTHEST = 1.0
_ROWS = ("n", "rows")  # keys that count rows of weights

#: Rules that tables may overrule, by name.
OVERRULED: dict[str, TableRows] = {
    rule.name: rule.rows for family in FAMILIES.values() for rule in family.rules if rule.rows
}

Shape = tuple[Any, ...]


class TuningTableError(ValueError):
    """A malformed tuning table; the message names the file, JSON path, value and rule."""


@dataclass(frozen=True)
class Row:
    """A table row: the Config for one shape, with the seconds measured or predicted.

    `shape`: values of the rule's keys.
    """

    kernel: str
    shape: Shape
    config: Any
    seconds: float
    why: str = ""


def serves(rows: TableRows, row: Row, shape: Shape) -> bool:
    """Returns whether the Config of a nearby row is valid for the requested shape."""
    same = (
        ours == theirs
        for name, ours, theirs in zip(rows.keys, shape, row.shape, strict=True)
        if name in _ROWS
    )
    return (not rows.shares_rows(row.config) or all(same)) and rows.accepts(row.config, shape)


def describe(rule: Rule, shape: Shape) -> str:
    """Formats the numbers of a shape: `n=4096 columns=4096 m=1`."""
    named = zip(rule.keys.items(), shape, strict=True)
    numbers = ((name, value) for (name, key), value in named if key.match is not Match.EQUAL)
    return " ".join(f"{name}={value}" for name, value in numbers)


def _equal_part(rows: TableRows, shape: Shape) -> Shape:
    """Returns the values of a shape that a row must share to serve the shape.

    For numbers that need not be equal it is None, for tuples of them their length.
    """
    named = zip(rows.keys.values(), shape, strict=True)
    return tuple(value if key.match is Match.EQUAL else _count(value) for key, value in named)


def _count(value: Any) -> int | None:
    return len(value) if isinstance(value, tuple) else None


def _distance(rows: TableRows, row: Shape, shape: Shape) -> tuple[float, float] | None:
    """Returns (octaves of excess cover, octaves of distance) of a row's shape; None if too far."""
    covered, off = [0.0], [0.0]
    for key, theirs, asked in zip(rows.keys.values(), row, shape, strict=True):
        if key.match is Match.COVERS:
            if theirs < asked:
                return None
            covered.append(math.log2(theirs / asked))
        elif key.match is Match.NEAR:
            several = isinstance(theirs, tuple)
            pairs = zip(theirs, asked, strict=True) if several else ((theirs, asked),)
            off += [abs(math.log2(a / b)) for a, b in pairs]
    return None if max(sum(covered), sum(off)) > _FARTHEST else (sum(covered), sum(off))


@dataclass(frozen=True)
class Table:
    """A tuning table: one JSON file, for one device.

    `device` is the name that the driver reports, or a name in `devices.DEVICES`. `multiprocessors`:
    of the device; None means as listed in `devices`, or unknown.
    """

    path: str
    device: str
    source: str
    rows: tuple[Row, ...]
    multiprocessors: int | None = None

    def is_for(self, device: str, multiprocessors: int) -> bool:
        """Returns whether the table is for this device with this many multiprocessors."""
        mine, other = find_device(self.device), find_device(device)
        count = self.multiprocessors or (mine and mine.multiprocessors)
        same = self.device == device or (mine is not None and mine == other)
        return same and count in (None, multiprocessors)

    @functools.cached_property
    def _by_equal_part(self) -> dict[tuple[Any, ...], list[Row]]:
        found: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.rows:
            key = row.kernel, *_equal_part(OVERRULED[row.kernel], row.shape)
            found.setdefault(key, []).append(row)
        return found

    def nearest(self, rule: Rule, *shape: Any) -> Row | None:
        """Returns the row with the nearest shape; None if no row is near.

        Values that must be equal (formats, ...) are equal. Among rows that cover the shape (at
        least as many rows of activations), the smallest excess cover wins; then the smallest
        distance in octaves, summed over all numbers; then the first row.
        """
        if (rows := rule.rows) is None:
            return None
        near = [
            (distance, row)
            for row in self._by_equal_part.get((rule.name, *_equal_part(rows, shape)), [])
            if (distance := _distance(rows, row.shape, shape)) is not None
        ]
        return min(near, key=lambda pair: pair[0], default=(None, None))[1]

    def serving(self, rule: Rule, shape: Shape) -> Row | None:
        """Returns the nearest row if its Config is valid for the shape; None otherwise."""
        row = self.nearest(rule, *shape)
        return row if row and rule.rows and serves(rule.rows, row, shape) else None

    def reason(self, rule: Rule, row: Row, shape: Shape) -> str:
        """Formats the reason: `measured for NVIDIA H200 (mine.json), this shape: 10.00 us`."""
        nearest = f"the nearest shape, {describe(rule, row.shape)}"
        found = "this shape" if row.shape == shape else nearest
        figures = ", ".join(filter(None, (f"{row.seconds * 1e6:.2f} us", row.why)))
        return f"{self.source} for {self.device} ({Path(self.path).name}), {found}: {figures}"


def _field(where: str, values: Mapping[str, Any], name: str, kind: type) -> Any:
    if name not in values:
        raise TuningTableError(f"{where}: {name} is missing")
    return _typed(f"{where}: {name}", values[name], kind)


def _typed(where: str, value: Any, kind: Any) -> Any:
    literals = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    if literals:
        if value not in literals or isinstance(value, bool) != isinstance(literals[0], bool):
            raise TuningTableError(
                f"{where}: {reprlib.repr(value)} must be one of {', '.join(map(str, literals))}"
            )
        return value
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or isinstance(value, bool) != (kind is bool):
        raise TuningTableError(f"{where}: {reprlib.repr(value)} must be of type {kind.__name__}")
    return value


def _positive(where: str, values: Mapping[str, Any], name: str, kind: type) -> Any:
    value = _field(where, values, name, kind)
    most = _LARGEST if kind is int else sys.float_info.max  # JSON's integers have no limit
    if not 0 < value < most:
        raise TuningTableError(
            f"{where}: {name}={reprlib.repr(value)} must be positive and below {most}"
        )
    return value


def _key(where: str, values: Mapping[str, Any], name: str, kind: Any) -> Any:
    """Returns the value `name` of a row's shape, checked; JSON lists become tuples."""
    if kind in (str, bool):
        return _field(where, values, name, kind)
    if kind is int:
        return _positive(where, values, name, int)
    (each, _) = typing.get_args(kind)
    listed = _field(where, values, name, list)
    if not listed:
        raise TuningTableError(f"{where}: {name} is empty")
    return tuple(
        _key(where, {f"{name}[{i}]": value}, f"{name}[{i}]", each) for i, value in enumerate(listed)
    )


def _config(where: str, kernel: str, values: Mapping[str, Any]) -> Any:
    config = OVERRULED[kernel].config
    hints = typing.get_type_hints(config)
    known = {field.name for field in dataclasses.fields(config)}
    if unknown := sorted(set(values) - known):
        raise TuningTableError(
            f"{where}: config: {unknown[0]!r} must be one of {', '.join(sorted(known))}"
        )
    return config(
        **{
            name: _typed(f"{where}: config: {name}", value, hints[name])
            for name, value in values.items()
        }
    )


def _row(where: str, values: Mapping[str, Any]) -> Row:
    kernel = _field(where, values, "kernel", str)
    if kernel not in OVERRULED:
        raise TuningTableError(f"{where}: kernel: {kernel!r} must be one of {', '.join(OVERRULED)}")
    rows = OVERRULED[kernel]
    known = {"kernel", *rows.keys, "config", "seconds", "why"}
    if unknown := sorted(set(values) - known):
        raise TuningTableError(f"{where}: {unknown[0]!r} must be one of {', '.join(sorted(known))}")
    row = Row(
        kernel=kernel,
        shape=tuple(_key(where, values, name, key.kind) for name, key in rows.keys.items()),
        config=_config(where, kernel, _field(where, values, "config", dict)),
        seconds=_positive(where, values, "seconds", float),
        why=_typed(f"{where}: why", values.get("why", ""), str),
    )
    try:
        rows.check(row.config, *row.shape)
    except (KernelError, ValueError) as error:
        raise TuningTableError(f"{where}: {error}") from error
    return row


def parse(text: str | bytes, path: str) -> Table:
    """Parses the text of a tuning table.

    Raises:
      TuningTableError: invalid JSON; values that are missing, unknown or of a wrong type; a Config
        that is invalid for its own shape.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TuningTableError(f"{path}: not JSON: {error}") from error
    content = _typed(path, content, dict)
    source = _field(path, content, "source", str)
    if source not in SOURCES:
        raise TuningTableError(f"{path}: source: {source!r} must be one of {', '.join(SOURCES)}")
    rows = tuple(
        _row(f"{path}: row {i}", _typed(f"{path}: row {i}", values, dict))
        for i, values in enumerate(_field(path, content, "rows", list))
    )
    count = (
        _positive(path, content, "multiprocessors", int) if "multiprocessors" in content else None
    )
    return Table(path, _field(path, content, "device", str), source, rows, count)


def load(path: Path) -> Table:
    """Reads a tuning table from a file.

    Raises:
      TuningTableError: the file cannot be read, or is malformed.
    """
    try:
        text = read_regular(path, _LARGEST_FILE)
    except OSError as error:
        raise TuningTableError(f"{path}: {error.strerror or error}") from error
    return parse(text, str(path))


@functools.cache
def packaged() -> tuple[Table, ...]:
    """Returns the tuning tables that come with the package, measured ones first."""
    tables = [load(path) for path in sorted(FOLDER.glob("*.json"))]
    return tuple(sorted(tables, key=lambda table: SOURCES.index(table.source)))
