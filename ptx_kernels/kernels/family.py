"""Kernel family records: shapes, rules and loop facts that tuning, reports and checks need."""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from ..devices import Target
from ..ptx import Buffer, Kernel, KernelError, u8

Arguments = Mapping[str, Any]
C = TypeVar("C")

#: `(buffer, all buffers by name, generator) -> array`. The generator is a numpy.random.Generator.
#: It is Any here because naming the class at run time would import all of NumPy's generators.
RandomValues = Callable[[Buffer, Mapping[str, Buffer], Any], np.ndarray]


@dataclass(frozen=True)
class Case:
    """A kernel at a relevant shape; `label` is unique."""

    label: str
    family: str
    arguments: dict[str, Any]

    @classmethod
    def of(cls, build: Callable[..., Kernel], label: str, **arguments: Any) -> Case:
        """Returns a case of a kernel function; its label is preceded by the function's name."""
        return cls(f"{build.__name__}-{label}", build.__name__, arguments)


class Match(enum.Enum):
    """Required relation of a tuning table row's value to that of the requested shape.

    NEAR: within an octave, summed over all such values. COVERS: at least as large, by at most an
    octave, and the smallest such row, because a kernel for more rows also takes fewer.
    """

    EQUAL = "equal"
    NEAR = "near"
    COVERS = "covers"


@dataclass(frozen=True)
class Key:
    """An argument of a selection rule.

    `kind` is str, int, bool, or a tuple of str or int (in JSON a list).
    """

    kind: Any
    match: Match


@dataclass(frozen=True)
class TableRows:
    """Schema of the tuning table rows that overrule a selection rule.

    Attributes:
      config: type of the Config that a row holds.
      keys: the rule's arguments, in order, which identify a row.
      check: `(config, *shape)`; raises KernelError or ValueError for a Config that is invalid for a
        shape.
      shares_rows: config -> whether it divides its own number of rows evenly, and so serves no
        other number.
    """

    config: type
    keys: dict[str, Key]
    check: Callable[..., None]
    shares_rows: Callable[[Any], bool] = lambda config: False

    def accepts(self, config: Any, shape: tuple[Any, ...]) -> bool:
        """Returns whether a Config is valid for a shape."""
        try:
            self.check(config, *shape)
        except (KernelError, ValueError):
            return False
        return True


@dataclass(frozen=True)
class Rule(Generic[C]):
    """A selection rule: returns the Config (or number) for a shape on a device.

    Attributes:
      name: name used in tuning tables and reasons.
      function: `(*shape)`, or `(device, *shape)` if the choice depends on the device.
      rows: schema of the table rows that overrule it; None means that no table does.
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
        """Returns the rule's own choice for a device, regardless of tables."""
        return self.function(*((device,) if self.takes_device else ()), *shape, **named)

    @property
    def keys(self) -> Mapping[str, Key]:
        """The rule's arguments by name, the keys of a table row; empty if no table overrules it."""
        return self.rows.keys if self.rows else {}

    def accepts(self, config: Any, shape: tuple[Any, ...]) -> bool:
        """Returns whether tables may overrule the rule and the Config is valid for the shape."""
        return self.rows is not None and self.rows.accepts(config, shape)

    def shape(self, *shape: Any, **named: Any) -> tuple[Any, ...]:
        """Returns the arguments in the order of the rule's parameters, with defaults filled in.

        Raises TypeError like a call.
        """
        bound = self._signature.bind(*((None,) if self.takes_device else ()), *shape, **named)
        bound.apply_defaults()
        return bound.args[1:] if self.takes_device else bound.args


@dataclass(frozen=True)
class PackedWeights:
    """Packed matrices that a launch multiplies by: their formats and total number of weights."""

    formats: tuple[str, ...]
    count: int


def one_matrix(arguments: Arguments) -> PackedWeights:
    """Returns the weights of one matrix (n, columns), or of one per token and selected expert."""
    count = arguments["n"] * arguments["columns"] * choices(arguments)
    return PackedWeights((arguments["format"],), count)


