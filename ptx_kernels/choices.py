"""Who decides on a Config: tables before rules, and what they know of the device.

The first that knows the shape decides: the user's table (the file that the environment variable `JAX_Q4K_TUNING`
names), a table measured on the device, a table of the cost model for the device, a rule of `ptx_kernels.tuning`.
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
from .devices import REFERENCE
from .ptx import KernelError

P = ParamSpec("P")
C = TypeVar("C")

#: Names the file of the user's own table; read once.
VARIABLE = "JAX_Q4K_TUNING"

_device: ContextVar[str] = ContextVar("device", default=REFERENCE.name)


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
    values = {field.name: (getattr(config, field.name), field.default) for field in dataclasses.fields(config)}
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
def on_device(name: str) -> Iterator[None]:
    """Chooses inside the block for the device that the driver calls `name`; outside of any, for an H200."""
    token = _device.set(name)
    try:
        yield
    finally:
        _device.reset(token)


def current_device() -> str:
    return _device.get()


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
    return [table for table in known if table.is_for(current_device())]


class Rule(Generic[P, C]):
    """A function of `ptx_kernels.tuning` that chooses a Config (or a number) by itself; says so when asked."""

    def __init__(self, rule: Callable[P, C]) -> None:
        self.rule: Callable[..., C] = rule
        functools.update_wrapper(self, rule)

    @property
    def name(self) -> str:
        return self.rule.__name__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> C:
        choice = self.choose(*args, **kwargs)
        if (made := _record.get()) is not None:
            made.append(choice)
        return choice.config

    def choose(self, *args: P.args, **kwargs: P.kwargs) -> Choice:
        """What it chooses, and why.

        Raises:
          TuningTableError: the user's table is malformed.
        """
        bound = inspect.signature(self.rule).bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = tuple(bound.arguments.values())
        config, why = self._decide(arguments)
        return Choice(self.name, arguments, config, why)

    def _decide(self, arguments: tuple[Any, ...]) -> tuple[C, str]:
        return self.rule(*arguments), f"rule tuning.{self.name}"


def _accepts(config: Any, shape: tuple[Any, ...]) -> bool:
    """Whether a Config from a neighbour's row goes with the shape too."""
    try:
        config.check(*shape)
    except KernelError:
        return False
    return True


class Tabled(Rule[P, C]):
    """A rule that tables overrule: its first arguments are (format, n, columns, m)."""

    def _decide(self, arguments: tuple[Any, ...]) -> tuple[C, str]:
        for table in tables_in_force():
            row = table.nearest(self.name, *arguments[:4])
            if row and _accepts(row.config, arguments[:4]):
                exact = (row.format, row.n, row.columns, row.m) == arguments[:4]
                found = "this shape" if exact else f"the nearest shape, {row.n}x{row.columns} m={row.m}"
                figures = ", ".join(filter(None, (f"{row.seconds * 1e6:.2f} us", row.why)))
                name = Path(table.path).name
                return row.config, f"{table.source} for {table.device} ({name}), {found}: {figures}"
        return self.rule(*arguments), f"rule tuning.{self.name}, no table for {current_device()} has the shape"
