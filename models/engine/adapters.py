"""Names and places of the LoRA adapters that an engine holds."""

from __future__ import annotations

import re
import secrets
from collections.abc import Set
from typing import Any, NamedTuple

from ..runner.adapters import Adapter, Stacks, arrays_for, check_scale, stacks_for
from ..runner.model import Model
from ..runner.programs import shapes_of

#: Limits of `max_adapters` and `max_adapter_rank`.
MOST_ADAPTERS, MOST_RANK = 256, 1024

_NAME = re.compile(r"[A-Za-z0-9._/-]{1,64}")


class Loaded(NamedTuple):
    """An adapter that is loaded.

    Attributes:
      place: its place in the stacks, from 1; 0 means none.
      salt: separates cached prefixes; each load has its own, since a name may come again.
    """

    place: int
    salt: bytes


class Adapters:
    """Names and places of an engine's adapters. The engine guards it with a lock.

    Attributes:
      rank: largest rank.
    """

    def __init__(self, model: Model, count: int, rank: int) -> None:
        self.rank = rank
        self._count = count
        self._shapes: Stacks = {}
        self._loaded: dict[str, Loaded] = {}
        self._model = model

    def stacks(self) -> tuple[int, Stacks] | None:
        """Allocates the arrays; returns them with the number of places, None without places."""
        if not self._count:
            return None
        stacks = stacks_for(self._model, self._count, self.rank)
        self._shapes = shapes_of(stacks)
        return self._count, stacks

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._loaded)

    def find(self, name: str | None) -> Loaded:
        """Returns a loaded adapter, or the one that stands for none; raises ValueError."""
        if name is None:
            return Loaded(0, b"")
        if not isinstance(name, str) or name not in self._loaded:
            known = ", ".join(self._loaded) or "none"
            raise ValueError(f"adapter={name!r:.100} is not loaded; loaded: {known}")
        return self._loaded[name]

    def entry(self, name: str, adapter: Adapter, scale: float) -> Stacks:
        """Returns the arrays of an adapter; raises ValueError, TypeError if it cannot be loaded."""
        if not isinstance(adapter, Adapter):
            found = f"adapter is of type {type(adapter).__name__}"
            raise TypeError(f"{found}; it must be an Adapter, such as models.read_lora returns")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"name={name!r:.100} must be 1 to 64 letters, digits, '.', '_', '-', '/'"
            )
        check_scale(scale, adapter.pairs)
        if not self._count:
            raise ValueError("the engine has no room for adapters: create it with max_adapters=")
        self._check_new(name)
        return arrays_for(adapter, self._shapes, self.rank, scale)

    def nothing(self) -> Stacks:
        """Returns the arrays of an adapter that changes nothing."""
        return arrays_for(Adapter({}, ""), self._shapes, self.rank, 1.0)

    def free_place(self, name: str, used: Set[int]) -> int:
        """Returns a place for a new adapter; raises ValueError if there is none.

        used: places that requests use, also those of unloaded adapters.
        """
        self._check_new(name)
        if len(self._loaded) == self._count:
            problem = f"max_adapters={self._count} adapters are loaded: {', '.join(self._loaded)}"
            raise ValueError(f"{problem}; unload one first")
        taken = used | {one.place for one in self._loaded.values()}
        free = [place for place in range(1, self._count + 1) if place not in taken]
        if not free:
            raise ValueError("running requests still use the adapters that were unloaded")
        return free[0]

    def add(self, name: str, place: int) -> None:
        """Makes an adapter at a place known."""
        self._loaded[name] = Loaded(place, secrets.token_bytes(16))

    def remove(self, name: str) -> None:
        """Forgets a name; raises ValueError for one that is not loaded."""
        self.find(name)
        del self._loaded[name]

    def _check_new(self, name: str) -> None:
        if name in self._loaded:
            raise ValueError(f"the adapter {name!r} is loaded already; unload it first")


def check_room(count: int, model: Model) -> None:
    """Raises ValueError for a model that cannot be combined with adapters."""
    if count and model.placement is not None:
        raise ValueError("model is on several devices; max_adapters needs a model on one device")


def adapters_of(adapter: Any, rows: int) -> list[Any]:
    """Returns the name of each prompt's adapter: one for all, or a list of them."""
    if not isinstance(adapter, list | tuple):
        return [adapter] * rows
    if len(adapter) != rows:
        problem = f"adapter has {len(adapter)} items for {rows} prompts"
        raise ValueError(f"{problem}; it must be one, or one for each")
    return list(adapter)
