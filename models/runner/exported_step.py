"""Compiles a model's decode step ahead of time into a file, and loads and runs such a file."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp

from jax_q4k import page_dtype
from jax_q4k.cache import compiled_files

from ..kv_cache import PagedCache
from .model import Model
from .programs import Weights, compiler_options

_NAME = "decode step, version 1"


class CompiledStep:
    """A decode step loaded from a file, with a model's weights.

    Attributes:
      batch, capacity, cache_dtype: batch size, KV cache capacity in tokens, and cache dtype that
        the step was compiled for.
    """

    def __init__(
        self, model: Model, program: compiled_files.LoadedProgram, shapes: dict[str, Any]
    ) -> None:
        self.batch, self.capacity = int(shapes["batch"]), int(shapes["capacity"])
        self.cache_dtype = jnp.dtype(shapes["cache_dtype"])
        self._config, self._program, self._shapes = model.config, program, shapes["arguments"]
        self._weights = jax.device_put(model.weights, program.device)

    def create_cache(self) -> PagedCache:
        """Creates an empty KV cache with the step's batch, capacity and dtype, on its device."""
        cache = PagedCache.create(self._config, self.batch, self.capacity, dtype=self.cache_dtype)
        return jax.device_put(cache, self._program.device)

    def __call__(self, token: Any, cache: PagedCache) -> tuple[jax.Array, PagedCache]:
        """Runs one step like `Decoder.decode`.

        Returns float32 logits (batch, vocab_size) and the updated cache.

        Args:
          token: (batch,) int32, next token of each sequence; invalid ids result in NaN.
          cache: from `create_cache` or the previous step; it is donated.

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
    """Compiles the decode step into a file; returns the size of its code in bytes.

    The target device need not be present. `jax_q4k.implementation` selects the kernels. The weights
    are not in the file.

    Args:
      target: `cpu` of this machine; or `h200`, an NVIDIA H200, which needs JAX's CUDA plugin but no
        GPU.
      batch: sequences per step.
      context: maximum tokens of a sequence; None means the model's context length.
      cache_dtype: as in `generate`.

    Raises:
      ValueError: an encoder, an unknown target, a batch below 1, a context beyond the model's.
      jax_q4k.UnavailableError: something that the target needs is not installed. OSError: the file
        cannot be written.
    """
    model.check_generates()
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
        cuda_options=compiler_options(on_gpu=True),
    )
    compiled_files.write(path, header, body)
    return len(body)


def load_compiled(path: str | os.PathLike[str], model: Model) -> CompiledStep:
    """Loads a file that `compile_step` wrote, with a model's weights, onto JAX's first device.

    The file is checked before use. It then runs as machine code, so load only files from sources
    whose programs you would run.

    Raises:
      jax_q4k.CompiledFileError: the file is damaged, truncated or not a compiled program, or it is
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
    """Returns the step's arguments (weights, token, cache), or their shapes and dtypes."""
    cache = jax.eval_shape(lambda: PagedCache.create(model.config, batch, context, dtype=dtype))
    return model.weights, jax.ShapeDtypeStruct((batch,), jnp.int32), cache


def _shapes(arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Returns `shapes` of the file's header: the shapes of the step's arguments."""
    _, token, cache = arguments
    return {
        "batch": token.shape[0],
        "capacity": cache.capacity,
        "cache_dtype": str(cache.dtype),
        "arguments": [[list(a.shape), str(a.dtype)] for a in jax.tree.leaves(arguments)],
    }
