"""Who decides on a Config: tables before rules, and what they know of the device.

The first that knows the shape decides: the user's table (the file that the environment variable `JAX_Q4K_TUNING`
names), a table measured on the device, a table of the cost model for the device, a rule of `ptx_kernels.tuning`.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import tables
from .devices import REFERENCE

#: Names the file of the user's own table; read once.
VARIABLE = "JAX_Q4K_TUNING"

_device: ContextVar[str] = ContextVar("device", default=REFERENCE.name)


@dataclass(frozen=True)
class Choice:
    """A Config and the reason for it."""

    config: Any
    why: str


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


class Tabled:
    """A rule of `ptx_kernels.tuning`, (format, n, columns, m) -> Config, that tables overrule."""

    def __init__(self, rule: Callable[[str, int, int, int], Any]) -> None:
        self.rule = rule
        functools.update_wrapper(self, rule)

    def __call__(self, format: str, n: int, columns: int, m: int) -> Any:
        return self.choose(format, n, columns, m).config

    def choose(self, format: str, n: int, columns: int, m: int) -> Choice:
        """The Config for weights (n, columns) and m rows of activations, and why.

        Raises:
          TuningTableError: the user's table is malformed.
        """
        kernel = self.rule.__name__
        for table in tables_in_force():
            if row := table.nearest(kernel, format, n, columns, m):
                exact = (row.n, row.columns, row.m) == (n, columns, m)
                found = "this shape" if exact else f"the nearest shape, {row.n}x{row.columns} m={row.m}"
                figures = ", ".join(filter(None, (f"{row.seconds * 1e6:.2f} us", row.why)))
                return Choice(
                    row.config, f"{table.source} for {table.device} ({Path(table.path).name}), {found}: {figures}"
                )
        return Choice(self.rule(format, n, columns, m), f"rule tuning.{kernel}, no table for {current_device()} has it")
