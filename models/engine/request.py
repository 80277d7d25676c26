"""One request on the host: its tokens, the text decoded so far, and how its context shifts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..sampling import Sampling
from ..sampling.stop_strings import StopStrings
from ..tokenizer import Tokenizer
from .outputs import FinishReason, TokenLogprobs


@dataclasses.dataclass(frozen=True)
class ContextShift:
    """How a text goes on where the context is full: half of it goes, behind its first tokens.

    Attributes:
      keep: tokens at the text's beginning that stay, such as BOS and a system message.
    """

    keep: int = 1

    def __post_init__(self) -> None:
        if self.keep < 0:
            raise ValueError(f"keep={self.keep} must be at least 0")

    def rest(self, tokens: list[int]) -> list[int]:
        """What stays of a full context."""
        return tokens[: self.keep] + tokens[self.keep + (len(tokens) - self.keep + 1) // 2 :]


class Request:
    """One request on the host: its new tokens, and the decoded text that can no longer change."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        sampling: Sampling,
        end_ids: tuple[int, ...],
        prompt: Sequence[int] = (),
        context: int = 2**31,
    ) -> None:
        """context: tokens of prompt and new ones at a time, where the context shifts."""
        self.prompt = list(prompt)  # with which the context began
        self.begun = 0  # new tokens before that
        self._context = context
        self.tokens: list[int] = []
        self.ends: list[int] = []  # of the text that was certain with each token
        self.text = ""
        self.finish_reason: FinishReason | None = None
        # The ids continue a text, so their first space counts.
        self._decoder = None if tokenizer is None else tokenizer.stream(strip_prefix=False)
        self._stop = StopStrings(sampling.stops)
        if tokenizer is not None:
            self._stop.read_controls(tokenizer.cut_at_controls)
        self._end_ids = () if sampling.ignore_end else end_ids
        self._taken = 0
        self.most_tokens = sampling.max_new_tokens
        self.top = sampling.logprobs  # likeliest tokens that are wanted; None: no probabilities
        self.logprobs: list[TokenLogprobs] = []  # of `tokens`
        self.taken = 0  # of the tokens that the device has sampled in this context

    @property
    def room(self) -> int:
        """New tokens that the context has room for, of those that are wanted."""
        return min(self.most_tokens - self.begun, self._context - len(self.prompt))

    @property
    def is_full(self) -> bool:
        """True where the row goes on in another context."""
        return self.finish_reason is None and self.taken == self.room

    def shift(self, shift: ContextShift) -> None:
        """Begins another context with what stays of this one."""
        self.prompt = shift.rest(self.prompt + self.tokens[self.begun :])
        self.begun, self.taken = len(self.tokens), 0

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None

    def push(self, token: int, logprobs: TokenLogprobs | None = None) -> None:
        """Takes the next token; ignored once the row is finished."""
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
        """Ends the row, unless it has ended, with the text that was held back."""
        if self.finish_reason is not None:
            return
        self.finish_reason = reason
        if self._decoder is not None:
            self.text += self._stop.push(self._decoder.finish()) + self._stop.finish()
        if self.ends:
            self.ends[-1] = len(self.text)

    def take_text(self, end: int | None = None) -> str:
        """The text from where the last call ended, up to `end`."""
        end = len(self.text) if end is None else end
        text, self._taken = self.text[self._taken : end], end
        return text
