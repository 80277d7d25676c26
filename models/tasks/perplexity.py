"""Computes perplexity and bits per byte of a text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np

from ..engine.generate import embeddings, generate
from ..engine.outputs import Output
from ..engine.prompt_results import PROMPT_ALONE, TokenVectors
from ..runner.model import Model
from ..tokenizer import Tokenizer

#: Windows that are computed at a time.
BATCH = 8


class TooShortError(ValueError):
    """The text has fewer tokens than two of llama.cpp's windows."""


@dataclasses.dataclass(frozen=True)
class Score:
    """Negative log-likelihood of a text, and perplexity and bits per byte computed from it.

    Attributes:
      nats: sum of -log p over all predicted tokens.
      tokens: number of predicted tokens.
      bytes: UTF-8 bytes of the predicted tokens.
      squares: sum of (-log p)^2.
      second_halves: score of only the second half of each window, with windows="llama.cpp".
    """

    nats: float
    tokens: int
    bytes: int
    squares: float = 0.0
    second_halves: Score | None = None

    @property
    def perplexity(self) -> float:
        """Exponential of the mean negative log-likelihood per token; infinite beyond float64.

        Comparable only between models with the same tokenizer.
        """
        try:
            return math.exp(self.nats / self.tokens)
        except OverflowError:
            return math.inf

    @property
    def error(self) -> float:
        """Standard error of `perplexity`, assuming independent tokens; NaN for a single token."""
        if self.tokens < 2:
            return math.nan
        variance = max(self.squares / self.tokens - (self.nats / self.tokens) ** 2, 0.0)
        return self.perplexity * math.sqrt(variance / (self.tokens - 1))

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of text, comparable between models with different tokenizers."""
        return self.nats / math.log(2) / self.bytes


def score(
    model: Model,
    text: str,
    *,
    context: int | None = None,
    windows: Literal["whole", "llama.cpp"] = "whole",
    progress: Callable[[int, int], object] | None = None,
) -> Score:
    """Computes the negative log-likelihood of `text` in consecutive windows without overlap.

    Every window begins with BOS if the tokenizer adds one. Without BOS a window's first token is
    not predicted.

    Args:
      context: tokens per window, BOS included; None means the model's context length, at most 512.
      windows: "whole": BOS precedes the tokens of a window, and the last window may be shorter.
        "llama.cpp": as in its `perplexity` program, BOS replaces the first token of a window, and a
        shorter last window is dropped; `second_halves.perplexity` is the number that it prints.
      progress: called with (windows done, number of windows).

    Raises:
      ValueError: no tokenizer, a context below 2 or beyond the model's, or a text too short to
        predict anything. TooShortError: the text is shorter than two of llama.cpp's windows.
        TypeError: the context is not an integer.
    """
    if windows not in ("whole", "llama.cpp"):
        raise ValueError(f"windows={windows!r} must be 'whole' or 'llama.cpp'")
    tokenizer, length = checked(model, context)
    start = list(tokenizer.vocabulary.before)
    if windows == "whole":
        cut = _windows(tokenizer.encode(text, add_special=False), start, length)
    else:
        cut = llama_windows(tokenizer, text, length)
    if not cut:
        raise ValueError("text has too few tokens to predict any")
    first = (len(start) if windows == "whole" else 0) or 1  # tokens of a window not predicted

    nats: list[np.ndarray] = []
    for rows in batches(cut):
        outputs = generate(model, rows, PROMPT_ALONE)
        nats += [_nats(output)[first - 1 :] for output in outputs]
        if progress is not None:
            progress(len(nats), len(cut))
    targets = [window[first:] for window in cut]
    total = _score(tokenizer, nats, targets)
    if windows == "whole":
        return total
    half = length // 2  # the token at this index predicts the first one that is scored
    halves = [row[half:] for row in nats], [ids[half:] for ids in targets]
    return dataclasses.replace(total, second_halves=_score(tokenizer, *halves))


def _score(tokenizer: Tokenizer, nats: list[np.ndarray], targets: list[list[int]]) -> Score:
    """Returns the Score of predicted tokens.

    nats: negative log-likelihoods per window. targets: predicted token ids per window.
    """
    values = np.concatenate(nats)
    size = sum(len(tokenizer.token_bytes(token)) for window in targets for token in window)
    return Score(float(values.sum()), len(values), size, float((values**2).sum()))


def _windows(ids: list[int], start: list[int], length: int) -> list[list[int]]:
    """Splits ids into windows of up to `length` tokens that begin with `start`.

    Drops a window with a single token.
    """
    room = length - len(start)
    windows = [start + ids[i : i + room] for i in range(0, len(ids), room)]
    return [window for window in windows if len(window) > 1]


def llama_windows(
    tokenizer: Tokenizer, text: str, length: int, *, parse_special: bool = False
) -> list[list[int]]:
    """Splits a text into windows of exactly `length` tokens, as llama.cpp's `perplexity` does.

    BOS, if the tokenizer adds it, replaces the first token of each window. Raises TooShortError.
    """
    return with_start(tokenizer, llama_cut(tokenizer, text, length, parse_special=parse_special))


def with_start(tokenizer: Tokenizer, cut: list[list[int]]) -> list[list[int]]:
    """Replaces the first tokens of windows by BOS, if the tokenizer adds it."""
    start = list(tokenizer.vocabulary.before)
    return [start + ids[len(start) :] for ids in cut]


def llama_cut(
    tokenizer: Tokenizer, text: str, length: int, *, parse_special: bool = False
) -> list[list[int]]:
    """Like `llama_windows`, before BOS replaces the first tokens."""
    ids = tokenizer.encode(text, parse_special=parse_special, add_end=False)
    if len(ids) < 2 * length:
        needed = f"llama.cpp's windows of {length} tokens need {2 * length}"
        raise TooShortError(f"text has {len(ids)} tokens; {needed}")
    return [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]


def hidden_states(model: Model, rows: list[list[int]], first: int) -> np.ndarray:
    """Returns the hidden states of the tokens of windows that predict those after `first`.

    They are inputs of the final norm, float32 (n, hidden_size).
    """
    prompts = [np.array(row, np.int32) for row in rows]
    wanted = [TokenVectors(len(ids), normed=False) for ids in prompts]
    found = embeddings(model, prompts, wanted)
    return np.concatenate([vectors[first:-1] for vectors in found])


def checked(model: Model, context: int | None) -> tuple[Tokenizer, int]:
    """Returns the model's tokenizer, and the tokens of a window; raises as `score` does."""
    model.check_generates()
    tokenizer, longest = model.tokenizer, model.config.context_length
    if tokenizer is None:
        raise ValueError("model has no tokenizer")
    if context is not None and (isinstance(context, bool) or not isinstance(context, int)):
        raise TypeError(f"context={context!r} must be an integer")
    length = min(longest, 512) if context is None else context
    if not 2 <= length <= longest:
        raise ValueError(f"context={context} must be 2 to {longest}, the model's context length")
    return tokenizer, length


def batches(windows: list[list[int]], size: int = BATCH) -> Iterator[list[list[int]]]:
    """Yields the windows, up to `size` at a time."""
    for at in range(0, len(windows), size):
        yield windows[at : at + size]


def _nats(output: Output) -> np.ndarray:
    """Returns -log p, float64, of a prompt's tokens but the first."""
    assert output.prompt_logprobs is not None
    return np.array([-one.logprob for one in output.prompt_logprobs if one is not None])
