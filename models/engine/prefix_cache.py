"""Prefix cache: reuses the KV cache of an earlier text for prompts that share its prefix."""

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
    """KV cache and recurrent state of a model's last text, for prompts with the same prefix.

    Pass one object to successive calls of `generate` or `stream`. Any prompt is allowed; tokens
    after the common prefix are computed. Threads may share an object: the first call takes its
    cache. Models with sliding windows or recurrent layers reuse it only if the prompt continues the
    whole text. The object holds the cache's memory until it is deleted or `clear` is called.

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
        """Stores the cache of a text, a single sequence.

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
        """Returns a cache with the first tokens of a prompt, and their number; None if none match.

        The object no longer holds the cache, so that only one of several threads gets it.

        capacity: minimum capacity of the cache in tokens. dtype: of its pages. selection: of the
        operations that will use the cache, which must be the ones that computed it.
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
        """Capacity of the cache in tokens; 0 without one."""
        return 0 if self._cache is None else self._cache.capacity


def _usable(
    config: Config,
    tokens: Sequence[int],
    prompt: Sequence[int],
    cache: PagedCache,
    capacity: int,
    dtype: Any,
) -> int:
    """Returns the number of leading prompt tokens that the cache of `tokens` covers."""
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
