"""The one door to a Config: who decides on it, in order, for which device, and why."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..devices import Target, target
from ..file_stamp import file_stamp
from ..kernels.family import Rule
from . import tables

C = TypeVar("C")

#: Names the file of the user's own table; read once.
VARIABLE = "JAX_Q4K_TUNING"

_REFERENCE = target()
_target: ContextVar[Target] = ContextVar("target", default=_REFERENCE)


@contextlib.contextmanager
def on_device(device: Target) -> Iterator[None]:
    """Chooses inside the block for `device`; outside of any, for the reference."""
    token = _target.set(device)
    try:
        yield
    finally:
        _target.reset(token)


def current_device() -> Target:
    """The device that choices are made for."""
    return _target.get()


@dataclass(frozen=True)
class Choice:
    """A Config (or a number), the rule and shape that were asked for, and why."""

    rule: str
    arguments: tuple[Any, ...]
    config: Any
    why: str

    def __str__(self) -> str:
        shape = ", ".join(map(str, self.arguments))
        return f"{self.rule}({shape}) -> {_short(self.config)}: {self.why}"


def choose(rule: Rule[C], *shape: Any, **named: Any) -> C:
    """The Config (or number) that a shape gets on the current device.

    Raises:
      TypeError: arguments that the rule does not take. TuningTableError: the user's table is
        malformed.
    """
    choice = decide(rule, *shape, **named)
    if (made := _record.get()) is not None:
        made.append(choice)
    return choice.config


def decide(rule: Rule, *shape: Any, **named: Any) -> Choice:
    """Choice of the first that knows the shape.

    These are, in order, the user's table, a table measured on the device, a table of the cost model
    for it, and the rule. Errors are those of `choose`.
    """
    device, shape = current_device(), rule.shape(*shape, **named)
    for table in tables_for(device) if rule.rows else ():
        if row := table.serving(rule, shape):
            return Choice(rule.name, shape, row.config, table.reason(rule, row, shape))
    why = f"rule {rule.name}"
    if rule.takes_device:
        why += f" for {device}"
    if rule.rows:
        why += f", no table for {device.name} has the shape"
    return Choice(rule.name, shape, rule(device, *shape), why)


def tables_for(device: Target) -> list[tables.Table]:
    """The tables of a device, those that decide first in front.

    Raises:
      TuningTableError: the user's table is malformed.
    """
    path = os.environ.get(VARIABLE)
    known = [*([_user_table(path, file_stamp(path))] if path else []), *tables.packaged()]
    return [table for table in known if table.is_for(device.name, device.multiprocessors)]


@functools.lru_cache(maxsize=16)
def _user_table(path: str, _stamp: tuple[int, ...]) -> tables.Table:
    return tables.load(Path(path))


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
