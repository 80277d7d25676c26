"""Reports operands that are all-gathered because an operation cannot take them sharded."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax

from .layout import OVER_DEVICES, Axes, axes_of


class Gather(NamedTuple):
    """An operand that is gathered because its operation cannot take it sharded.

    Attributes:
      operand: type, such as `f32[8,1024]`.
      axes: mesh axes that the operand is split over; empty for part of a mesh axis.
    """

    operation: str
    operand: str
    axes: Axes

    def __str__(self) -> str:
        axes = " and ".join(map(repr, self.axes)) or "a part of a mesh axis"
        return f"{self.operation}: {self.operand} over {axes}"


_record: ContextVar[list[Gather] | None] = ContextVar("record", default=None)


@contextlib.contextmanager
def recorded() -> Iterator[list[Gather]]:
    """Yields a list that collects the Gathers of operations lowered inside the block.

    XLA's partitioner makes these gathers.
    """
    found: list[Gather] = []
    token = _record.set(found)
    try:
        yield found
    finally:
        _record.reset(token)


def record() -> list[Gather]:
    """Returns the list of the innermost `recorded` block; an unused list if there is none."""
    found = _record.get()
    return [] if found is None else found


def gathers(
    operation: str,
    operands: Sequence[Any],
    before: Sequence[Iterable[Any] | None],
    after: Sequence[Iterable[Any]],
) -> list[Gather]:
    """Lists the operands that are gathered when they are resharded from `before` to `after`.

    before, after: PartitionSpec of each operand. None in `before` means that the operand is split
    over part of a mesh axis.
    """
    found = []
    for operand, old, new in zip(operands, before, after, strict=True):
        entries = itertools.zip_longest(map(axes_of, old or ()), map(axes_of, new), fillvalue=())
        axes = tuple(axis for have, want in entries for axis in have if axis not in want)
        if axes or old is None:
            aval = jax.core.ShapedArray(operand.shape, operand.dtype)
            found.append(Gather(operation, aval.str_short(short_dtypes=True), axes))
    return found


def of_call(equation: Any) -> list[Gather]:
    """Lists the gathers of an equation that runs an operation on an explicit mesh.

    Returns [] for other equations.
    """
    name = str(equation.params.get("name", ""))
    if not name.endswith(OVER_DEVICES):
        return []
    moves = [e for e in equation.params["jaxpr"].eqns if e.primitive.name == "reshard"]
    operands = [move.invars[0].aval for move in moves]
    before = [operand.sharding.spec for operand in operands]
    after = [move.outvars[0].aval.sharding.spec for move in moves]
    return gathers(name.removesuffix(OVER_DEVICES), operands, before, after)
