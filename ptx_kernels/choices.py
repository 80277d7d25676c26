"""Who decides on a Config: tables before rules, and what they know of the device.

The first that knows the shape decides: the user's table (the file that the environment variable
`JAX_Q4K_TUNING` names), a table measured on the device, a table of the cost model for the device, a
rule of `ptx_kernels.tuning`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

from . import tables
from .devices import REFERENCE, find_device

P = ParamSpec("P")
C = TypeVar("C")

#: Names the file of the user's own table; read once.
VARIABLE = "JAX_Q4K_TUNING"

_MULTIPROCESSORS = "multiprocessors"  # of the rules that ask for them, the parameter


@dataclass(frozen=True)
class Target:
    """The device that choices are for.

    Attributes:
      name: as the driver calls it.
      multiprocessors: that it has.
      assumed: whether nobody knows how many it has: as many as the reference.
    """

    name: str
    multiprocessors: int
    assumed: bool = False

    def __str__(self) -> str:
        """`108 multiprocessors`, and whose they are where they are not known to be the device's."""
        whose = f" of an {REFERENCE.name}, {self.name} being unknown" if self.assumed else ""
        return f"{self.multiprocessors} multiprocessors{whose}"


def target(name: str, multiprocessors: int | None = None) -> Target:
    """The device that the driver calls `name`.

    Args:
      multiprocessors: as the device itself reports; None: as `devices` knows them of the name, or
        else the reference's (`assumed`).

    Raises:
      TypeError: a name that is no text, a number that is no integer. ValueError: `multiprocessors`
        is not positive.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"device={name!r} must be a name as the driver reports it, such as {REFERENCE.name!r}"
        )
    if multiprocessors is None:
        known = find_device(name)
        return Target(name, (known or REFERENCE).multiprocessors, assumed=known is None)
    if not isinstance(multiprocessors, int) or isinstance(multiprocessors, bool):
        raise TypeError(f"multiprocessors={multiprocessors!r} must be an integer")
    if multiprocessors < 1:
        raise ValueError(f"multiprocessors={multiprocessors} must be at least 1")
    return Target(name, multiprocessors)


_REFERENCE = target(REFERENCE.name)
_target: ContextVar[Target] = ContextVar("target", default=_REFERENCE)


@dataclass(frozen=True)
class Choice:
    """What a rule of `ptx_kernels.tuning` was asked, what it chose, and why."""

    rule: str
    arguments: tuple[Any, ...]
    config: Any
    why: str

    def __str__(self) -> str:
        return f"{self.rule}({', '.join(map(str, self.arguments))}) -> {_short(self.config)}: {self.why}"


def _short(config: Any) -> str:
    """A Config's fields that differ from their defaults."""
    if not dataclasses.is_dataclass(config):
        return str(config)
    values = {
        field.name: (getattr(config, field.name), field.default)
        for field in dataclasses.fields(config)
    }
    changed = (f"{name}={value!r}" for name, (value, default) in values.items() if value != default)
    return f"{type(config).__name__}({', '.join(changed)})"


_record: ContextVar[list[Choice] | None] = ContextVar("record", default=None)


@contextlib.contextmanager
def recorded() -> Iterator[list[Choice]]:
    """The choices that are made inside the block, in order."""
    made: list[Choice] = []
    token = _record.set(made)
    try:
        yield made
    finally:
        _record.reset(token)


@contextlib.contextmanager
def on_device(device: Target) -> Iterator[None]:
    """Chooses inside the block for `device`; outside of any, for an H200."""
    token = _target.set(device)
    try:
        yield
    finally:
        _target.reset(token)


def current_device() -> Target:
    """The device that choices are made for."""
    return _target.get()


@functools.cache
def _user_table(path: str) -> tables.Table:
    return tables.load(Path(path))


def tables_in_force() -> list[tables.Table]:
    """The tables for the current device, those that decide first in front.

    Raises:
      TuningTableError: the user's table is malformed.
    """
    path = os.environ.get(VARIABLE)
    known = [*([_user_table(path)] if path else []), *tables.packaged()]
    device = current_device()
    return [table for table in known if table.is_for(device.name, device.multiprocessors)]


class Rule(Generic[P, C]):
    """A function of `ptx_kernels.tuning` that chooses a Config (or a number) by itself; says so
    when asked.

    A rule with a parameter `multiprocessors` gets those of the current device.
    """

    def __init__(self, rule: Callable[P, C]) -> None:
        self.rule: Callable[..., C] = rule
        functools.update_wrapper(self, rule)
        self._signature = inspect.signature(rule)
        self._fills = _MULTIPROCESSORS in self._signature.parameters

    @property
    def name(self) -> str:
        return self.rule.__name__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> C:
        choice = self.choose(*args, **kwargs)
        if (made := _record.get()) is not None:
            made.append(choice)
        return choice.config

    def choose(self, *args: P.args, **kwargs: P.kwargs) -> Choice:
        """What it chooses for the current device, and why.

        Raises:
          TypeError: `multiprocessors` is given: `on_device` says them. TuningTableError: the user's
            table is malformed.
        """
        if _MULTIPROCESSORS in kwargs:
            raise TypeError(
                f"{self.name} takes multiprocessors from choices.on_device; {self.name}.rule takes any"
            )
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        bound.arguments.pop(_MULTIPROCESSORS, None)
        arguments = tuple(bound.arguments.values())
        config, why = self._decide(arguments)
        return Choice(self.name, arguments, config, why)

    def _decide(self, arguments: tuple[Any, ...]) -> tuple[C, str]:
        if not self._fills:
            return self.rule(*arguments), f"rule tuning.{self.name}"
        device = current_device()
        config = self.rule(*arguments, multiprocessors=device.multiprocessors)
        return config, f"rule tuning.{self.name} for {device}"


class Tabled(Rule[P, C]):
    """A rule that tables overrule: `tables.FAMILIES` says how its arguments have to agree with a
    row's.
    """

    def _decide(self, arguments: tuple[Any, ...]) -> tuple[C, str]:
        family = tables.FAMILIES[self.name]
        for table in tables_in_force():
            row = table.nearest(self.name, *arguments)
            if row and family.serves(row, arguments):
                found = (
                    "this shape"
                    if row.shape == arguments
                    else f"the nearest shape, {family.describe(row.shape)}"
                )
                figures = ", ".join(filter(None, (f"{row.seconds * 1e6:.2f} us", row.why)))
                name = Path(table.path).name
                return row.config, f"{table.source} for {table.device} ({name}), {found}: {figures}"
        config, why = super()._decide(arguments)
        return config, f"{why}, no table for {current_device().name} has the shape"
