"""Text and tokens from prompts: all at once, or piece by piece."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_q4k import page_dtype

from ..runner.model import Model
from ..sampling import Sampling
from . import memory
from .batch import INTERVAL, GenerationBatch, capacity_of
from .outputs import Output, Piece, Timings
from .prefix_cache import Prefix
from .request import ContextShift

#: Seconds. A stream takes more tokens a call where calls are shorter than a reader sees, so that
#: little of their time is the host's, or where they are longer than this: plain JAX on a CPU
#: decodes all weights once a call.
FLUENT_CALL, SLOW_CALL = 1 / 60, 0.25


def generate(
    model: Model,
    prompts: Any,
    sampling: Sampling | Sequence[Sampling] | None = None,
    *,
    cache_dtype: Any = jnp.float32,
    draft: Any = None,
    prefix: Prefix | None = None,
    shift: ContextShift | None = None,
    **fields: Any,
) -> Any:
    """Continues prompts.

    The tokens come from a jitted `lax.while_loop` over a donated cache, which is entered again
    every tenth of a second, so that Ctrl-C ends it, and with stop strings every INTERVAL tokens. A
    row's tokens depend on its prompt, way of sampling and seed, and on the other rows no more than
    by rounding. Prompts are padded to `model.padded_length`; where memory does not suffice for all,
    some run after others.

    Args:
      prompts: a text, a sequence of token ids, or a list of either kind, whose lengths may differ.
      sampling: how, or a list of ways, one for each prompt; None takes the most likely of up to 64
        tokens. Other numbers compile nothing. Of one way for all, row i draws with `seed + i`.
      cache_dtype: of the cached keys and values: float32, bfloat16, float16, int8 (with a scale per
        token and head) or float8_e4m3fn.
      draft: guesses of the next tokens, which one pass over all of them checks; None: none are
        made. "lookup", or a `drafts.PromptLookup`: what followed the last tokens where they stood
        before; a smaller Model with the same vocabulary, or a `drafts.DraftModel`; or
        what `load_nextn` reads, the layer of the model's file that predicts further ones. The
        tokens are those without drafts, but for rounding: with activations="f32" they are the same.
      prefix: what is computed of an earlier text is used where the prompt begins as it does, and
        this text's is left there: a `Prefix`, for one prompt, of the model on one device, without a
        draft model; else it stays as it is.
      shift: texts go on where the context is full, without half of what came before; None: a
        prompt and its new tokens must fit into the context.
      fields: of `Sampling`, instead of those of `sampling`: `max_new_tokens=100`.

    Returns:
      An Output, or a list of them for a list of prompts.

    Raises:
      ValueError: an empty prompt, an id outside the vocabulary, a prompt and new tokens beyond the
        context length, a text without a tokenizer, a field out of range. TypeError: prompts or
        fields of another type. All of them before any work.
    """
    rows, single = _rows(model, prompts)
    samplings = _samplings(sampling, fields, len(rows))
    _check(model, rows, samplings, prefix, shift)
    if prefix is not None and len(rows) > 1:
        raise ValueError(f"prefix serves one prompt; there are {len(rows)}")
    outputs: list[Output] = []
    timings: list[Timings] = []
    context = None if shift is None else model.config.context_length
    capacity, dtype = capacity_of(rows, samplings, context), page_dtype(cache_dtype, "cache_dtype")
    most = memory.rows_at_once(model, len(rows), max(map(len, rows)), capacity, dtype)
    for batch in memory.cut(len(rows), most):
        given = rows[batch], samplings[batch], cache_dtype, draft
        run = GenerationBatch(model, *given, filled_to=most, prefix=prefix, shift=shift)
        try:
            run.start()
            run.finish()
        finally:
            run.keep()
        outputs += run.outputs()
        timings.append(run.timings)
    if len(timings) > 1:
        whole = Timings(*map(sum, zip(*map(dataclasses.astuple, timings), strict=True)))
        outputs = [dataclasses.replace(output, timings=whole) for output in outputs]
    return outputs[0] if single else outputs


def stream(
    model: Model,
    prompt: Any,
    sampling: Sampling | None = None,
    *,
    cache_dtype: Any = jnp.float32,
    draft: Any = None,
    prefix: Prefix | None = None,
    shift: ContextShift | None = None,
    **fields: Any,
) -> Iterator[Piece]:
    """Continues one prompt token by token; arguments, checks and result as `generate`'s.

    The checks run at the call. Where processes share the model's devices, all of them must read the
    stream. The texts of all pieces together are the text of the last piece's
    `output`.
    """
    rows, single = _rows(model, prompt)
    if not single:
        raise TypeError("prompt is a list of prompts; stream takes one")
    samplings = _samplings(sampling, fields, 1)
    _check(model, rows, samplings, prefix, shift)
    return _pieces(
        GenerationBatch(model, rows, samplings, cache_dtype, draft, prefix=prefix, shift=shift)
    )


def _samplings(sampling: Any, fields: dict[str, Any], rows: int) -> list[Sampling]:
    """The ways of rows, each with its own seed."""
    if isinstance(sampling, Sequence):
        if len(sampling) != rows:
            problem = f"sampling holds {len(sampling)} ways for {rows} prompts"
            raise ValueError(f"{problem}; it must be one, or one for each")
        return [_sampling(one, fields) for one in sampling]
    one = _sampling(sampling, fields)
    # `dataclasses.replace` checks every field again.
    return [
        dataclasses.replace(one, seed=(one.seed + i) % 2**32) if i else one for i in range(rows)
    ]


def _sampling(sampling: Any, fields: dict[str, Any]) -> Sampling:
    if sampling is None:
        return Sampling(**fields)
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling is of type {type(sampling).__name__}; it must be a Sampling")
    return dataclasses.replace(sampling, **fields) if fields else sampling


def _pieces(run: GenerationBatch) -> Iterator[Piece]:
    try:
        yield from _pieces_of(run)
    finally:
        run.keep()


def _pieces_of(run: GenerationBatch) -> Iterator[Piece]:
    run.start()
    (row,) = run.rows
    yielded, interval = 0, 1
    while True:
        for i in range(yielded, len(row.tokens)):
            logprobs = row.logprobs[i] if row.logprobs else None
            yield Piece(row.tokens[i], row.take_text(row.ends[i]), logprobs=logprobs)
        yielded = len(row.tokens)
        if run.done:
            (output,) = run.outputs()
            yield Piece(None, row.take_text(), output)
            return
        seconds = run.advance(interval)
        # Processes that share the devices must make the same calls, whatever their clocks say.
        if run.shared or not FLUENT_CALL < seconds < SLOW_CALL:
            interval = min(2 * interval, INTERVAL)


def _rows(model: Model, prompts: Any) -> tuple[list[np.ndarray], bool]:
    """Every prompt as int32 ids, and whether there was a single one instead of a list."""
    if not isinstance(model, Model):
        found = f"model is of type {type(model).__name__}"
        raise TypeError(f"{found}; it must be a Model, such as models.load(path) gives")
    if isinstance(prompts, bytes | bytearray):
        raise TypeError("prompts is of bytes; decode them to a text, or pass a list of token ids")
    is_rows = isinstance(prompts, Sequence | np.ndarray | jax.Array)  # a str is a Sequence
    if not is_rows or getattr(prompts, "ndim", 1) == 0:
        raise TypeError(
            f"prompts is of type {type(prompts).__name__}; "
            "it must be a text, ids, or a list of either"
        )
    single = isinstance(prompts, str) or (
        len(prompts) > 0 and not isinstance(prompts[0], str) and np.ndim(prompts[0]) == 0
    )
    rows = [prompts] if single else list(prompts)
    if len(prompts) and isinstance(prompts[0], Mapping):
        given = "models.chat.encode(model.tokenizer, messages), or use a models.Conversation"
        raise TypeError(f"prompts holds messages; pass {given}")
    if not rows:
        raise ValueError("prompts is empty; at least one prompt of at least one token is needed")
    return [
        _ids(model, row, "prompt" if single else f"prompts[{i}]") for i, row in enumerate(rows)
    ], single


def _ids(model: Model, prompt: Any, name: str) -> np.ndarray:
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise ValueError(f"{name} is a text, but the model has no tokenizer: pass token ids")
        prompt = model.tokenizer.encode(prompt, add_end=False)
    ids = np.asarray(prompt)
    if ids.ndim != 1 or ids.size == 0:
        raise ValueError(
            f"{name} has shape {ids.shape}; it must be a text or ids (time,), at least one"
        )
    model.check_ids(name, ids)
    return ids.astype(np.int32)


def _check(
    model: Model,
    prompts: list[np.ndarray],
    samplings: list[Sampling],
    prefix: Any,
    shift: Any,
) -> None:
    """Raises TypeError for arguments of other types, ValueError where a row does not fit."""
    for name, given, kind in (("prefix", prefix, Prefix), ("shift", shift, ContextShift)):
        if given is not None and not isinstance(given, kind):
            found = f"{name} is of type {type(given).__name__}"
            raise TypeError(f"{found}; it must be a {kind.__name__} or None")
    context = model.config.context_length
    for ids, sampling in zip(prompts, samplings, strict=True):
        if shift is not None and (len(ids) >= context or shift.keep > context // 2):
            problem = f"a prompt of {len(ids)} tokens, of which keep={shift.keep} stay,"
            raise ValueError(f"{problem} leaves no room in the context length, {context}")
        if shift is None and len(ids) + sampling.max_new_tokens > context:
            raise ValueError(
                f"a prompt of {len(ids)} tokens and max_new_tokens={sampling.max_new_tokens} are "
                f"more than the context length, {context}"
            )
        if sampling.dry_multiplier and sampling.dry_sequence_breakers and model.tokenizer is None:
            raise ValueError("dry_sequence_breakers needs a tokenizer, which the model has not")
        if sampling.stop and model.tokenizer is None:
            raise ValueError(f"stop={sampling.stop!r} needs a tokenizer, which the model has not")
        vocab_size = model.config.vocab_size
        most = max((token for token, _ in sampling.biases), default=0)
        if most >= vocab_size:
            raise ValueError(f"logit_bias names token {most}; ids must be 0 to {vocab_size - 1}")
