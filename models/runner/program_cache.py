"""Finds compiled generation programs in memory or on disk, and compiles missing ones."""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jax_q4k import selected
from jax_q4k.cache.program_cache import Types, settings, trace_context
from jax_q4k.collecting import gc_throttled

from .engine_state import EngineState
from .model import Model
from .programs import AllWeights, Program
from .speculative.drafts import PromptLookup


class CachedPrograms:
    """Runs the programs of one generation; each is compiled at most once per model.

    Make one per call of `generate`. The types of the weights and JAX's settings are part of every
    key, and computing them takes longer than a step of a small model.

    Attributes:
      weights: the first argument of programs is a part of them; other arrays of the same types may
        replace them.
      compile_seconds: time spent so far on compiling programs or loading them from disk.
      compilations: number of these programs.
    """

    def __init__(self, model: Model, weights: Any, selection: Any) -> None:
        """Prepares running programs with parts of `weights` as first argument.

        selection: the implementation that runs, a value of `jax_q4k.current_selection`.
        """
        self.compile_seconds = 0.0
        self.compilations = 0
        self.weights = weights
        self._model, self._selection = model, selection
        self._weight_types: dict[Any, Types] = {}  # of parts of the weights
        # Executables on disk depend on JAX's settings too; JAX checks them for those in memory.
        on_disk = model.program_cache
        self._disk = None if on_disk is None else (on_disk, _settings_of(model))

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Sets what programs are traced and called with: implementation, mesh, transfer guard."""
        # The implicit transfer of NumPy arguments is intended; `device_put` is ten times slower.
        allowed = jax.transfer_guard_host_to_device("allow")
        with selected(self._selection), self._model.on_devices(), allowed:
            yield

    def ready(self, program: Program, *arguments: Any) -> Callable[..., Any]:
        """Returns the compiled program for arguments of these types; call it within `context`.

        It takes the weights before these arguments, unless the program does without.
        """
        on_disk = is_cacheable(self._model, program)
        weights = program.part_of(self.weights)
        types = self._types_of(weights), Types(arguments)
        key = program, types, trace_context(), self._disk if on_disk else None
        if program.takes_weights:
            arguments = weights, *arguments
        compiled = functools.partial(self._compiled, program, arguments, on_disk)
        found: Callable[..., Any] = self._model.ready.get(key, compiled)
        return found

    def _types_of(self, weights: Any) -> Types:
        missing = isinstance(weights, AllWeights) and tuple(part is None for part in weights)
        if missing not in self._weight_types:
            self._weight_types[missing] = Types(weights)
        return self._weight_types[missing]

    @gc_throttled()
    def _compiled(
        self, program: Program, arguments: tuple[Any, ...], on_disk: bool
    ) -> Callable[..., Any]:
        began = time.perf_counter()
        if on_disk:
            ready = cached_program(self._model, program, arguments)
        else:
            ready = program.jitted(shardings=_shardings(self._model, program, arguments))
            ready.lower(*arguments).compile()  # later calls reuse this executable
        self.compile_seconds += time.perf_counter() - began
        self.compilations += 1
        return ready


def _shardings(model: Model, program: Program, arguments: tuple[Any, ...]) -> Any:
    """Returns the shardings of a program's results; None if they need not be given.

    On automatic axes XLA would choose them. A state with other shardings would compile the next
    program again.
    """
    placement = model.placement
    states = [argument for argument in arguments if isinstance(argument, EngineState)]
    if placement is None or placement.explicit or not states:
        return None
    kept = jax.tree.map(lambda x: x.sharding, states[0])
    return kept if program.returns_state else (kept, placement.replicated)


def _settings_of(model: Model) -> str:
    device, *_ = model.weights[0].devices()
    return json.dumps(settings(device))


def cached_program(
    model: Model, program: Program, arguments: tuple[Any, ...]
) -> Callable[..., Any]:
    """Returns a function that runs `program`, compiled for arguments of these shapes.

    Takes the compiled program from the on-disk cache, or compiles and stores it.
    """
    assert model.program_cache is not None
    (device,) = model.weights[0].devices()
    results = program.results(arguments)
    loaded = model.program_cache.get(
        program.name,
        program.jitted(keep_unused=True),
        arguments,
        results,
        device,
        model=model.network.fingerprint(),
        about=program.about(),
    )
    tree = jax.tree.structure(results)

    def run(*arguments: Any) -> Any:
        leaves = jax.tree.leaves(arguments)
        placed = [x if isinstance(x, jax.Array) else jax.device_put(x, device) for x in leaves]
        return jax.tree.unflatten(tree, loaded(placed))

    return run


def is_cacheable(model: Model, program: Program) -> bool:
    """Returns whether a program can be cached on disk.

    It can without user functions and a drafting model, on one device, if the model has an on-disk
    cache.
    """
    simple = model.placement is None and not program.calls_functions
    simple = simple and isinstance(program.draft, PromptLookup | None)
    return model.program_cache is not None and simple
