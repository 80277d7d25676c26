"""Converts outputs of generation to JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..engine.outputs import Output, TokenLogprobs
    from ..runner.model import Model
    from ..sampling import Sampling


def described(
    model: Model,
    index: int,
    prompt: str | list[int],
    ids: list[int],
    output: Output,
    sampling: Sampling,
) -> dict[str, Any]:
    """Returns the output of prompt number `index`, from 0, as a JSON object.

    ids: the prompt's token ids.
    """
    found: dict[str, Any] = {
        "index": index,
        "prompt": prompt,
        "text": output.text,
        "tokens": output.tokens,
        **({"reasoning": output.reasoning} if output.reasoning else {}),
        "finish_reason": output.finish_reason,
        "seed": None if sampling.greedy else (sampling.seed + index) % 2**32,
    }
    if output.prompt_logprobs is not None:
        pairs = zip(ids, output.prompt_logprobs, strict=True)
        found["prompt_logprobs"] = [
            None if one is None else _of_token(model, token, one) for token, one in pairs
        ]
    if output.logprobs is not None:
        new = zip(output.tokens, output.logprobs, strict=True)
        found["logprobs"] = [_of_token(model, token, one) for token, one in new]
    return found


def _of_token(model: Model, token: int, one: TokenLogprobs) -> dict[str, Any]:
    top = [_named(model, *pair) for pair in one.top]
    found = _named(model, token, one.logprob) | {"top": top}
    return found if one.rank is None else found | {"rank": one.rank}


def _named(model: Model, token: int, logprob: float) -> dict[str, Any]:
    text = None if model.tokenizer is None else model.tokenizer.decode([token], False, False)
    return {"token": token, "text": text, "logprob": logprob}
