"""Perplexity and bits per byte of a text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import numpy as np

from ..runner.model import Model
from ..support.buckets import bucket
from ..tokenizer import Tokenizer

BATCH = 8  # windows in one call


class TooShortError(ValueError):
    """A text of fewer tokens than two of llama.cpp's windows have."""


@dataclasses.dataclass(frozen=True)
class Score:
    """The negative log-likelihood of a text.

    Attributes:
      nats: the sum of -log p over all predicted tokens.
      tokens: predicted.
      bytes: UTF-8 of the tokens that were predicted.
      squares: the sum of (-log p)^2.
      second_halves: of the tokens of windows' second halves alone, with windows="llama.cpp".
    """

    nats: float
    tokens: int
    bytes: int
    squares: float = 0.0
    second_halves: Score | None = None

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
    def error(self) -> float:
        """The standard error of `perplexity`, as if tokens were independent; NaN for one token."""
        if self.tokens < 2:
            return math.nan
        variance = max(self.squares / self.tokens - (self.nats / self.tokens) ** 2, 0.0)
        return self.perplexity * math.sqrt(variance / (self.tokens - 1))

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of text, which compares models whatever their tokenizers."""
        return self.nats / math.log(2) / self.bytes


def score(
    model: Model,
    text: str,
    *,
    context: int | None = None,
    windows: Literal["whole", "llama.cpp"] = "whole",
    progress: Callable[[int, int], object] | None = None,
) -> Score:
    """Predicts `text` in windows that follow one another without overlap.

    Every window begins with the tokenizer's BOS, where it adds one; without it a window's first
    token is context only.

    Args:
      context: tokens per window, BOS included; None takes the model's context length, 512 at most.
      windows: "whole": BOS stands before a window's tokens, and the text's end is a shorter window.
        "llama.cpp": as its `perplexity` program does, BOS takes the place of a window's first
        token, and an end shorter than a window is left out; `second_halves.perplexity` is its
        figure.
      progress: called with (windows done, windows in all).

    Raises:
      ValueError: no tokenizer, a context below 2 or beyond the model's, or a text that is too
        short to predict anything. TooShortError: it is too short for two windows of llama.cpp's.
        TypeError: a context that is no integer.
    """
    tokenizer, longest = model.tokenizer, model.config.context_length
    if tokenizer is None:
        raise ValueError("model has no tokenizer")
    if windows not in ("whole", "llama.cpp"):
        raise ValueError(f"windows={windows!r} must be 'whole' or 'llama.cpp'")
    if context is not None and (isinstance(context, bool) or not isinstance(context, int)):
        raise TypeError(f"context={context!r} must be an integer")
    length = min(longest, 512) if context is None else context
    if not 2 <= length <= longest:
        raise ValueError(f"context={context} must be 2 to {longest}, the model's context length")
    start = list(tokenizer.vocabulary.before)
    if windows == "whole":
        cut = _windows(tokenizer.encode(text, add_special=False), start, length)
    else:
        cut = _llama_windows(tokenizer.encode(text, add_end=False), start, length)
    if not cut:
        raise ValueError("text has too few tokens to predict any")
    first = (len(start) if windows == "whole" else 0) or 1  # tokens of a window not predicted

    program, nats = model.programs().score, []
    for at in range(0, len(cut), BATCH):
        rows = cut[at : at + BATCH]
        tokens, lengths = model.put(_padded(rows, length))
        with model.on_devices():
            found = np.asarray(program(model.weights, tokens, lengths), np.float64)
        nats += [row[first - 1 : len(ids) - 1] for row, ids in zip(found, rows, strict=False)]
        if progress is not None:
            progress(at + len(rows), len(cut))
    targets = [window[first:] for window in cut]
    whole = _score(tokenizer, nats, targets)
    if windows == "whole":
        return whole
    behind = length // 2  # the token there predicts the first one that counts
    halves = [row[behind:] for row in nats], [ids[behind:] for ids in targets]
    return dataclasses.replace(whole, second_halves=_score(tokenizer, *halves))


def _score(tokenizer: Tokenizer, nats: list[np.ndarray], targets: list[list[int]]) -> Score:
    """Of predicted tokens, window by window."""
    values = np.concatenate(nats)
    size = sum(len(tokenizer.token_bytes(token)) for window in targets for token in window)
    return Score(float(values.sum()), len(values), size, float((values**2).sum()))


def _windows(ids: list[int], start: list[int], length: int) -> list[list[int]]:
    """Ids in windows of `length` tokens that begin with `start`; none has only one token."""
    room = length - len(start)
    windows = [start + ids[i : i + room] for i in range(0, len(ids), room)]
    return [window for window in windows if len(window) > 1]


def _llama_windows(ids: list[int], start: list[int], length: int) -> list[list[int]]:
    """Ids in whole windows of `length` tokens, whose first `start` takes the place of."""
    if len(ids) < 2 * length:
        needed = f"llama.cpp's windows of {length} tokens need {2 * length}"
        raise TooShortError(f"text has {len(ids)} tokens; {needed}")
    firsts = range(0, len(ids) - length + 1, length)
    return [start + ids[i + len(start) : i + length] for i in firsts]


def _padded(windows: list[list[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (rows, time) and lengths (rows,), of few shapes; a row of padding predicts nothing."""
    count = 1 << (len(windows) - 1).bit_length()
    tokens = np.zeros((count, min(length, bucket(max(map(len, windows))))), np.int32)
    lengths = np.ones(count, np.int32)
    for row, window in enumerate(windows):
        tokens[row, : len(window)] = window
        lengths[row] = len(window)
    return tokens, lengths
