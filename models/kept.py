"""Programs of generation from a folder where an earlier process has left them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from .compiled import fingerprint
from .config import Config
from .kv_cache import PagedCache, page_shapes, state_shapes
from .model import Model
from .programs import Programs
from .sampler import Logprobs
from .state import State
from .ways import Way


def kept_program(
    model: Model,
    programs: Programs,
    name: str,
    program: Any,
    arguments: tuple[Any, ...],
    cache_dtype: Any,
) -> Callable[..., State]:
    """`program`, one of `programs` that gives a State, by way of `model.kept`.

    name: says which of them it is. arguments: that it will get, or others of their shapes.
    """
    assert model.kept is not None
    (device,) = model.weights[0].devices()
    about = {
        "way": tuple(programs.way),
        "cache_dtype": str(cache_dtype),
    }
    loaded = model.kept.get(name, program, arguments, device, model=fingerprint(model), about=about)
    tree = _structure(model.config, programs.way, cache_dtype)

    def run(*arguments: Any) -> State:
        leaves = jax.tree.leaves(arguments)
        given = [x if isinstance(x, jax.Array) else jax.device_put(x, device) for x in leaves]
        return jax.tree.unflatten(tree, loaded(given))

    return run


def _structure(config: Config, way: Way, cache_dtype: Any) -> Any:
    """A State's, which nobody traces to see."""
    array: Any = 0
    seen = array if way.penalizes else None
    text = array if way.reads_text else None
    logprobs = None if way.logprobs is None else Logprobs(array, array, array)
    layers = range(config.num_layers)
    cache = PagedCache(
        [(array,) * len(page_shapes(config, i, 1, 1, cache_dtype)) for i in layers],
        array,
        array,
        [array] * len(config.windows),
        [(array,) * len(state_shapes(config, i, 1)) for i in layers],
    )
    state = State(cache, array, array, array, array, array, seen, text, logprobs)
    return jax.tree.structure(state)
