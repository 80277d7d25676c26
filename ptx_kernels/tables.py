"""Tuning tables: JSON files that say which Config a kernel gets at which shapes on one device.

    {"device": "NVIDIA H200", "multiprocessors": 132, "source": "measured",
     "rows": [{"kernel": "matvec", "format": "Q4_K", "n": 4096, "columns": 14336, "m": 1,
               "config": {"warps": 4, ...}, "seconds": 1.0e-05}, ...]}

A row is keyed by the arguments of its kernel's rule in `ptx_kernels.tuning`: `FAMILIES` lists them.
Its `config` holds some of the fields of the kernel's Config; the others keep their defaults. `why`
is optional: what the cost model says binds the launch, and what kept faster Configs out.
`multiprocessors` is optional where `devices` knows the device. Everything beside `device`,
`multiprocessors`, `source` and `rows` (driver, versions, commit, date) is provenance and not read.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import reprlib
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .devices import find_device
from .kernels.gemm import GemmConfig
from .kernels.matvec import MatvecConfig
from .kernels.matvec.prologue import MOST_BYTES, int8_bytes
from .kernels.quantize_q8_1 import GROUP
from .ptx import KernelError

SOURCES = ("measured", "model")
FOLDER = Path(__file__).with_name("tuned")

_LARGEST = 1 << 40  # of every number of a shape
_FARTHEST = (
    1.0  # octaves up to which a row stands for a shape that is not its own, all sizes together
)
_ROWS = ("n", "rows")  # of weights: the keys that say how many


class TuningTableError(ValueError):
    """A tuning table that is malformed; the message names the file, the place in it, the value and
    the rule.
    """


class Match(enum.Enum):
    """How a row's value has to agree with that of the shape that is asked for."""

    EQUAL = "equal"
    NEAR = "near: within an octave, all such values together"
    COVERS = "as large or larger by at most an octave, and the least such: what holds more rows holds fewer too"


@dataclass(frozen=True)
class Key:
    """One argument of a rule: `kind` is str, int, bool, or a list of str or int (a tuple in
    Python).
    """

    kind: Any
    match: Match


