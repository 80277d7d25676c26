"""Defines `Sampling`: the user's sampling parameters, one object per call or per prompt."""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from .constraint import Constraint
from .stop_strings import StopStrings

#: Temperatures below it select the most likely token.
LEAST_TEMPERATURE = 1e-5
#: Maximum number of tokens in `logit_bias`.
MAX_BIASES = 4096
#: Maximum number of `stop_token_ids`.
MAX_STOP_TOKENS = 256
#: Bounds of a bias. Below the lower one float32 is infinite; above the upper one it may become
#: infinite when penalties multiply it.
LEAST_BIAS, MOST_BIAS = -float(np.finfo(np.float32).max), 1e30
#: Programs flush smaller magnitudes to 0.
_LEAST_NORMAL = float(np.finfo(np.float32).tiny)
#: Largest values of `logprobs` and of `prompt_logprobs`.
MAX_LOGPROBS, MAX_PROMPT_LOGPROBS = 1024, 20

#: (logits float32 (vocab_size,), tokens int32 (capacity,), length int32 ()) -> logits, in jit. The
#: first `length` tokens are the prompt and the generated tokens.
Processor: TypeAlias = Callable[[Any, Any, Any], Any]


def _field(default: Any, help: str, **metadata: Any) -> Any:
    """Returns a dataclass field whose metadata has its help text for the command line."""
    return dataclasses.field(default=default, metadata=metadata | {"help": help})


#: Names of other libraries -> fields.
_ELSEWHERE = {
    **dict.fromkeys(("max_tokens", "max_length", "max_completion_tokens"), "max_new_tokens"),
    **dict.fromkeys(("n_predict", "num_predict"), "max_new_tokens"),
    **dict.fromkeys(("stop_sequences", "stop_strings", "stops"), "stop"),
    **dict.fromkeys(("repeat_penalty", "repetition"), "repetition_penalty"),
    **dict.fromkeys(("top_logprobs", "n_probs"), "logprobs"),
    **dict.fromkeys(("do_sample", "temp"), "temperature"),
    "ignore_eos": "ignore_end",
    "eos_token_id": "stop_token_ids",
    "logits_processor": "processors",
    "grammar": "constraint",
}


