"""Collects a request's new tokens and the text that can no longer change."""

from __future__ import annotations

from ..sampling import Sampling
from ..sampling.stop_strings import StopStrings
from ..tokenizer import Tokenizer
from .outputs import FinishReason, TokenLogprobs


class GeneratedText:
    """New tokens of one request, decoded as they come.

    Attributes:
      tokens: new token ids, without the end token.
      ends: length of the final text after each token.
      text: text that can no longer change.
      finish_reason: None as long as more tokens are wanted.
      logprobs: log-probabilities of `tokens`, if they are requested.
      end_token: the end token that ended the text, and its log-probabilities if they are
        requested; None without one.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, sampling: Sampling, end_ids: tuple[int, ...]
    ) -> None:
        """Starts an empty text. end_ids: end tokens of the model."""
        self.tokens: list[int] = []
        self.ends: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.end_token: tuple[int, TokenLogprobs | None] | None = None
        self._decoder, self._spelled = None, frozenset[int]()
        self._stop = StopStrings(sampling.stops)
        if tokenizer is not None:
            self._spelled = tokenizer.control_ids(sampling.spelled_tokens)
            # The ids continue a text, so a leading space is kept.
            self._decoder = tokenizer.stream(strip_prefix=False, spelled=self._spelled)
            self._stop.read_controls(tokenizer.cut_at_controls)
        self._end_ids = sampling.end_ids(end_ids)
        self._min_tokens = sampling.min_new_tokens
        self._max_tokens = sampling.max_new_tokens

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text; None if none has."""
        return self._stop.matched

    def push(self, token: int, logprobs: TokenLogprobs | None = None) -> None:
        """Appends the next new token; ignores it if the text is finished."""
        if self.finish_reason is not None:
            return
        if token in self._end_ids:
            self.end_token = token, logprobs
            self.finish("end")
            return
        self.tokens.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if self._decoder is not None:
            text = self._decoder.push(token)
            is_short = len(self.tokens) <= self._min_tokens
            if not is_short:
                mark = "" if token in self._spelled else self._stop.marks.get(token, "")
                text = self._stop.push(text + mark)
            self.text += text
            if self._stop.matched is not None:
                self.finish_reason = "stop"
        self.ends.append(len(self.text))
        if len(self.tokens) == self._max_tokens:
            self.finish("length")

    def finish(self, reason: FinishReason) -> None:
        """Finishes the text with `reason`, and releases what was held back for stop strings.

        Does nothing if the text is already finished.
        """
        if self.finish_reason is not None:
            return
        if self._decoder is not None:
            self.text += self._stop.push(self._decoder.finish()) + self._stop.finish()
        if self.ends:
            self.ends[-1] = len(self.text)
        self.finish_reason = reason
