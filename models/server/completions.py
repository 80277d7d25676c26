"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..engine.outputs import Output, TokenLogprobs
from . import bodies
from .answers import Answers
from .errors import ApiError
from .events import EventStream
from .generation import (
    Form,
    New,
    check_length,
    chunks_of,
    finite,
    new_id,
    prompt_logprobs_of,
    reason_of,
    respond,
    submit,
    timings_of,
    token_ids,
    token_text,
    usage_of,
    with_answers,
)
from .parameters import (
    MOST_LOGPROBS,
    Parameters,
    check,
    check_number,
    check_prompt_logprobs,
    refuse,
    wanted_of,
)
from .service import Service

#: Most prompts of a request, and the tokens of an answer if it does not say.
MOST_PROMPTS, DEFAULT_TOKENS = 64, 16


class Completion(Parameters, kw_only=True):
    """Body of a text completion."""

    prompt: str | list[Any]  # a text, texts, ids, or lists of ids
    logprobs: int | None = None
    echo: bool | None = None
    prompt_logprobs: int | None = None
    # Known, and refused where it would change the result.
    suffix: str | None = None


@with_answers
async def create(request: Request, service: Service, answers: Answers) -> Response | EventStream:
    """Continues one or several prompts, as a whole or as a stream."""
    body, ignored = await bodies.read(request, Completion, service.settings)
    service.check_model(body.model)
    check(body)
    refuse("suffix", bool(body.suffix))
    check_number("logprobs", body.logprobs, 0, MOST_LOGPROBS)
    check_prompt_logprobs(body.prompt_logprobs, body.stream)
    # Of the prompt: those that are part of the echo, and those that are asked for by themselves.
    counts = [body.logprobs if body.echo else None, body.prompt_logprobs]
    of_prompt = max((count for count in counts if count is not None), default=None)
    check_number("max_tokens", body.max_tokens, 1 if of_prompt is None else 0)
    prompts = await prompts_of(service, body.prompt)
    most = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    options: Any = {"most": most, "logprobs": body.logprobs, "prompt_logprobs": of_prompt}
    await submit(service, answers, prompts, body, wanted=wanted_of(body), **options)
    total = sum(map(len, prompts))
    head = {**new_id("cmpl"), "object": "text_completion", "model": service.name_of(body.model)}
    echoed = await _echoed(service, body)
    lengths: dict[int, int] = {}  # characters of each answer so far
    scores_echo = bool(body.echo) and body.logprobs is not None

    def ids(answer: int) -> dict[str, Any]:
        prompt = prompts[answer // body.answers]
        return {"prompt_token_ids": prompt} if body.return_token_ids else {}

    def first(answer: int) -> dict[str, Any]:
        found: dict[str, Any] = {"text": echoed[answer // body.answers]} | ids(answer)
        if scores_echo:
            scores = answers.prompt_logprobs(answer)
            found["logprobs"] = _of_prompt(service, prompts[answer // body.answers], scores, body)
        return found

    def choices(new: New) -> list[dict[str, Any]]:
        # The prompt is scored when its first new token comes, or when there is none to come.
        found = [first(new.answer)] if scores_echo and new.answer not in lengths else []
        before = lengths.setdefault(new.answer, len(echoed[new.answer // body.answers]))
        lengths[new.answer] += len(new.text)
        tokens, logprobs = new.tokens, new.logprobs
        if scores_echo and (output := new.pieces[-1].output) is not None:
            tokens, logprobs = _with_end(output, tokens, logprobs)
        if new.text or logprobs or (body.return_token_ids and new.tokens):
            scores = _logprobs(service, tokens, logprobs, before)
            found.append({"text": new.text, "logprobs": scores} | token_ids(body, new.tokens))
        return found

    def logprobs_of(answer: int, output: Output) -> dict[str, Any] | None:
        if not scores_echo:
            return _logprobs(service, output.tokens, output.logprobs, 0)
        prompt, text = prompts[answer // body.answers], echoed[answer // body.answers]
        before = _of_prompt(service, prompt, output.prompt_logprobs, body)
        tokens, logprobs = _with_end(output, output.tokens, output.logprobs)
        after = _logprobs(service, tokens, logprobs, len(text)) or {}
        return {name: [*values, *after[name]] for name, values in before.items()}

    def whole(outputs: list[Output]) -> dict[str, Any]:
        tokenizer = answers.engine.model.tokenizer
        choices = [
            {
                "index": i,
                "text": echoed[i // body.answers] + (output.text or ""),
                "logprobs": logprobs_of(i, output),
                "finish_reason": reason_of(output),
                **ids(i),
                **token_ids(body, output.tokens),
                **prompt_logprobs_of(
                    tokenizer, prompts[i // body.answers], output, body.prompt_logprobs
                ),
            }
            for i, output in enumerate(outputs)
        ]
        usage = usage_of(total, outputs, body.answers)
        timings = timings_of(outputs, body.answers)
        return {**head, "choices": choices, "usage": usage, "timings": timings}

    chunks = None
    if body.stream:
        begins = first if (body.echo or body.return_token_ids) and not scores_echo else None
        chunks = chunks_of(answers, Form(head, begins, choices, {"text": ""}), body, total)
    return await respond(request, service, answers, whole=whole, chunks=chunks, ignored=ignored)


async def _echoed(service: Service, body: Completion) -> list[str]:
    """Returns each prompt's text if it is to be part of the answers; else empty texts."""
    rows = _rows_of(body.prompt)
    if not body.echo:
        return [""] * len(rows)
    tokenizer = service.tokenizer()

    def texts() -> list[str]:
        return [row if isinstance(row, str) else tokenizer.decode(row) for row in rows]

    return await asyncio.to_thread(texts)


def _rows_of(prompt: str | list[Any]) -> list[Any]:
    """Returns the prompts in a parameter that has one or several, each a text or ids."""
    is_one = isinstance(prompt, str) or (bool(prompt) and type(prompt[0]) is int)
    return [prompt] if is_one else prompt  # type: ignore[return-value]


async def prompts_of(
    service: Service, prompt: str | list[Any], name: str = "prompt", *, add_end: bool = False
) -> list[list[int]]:
    """Returns the token ids of each prompt; raises ApiError, about parameter `name`.

    add_end: whether texts get the end token that the model's file asks for.
    """
    rows = _rows_of(prompt)
    if not rows:
        raise ApiError(400, f"{name} is empty", param=name)
    if len(rows) > MOST_PROMPTS:
        raise ApiError(400, f"{name} may have {MOST_PROMPTS} texts at most", param=name)
    config = service.ready().model.config
    for row in rows:
        if isinstance(row, list) and len(row) > config.context_length:  # before looking at each
            problem = f"{name} has {len(row)} tokens; the context length is {config.context_length}"
            raise ApiError(400, problem, param=name, code="context_length_exceeded")
    if not all(isinstance(row, str) or _are_ids(row) for row in rows):
        problem = f"{name} must be a text, a list of texts, token ids, or a list of lists of these"
        raise ApiError(400, problem, param=name)
    vocab = config.vocab_size
    for row in rows:
        if isinstance(row, str):
            check_length(service, [row], name)
        elif wrong := [token for token in row if not 0 <= token < vocab]:
            problem = f"{name} has the id {wrong[0]}; ids must be 0 to {vocab - 1}"
            raise ApiError(400, problem, param=name)

    def ids_of(row: Any) -> list[int]:
        return service.tokenizer().encode(row, add_end=add_end) if isinstance(row, str) else row

    def encoded() -> list[list[int]]:
        return [ids_of(row) for row in rows]

    try:
        found = await asyncio.to_thread(encoded)
    except (ValueError, TypeError) as error:
        raise ApiError(400, str(error), param=name) from None
    if not all(found):
        raise ApiError(400, f"{name} has a text without tokens", param=name)
    return found


def _are_ids(row: Any) -> bool:
    return isinstance(row, list) and all(type(one) is int for one in row)


def _with_end(
    output: Output, tokens: list[int], logprobs: list[TokenLogprobs] | None
) -> tuple[list[int], list[TokenLogprobs] | None]:
    """Appends the end token, if the answer has one.

    Clients that score an echo leave the last token out, because it is the answer's.
    """
    if output.end_token is None or output.end_token[1] is None:
        return tokens, logprobs
    token, entry = output.end_token
    return [*tokens, token], [*(logprobs or ()), entry]


def _of_prompt(
    service: Service, prompt: list[int], logprobs: Any, body: Completion
) -> dict[str, Any]:
    """Returns log-probabilities of an echo; its first token has none.

    logprobs: one entry per token of the prompt.
    """
    tokenizer = service.tokenizer()
    stream, offsets, length = tokenizer.stream(), [], 0
    for token in prompt:
        offsets.append(length)
        length += len(stream.push(token))
    entries = [one and one._replace(top=one.top[: body.logprobs]) for one in logprobs]
    rest = _logprobs(service, prompt[1:], entries[1:], 0) or {}
    nothing = {"token_logprobs": None, "top_logprobs": None}
    nothing["tokens"] = token_text(tokenizer, prompt[0])[0]  # type: ignore[assignment]
    found = {name: [nothing[name], *rest[name]] for name in nothing}
    return {**found, "text_offset": offsets}


def _logprobs(
    service: Service, tokens: list[int], logprobs: list[TokenLogprobs] | None, offset: int
) -> dict[str, Any] | None:
    """Returns log-probabilities; offset: characters of the text before these tokens."""
    if logprobs is None:
        return None
    tokenizer = service.ready().model.tokenizer
    texts = [token_text(tokenizer, token)[0] for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [finite(one.logprob) for one in logprobs],
        "top_logprobs": [
            {token_text(tokenizer, token)[0]: finite(value) for token, value in one.top}
            for one in logprobs
        ],
        "text_offset": offsets,
    }