def unknown_field(name: str) -> str:
    """Returns the message about a name that is no field, with the field that it resembles."""
    fields = [field.name for field in dataclasses.fields(Sampling)]
    meant = _ELSEWHERE.get(name) or next(iter(difflib.get_close_matches(name, fields, 1)), None)
    hint = f"; did you mean {meant}?" if meant else f"; it has {', '.join(fields)}"
    return f"Sampling has no field {name}{hint}"


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling parameters; validated and hashable.

    Stages apply in llama.cpp's order: bias, penalties, DRY, `processors`, top-k, top-p, min-p, then
    temperature, so the filters do not depend on the temperature. The numbers are traced: changing
    them does not recompile (`stages.SamplingStages` lists what does). They become float32, so
    nonzero numbers below 1.2e-38 in magnitude are rejected.

    Attributes:
      max_new_tokens: at least 1; 0 is possible with `prompt_logprobs`, for a prompt alone.
      min_new_tokens: 0 to max_new_tokens; end tokens and stop strings do not end shorter answers.
      temperature: 0 to 100; below 1e-5 the most likely token is taken, regardless of filters.
      top_k: keeps this many of the most likely tokens; 0 keeps all.
      top_p: above 0, up to 1; keeps the fewest most likely tokens whose probabilities sum to at
        least this.
      min_p: 0 to 1; keeps tokens at least this fraction as likely as the most likely one.
      repetition_penalty: 0.01 to 100; divides positive logits of tokens seen before, prompt
        included, and multiplies negative ones.
      presence_penalty: -100 to 100; subtracted from logits of tokens seen before, prompt included.
      frequency_penalty: -100 to 100; subtracted once per occurrence, prompt included.
      penalize_new_only: presence_penalty and frequency_penalty count new tokens only, as OpenAI's
        API and vLLM do; llama.cpp counts the prompt, too.
      dry_multiplier: 0 to 100; penalty of a token that would extend a repeated run of
        `dry_allowed_length` tokens. Each further token of the run multiplies it by `dry_base`, 1 to
        100. 0 disables DRY.
      dry_penalty_last_n: number of last tokens to search for runs; -1: all.
      dry_sequence_breakers: strings; runs do not extend across a token that contains one. Stored as
        a tuple.
      logit_bias: token id -> number added to its logit, -3.4e38 to 1e30; -inf excludes the token.
        Stored as a tuple of pairs, sorted by id.
      processors: functions of a row's logits, applied in sequence, in jit: (logits float32
        (vocab_size,), tokens int32 (capacity,), length int32 ()) -> logits. The first `length`
        tokens are the prompt and the tokens so far. A function is traced once per program if the
        same object is passed again. Stored as a tuple.
      logprobs: 0 to 1024; an Output then has the log-probability of each token and of this many
        most likely tokens, from the model's unmodified logits. None means no log-probabilities.
      prompt_logprobs: 0 to 20; an Output then has the log-probability of each token of the prompt
        but the first, too, and of this many most likely tokens in its place.
      seed: 0 to 2^32 - 1. Row i of a batch samples like a single prompt with `seed + i`.
      stop: one or several strings that end the text; they need a tokenizer. A string also matches
        control tokens that it spells, such as "<|im_end|>". Stored as a tuple. None means no
        strings.
      constraint: form that the text must have, such as JSON of a schema; None means any.
      ignore_end: continue after the tokenizer's end tokens.
      stop_token_ids: tokens that end the text like an end token, also with `ignore_end`. Stored as
        a tuple.
      spelled_tokens: control tokens whose names are part of the text, such as "<|channel|>"; those
        of others are left out. Stored as a tuple.
    """

    def __new__(cls, *_: Any, **fields: Any) -> Sampling:
        """Raises TypeError for an unknown field, with the name that it has here."""
        for name in fields:
            if name not in cls.__dataclass_fields__:
                raise TypeError(unknown_field(name))
        return super().__new__(cls)

    max_new_tokens: int = _field(64, "maximum new tokens; default: 64", short="-n", metavar="N")
    min_new_tokens: int = _field(
        0, "end no text before; default: 0", range=(0, 2**31 - 1), metavar="N"
    )
    temperature: float = _field(
        0.0, "randomness; 0, the default, takes the most likely token", range=(0, 100), metavar="T"
    )
    top_k: int = _field(
        0, "keep the K most likely tokens; default: 0, all", range=(0, 2**31 - 1), metavar="K"
    )
    top_p: float = _field(
        1.0,
        "keep the most likely tokens up to this total probability; default: 1, all",
        range=(0, 1),
        open_low=True,
        metavar="P",
    )
    min_p: float = _field(
        0.0,
        "drop tokens less likely than P times the most likely one; default: 0, none",
        range=(0, 1),
        metavar="P",
    )
    repetition_penalty: float = _field(
        1.0, "divide the logits of earlier tokens by X; default: 1", range=(0.01, 100), metavar="X"
    )
    presence_penalty: float = _field(
        0.0, "subtract X for earlier tokens; default: 0", range=(-100, 100), metavar="X"
    )
    frequency_penalty: float = _field(
        0.0, "subtract X per earlier occurrence; default: 0", range=(-100, 100), metavar="X"
    )
    penalize_new_only: bool = _field(
        False, "presence and frequency penalties count new tokens only, not the prompt"
    )
    dry_multiplier: float = _field(
        0.0, "strength of the DRY penalty on repetition; default: 0", range=(0, 100), metavar="X"
    )
    dry_base: float = _field(
        1.75, "DRY's growth per repeated token; default: 1.75", range=(1, 100), metavar="X"
    )
    dry_allowed_length: int = _field(
        2, "longest repetition without DRY penalty; default: 2", range=(1, 2**31 - 1), metavar="N"
    )
    dry_penalty_last_n: int = _field(
        -1,
        "search the last N tokens for repetitions; default: -1, all",
        range=(-1, 2**31 - 1),
        metavar="N",
    )
    dry_sequence_breakers: str | Sequence[str] = _field(
        ("\n", ":", '"', "*"), "end DRY repetitions at tokens with TEXT; repeatable", metavar="TEXT"
    )
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = _field(
        (), "add X to the logits of token ID; may be repeated", metavar="ID=X"
    )
    processors: Sequence[Processor] = dataclasses.field(default=(), metadata={})
    logprobs: int | None = _field(
        None,
        "report the N most likely tokens' log-probabilities",
        range=(0, MAX_LOGPROBS),
        metavar="N",
    )
    prompt_logprobs: int | None = _field(
        None,
        "report the log-probabilities of the prompt's tokens, with the N most likely tokens'",
        range=(0, MAX_PROMPT_LOGPROBS),
        metavar="N",
    )
    seed: int = _field(0, "seed of the random numbers; default: 0", range=(0, 2**32 - 1))
    stop: str | Sequence[str] | None = _field(
        (), "stop before this text; may be repeated", metavar="TEXT"
    )
    constraint: Constraint | None = dataclasses.field(default=None, metadata={})
    ignore_end: bool = _field(False, "continue after the model's end token")
    stop_token_ids: Sequence[int] = _field(
        (), "stop at this token id; may be repeated", metavar="ID"
    )
    spelled_tokens: str | Sequence[str] = _field(
        (), "keep this control token's name in the text; may be repeated", metavar="NAME"
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if "range" in field.metadata and not (value is None and field.default is None):
                object.__setattr__(self, field.name, _in_range(field, getattr(self, field.name)))
        value = self.max_new_tokens
        try:
            object.__setattr__(self, "max_new_tokens", operator.index(value))
        except TypeError:
            raise TypeError(f"max_new_tokens={value!r} must be an integer") from None
        if value < (self.prompt_logprobs is None):
            least = "at least 1, or 0 with prompt_logprobs"
            raise ValueError(f"max_new_tokens={value} must be {least}")
        if self.min_new_tokens > value:
            least = f"min_new_tokens={self.min_new_tokens}"
            raise ValueError(f"{least} must not exceed max_new_tokens={value}")
        if not isinstance(self.constraint, Constraint | None):
            kind = type(self.constraint).__name__
            raise TypeError(f"constraint is of type {kind}; it must be a Constraint or None")
        object.__setattr__(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(self, "stop", StopStrings(self.stop or ()).stops)
        object.__setattr__(self, "processors", _processors(self.processors))
        breakers = StopStrings(self.dry_sequence_breakers or ()).stops
        object.__setattr__(self, "dry_sequence_breakers", breakers)
        spelled = StopStrings(self.spelled_tokens or ()).stops
        object.__setattr__(self, "spelled_tokens", spelled)

    def replaced(self, **fields: Any) -> Sampling:
        """Returns a copy with other values of some fields, validated."""
        return dataclasses.replace(self, **fields)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs, sorted by id."""
        return self.logit_bias  # type: ignore[return-value]

    @property
    def stops(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return self.stop  # type: ignore[return-value]

    @property
    def greedy(self) -> bool:
        return self.temperature < LEAST_TEMPERATURE

    def end_ids(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Returns the tokens that end the text. ids: the model's end tokens."""
        return (*(() if self.ignore_end else ids), *self.stop_token_ids)

    @property
    def penalizes(self) -> bool:
        """Whether a penalty depends on tokens seen before."""
        penalties = self.presence_penalty, self.frequency_penalty
        return self.repetition_penalty != 1 or any(penalties)


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """Returns a checked logit_bias as pairs, sorted by id."""
    pairs = value.items() if isinstance(value, Mapping) else value
    try:
        found = sorted((operator.index(token), float(bias)) for token, bias in pairs)
    except (TypeError, ValueError):
        raise TypeError(
            f"logit_bias={value!r} must hold pairs of a token id and a number"
        ) from None
    except OverflowError:
        raise ValueError(f"logit_bias={value!r:.100} holds a number outside of float64") from None
    if len(found) > MAX_BIASES:
        raise ValueError(f"logit_bias names {len(found)} tokens; it may name up to {MAX_BIASES}")
    before = -1
    for token, bias in found:
        in_range = bias == -math.inf or LEAST_BIAS <= bias <= MOST_BIAS  # written so that NaN fails
        if not 0 <= token < 2**31 or not in_range:
            rule = f"ids must be at least 0, numbers in [{LEAST_BIAS:.8g}, {MOST_BIAS:g}] or -inf"
            raise ValueError(f"logit_bias has {token}: {bias}; {rule}")
        if token == before:
            raise ValueError(f"logit_bias names token {token} twice")
        before = token
    return tuple(found)


def _stop_token_ids(value: Any) -> tuple[int, ...]:
    try:
        given = () if value is None else value
        found = tuple(dict.fromkeys(operator.index(token) for token in given))
    except TypeError:
        raise TypeError(f"stop_token_ids={value!r:.100} must hold token ids") from None
    if len(found) > MAX_STOP_TOKENS:
        raise ValueError(f"stop_token_ids has {len(found)} ids; {MAX_STOP_TOKENS} are possible")
    if wrong := [token for token in found if not 0 <= token < 2**31]:
        raise ValueError(f"stop_token_ids has {wrong[0]}; ids must be at least 0")
    return found


def _processors(value: Any) -> tuple[Processor, ...]:
    value = (value,) if callable(value) else value
    try:
        found = tuple(value)
        for one in found:
            hash(one)
    except TypeError:
        found = (None,)
    if not all(map(callable, found)):
        raise TypeError(f"processors={value!r} must be functions of logits, tokens and a length")
    return found


def _in_range(field: dataclasses.Field[Any], value: Any) -> float:
    kind = int if str(field.type).startswith("int") else float
    (low, high), open_low = field.metadata["range"], field.metadata.get("open_low", False)
    bracket = "(" if open_low else "["
    message = f"{field.name}={value!r} must be {kind.__name__} in {bracket}{low}, {high}]"
    try:
        if isinstance(value, bool | str):
            raise TypeError
        number = operator.index(value) if kind is int else float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(message) from None
    # Written so that NaN fails.
    if not (low < number <= high if open_low else low <= number <= high):
        raise ValueError(message)
    # All temperatures near 0 select the most likely token.
    if 0 < abs(number) < _LEAST_NORMAL and field.name != "temperature":
        raise ValueError(f"{message}; float32 rounds it to 0")
    return number
