"""Kernel families: the record of what tuning, reports and checks need to know about each."""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from ..devices import Target
from ..ptx import Buffer, Kernel, KernelError, u8

Arguments = Mapping[str, Any]
C = TypeVar("C")

#: `(buffer, all buffers by name, generator) -> array`. The generator is a numpy.random.Generator,
#: Any here because naming that at run time would import all of NumPy's generators.
RandomValues = Callable[[Buffer, Mapping[str, Buffer], Any], np.ndarray]


@dataclass(frozen=True)
class Case:
    """A kernel at a shape that matters; `label` is unique."""

    label: str
    family: str
    arguments: dict[str, Any]


class Match(enum.Enum):
    """Agreement of a table row's value with that of the shape that is asked for.

    NEAR: within an octave, all such values together. COVERS: as large or larger by at most an
    octave, and the least such, because what holds more rows holds fewer too.
    """

    EQUAL = "equal"
    NEAR = "near"
    COVERS = "covers"


@dataclass(frozen=True)
class Key:
    """One argument of a rule; `kind` is str, int, bool, or a tuple of str or int (JSON: a list)."""

    kind: Any
    match: Match


@dataclass(frozen=True)
class TableRows:
    """The rows of tuning tables that overrule a rule.

    Attributes:
      config: type of what they hold.
      keys: by which they are found: the rule's arguments, in their order.
      check: `(config, *shape)`; raises KernelError or ValueError for a Config that does not go with
        a shape.
      shares_rows: config -> whether it was chosen to share its own number of rows evenly, and so
        serves no other.
    """

    config: type
    keys: dict[str, Key]
    check: Callable[..., None]
    shares_rows: Callable[[Any], bool] = lambda config: False

    def accepts(self, config: Any, shape: tuple[Any, ...]) -> bool:
        """True where a Config goes with the shape."""
        try:
            self.check(config, *shape)
        except (KernelError, ValueError):
            return False
        return True


@dataclass(frozen=True)
class Rule(Generic[C]):
    """A rule of choice: the Config (or number) that a shape gets on a device.

    Attributes:
      name: by which tuning tables and reasons call it.
      function: `(*shape)`, or `(device, *shape)` where the choice depends on the device.
      rows: that overrule it; None: no table does.
    """

    name: str
    function: Callable[..., C]
    rows: TableRows | None = None

    @functools.cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self.function)

    @functools.cached_property
    def takes_device(self) -> bool:
        return "device" in self._signature.parameters

    def __call__(self, device: Target, *shape: Any, **named: Any) -> C:
        """The rule's own choice for a device, whatever tables say."""
        return self.function(*((device,) if self.takes_device else ()), *shape, **named)

    @property
    def keys(self) -> Mapping[str, Key]:
        """The keys of its rows: its arguments by name; empty where no table overrules it."""
        return self.rows.keys if self.rows else {}

    def accepts(self, config: Any, shape: tuple[Any, ...]) -> bool:
        """True where tables may overrule the rule, and a Config goes with the shape."""
        return self.rows is not None and self.rows.accepts(config, shape)

    def shape(self, *shape: Any, **named: Any) -> tuple[Any, ...]:
        """Whole shape in the order of the rule's parameters, defaults filled in.

        Raises TypeError as a call does.
        """
        bound = self._signature.bind(*((None,) if self.takes_device else ()), *shape, **named)
        bound.apply_defaults()
        return bound.args[1:] if self.takes_device else bound.args


@dataclass(frozen=True)
class PackedWeights:
    """The packed matrices that a launch multiplies by: their formats, and weights in all."""

    formats: tuple[str, ...]
    count: int


def one_matrix(arguments: Arguments) -> PackedWeights:
    """One matrix (n, columns) of a `format`, or as many as tokens' choices of experts."""
    count = arguments["n"] * arguments["columns"] * choices(arguments)
    return PackedWeights((arguments["format"],), count)


def pair(arguments: Arguments) -> PackedWeights:
    """Two matrices (n, columns) of `formats`, or as many of each as tokens' choices of experts."""
    formats = arguments["formats"]
    count = len(formats) * arguments["n"] * arguments["columns"]
    return PackedWeights(formats, count * choices(arguments))


def joined(arguments: Arguments) -> PackedWeights:
    """Matrices of `formats`, as many `rows` each."""
    return PackedWeights(arguments["formats"], sum(arguments["rows"]) * arguments["columns"])


def all_of_it(buffer: Buffer, arguments: Arguments) -> float:
    return 1


def one_layer(buffer: Buffer, arguments: Arguments) -> float:
    """All of it, but of a stack of packed matrices one."""
    stacked = arguments["layers"] and buffer.type is u8
    return 1 / arguments["layers"] if stacked else 1


def chosen_experts(buffer: Buffer, arguments: Arguments) -> float:
    """All of it, but of a mixture's packed matrices those that a token's choices may be.

    Of a stack of layers one.
    """
    if not arguments["experts"]:
        return one_layer(buffer, arguments)
    return choices(arguments) / arguments["experts"] if buffer.type is u8 else 1


def choices(arguments: Arguments) -> int:
    """Products of a row of activations with an expert's matrix; 1 of what has no experts."""
    return arguments["m"] * arguments["top"] if arguments.get("experts") else 1


def rows_together(arguments: Arguments) -> int:
    """Rows of activations that a warp of a mat-vec multiplies by the same weights."""
    return 1 if arguments.get("experts") else arguments["m"]


def ids_of_rows(buffer: Buffer, buffers: Mapping[str, Buffer], rng: Any) -> np.ndarray:
    """Indices along the first axis of packed weights; two that there are not in front."""
    rows = next(b.shape[0] for b in buffers.values() if b.type is u8)
    ids = rng.integers(0, rows, buffer.shape)
    if ids.size > 2:
        ids.ravel()[:2] = rows, -1
    return ids


def once(arguments: Arguments) -> int:
    return 1


@dataclass(frozen=True)
class Family:
    """One kernel family.

    Attributes:
      build: the kernel function.
      examples: shapes that stand for it in reports, golden texts and assembly tests.
      rules: by which its Configs are chosen.
      weights: arguments -> the packed weights that a launch multiplies by; None: it is no product.
      touched: (buffer, arguments) -> the share of a buffer that a launch touches; more than 1
        counts as 1.
      rewritten: buffers that a launch reads as a whole and then writes: they count twice.
      passes: arguments -> how often the hot loop reads the weights, or the bytes of all inputs;
        None: these do not tell how many trips it takes.
      trips: arguments -> trips of all warps through the hot loop, or None; None where its loads or
        stores tell them.
      stores: arguments -> global stores of all warps in the hot loop, which tell the trips where
        its loads do not.
      shorter: arguments -> one that the hot loop's trips grow with, and a value at which the loop
        is under way; None: what comes before and behind them counts as much.
      operands: an integer or special buffer's name -> its random values, by (buffer, all buffers by
        name, generator).
    """

    name: str
    build: Callable[..., Kernel]
    examples: tuple[Case, ...]
    rules: tuple[Rule, ...] = ()
    weights: Callable[[Arguments], PackedWeights] | None = None
    touched: Callable[[Buffer, Arguments], float] = all_of_it
    rewritten: tuple[str, ...] = ()
    passes: Callable[[Arguments], int] | None = None
    trips: Callable[[Arguments], float | None] | None = None
    stores: Callable[[Arguments], int] | None = None
    shorter: Callable[[Arguments], tuple[str, int] | None] = lambda arguments: None
    operands: Mapping[str, RandomValues] = field(default_factory=dict)
