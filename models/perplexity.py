"""How well a model predicts a text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from .model import Model

BATCH = 8  # windows in one call


@dataclasses.dataclass(frozen=True)
class Score:
    """What predicting a text cost."""

    nats: float  # the sum of -log p over all predicted tokens
    tokens: int  # predicted
    bytes: int  # of UTF-8, of the tokens that were predicted

    @property
    def perplexity(self) -> float:
        """exp of the mean nats per token, infinite beyond float64; it compares models of one
        tokenizer only.
        """
        try:
            return math.exp(self.nats / self.tokens)
        except OverflowError:
            return math.inf

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of text, which compares models whatever their tokenizers."""
        return self.nats / math.log(2) / self.bytes


def score(
    model: Model,
    text: str,
    *,
    context: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Score:
    """Predicts `text` in windows that follow one another without overlap.

    Every window begins with the tokenizer's BOS, where it adds one; without it a window's first
    token is context only.

    Args:
      context: tokens per window, BOS included; None takes the model's context length, 512 at most.
      progress: called with (windows done, windows in all).

    Raises:
      ValueError: no tokenizer, a context below 2 or beyond the model's, a text too short to predict
        anything.
    """
    tokenizer, longest = model.tokenizer, model.config.context_length
    if tokenizer is None:
        raise ValueError("model has no tokenizer")
    length = min(longest, 512) if context is None else context
    if not 2 <= length <= longest:
        raise ValueError(f"context={context} must be 2 to {longest}, the model's context length")
    start = (
        [tokenizer.bos_token_id]
        if tokenizer.vocabulary.add_bos and tokenizer.bos_token_id is not None
        else []
    )
    ids = tokenizer.encode(text, add_special=False)
    room = length - len(start)
    windows = [ids[i : i + room] for i in range(0, len(ids), room)]
    if not start:
        windows = [
            window for window in windows if len(window) > 1
        ]  # nothing to predict in one token
    if not windows:
        raise ValueError("text has too few tokens to predict any")

    @jax.jit
    def nats(weights: list[jax.Array], tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """-log p of tokens 1 to length - 1, summed per row of (rows, length)."""
        log_p = jax.nn.log_softmax(model.decoder(weights)(tokens, lengths)[:, :-1])
        taken = jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=2)[..., 0]
        return -jnp.sum(taken, axis=1, where=jnp.arange(1, length) < lengths[:, None])

    total, predicted, size = 0.0, 0, 0
    for first in range(0, len(windows), BATCH):
        rows = windows[first : first + BATCH]
        tokens = np.zeros((BATCH, length), np.int32)
        lengths = np.ones(BATCH, np.int32)  # a row of padding predicts nothing
        for row, window in enumerate(rows):
            tokens[row, : len(start) + len(window)] = start + window
            lengths[row] = len(start) + len(window)
            targets = window if start else window[1:]
            predicted += len(targets)
            size += sum(len(tokenizer.token_bytes(i)) for i in targets)
        total += float(np.asarray(nats(model.weights, tokens, lengths), np.float64).sum())
        if progress is not None:
            progress(first + len(rows), len(windows))
    return Score(total, predicted, size)
