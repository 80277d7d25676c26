"""Programs of the demo model that the checks run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp

import jax_q4k as jq
from jax_q4k import models

from ...kv_cache import PagedCache
from ...runner.model import Model

#: Prompts, tokens of each, room for more, and page dtype of a program.
PROGRAMS = (1, 8, 1, jnp.float32), (2, 16, 1, jnp.bfloat16), (1, 400, 112, jnp.bfloat16)


def steps(simulated: bool) -> Iterator[Callable[[], Any]]:
    """Yields functions that read prompts and decode a token: of few rows, and of many.

    Prompts of more than 64 tokens have their own kernels, and so has attention to many pages.

    simulated: only the first one, which takes less than a minute.
    """
    model = models.load("demo")
    for program in PROGRAMS[: 1 if simulated else None]:
        yield functools.partial(prompt_and_step, model, *program)


def prompt_and_step(model: Model, batch: int, length: int, room: int, dtype: Any) -> Any:
    """Reads `batch` prompts of `length` tokens and decodes one; returns the next ones (batch,)."""
    decoder = model.decoder()
    cache = PagedCache.create(model.config, batch, length + room, dtype=jnp.dtype(dtype))
    tokens = jnp.arange(batch * length, dtype=jnp.int32) * 7 % model.config.vocab_size
    lengths = jnp.full((batch,), length, jnp.int32)
    logits, cache = decoder.prefill(tokens.reshape(batch, length), lengths, cache)
    logits, cache = decoder.decode(jq.argmax(logits), cache)
    return jq.argmax(logits)
