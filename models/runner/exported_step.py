"""A model's decode step, compiled ahead of time into a file, and run from it."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp

from jax_q4k import page_dtype
from jax_q4k.cache import compiled_files

from ..kv_cache import PagedCache
from .model import Model
from .programs import CUDA_COMPILER_OPTIONS, Weights

_NAME = "decode step, version 1"


class CompiledStep:
    """A decode step from a file, machine code for one batch and capacity, with a model's weights.

    Attributes:
      batch, capacity, cache_dtype: that it was compiled for.
    """

    def __init__(
        self, model: Model, program: compiled_files.LoadedProgram, shapes: dict[str, Any]
    ) -> None:
        self.batch, self.capacity = int(shapes["batch"]), int(shapes["capacity"])
        self.cache_dtype = jnp.dtype(shapes["cache_dtype"])
        self._config, self._program, self._shapes = model.config, program, shapes["arguments"]
        self._weights = jax.device_put(model.weights, program.device)

    def create_cache(self) -> PagedCache:
        """An empty cache of the step's batch and capacity, on its device."""
        cache = PagedCache.create(self._config, self.batch, self.capacity, dtype=self.cache_dtype)
        return jax.device_put(cache, self._program.device)

    def __call__(self, token: Any, cache: PagedCache) -> tuple[jax.Array, PagedCache]:
        """One step, as `Decoder.decode`: logits float32 (batch, vocab_size) and the cache.

        Args:
          token: (batch,) int32, one more of each sequence; ids outside the vocabulary give NaN.
          cache: as `create_cache` makes it or a step gives it; it is donated.

        Raises:
          TypeError: shapes or dtypes that the step was not compiled for.
        """
        token = jax.device_put(token, self._program.device)
        leaves, tree = jax.tree.flatten(cache)
        arguments = [*self._weights, token, *leaves]
        compiled_files.check_arguments(arguments, self._shapes)
        logits, *after = self._program(arguments)
        return logits, jax.tree.unflatten(tree, after)


def compile_step(
    model: Model,
    path: str | os.PathLike[str],
    *,
    target: str = "cpu",
    batch: int = 1,
    context: int | None = None,
    cache_dtype: Any = jnp.float32,
) -> int:
    """Compiles the decode step for a device that need not be here, into a file; returns its bytes.

    What `jax_q4k.implementation` says counts. The weights are not in the file.

    Args:
      target: `cpu`, this machine's; or `h200`, an NVIDIA H200, which takes JAX's CUDA plugin but no
        GPU.
      batch: sequences of a step.
      context: tokens that a sequence can have; None: as many as the model.
      cache_dtype: as `generate` takes it.

    Raises:
      ValueError: an unknown target, a batch below 1, a context beyond the model's.
      jax_q4k.UnavailableError: what the target takes is not installed. OSError: the file cannot be
        written.
    """
    longest = model.config.context_length
    context = longest if context is None else context
    if not 1 <= context <= longest:
        raise ValueError(f"context={context} must be 1 to {longest}, the model's context length")
    dtype, merge = page_dtype(cache_dtype, "cache_dtype"), model.decoder

    def step(weights: Weights, token: jax.Array, cache: PagedCache) -> tuple[jax.Array, PagedCache]:
        return merge(weights).decode(token, cache)

    arguments = _arguments(model, batch, context, dtype)
    header, body = compiled_files.compile_for(
        target,
        jax.jit(step, donate_argnames="cache", keep_unused=True),
        arguments,
        name=_NAME,
        model=model.network.fingerprint(),
        shapes=_shapes(arguments),
        cuda_options=CUDA_COMPILER_OPTIONS,
    )
    compiled_files.write(path, header, body)
    return len(body)


def load_compiled(path: str | os.PathLike[str], model: Model) -> CompiledStep:
    """The step of a file that `compile_step` wrote, with a model's weights, on JAX's first device.

    Nothing of a file is used before its checks; what runs then is machine code, so load files of
    those alone whose programs you would run.

    Raises:
      jax_q4k.CompiledFileError: a file that is damaged, cut off or no compiled program, or that is
        for another model, device, or version of JAX, jaxlib or this package. OSError: it cannot be
        read.
    """
    device = jax.local_devices()[0]

    def expected(said: dict[str, Any]) -> dict[str, Any]:
        dtype = page_dtype(said["cache_dtype"])
        return _shapes(_arguments(model, said["batch"], said["capacity"], dtype))

    header, program = compiled_files.read(
        path, name=_NAME, model=model.network.fingerprint(), device=device, shapes=expected
    )
    return CompiledStep(model, program, header.shapes)


def _arguments(model: Model, batch: int, context: int, dtype: Any) -> tuple[Any, ...]:
    """The step's, as far as shapes and dtypes go."""
    cache = jax.eval_shape(lambda: PagedCache.create(model.config, batch, context, dtype=dtype))
    return model.weights, jax.ShapeDtypeStruct((batch,), jnp.int32), cache


def _shapes(arguments: tuple[Any, ...]) -> dict[str, Any]:
    """What a file says of its step's arguments."""
    _, token, cache = arguments
    return {
        "batch": token.shape[0],
        "capacity": cache.capacity,
        "cache_dtype": str(cache.dtype),
        "arguments": [[list(a.shape), str(a.dtype)] for a in jax.tree.leaves(arguments)],
    }
