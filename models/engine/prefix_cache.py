"""Prompts that begin as an earlier text: what is computed of it stays."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ..config import Config
from ..kv_cache.paged import PagedCache, grown
from ..runner.model import Model

#: Tokens of a prompt that go on with a cache at a time.
PIECE = 128

#: Of a prompt that is longer than some pieces, at least this share must be there: a token that goes
#: on with a cache reads it by itself, which takes longer than one of a whole prompt.
SHARE = 0.5


class Prefix:
    """The keys, values and states of a model's last text, for prompts that begin with it.

    Give one object to successive calls of `generate` or `stream`. It is right for any prompt: what
    differs is computed. Calls in several threads may share one: the first takes what it holds.
    Models with windows or recurrent layers go on only where the whole text was continued. It holds
    a cache's memory until it is dropped or `clear` is called.

    Attributes:
      tokens: the text's ids, as far as they are computed.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.clear()

    def clear(self) -> None:
        with self._lock:
            self.tokens: list[int] = []
            self._cache: PagedCache | None = None
            self._model: weakref.ref[Model] | None = None
            self._selection: Any = None

    def keep(self, model: Model, tokens: Sequence[int], cache: PagedCache, selection: Any) -> None:
        """Takes over the cache of a text, of one sequence.

        selection: `jax_q4k.current_selection()` of the operations that made it.
        """
        with self._lock:
            self.tokens, self._cache, self._model = list(tokens), cache, weakref.ref(model)
            self._selection = selection

    def take(
        self,
        model: Model,
        prompt: Sequence[int],
        capacity: int,
        dtype: Any,
        selection: Any,
    ) -> tuple[PagedCache, int] | None:
        """The cache of a prompt's first tokens, and how many they are; None: there is none to use.

        What was held is held no longer: of several threads, one takes it.

        capacity: tokens that the cache is to have room for, at least. dtype: of its pages.
        selection: of the operations that are to go on with it, which are to have made it.
        """
        with self._lock:
            cache, tokens, owner, made_by = self._cache, self.tokens, self._model, self._selection
            self.clear()
        if cache is None or owner is None or owner() is not model or made_by != selection:
            return None
        if not (count := _usable(model.config, tokens, prompt, cache, capacity, dtype)):
            return None
        cache = grown(cache, model.config, max(capacity, cache.capacity), PIECE)
        return dataclasses.replace(cache, context_lens=jnp.array([count], jnp.int32)), count

    @property
    def capacity(self) -> int:
        """Of the cache; 0: there is none."""
        return 0 if self._cache is None else self._cache.capacity


def _usable(
    config: Config,
    tokens: Sequence[int],
    prompt: Sequence[int],
    cache: PagedCache,
    capacity: int,
    dtype: Any,
) -> int:
    """How many of a prompt's tokens need not be computed again, with the cache of `tokens`."""
    if cache.dtype != dtype:
        return 0
    pairs = zip(tokens, prompt, strict=False)
    count = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    rewinds = not any(config.windows) and not any(cache.states)
    if count == len(prompt):  # the last token's logits are not there any more
        count -= 1
    if count < len(tokens) and not rewinds:
        return 0
    original = config.original_context or capacity  # beyond it, ropes may be others
    if (cache.capacity <= original) != (max(capacity, cache.capacity) <= original):
        return 0
    rest = len(prompt) - count
    return 0 if rest > 4 * PIECE and count < SHARE * len(prompt) else count
