"""Prefix cache: reuses the KV cache of an earlier call for prompts that share its prefix."""

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

#: Chunk of a prompt, in tokens, that is appended to a cache at a time.
PIECE = 128

#: Minimum cached fraction of a prompt longer than a few chunks. Below it a full prefill is faster,
#: because each token of a chunk reads the cache separately.
SHARE = 0.5


class Prefix:
    """Prefix cache: KV cache and recurrent state of the last call's tokens, for later prompts.

    Pass one object to successive calls of `generate` or `stream`. Any prompt is allowed; tokens
    after the common prefix are computed. Threads may share an object: the first call takes its
    cache. Models with sliding windows or recurrent layers reuse the cache only if the prompt starts
    with all cached tokens. The object holds the cache's memory until it is deleted or `clear` is
    called.

    Attributes:
      tokens: token ids in the cache.
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
        """Stores the KV cache of a single sequence, `tokens`.

        selection: `jax_q4k.current_selection()` of the operations that computed it.
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
        """Removes the cache from this object and returns it, if it covers the start of a prompt.

        Returns the cache and the number of prompt tokens that it holds; None if it does not match.
        Only one of several threads gets the cache.

        capacity: minimum capacity of the cache in tokens. dtype: dtype of its pages. selection:
        `jax_q4k.current_selection()` of the caller, which must equal that of `keep`.
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
        """Capacity of the stored cache in tokens; 0 if nothing is stored."""
        return 0 if self._cache is None else self._cache.capacity


def _usable(
    config: Config,
    tokens: Sequence[int],
    prompt: Sequence[int],
    cache: PagedCache,
    capacity: int,
    dtype: Any,
) -> int:
    """Returns how many leading tokens of `prompt` need no prefill with the cache of `tokens`.

    0 if the cache cannot be used.
    """
    if cache.dtype != dtype:
        return 0
    pairs = zip(tokens, prompt, strict=False)
    count = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    rewinds = not any(config.windows) and not any(cache.states)
    if count == len(prompt):  # the last token's logits must be computed again
        count -= 1
    if count < len(tokens) and not rewinds:
        return 0
    original = config.original_context or capacity  # beyond it, rope frequencies may differ
    if (cache.capacity <= original) != (max(capacity, cache.capacity) <= original):
        return 0
    rest = len(prompt) - count
    return 0 if rest > 4 * PIECE and count < SHARE * len(prompt) else count
