"""Programs of the demo model that the checks run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp

import jax_q4k as jq
from jax_q4k import models

from ...kv_cache import PagedCache
from ...runner.model import Model


def steps(simulated: bool) -> Iterator[Callable[[], Any]]:
    """Yields functions that read prompts and decode a token: of few rows, and of many.

    simulated: only the first one, which takes less than a minute.
    """
    model = models.load("demo")
    yield lambda: prompt_and_step(model, 1, 8, jnp.float32)
    if not simulated:
        yield lambda: prompt_and_step(model, 2, 16, jnp.bfloat16)


def prompt_and_step(model: Model, batch: int, length: int, dtype: Any) -> Any:
    """Reads `batch` prompts of `length` tokens and decodes one; returns the next ones (batch,)."""
    decoder = model.decoder()
    cache = PagedCache.create(model.config, batch, length + 1, dtype=jnp.dtype(dtype))
    tokens = jnp.arange(batch * length, dtype=jnp.int32) * 7 % model.config.vocab_size
    lengths = jnp.full((batch,), length, jnp.int32)
    logits, cache = decoder.prefill(tokens.reshape(batch, length), lengths, cache)
    logits, cache = decoder.decode(jq.argmax(logits), cache)
    return jq.argmax(logits)
