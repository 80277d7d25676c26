"""Programs of generation from a folder where an earlier process has left them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from .model import Model
from .programs import Begin, Loop, Start
from .state import State


def kept_program(
    model: Model, program: Start | Begin | Loop, arguments: tuple[Any, ...]
) -> Callable[..., State]:
    """`program` for arguments of these shapes, by way of `model.kept`."""
    assert model.kept is not None
    (device,) = model.weights[0].devices()
    results = program.results(arguments)
    loaded = model.kept.get(
        program.name,
        program.jitted(keep_unused=True),
        arguments,
        results,
        device,
        model=model.network.fingerprint(),
        about=program.about(),
    )
    tree = jax.tree.structure(results)

    def run(*arguments: Any) -> State:
        leaves = jax.tree.leaves(arguments)
        given = [x if isinstance(x, jax.Array) else jax.device_put(x, device) for x in leaves]
        state: State = jax.tree.unflatten(tree, loaded(given))
        return state

    return run


def can_be_kept(model: Model, program: Start | Begin | Loop) -> bool:
    """Whether files can hold the program: without users' functions and drafts, on one device."""
    alone = model.placement is None and program.draft is None and not program.way.processors
    return model.kept is not None and alone