@dataclass(frozen=True)
class Family:
    """The rows of one rule of `ptx_kernels.tuning`.

    Attributes:
      config: what they hold.
      keys: by which they are found: the rule's arguments, in their order.
      check: `(config, *shape)`; raises KernelError or ValueError for a Config that does not go with
        a shape.
    """

    config: type
    keys: dict[str, Key]
    check: Callable[..., None]

    def serves(self, row: Row, shape: tuple[Any, ...]) -> bool:
        """Whether a neighbour's row goes with the shape too.

        Not where it was chosen to share its own number of rows evenly: a fixed grid, or blocks that
        each quantize.
        """
        config = row.config
        fixed = isinstance(config, MatvecConfig) and (
            config.persistent or config.activations == "inline_q8"
        )
        same = (
            ours == theirs
            for name, ours, theirs in zip(self.keys, shape, row.shape, strict=True)
            if name in _ROWS
        )
        return (not fixed or all(same)) and self.accepts(config, shape)

    def accepts(self, config: Any, shape: tuple[Any, ...]) -> bool:
        """Whether a Config goes with the shape."""
        try:
            self.check(config, *shape)
        except (KernelError, ValueError):
            return False
        return True

    def describe(self, shape: tuple[Any, ...]) -> str:
        """The numbers of a shape: `n=4096 columns=4096 m=1`."""
        named = zip(self.keys.items(), shape, strict=True)
        return " ".join(
            f"{name}={value}" for (name, key), value in named if key.match is not Match.EQUAL
        )

    def equal_part(self, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        """What all rows that may serve a shape share with it."""
        named = zip(self.keys.values(), shape, strict=True)
        return tuple(value if key.match is Match.EQUAL else _count(value) for key, value in named)

    def distance(self, row: tuple[Any, ...], shape: tuple[Any, ...]) -> tuple[float, float] | None:
        """(octaves that `row` covers too much, octaves that it lies off), the smaller the better;
        None: too far.
        """
        covered, off = [0.0], [0.0]
        for key, theirs, asked in zip(self.keys.values(), row, shape, strict=True):
            if key.match is Match.COVERS:
                if theirs < asked:
                    return None
                covered.append(math.log2(theirs / asked))
            elif key.match is Match.NEAR:
                pairs = (
                    zip(theirs, asked, strict=True)
                    if isinstance(theirs, tuple)
                    else ((theirs, asked),)
                )
                off += [abs(math.log2(a / b)) for a, b in pairs]
        return None if max(sum(covered), sum(off)) > _FARTHEST else (sum(covered), sum(off))


def _count(value: Any) -> int | None:
    return len(value) if isinstance(value, tuple) else None


def _check_matvec(config: MatvecConfig, format: str, n: int, columns: int, m: int) -> None:
    if config.activations != "q8_1":
        raise ValueError(f"activations={config.activations!r} must be 'q8_1', what callers bring")
    config.check(format, n, columns, m)


def _check_fused(
    config: MatvecConfig,
    formats: tuple[str, ...],
    rows: tuple[int, ...],
    columns: int,
    m: int,
    floats: bool,
    output: str,
) -> None:
    if not formats or len(rows) not in (1, len(formats)):
        raise ValueError(
            f"rows={rows} must be those of each of formats={formats}, or one number for all"
        )
    if config.activations not in (("q8_1", "inline_q8") if floats else ("q8_1",)):
        raise ValueError(
            f"activations={config.activations!r} must be q8_1, or with floats inline_q8"
        )
    if output not in ("f32", "q8_1"):
        raise ValueError(f"output={output!r} must be f32 or q8_1")
    if output == "q8_1" and (config.block_rows % GROUP or any(n % GROUP for n in rows)):
        raise ValueError(
            f"q8_1: rows={rows} and a block's {config.block_rows} must be multiples of {GROUP}"
        )
    if config.activations == "inline_q8" and int8_bytes(m, columns) > MOST_BYTES:
        raise ValueError(
            f"inline_q8: m={m} rows of columns={columns} take more than {MOST_BYTES} bytes"
        )
    for format in formats:
        config.check(format, min(rows), columns, m)


def _check_gemm(config: GemmConfig, format: str, n: int, columns: int, m: int) -> None:
    config.check(format, columns)
    if config.products != "int8":
        raise KernelError(f"products={config.products!r} must be 'int8', what callers bring")


_FORMAT, _SIZE = Key(str, Match.EQUAL), Key(int, Match.NEAR)

#: What may be in a table, by the name of the rule that it overrules.
FAMILIES: dict[str, Family] = {
    "matvec": Family(
        MatvecConfig,
        dict(format=_FORMAT, n=_SIZE, columns=_SIZE, m=Key(int, Match.COVERS)),
        _check_matvec,
    ),
    "fused_matvec": Family(
        MatvecConfig,
        dict(
            formats=Key(tuple[str, ...], Match.EQUAL),
            rows=Key(tuple[int, ...], Match.NEAR),
            columns=_SIZE,
            m=Key(int, Match.COVERS),
            floats=Key(bool, Match.EQUAL),
            output=Key(str, Match.EQUAL),
        ),
        _check_fused,
    ),
    "gemm": Family(
        GemmConfig,
        dict(format=_FORMAT, n=_SIZE, columns=_SIZE, m=Key(int, Match.COVERS)),
        _check_gemm,
    ),
}


@dataclass(frozen=True)
class Row:
    """The Config for one shape (the values of its family's keys), with the seconds measured or
    predicted.
    """

    kernel: str
    shape: tuple[Any, ...]
    config: Any
    seconds: float
    why: str = ""


@dataclass(frozen=True)
class Table:
    """One file. `device` is as the driver reports it, or a name in `devices.DEVICES`.

    `multiprocessors`: of the device; None: as `devices` has them, or not known.
    """

    path: str
    device: str
    source: str
    rows: tuple[Row, ...]
    multiprocessors: int | None = None

    def is_for(self, device: str, multiprocessors: int) -> bool:
        """Whether it is of this device, and of one that is cut into as many multiprocessors."""
        mine, other = find_device(self.device), find_device(device)
        count = self.multiprocessors or (mine and mine.multiprocessors)
        return (self.device == device or (mine is not None and mine == other)) and count in (
            None,
            multiprocessors,
        )

    @functools.cached_property
    def _by_equal_part(self) -> dict[tuple[Any, ...], list[Row]]:
        found: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.rows:
            found.setdefault((row.kernel, *FAMILIES[row.kernel].equal_part(row.shape)), []).append(
                row
            )
        return found

    def nearest(self, kernel: str, *shape: Any) -> Row | None:
        """The row whose shape is nearest, or None where none is near.

        Equal in what must be equal (formats, ...). Of those that cover the shape (as many rows of
        activations at least) those that cover least more; among them the least distance in octaves,
        all numbers added up. The first of equals.
        """
        family = FAMILIES[kernel]
        rows = self._by_equal_part.get((kernel, *family.equal_part(shape)), [])
        near = [
            (distance, row)
            for row in rows
            if (distance := family.distance(row.shape, shape)) is not None
        ]
        return min(near, key=lambda pair: pair[0], default=(None, None))[1]


def _field(where: str, values: Mapping[str, Any], name: str, kind: type) -> Any:
    if name not in values:
        raise TuningTableError(f"{where}: {name} is missing")
    return _typed(f"{where}: {name}", values[name], kind)


def _typed(where: str, value: Any, kind: Any) -> Any:
    choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    if choices:
        if value not in choices or isinstance(value, bool) != isinstance(choices[0], bool):
            raise TuningTableError(
                f"{where}: {reprlib.repr(value)} must be one of {', '.join(map(str, choices))}"
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
    """A value of a shape; the lists of JSON become tuples."""
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
    config = FAMILIES[kernel].config
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
    if kernel not in FAMILIES:
        raise TuningTableError(f"{where}: kernel: {kernel!r} must be one of {', '.join(FAMILIES)}")
    family = FAMILIES[kernel]
    known = {"kernel", *family.keys, "config", "seconds", "why"}
    if unknown := sorted(set(values) - known):
        raise TuningTableError(f"{where}: {unknown[0]!r} must be one of {', '.join(sorted(known))}")
    row = Row(
        kernel=kernel,
        shape=tuple(_key(where, values, name, key.kind) for name, key in family.keys.items()),
        config=_config(where, kernel, _field(where, values, "config", dict)),
        seconds=_positive(where, values, "seconds", float),
        why=_typed(f"{where}: why", values.get("why", ""), str),
    )
    try:
        family.check(row.config, *row.shape)
    except (KernelError, ValueError) as error:
        raise TuningTableError(f"{where}: {error}") from error
    return row


def parse(text: str | bytes, path: str) -> Table:
    """A table from a file's text.

    Raises:
      TuningTableError: no JSON, what is missing, of a wrong type or unknown, a Config that its own
        shape refuses.
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
