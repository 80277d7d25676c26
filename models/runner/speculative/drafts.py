"""Drafts: guesses of a text's next tokens, which one pass over all of them checks.

A token of a draft stays if it is what sampling takes at its place, so that the text is the one that
it would be without drafts; a pass over several tokens takes little longer than one over one where
reading the weights is what takes time (https://arxiv.org/abs/2211.17192).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeAlias

import jax
import jax.numpy as jnp

from ...kv_cache import PagedCache
from ...network.parts import HasDecoder
from .mtp import NextTokens

if TYPE_CHECKING:
    from ...network.decoder import Decoder

#: Most tokens of a draft.
MAX_TOKENS = 63


@dataclasses.dataclass(frozen=True)
class PromptLookup:
    """Drafts of what followed where the last tokens stood before in the prompt or in the text.

    It costs next to nothing, and pays where a text repeats itself: code, summaries, extracts.

    Attributes:
      tokens: of a draft; None: as many as pay on the device.
      longest, shortest: how many of the last tokens are looked for, the longest run first.
    """

    tokens: int | None = None
    longest: int = 5
    shortest: int = 3

    def __post_init__(self) -> None:
        _check_tokens(self.tokens)
        if not 1 <= self.shortest <= self.longest <= 64:
            found = f"shortest={self.shortest} and longest={self.longest}"
            raise ValueError(f"{found} must be 1 to 64, the longest not below the shortest")

    def found(
        self, history: jax.Array, lengths: jax.Array, count: int
    ) -> tuple[jax.Array, jax.Array]:
        """Returns drafts int32 (batch, count), and whether a row has one, bool (batch,).

        history: int32 (batch, capacity); its first `lengths` (batch,) tokens are valid. A match
        that reaches the end of the history repeats from its own beginning.
        """
        capacity = history.shape[1]
        at = jnp.arange(capacity, dtype=jnp.int32)[None]  # where the tokens behind a run begin
        places = lengths[:, None] - 1 - jnp.arange(self.longest, dtype=jnp.int32)[None]
        last = jnp.take_along_axis(history, jnp.maximum(places, 0), axis=1)  # the last token first
        alike, run = at < lengths[:, None], jnp.zeros_like(history)
        for i in range(self.longest):
            alike &= (jnp.roll(history, i + 1, axis=1) == last[:, i : i + 1]) & (at > i)
            run += alike.astype(jnp.int32)
        # A longer run counts more, then a later one.
        best = jnp.max(jnp.where(run >= self.shortest, run * capacity + at, -1), axis=1)
        found = jnp.where(best < 0, -1, best % capacity)
        period = jnp.maximum(lengths - found, 1)[:, None]
        behind = found[:, None] + jnp.arange(count, dtype=jnp.int32)[None] % period
        drafts = jnp.take_along_axis(history, jnp.maximum(behind, 0), axis=1)
        return drafts, found >= 0


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """Drafts of a smaller model with the same vocabulary.

    Attributes:
      model: a Model.
      tokens: of a draft; None: as many as pay on the device.
    """

    model: HasDecoder
    tokens: int | None = None

    def __post_init__(self) -> None:
        _check_tokens(self.tokens)


Draft: TypeAlias = PromptLookup | DraftModel | NextTokens


def tokens_of(draft: Draft, on_gpu: bool) -> int:
    """Tokens of a draft, where it does not say.

    On a GPU a pass over eight tokens reads the weights once and has little to compute; a CPU
    computes about as long as it reads at four.
    """
    return draft.tokens or (7 if on_gpu else 3)


def cost_of(tokens: int, on_gpu: bool) -> float:
    """The further time of a pass that checks a draft, in passes over one token.

    Measured with a llama of 1 B on two cores of a CPU: 0.2 to 0.4 a token, of the demo model 0.5.
    On a GPU by its bytes.
    """
    return tokens * (0.04 if on_gpu else 0.5)


def _check_tokens(tokens: int | None) -> None:
    if tokens is not None and not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(f"tokens={tokens} must be 1 to {MAX_TOKENS}")


def model_drafts(
    decoder: Decoder, token: jax.Array, cache: PagedCache, count: int, active: jax.Array
) -> tuple[jax.Array, PagedCache]:
    """The likeliest next tokens one after another, int32 (batch, count), behind `token` (batch,).

    The cache that is returned has the same tokens as before; its pages are updated in place, where
    what is beyond its lengths means nothing.
    """
    drafts, before = [], cache
    for _ in range(count):
        logits, cache = decoder.decode(token, cache, active)
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        drafts.append(token)
    lens, states = before.context_lens, before.states
    cache = dataclasses.replace(cache, context_lens=lens, states=states)
    return jnp.stack(drafts, axis=1), cache
