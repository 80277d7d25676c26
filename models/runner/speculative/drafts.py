"""Proposes draft tokens for speculative decoding, by prompt lookup or a draft model.

A draft token is accepted if sampling chooses the same token at its position, so the output is the
same as without drafts. If reading the weights dominates, a pass over several tokens takes little
longer than a pass over one (https://arxiv.org/abs/2211.17192).
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

#: Maximum tokens of a draft.
MAX_TOKENS = 63


@dataclasses.dataclass(frozen=True)
class PromptLookup:
    """Prompt lookup: drafts the tokens that followed an earlier occurrence of the last tokens.

    Drafting costs almost nothing, and helps with repetitive text such as code, summaries and
    extracts.

    Attributes:
      tokens: tokens per draft; None means a default for the device.
      longest, shortest: maximum and minimum number of last tokens to match; longer matches win.
    """

    tokens: int | None = None
    longest: int = 5
    shortest: int = 3

    def __post_init__(self) -> None:
        _check_tokens(self.tokens)
        if not 1 <= self.shortest <= self.longest <= 64:
            found = f"shortest={self.shortest} and longest={self.longest}"
            raise ValueError(f"{found} must be 1 to 64, and longest at least shortest")

    def found(
        self, history: jax.Array, lengths: jax.Array, count: int
    ) -> tuple[jax.Array, jax.Array]:
        """Looks up drafts: returns int32 (batch, count), and whether a row has one, bool (batch,).

        history: int32 (batch, capacity); its first `lengths` (batch,) tokens are valid. A match
        that reaches the end of the history repeats from its own beginning.
        """
        capacity = history.shape[1]
        at = jnp.arange(capacity, dtype=jnp.int32)[None]  # position after a run
        ends = lengths[:, None] - 1 - jnp.arange(self.longest, dtype=jnp.int32)[None]
        last = jnp.take_along_axis(history, jnp.maximum(ends, 0), axis=1)  # the last token first
        alike, run = at < lengths[:, None], jnp.zeros_like(history)
        for i in range(self.longest):
            alike &= (jnp.roll(history, i + 1, axis=1) == last[:, i : i + 1]) & (at > i)
            run += alike.astype(jnp.int32)
        # Prefers the longest run, then the latest.
        best = jnp.max(jnp.where(run >= self.shortest, run * capacity + at, -1), axis=1)
        found = jnp.where(best < 0, -1, best % capacity)
        period = jnp.maximum(lengths - found, 1)[:, None]
        following = found[:, None] + jnp.arange(count, dtype=jnp.int32)[None] % period
        drafts = jnp.take_along_axis(history, jnp.maximum(following, 0), axis=1)
        return drafts, found >= 0


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """Draft model: a smaller model with the same vocabulary, which predicts the draft tokens.

    Attributes:
      model: the smaller Model.
      tokens: tokens per draft; None means a default for the device.
    """

    model: HasDecoder
    tokens: int | None = None

    def __post_init__(self) -> None:
        _check_tokens(self.tokens)


Draft: TypeAlias = PromptLookup | DraftModel | NextTokens


def tokens_of(draft: Draft, on_gpu: bool) -> int:
    """Returns the number of tokens per draft, by default 7 on a GPU and 3 elsewhere.

    A GPU reads the weights once for eight tokens and computes little. On a CPU, computing takes
    about as long as reading at four tokens.
    """
    return draft.tokens or (7 if on_gpu else 3)


def cost_of(tokens: int, on_gpu: bool, rows: int = 1) -> float:
    """Returns an estimate of the extra time to verify drafts of `rows` rows, in plain passes.

    A further token in a pass takes a fixed part of the time of a pass over one token. Measured on
    two CPU cores: 0.2 to 0.4 for a 1B llama, 0.5 for the demo model. The figure for GPUs is
    estimated from bytes read.
    """
    slope = 0.04 if on_gpu else 0.5
    return slope * rows * tokens / (1 + slope * (rows - 1))


def _check_tokens(tokens: int | None) -> None:
    if tokens is not None and not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(f"tokens={tokens} must be 1 to {MAX_TOKENS}")


def model_drafts(
    decoder: Decoder, token: jax.Array, cache: PagedCache, count: int, active: jax.Array
) -> tuple[jax.Array, PagedCache]:
    """Decodes `count` draft tokens greedily after `token` (batch,), with the draft model.

    Returns the drafts, int32 (batch, count), and the cache with the same lengths as before. Its
    pages are updated in place; entries beyond the lengths are unspecified.
    """
    drafts, before = [], cache
    for _ in range(count):
        logits, cache = decoder.decode(token, cache, active)
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        drafts.append(token)
    lens, states = before.context_lens, before.states
    cache = dataclasses.replace(cache, context_lens=lens, states=states)
    return jnp.stack(drafts, axis=1), cache
