"""Tuning tables: JSON files that say which Config a kernel gets at which shapes on one device.

    {"device": "NVIDIA H200", "source": "measured",
     "rows": [{"kernel": "matvec", "format": "Q4_K", "n": 4096, "columns": 14336, "m": 1,
               "config": {"warps": 4, ...}, "seconds": 1.0e-05}, ...]}

Everything beside `device`, `source` and `rows` (driver, versions, commit, date) is provenance and not read. A row's
`config` holds some of the fields of the kernel's Config; the others keep their defaults. `why` is optional: what the
cost model says binds the launch.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import reprlib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .devices import find_device
from .kernels.matvec import MatvecConfig
from .ptx import KernelError

SOURCES = ("measured", "model")
FOLDER = Path(__file__).with_name("tuned")

#: Which Config the rows of a kernel hold.
CONFIGS: dict[str, type] = {"matvec": MatvecConfig}

_LARGEST = 1 << 40  # of n, columns and m
_FARTHEST = 1.0  # octaves in n or in columns up to which a row stands for a shape that is not its own


class TuningTableError(ValueError):
    """A tuning table that is malformed; the message names the file, the place in it, the value and the rule."""


@dataclass(frozen=True)
class Row:
    """The Config for one shape, with the seconds measured or predicted."""

    kernel: str
    format: str
    n: int
    columns: int
    m: int
    config: Any
    seconds: float
    why: str = ""


@dataclass(frozen=True)
class Table:
    """One file. `device` is as the driver reports it, or a name in `devices.DEVICES`."""

    path: str
    device: str
    source: str
    rows: tuple[Row, ...]

    def is_for(self, device: str) -> bool:
        known = find_device(device)
        return self.device == device or (known is not None and find_device(self.device) == known)

    def nearest(self, kernel: str, format: str, n: int, columns: int, m: int) -> Row | None:
        """The row whose shape is nearest, or None where none is near.

        Of the rows with at least m rows of activations (registers that hold more serve fewer too) those with the
        fewest; among them the least distance in octaves of n plus octaves of columns, each at most one. The first
        of equals.
        """
        fitting = [r for r in self.rows if (r.kernel, r.format) == (kernel, format) and r.m >= m]
        fewest = min((r.m for r in fitting), default=0)

        def octaves(row: Row) -> tuple[float, float]:
            return abs(math.log2(row.n / n)), abs(math.log2(row.columns / columns))

        near = [r for r in fitting if r.m == fewest and max(octaves(r)) <= _FARTHEST]
        return min(near, key=lambda row: sum(octaves(row)), default=None)


def _field(where: str, values: Mapping[str, Any], name: str, kind: type) -> Any:
    if name not in values:
        raise TuningTableError(f"{where}: {name} is missing")
    return _typed(f"{where}: {name}", values[name], kind)


def _typed(where: str, value: Any, kind: Any) -> Any:
    choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    if choices:
        if value not in choices or isinstance(value, bool) != isinstance(choices[0], bool):
            raise TuningTableError(f"{where}: {reprlib.repr(value)} must be one of {', '.join(map(str, choices))}")
        return value
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or isinstance(value, bool) != (kind is bool):
        raise TuningTableError(f"{where}: {reprlib.repr(value)} must be of type {kind.__name__}")
    return value


def _positive(where: str, values: Mapping[str, Any], name: str, kind: type) -> Any:
    value = _field(where, values, name, kind)
    most = _LARGEST if kind is int else math.inf
    if not 0 < value < most:
        raise TuningTableError(f"{where}: {name}={reprlib.repr(value)} must be positive and below {most}")
    return value


def _config(where: str, kernel: str, values: Mapping[str, Any]) -> Any:
    config = CONFIGS[kernel]
    hints = typing.get_type_hints(config)
    known = {field.name for field in dataclasses.fields(config)}
    if unknown := sorted(set(values) - known):
        raise TuningTableError(f"{where}: config: {unknown[0]!r} must be one of {', '.join(sorted(known))}")
    fields = {name: _typed(f"{where}: config: {name}", value, hints[name]) for name, value in values.items()}
    made = config(**fields)
    if made.activations != "q8_1":
        raise TuningTableError(f"{where}: config: activations={made.activations!r} must be 'q8_1', what callers bring")
    return made


def parse(text: str | bytes, path: str) -> Table:
    """A table from a file's text.

    Raises:
      TuningTableError: no JSON, what is missing, of a wrong type or unknown, a Config that its own shape refuses.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TuningTableError(f"{path}: not JSON: {error}") from error
    content = _typed(path, content, dict)
    source = _field(path, content, "source", str)
    if source not in SOURCES:
        raise TuningTableError(f"{path}: source: {source!r} must be one of {', '.join(SOURCES)}")
    rows = []
    for i, values in enumerate(_field(path, content, "rows", list)):
        where = f"{path}: row {i}"
        values = _typed(where, values, dict)
        kernel = _field(where, values, "kernel", str)
        if kernel not in CONFIGS:
            raise TuningTableError(f"{where}: kernel: {kernel!r} must be one of {', '.join(CONFIGS)}")
        row = Row(
            kernel=kernel,
            format=_field(where, values, "format", str),
            n=_positive(where, values, "n", int),
            columns=_positive(where, values, "columns", int),
            m=_positive(where, values, "m", int),
            config=_config(where, kernel, _field(where, values, "config", dict)),
            seconds=_positive(where, values, "seconds", float),
            why=_typed(f"{where}: why", values.get("why", ""), str),
        )
        try:
            row.config.check(row.format, row.n, row.columns, row.m)
        except KernelError as error:
            raise TuningTableError(f"{where}: {error}") from error
        rows.append(row)
    return Table(path, _field(path, content, "device", str), source, tuple(rows))


def load(path: Path) -> Table:
    """Reads a table.

    Raises:
      TuningTableError: it cannot be read, or is malformed.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise TuningTableError(f"{path}: {error.strerror or error}") from error
    return parse(text, str(path))


@functools.cache
def packaged() -> tuple[Table, ...]:
    """The tables that come with the package, measured ones first."""
    tables = [load(path) for path in sorted(FOLDER.glob("*.json"))]
    return tuple(sorted(tables, key=lambda table: SOURCES.index(table.source)))
