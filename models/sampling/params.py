"""Ways to continue a prompt, as users say them: `Sampling`, one for a call or for each prompt."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from .stop_strings import StopStrings

#: Temperatures below it take the likeliest token.
LEAST_TEMPERATURE = 1e-5
#: Most tokens that `logit_bias` may name.
MAX_BIASES = 4096
#: Bounds of a bias: beyond the lower one float32 is infinite, and so it may be above the upper one
#: once penalties have multiplied it.
LEAST_BIAS, MOST_BIAS = -float(np.finfo(np.float32).max), 1e30
#: What is closer to 0 counts as 0 in programs.
_LEAST_NORMAL = float(np.finfo(np.float32).tiny)
#: Most likely tokens whose probabilities `logprobs` may ask for.
MAX_LOGPROBS = 1024

#: (logits float32 (vocab_size,), tokens int32 (capacity,), length int32 ()) -> logits, in jit. The
#: first `length` of the tokens are the prompt and what was generated.
Processor: TypeAlias = Callable[[Any, Any, Any], Any]


def _field(default: Any, help: str, **metadata: Any) -> Any:
    """A field, with its text in the command line's help."""
    return dataclasses.field(default=default, metadata=metadata | {"help": help})


@dataclasses.dataclass(frozen=True)
class Sampling:
    """A way to continue a prompt; validated and hashable.

    Filters apply in llama.cpp's order: bias, penalties, DRY, `processors`, top-k, top-p, min-p,
    then temperature, so which tokens stay does not depend on the temperature. The numbers are
    traced: changing them does not recompile (`stages.SamplingStages` lists what does). They become
    float32, so numbers other than 0 below 1.2e-38 in magnitude are refused.

    Attributes:
      max_new_tokens: at least 1.
      temperature: 0 to 100; 0, and anything below 1e-5, takes the most likely token, whatever the
        filters.
      top_k: keeps this many of the most likely tokens; 0 keeps all.
      top_p: above 0, up to 1: keeps the fewest most likely tokens whose probabilities sum to this
        at least.
      min_p: 0 to 1: keeps tokens at least this fraction as likely as the most likely one.
      repetition_penalty: 0.01 to 100: divides positive logits of tokens seen before, prompt
        included, and multiplies negative ones.
      presence_penalty: -100 to 100: is subtracted from logits of tokens seen before, prompt
        included.
      frequency_penalty: -100 to 100: is subtracted as often as they were seen.
      dry_multiplier: 0 to 100: what a token costs that makes a run of `dry_allowed_length` tokens,
        which stood in the text before, longer; each token of a longer run multiplies it by
        `dry_base`, 1 to 100. 0: nothing.
      dry_penalty_last_n: the last tokens that runs are looked for in; -1: all.
      dry_sequence_breakers: texts; no run goes across a token that holds one. Kept as a tuple.
      logit_bias: token ids -> what is added to their logits, -3.4e38 to 1e30; -inf excludes one.
        Kept as a tuple of pairs, by id.
      processors: functions of a row's logits, in jit, one behind the other: (logits float32
        (vocab_size,), tokens int32 (capacity,), length int32 ()) -> logits. The first `length`
        tokens are the text so far. Each function is traced once for a program: give the same object
        again. Kept as a tuple.
      logprobs: 0 to 1024: an Output holds the log-probability of each token, and of as many of the
        likeliest ones, by the model's own logits. None: it does not.
      seed: 0 to 2^32 - 1. Row i of a batch draws as a prompt alone does with `seed + i`.
      stop: strings that end a text, or one; they need a tokenizer. Control tokens, which have no
        text, match where a string spells them: "<|im_end|>". Kept as a tuple. None: none.
      ignore_end: does not end at the tokenizer's end tokens.
    """

    max_new_tokens: int = _field(64, "most new tokens; default: 64", short="-n", metavar="N")
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
    dry_multiplier: float = _field(
        0.0, "strength of DRY, against repeated runs; default: 0, off", range=(0, 100), metavar="X"
    )
    dry_base: float = _field(
        1.75, "growth per token of a longer run; default: 1.75", range=(1, 100), metavar="X"
    )
    dry_allowed_length: int = _field(
        2, "longest run without a penalty; default: 2", range=(1, 2**31 - 1), metavar="N"
    )
    dry_penalty_last_n: int = _field(
        -1,
        "search the last N tokens for runs; default: -1, all",
        range=(-1, 2**31 - 1),
        metavar="N",
    )
    dry_sequence_breakers: str | Sequence[str] = _field(
        ("\n", ":", '"', "*"), "runs end at tokens with TEXT; may be repeated", metavar="TEXT"
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
    seed: int = _field(0, "seed of the random numbers; default: 0", range=(0, 2**32 - 1))
    stop: str | Sequence[str] | None = _field(
        (), "end before this text; may be repeated", metavar="TEXT"
    )
    ignore_end: bool = _field(False, "go on beyond the model's end token")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            given = getattr(self, field.name)
            if "range" in field.metadata and not (given is None and field.default is None):
                object.__setattr__(self, field.name, _in_range(field, getattr(self, field.name)))
        given = self.max_new_tokens
        try:
            object.__setattr__(self, "max_new_tokens", operator.index(given))
        except TypeError:
            raise TypeError(f"max_new_tokens={given!r} must be an integer") from None
        if given < 1:
            raise ValueError(f"max_new_tokens={given} must be at least 1")
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(self, "stop", StopStrings(self.stop or ()).stops)
        object.__setattr__(self, "processors", _processors(self.processors))
        breakers = StopStrings(self.dry_sequence_breakers or ()).stops
        object.__setattr__(self, "dry_sequence_breakers", breakers)

    def replaced(self, **fields: Any) -> Sampling:
        """With other values of some fields, checked."""
        return dataclasses.replace(self, **fields)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs, by id."""
        return self.logit_bias  # type: ignore[return-value]

    @property
    def stops(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return self.stop  # type: ignore[return-value]

    @property
    def greedy(self) -> bool:
        return self.temperature < LEAST_TEMPERATURE

    @property
    def penalizes(self) -> bool:
        """True where tokens seen before count."""
        penalties = self.presence_penalty, self.frequency_penalty
        return self.repetition_penalty != 1 or any(penalties)


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    """A logit_bias as pairs, by id."""
    pairs = given.items() if isinstance(given, Mapping) else given
    try:
        found = sorted((operator.index(token), float(bias)) for token, bias in pairs)
    except (TypeError, ValueError):
        raise TypeError(
            f"logit_bias={given!r} must hold pairs of a token id and a number"
        ) from None
    except OverflowError:
        raise ValueError(f"logit_bias={given!r:.100} holds a number beyond float64") from None
    if len(found) > MAX_BIASES:
        raise ValueError(f"logit_bias names {len(found)} tokens; it may name {MAX_BIASES}")
    before = -1
    for token, bias in found:
        in_range = bias == -math.inf or LEAST_BIAS <= bias <= MOST_BIAS  # written so that NaN fails
        if not 0 <= token < 2**31 or not in_range:
            rule = f"ids are from 0, numbers in [{LEAST_BIAS:.8g}, {MOST_BIAS:g}] or -inf"
            raise ValueError(f"logit_bias has {token}: {bias}; {rule}")
        if token == before:
            raise ValueError(f"logit_bias names token {token} twice")
        before = token
    return tuple(found)


def _processors(given: Any) -> tuple[Processor, ...]:
    given = (given,) if callable(given) else given
    try:
        found = tuple(given)
        for one in found:
            hash(one)
    except TypeError:
        found = (None,)
    if not all(map(callable, found)):
        raise TypeError(f"processors={given!r} must be functions of logits, tokens and a length")
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
    # Temperatures near 0 take the likeliest token, whatever they are.
    if 0 < abs(number) < _LEAST_NORMAL and field.name != "temperature":
        raise ValueError(f"{message}; float32 takes it for 0")
    return number
