"""Perplexity and bits per byte of a text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from .buckets import bucket
from .model import Model

BATCH = 8  # windows in one call


@dataclasses.dataclass(frozen=True)
class Score:
    """The negative log-likelihood of a text.

    Attributes:
      nats: the sum of -log p over all predicted tokens.
      tokens: predicted.
      bytes: UTF-8 of the tokens that were predicted.
    """

    nats: float
    tokens: int
    bytes: int

    @property
    def perplexity(self) -> float:
        """exp of the mean nats per token, infinite beyond float64.

        It compares models of one tokenizer only.
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
      ValueError: no tokenizer, a context below 2 or beyond the model's, or a text that is too
        short to predict anything.
    """
    tokenizer, longest = model.tokenizer, model.config.context_length
    if tokenizer is None:
        raise ValueError("model has no tokenizer")
    length = min(longest, 512) if context is None else context
    if not 2 <= length <= longest:
        raise ValueError(f"context={context} must be 2 to {longest}, the model's context length")
    bos = tokenizer.bos_token_id if tokenizer.vocabulary.add_bos else None
    start = [] if bos is None else [bos]
    windows = _windows(tokenizer.encode(text, add_special=False), start, length)
    if not windows:
        raise ValueError("text has too few tokens to predict any")
    context_only = len(start) or 1  # tokens of a window that are not predicted
    targets = [token for window in windows for token in window[context_only:]]

    nats, total = model.programs().score, 0.0
    for first in range(0, len(windows), BATCH):
        rows = windows[first : first + BATCH]
        tokens, lengths = model.put(_padded(rows, length))
        with model.on_devices():
            total += float(np.asarray(nats(model.weights, tokens, lengths), np.float64).sum())
        if progress is not None:
            progress(first + len(rows), len(windows))
    return Score(total, len(targets), sum(len(tokenizer.token_bytes(i)) for i in targets))


def _windows(ids: list[int], start: list[int], length: int) -> list[list[int]]:
    """Ids in windows of `length` tokens that begin with `start`; none has only one token."""
    room = length - len(start)
    windows = [start + ids[i : i + room] for i in range(0, len(ids), room)]
    return [window for window in windows if len(window) > 1]


def _padded(windows: list[list[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (rows, time) and lengths (rows,), of few shapes; a row of padding predicts nothing."""
    count = 1 << (len(windows) - 1).bit_length()
    tokens = np.zeros((count, min(length, bucket(max(map(len, windows))))), np.int32)
    lengths = np.ones(count, np.int32)
    for row, window in enumerate(windows):
        tokens[row, : len(window)] = window
        lengths[row] = len(window)
    return tokens, lengths
