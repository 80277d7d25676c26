"""Tracks one request on the host: its new tokens, decoded text, stop strings, context shift."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..sampling import Sampling
from ..sampling.stop_strings import StopStrings
from ..tokenizer import Tokenizer
from .outputs import FinishReason, TokenLogprobs


@dataclasses.dataclass(frozen=True)
class ContextShift:
    """Context shift: when the context is full, keeps its first tokens and the newer half.

    Attributes:
      keep: number of first tokens to keep, such as BOS and a system message.
    """

    keep: int = 1

    def __post_init__(self) -> None:
        if self.keep < 0:
            raise ValueError(f"keep={self.keep} must be at least 0")

    def rest(self, tokens: list[int]) -> list[int]:
        """Returns which of the context's `tokens` remain after the shift."""
        return tokens[: self.keep] + tokens[self.keep + (len(tokens) - self.keep + 1) // 2 :]


class Request:
    """One prompt's generation, on the host: new tokens, and text that can no longer change."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        sampling: Sampling,
        end_ids: tuple[int, ...],
        prompt: Sequence[int] = (),
        context: int = 2**31,
    ) -> None:
        """Starts a request.

        context: maximum tokens of prompt and new tokens before the context shifts.
        """
        self.prompt = list(prompt)  # first tokens of the current context
        self.begun = 0  # new tokens before the current context
        self._context = context
        self.tokens: list[int] = []
        self.ends: list[int] = []  # length of the final text after each token
        self.text = ""
        self.finish_reason: FinishReason | None = None
        # The ids continue a text, so a leading space is kept.
        self._decoder = None if tokenizer is None else tokenizer.stream(strip_prefix=False)
        self._stop = StopStrings(sampling.stops)
        if tokenizer is not None:
            self._stop.read_controls(tokenizer.cut_at_controls)
        self._end_ids = () if sampling.ignore_end else end_ids
        self._taken = 0
        self.max_tokens = sampling.max_new_tokens
        self.top = sampling.logprobs  # number of most likely tokens; None: no log-probabilities
        self.logprobs: list[TokenLogprobs] = []  # of `tokens`
        self.taken = 0  # tokens taken over from the device in this context

    @property
    def room(self) -> int:
        """Number of new tokens that fit: those requested, limited by the free context."""
        return min(self.max_tokens - self.begun, self._context - len(self.prompt))

    @property
    def is_full(self) -> bool:
        """Whether the request needs a context shift to continue."""
        return self.finish_reason is None and self.taken == self.room

    def shift(self, shift: ContextShift) -> None:
        """Starts a new context with the tokens that remain after the context shift."""
        self.prompt = shift.rest(self.prompt + self.tokens[self.begun :])
        self.begun, self.taken = len(self.tokens), 0

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None

    def push(self, token: int, logprobs: TokenLogprobs | None = None) -> None:
        """Appends the next new token; ignores it if the request is finished."""
        if self.finish_reason is not None:
            return
        if token in self._end_ids:
            self.finish("end")
            return
        self.tokens.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if self._decoder is not None:
            text = self._decoder.push(token) + self._stop.marks.get(token, "")
            self.text += self._stop.push(text)
            if self._stop.matched is not None:
                self.finish_reason = "stop"
        self.ends.append(len(self.text))

    def finish(self, reason: FinishReason) -> None:
        """Finishes the request with `reason`, and releases the text held back for stop strings.

        Does nothing if the request is already finished.
        """
        if self.finish_reason is not None:
            return
        self.finish_reason = reason
        if self._decoder is not None:
            self.text += self._stop.push(self._decoder.finish()) + self._stop.finish()
        if self.ends:
            self.ends[-1] = len(self.text)

    def take_text(self, end: int | None = None) -> str:
        """Returns the text after the last call's text, up to index `end`; None means all."""
        end = len(self.text) if end is None else end
        text, self._taken = self.text[self._taken : end], end
        return text
