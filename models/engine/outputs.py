"""Results of generation: outputs, pieces of a stream, timings."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

FinishReason = Literal["length", "end", "stop"]


@dataclasses.dataclass
class Timings:
    """Seconds and counts of one call, over all its rows.

    Attributes:
      prompt_tokens, new_tokens: sums over the rows.
      reused_tokens: prompt tokens found in the prefix cache.
      compile: seconds of tracing and compiling; 0 if programs for the shapes exist.
      drafted_tokens, accepted_tokens: total draft tokens, and those that were accepted.
      first_token: seconds from the checked prompt to the first token of every row.
      decode: seconds from there to the last token.
      decoded_tokens: tokens that `decode` covers, all but each row's first.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    compile: float = 0.0
    first_token: float = 0.0
    decode: float = 0.0
    decoded_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    reused_tokens: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Decode speed; NaN if only one token was requested."""
        return (
            self.decoded_tokens / self.decode
            if self.decoded_tokens and self.decode
            else float("nan")
        )


class TokenLogprobs(NamedTuple):
    """Log-probabilities (natural) at one position, from the model's unmodified logits.

    Attributes:
      logprob: of the sampled token.
      top: (token, log-probability) of the most likely tokens, in descending order; as many as
        `Sampling.logprobs`.
    """

    logprob: float
    top: list[tuple[int, float]]


@dataclasses.dataclass(frozen=True)
class Output:
    """Continuation of one prompt.

    Attributes:
      tokens: new token ids, without the end token, but with those of a stop string.
      text: new text, up to a stop string; None if the model has no tokenizer.
      finish_reason: `length` (max_new_tokens reached), `end` (an end token), `stop` (a stop
        string).
      timings: of the call, shared by the outputs of a batch.
      logprobs: one entry per token of `tokens`; None unless `Sampling.logprobs` is set.
    """

    tokens: list[int]
    text: str | None
    finish_reason: FinishReason
    timings: Timings
    logprobs: list[TokenLogprobs] | None = None


@dataclasses.dataclass(frozen=True)
class Piece:
    """One step of a stream: a token, and the text that is final with it, possibly empty.

    The last piece has `output`, and token None if earlier pieces had all tokens. `logprobs` is the
    token's if requested.
    """

    token: int | None
    text: str
    output: Output | None = None
    logprobs: TokenLogprobs | None = None
