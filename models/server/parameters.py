"""Sampling parameters of requests, under OpenAI's, vLLM's and llama.cpp's names."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from ..engine.stages import BIASES, STOPS
from ..sampling import Constraint, Sampling
from ..sampling.params import MAX_PROMPT_LOGPROBS
from .constraints import (
    ResponseFormat,
    Schema,
    StructuredOutputs,
    Wanted,
    of_fields,
    of_format,
    of_names,
    only,
)
from .errors import ApiError

#: Limits of a request. More stop tokens or biases than an engine's programs have room for would
#: compile programs of their own, for which all requests wait.
MOST_ANSWERS, MOST_STOPS, MOST_STOP_BYTES, MOST_LOGPROBS = 16, 16, 1024, 20
MOST_STOP_TOKENS, MOST_BIASES = STOPS, BIASES

_GOLDEN = 0x9E3779B1  # 2^32 divided by the golden ratio


class Parameters(msgspec.Struct, kw_only=True):
    """Parameters that all generation routes take; None and missing ones mean the default."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    drafts: int | None = msgspec.field(default=None, name="speculative.n_max")
    return_token_ids: bool | None = None
    user: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    grammar: str | None = None
    json_schema: Schema | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # Known, and refused where they would change the result.
    best_of: int | None = None
    functions: Any = None
    function_call: Any = None

    @property
    def answers(self) -> int:
        return 1 if self.n is None else self.n


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of a stream.

    Attributes:
      include_usage: whether a last chunk has the usage.
    """

    include_usage: bool | None = None


#: Parameters of llama-server and of earlier versions of vLLM -> field of `StructuredOutputs`.
_ALIASES = {
    "grammar": "grammar",
    "json_schema": "json",
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


def wanted_of(parameters: Parameters) -> Wanted | None:
    """Returns the constraint that a request asks for; raises ApiError."""
    aliases = {name: getattr(parameters, name) for name in _ALIASES}
    return only(
        of_format("response_format", parameters.response_format)
        + of_fields("structured_outputs", parameters.structured_outputs)
        + of_names(aliases, _ALIASES)
    )


def check(parameters: Parameters) -> None:
    """Raises ApiError for parameters that are out of range or not supported."""
    check_number("n", parameters.n, 1, MOST_ANSWERS)
    stops = _stops(parameters)
    if len(stops) > MOST_STOPS:
        raise ApiError(400, f"stop may have {MOST_STOPS} strings at most", param="stop")
    if any(len(stop.encode(errors="replace")) > MOST_STOP_BYTES for stop in stops):
        raise ApiError(400, f"a stop string may have {MOST_STOP_BYTES} bytes", param="stop")
    refuse("best_of", parameters.best_of not in (None, parameters.answers))
    check_number("min_tokens", parameters.min_tokens, 0)
    check_number("speculative.n_max", parameters.drafts, 0)
    for name, most in {"stop_token_ids": MOST_STOP_TOKENS, "logit_bias": MOST_BIASES}.items():
        if len(getattr(parameters, name) or ()) > most:
            raise ApiError(400, f"{name} may name {most} tokens at most", param=name)
    for name in ("functions", "function_call"):
        refuse(name, getattr(parameters, name) is not None)


def check_number(name: str, value: int | None, least: int, most: int | None = None) -> None:
    """Raises ApiError for a number that is out of range; None means the default."""
    if value is not None and (value < least or (most is not None and value > most)):
        bounds = f"at least {least}" if most is None else f"{least} to {most}"
        raise ApiError(400, f"{name} must be {bounds}", param=name)


def check_prompt_logprobs(count: int | None, stream: bool | None) -> None:
    """Raises ApiError for a wrong `prompt_logprobs`; as in vLLM, streams do not have them."""
    check_number("prompt_logprobs", count, 0, MAX_PROMPT_LOGPROBS)
    refuse("prompt_logprobs with stream", count is not None and bool(stream))


def refuse(name: str, changes: bool) -> None:
    """Raises ApiError for a parameter that would change the result, and is not supported."""
    if changes:
        raise ApiError(400, f"{name} is not supported", param=name, code="unsupported_parameter")


def seed_of(seed: int | None) -> int:
    """Returns a seed of 32 bits: of a seed of 64 bits, or by chance for None and -1."""
    if seed is None or seed == -1:
        return secrets.randbits(32)
    if not -(2**63) <= seed < 2**64:
        raise ApiError(400, "seed must be an integer of 64 bits", param="seed")
    high = seed >> 32 & 0xFFFFFFFF
    return (seed ^ high * _GOLDEN) & 0xFFFFFFFF


def samplings_of(
    parameters: Parameters,
    defaults: dict[str, Any],
    *,
    max_new_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    stops: tuple[str, ...],
    constraint: Constraint | None,
    spelled: tuple[str, ...],
) -> list[Sampling]:
    """Returns the sampling parameters of each of the `n` answers.

    defaults: the model's, fields of `Sampling`. stops: further stop strings.
    """
    fields: dict[str, Any] = dict(defaults)
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    for name in (*names, "presence_penalty", "frequency_penalty"):
        if (value := getattr(parameters, name)) is not None:
            fields[name] = value
    if fields.get("top_p") == 0:
        fields |= {"temperature": 0.0, "top_p": 1.0}
    if fields.get("top_k") == -1:
        fields["top_k"] = 0
    fields |= {"max_new_tokens": max_new_tokens, "logprobs": logprobs}
    fields["prompt_logprobs"] = prompt_logprobs
    fields |= {"stop": (*_stops(parameters), *stops), "ignore_end": bool(parameters.ignore_eos)}
    fields |= {"penalize_new_only": True, "min_new_tokens": parameters.min_tokens or 0}
    fields |= {"constraint": constraint, "spelled_tokens": spelled}
    fields["stop_token_ids"] = parameters.stop_token_ids or ()
    fields["logit_bias"] = _biases(parameters.logit_bias or {})
    seed = seed_of(parameters.seed)
    if fields["min_new_tokens"] > max_new_tokens:
        problem = f"min_tokens is {parameters.min_tokens}; at most {max_new_tokens} may follow"
        raise ApiError(400, problem, param="min_tokens")
    try:
        return [Sampling(**fields, seed=(seed + i) & 0xFFFFFFFF) for i in range(parameters.answers)]
    except (ValueError, TypeError) as error:
        raise wrong_value(error) from None


def wrong_value(error: Exception) -> ApiError:
    """Returns the error of a request for an error of Sampling or of an engine.

    If the message begins with the name of a parameter, the error names it.
    """
    name = str(error).partition(" ")[0].partition("=")[0]
    name = {"max_new_tokens": "max_tokens"}.get(name, name)
    known = name in Parameters.__struct_fields__
    return ApiError(400, str(error), param=name if known else None)


def _stops(parameters: Parameters) -> list[str]:
    stop = parameters.stop
    return [] if not stop else [stop] if isinstance(stop, str) else stop


def _biases(biases: dict[str, float]) -> dict[int, float]:
    if not all(token.isascii() and token.isdecimal() for token in biases):
        raise ApiError(400, "logit_bias must have token ids as names", param="logit_bias")
    found = {int(token): bias for token, bias in biases.items()}
    if len(found) < len(biases):
        raise ApiError(400, "logit_bias names a token twice", param="logit_bias")
    return found