def pair(arguments: Arguments) -> PackedWeights:
    """Returns the weights of two matrices (n, columns), or of two per token and selected expert."""
    formats = arguments["formats"]
    count = len(formats) * arguments["n"] * arguments["columns"]
    return PackedWeights(formats, count * choices(arguments))


def joined(arguments: Arguments) -> PackedWeights:
    """Returns the weights of several matrices, with `rows[i]` rows in format `formats[i]`."""
    return PackedWeights(arguments["formats"], sum(arguments["rows"]) * arguments["columns"])


def all_of_it(buffer: Buffer, arguments: Arguments) -> float:
    return 1


def one_layer(buffer: Buffer, arguments: Arguments) -> float:
    """Returns the fraction of a buffer that is read: one layer of a stack, or 1."""
    stacked = arguments["layers"] and buffer.type is u8
    return 1 / arguments["layers"] if stacked else 1


def chosen_experts(buffer: Buffer, arguments: Arguments) -> float:
    """Returns the fraction of a buffer that tokens may select: of packed experts, else 1.

    For a stack of layers it is the fraction of one layer.
    """
    if not arguments["experts"]:
        return one_layer(buffer, arguments)
    if buffer.type is not u8 or buffer.name.startswith("shared_"):
        return 1
    return arguments["m"] * arguments["top"] / arguments["experts"]


def choices(arguments: Arguments) -> int:
    """Returns the number of (activation row, selected expert) pairs; 1 without experts.

    A shared expert is one that all rows select.
    """
    if not arguments.get("experts"):
        return 1
    return int(arguments["m"] * (arguments["top"] + arguments.get("shared", False)))


def rows_together(arguments: Arguments) -> int:
    """Returns the activation rows that a mat-vec's warp multiplies by the same weights."""
    return 1 if arguments.get("experts") else arguments["m"]


def ids_of_rows(buffer: Buffer, buffers: Mapping[str, Buffer], rng: Any) -> np.ndarray:
    """Returns random row indices into packed weights; the first two are out of range."""
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
      build: the kernel function, whose name is the family's.
      examples: shapes that represent it in reports, golden texts and assembly tests.
      rules: rules that choose its Configs.
      weights: arguments -> the packed weights that a launch multiplies by; None means that it
        multiplies by none.
      touched: (buffer, arguments) -> the fraction of a buffer that a launch touches; more than 1
        counts as 1.
      rewritten: buffers that a launch reads in full and then writes; they count twice.
      passes: arguments -> number of times that the hot loop reads the weights, or the bytes of all
        inputs; None means that loop trips cannot be derived from bytes.
      trips: arguments -> trips of all warps through the hot loop, or None; None if the loop's loads
        or stores determine the trips.
      stores: arguments -> global stores of all warps in the hot loop, which determine the trips if
        its loads do not.
      shorter: arguments -> an argument that the hot loop's trips grow with, and a value for which
        the loop is in its steady state; None means that the code before and after the loop counts
        as much.
      operands: an integer or special buffer's name -> its random values, a function of (buffer, all
        buffers by name, generator).
    """

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

    @property
    def name(self) -> str:
        return self.build.__name__


def matmul_family(
    build: Callable[..., Kernel],
    cases: Iterable[Case],
    *rules: Rule,
    weights: Callable[[Arguments], PackedWeights],
    touched: Callable[[Buffer, Arguments], float] = one_layer,
    passes: Callable[[Arguments], int] = once,
    **facts: Any,
) -> Family:
    """Returns the family of a kernel that multiplies by packed weights.

    Its examples are the `cases` that call it. By default it reads one layer of a stack, once.
    """
    examples = tuple(case for case in cases if case.family == build.__name__)
    return Family(build, examples, rules, weights, touched, passes=passes, **facts)
