"""What generation gives: outputs, the pieces of a stream, and what they took."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

FinishReason = Literal["length", "end", "stop"]


@dataclasses.dataclass
class Timings:
    """Seconds and counts of one call, of all its rows together.

    Attributes:
      prompt_tokens, new_tokens: sums over the rows.
      reused_tokens: of the prompt, which a `Prefix` had computed.
      compile: tracing and compiling; 0 once a program for the shapes exists.
      drafted_tokens, accepted_tokens: of drafts in all, and those that stayed.
      first_token: from the checked prompt to the first token of every row.
      decode: from there to the last token.
      decoded_tokens: tokens that `decode` covers: all but each row's first.
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
        """Decoding's speed; NaN if a single token was asked for."""
        return (
            self.decoded_tokens / self.decode
            if self.decoded_tokens and self.decode
            else float("nan")
        )


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities at one place, by the model's own logits.

    Attributes:
      logprob: of the token that stands there.
      top: the likeliest tokens and theirs, the likeliest first; as many as `Sampling.logprobs`.
    """

    logprob: float
    top: list[tuple[int, float]]


@dataclasses.dataclass(frozen=True)
class Output:
    """One prompt's continuation.

    Attributes:
      tokens: the new token ids, without the end token, with those of a stop string.
      text: what follows the prompt's text, up to a stop string; None if the model has no tokenizer.
      finish_reason: `length` (max_new_tokens reached), `end` (an end token), `stop` (a stop
        string).
      timings: of the call; the outputs of a batch share them.
      logprobs: of each of `tokens`; None unless `Sampling.logprobs` asks for them.
    """

    tokens: list[int]
    text: str | None
    finish_reason: FinishReason
    timings: Timings
    logprobs: list[TokenLogprobs] | None = None


@dataclasses.dataclass(frozen=True)
class Piece:
    """One step of a stream: its token, and the text that became certain with it (perhaps empty).

    The last piece has `output`, and a token of None if all tokens were in pieces before it.
    `logprobs` is the token's, where they were asked for.
    """

    token: int | None
    text: str
    output: Output | None = None
    logprobs: TokenLogprobs | None = None
