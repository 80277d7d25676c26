"""Result classes of `generate` and `stream`: outputs, pieces of a stream, timings."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import numpy as np

FinishReason = Literal["length", "end", "stop", "cancelled"]


@dataclasses.dataclass
class Timings:
    """Seconds and token counts of one `generate` call, over all its prompts.

    Attributes:
      prompt_tokens, new_tokens: sums over the prompts.
      reused_tokens: prompt tokens found in the prefix cache.
      compile: seconds of tracing and compiling; 0 if programs for the shapes exist.
      drafted_tokens, accepted_tokens: total draft tokens, and those that were accepted.
      queue: seconds from the start, after arguments are checked, until every prompt has a row.
      first_token: seconds from the start until every prompt has its first new token.
      decode: seconds from then to the last token.
      decoded_tokens: new tokens except each prompt's first, which `decode` covers.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    compile: float = 0.0
    queue: float = 0.0
    first_token: float = 0.0
    decode: float = 0.0
    decoded_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    reused_tokens: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Decode speed in tokens per second; NaN if only one token was requested."""
        return (
            self.decoded_tokens / self.decode
            if self.decoded_tokens and self.decode
            else float("nan")
        )


class TokenLogprobs(NamedTuple):
    """Natural log-probabilities of one token and its alternatives, from unmodified logits.

    Attributes:
      logprob: log-probability of the token.
      top: (token, log-probability) of the most likely tokens, in descending order; as many as
        `Sampling.logprobs`, or `prompt_logprobs` for a token of the prompt.
      rank: number of tokens that are more likely, plus 1; None for new tokens.
    """

    logprob: float
    top: list[tuple[int, float]]
    rank: int | None = None


@dataclasses.dataclass(frozen=True, repr=False)
class Output:
    """Continuation of one prompt.

    Attributes:
      tokens: new token ids, without the end token, but with the tokens of a stop string.
      text: new text, up to a stop string; None if the model has no tokenizer.
      finish_reason: `length` (max_new_tokens reached), `end` (an end token), `stop` (a stop
        string), `cancelled`.
      timings: timings of the call, shared by the outputs of a batch.
      logprobs: one entry per token of `tokens`; None unless `Sampling.logprobs` is set.
      stop: the stop string that ended the text; None for other reasons.
      prompt_logprobs: one entry per token of the prompt, of which the first is None; None unless
        `Sampling.prompt_logprobs` is set.
      end_token: the end token that ended the text, and its log-probabilities if `logprobs` is set;
        None for other reasons.
      embedding: float32 (hidden_size,), or (tokens, hidden_size) without pooling; None unless the
        request is an embedding.
      reasoning: thoughts of a conversation's answer, which `text` then lacks.
    """

    tokens: list[int]
    text: str | None
    finish_reason: FinishReason
    timings: Timings
    logprobs: list[TokenLogprobs] | None = None
    stop: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    end_token: tuple[int, TokenLogprobs | None] | None = None
    embedding: np.ndarray | None = None
    reasoning: str = ""

    def __repr__(self) -> str:
        """Returns one line with the beginning of the text."""
        if self.embedding is not None:
            return f"Output(embedding of shape {self.embedding.shape})"
        text = self.text if self.text is None or len(self.text) <= 60 else f"{self.text[:57]}..."
        count = f"{len(self.tokens)} token{'' if len(self.tokens) == 1 else 's'}"
        return f"Output({text!r}, {count}, finish_reason={self.finish_reason!r})"


@dataclasses.dataclass(frozen=True)
class Piece:
    """One step of a stream: a token, and the new text that can no longer change, possibly empty.

    The last piece has `output`; its token is None if earlier pieces had all tokens. `logprobs` has
    the token's log-probabilities; None unless requested. `reasoning` is new text of a thought in a
    conversation, which `text` then lacks.
    """

    token: int | None
    text: str
    output: Output | None = None
    logprobs: TokenLogprobs | None = None
    reasoning: str = ""
