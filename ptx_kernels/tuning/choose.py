"""Chooses a kernel's Config for a shape and device: from a tuning table, else by its rule."""

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
from ..ptx.oldest import COMMON, built_for
from . import tables

C = TypeVar("C")

#: Environment variable that names the user's table file; read once.
VARIABLE = "JAX_Q4K_TUNING"

_REFERENCE = target()
_target: ContextVar[Target | None] = ContextVar("target", default=None)


@contextlib.contextmanager
def on_device(device: Target) -> Iterator[None]:
    """Context inside which choices are made, and kernels built, for `device`.

    Elsewhere they are for the reference device.
    """
    token = _target.set(device)
    try:
        with built_for(device.sm or COMMON):
            yield
    finally:
        _target.reset(token)


def current_device() -> Target:
    """Returns the device for which choices are made now."""
    return _target.get() or _REFERENCE


def device_of_context() -> Target | None:
    """Returns the device of the surrounding `on_device`; None outside of any."""
    return _target.get()


@dataclass(frozen=True)
class Choice:
    """Record of a choice: the rule, its arguments, the Config (or number), and the reason."""

    rule: str
    arguments: tuple[Any, ...]
    config: Any
    why: str

    def __str__(self) -> str:
        shape = ", ".join(map(str, self.arguments))
        return f"{self.rule}({shape}) -> {_short(self.config)}: {self.why}"


def choose(rule: Rule[C], *shape: Any, **named: Any) -> C:
    """Returns the Config (or number) for a kernel's shape on the current device.

    Raises:
      TypeError: arguments that the rule does not take. TuningTableError: the user's table is
        malformed.
    """
    choice = decide(rule, *shape, **named)
    if (made := _record.get()) is not None:
        made.append(choice)
    return choice.config


def decide(rule: Rule, *shape: Any, **named: Any) -> Choice:
    """Returns the `Choice` of the first source that knows the shape, with the reason.

    The order is: the user's table, a table measured on the device, the cost model's table for the
    device, the rule. Errors are those of `choose`.
    """
    device, shape = current_device(), rule.shape(*shape, **named)
    without = f"no table for {device.name} has the shape"
    for table in tables_for(device) if rule.rows else ():
        if row := table.serving(rule, shape):
            if device.clusters_allowed or not getattr(row.config, "cluster", False):
                return Choice(rule.name, shape, row.config, table.reason(rule, row, shape))
            without = "the tables' Config is a cluster"
    why = f"rule {rule.name}"
    if rule.takes_device:
        why += f" for {device}"
    if rule.rows:
        why += f", {without}"
    return Choice(rule.name, shape, rule(device, *shape), why)


def tables_for(device: Target) -> list[tables.Table]:
    """Returns the tables of a device, in the order in which they decide.

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
    """Yields a list that collects the choices made inside the context, in order."""
    made: list[Choice] = []
    token = _record.set(made)
    try:
        yield made
    finally:
        _record.reset(token)


def _short(config: Any) -> str:
    """Formats only the fields of a Config that differ from their defaults."""
    if not dataclasses.is_dataclass(config):
        return str(config)
    values = {
        field.name: (getattr(config, field.name), field.default)
        for field in dataclasses.fields(config)
    }
    changed = (f"{name}={value!r}" for name, (value, default) in values.items() if value != default)
    return f"{type(config).__name__}({', '.join(changed)})"
