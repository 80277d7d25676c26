"""The device that choices are made for, as a context."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from ..devices import Target, target

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
