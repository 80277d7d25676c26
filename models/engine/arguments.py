"""Checks and converts the arguments of `generate`, `stream` and `Engine.submit`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..config.pooling import POOLINGS, normalizes, pooling_of
from ..runner.model import Model
from ..runner.speculative.drafts import Draft, DraftModel, NextTokens, PromptLookup
from ..sampling import Sampling
from .encoding import Text
from .request import ContextShift


def refuse_tracing(function: str) -> None:
    """Raises TypeError inside `jax.jit`, where `function` could not read the tokens it makes."""
    with jax.transfer_guard("allow"):  # a copy, because an operation would be compiled
        traced = isinstance(jax.device_put(np.float32(0)), jax.core.Tracer)
    if traced:
        raise TypeError(
            f"{function} runs programs and reads their tokens: call it outside jit; inside, use "
            "model.decoder(weights), as examples/decode.py does"
        )


def samplings_of(sampling: Any, fields: dict[str, Any], rows: int) -> list[Sampling]:
    """Returns the sampling parameters of each prompt; a shared entry gets consecutive seeds."""
    if isinstance(sampling, Sequence):
        if len(sampling) != rows:
            problem = f"sampling has {len(sampling)} items for {rows} prompts"
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


def prompt_rows(
    model: Model, prompts: Any, name: str = "prompt", *, add_end: bool = False
) -> tuple[list[np.ndarray], bool]:
    """Tokenizes prompts: returns int32 ids per prompt, and whether `prompts` was a single one.

    name: what errors call a prompt. add_end: whether texts get the end token that the model's file
    asks for.
    """
    all = f"{name}s"
    if not isinstance(model, Model):
        found = f"model is of type {type(model).__name__}"
        raise TypeError(f"{found}; it must be a Model, such as models.load(path) returns")
    if isinstance(prompts, bytes | bytearray):
        raise TypeError(f"{all} is bytes; decode them to text, or pass a list of token ids")
    is_rows = isinstance(prompts, Sequence | np.ndarray | jax.Array)  # a str is a Sequence
    if not is_rows or getattr(prompts, "ndim", 1) == 0:
        raise TypeError(
            f"{all} is of type {type(prompts).__name__}; "
            "it must be a text, ids, or a list of either"
        )
    single = isinstance(prompts, str) or (
        len(prompts) > 0 and not isinstance(prompts[0], str) and np.ndim(prompts[0]) == 0
    )
    rows = [prompts] if single else list(prompts)
    if len(prompts) and isinstance(prompts[0], Mapping):
        replacement = "models.chat.encode(model.tokenizer, messages), or use a models.Conversation"
        raise TypeError(f"{all} holds messages; pass {replacement}")
    if not rows:
        raise ValueError(f"{all} is empty; at least one {name} of at least one token is needed")
    return [
        _ids(model, row, name if single else f"{all}[{i}]", add_end) for i, row in enumerate(rows)
    ], single


def _ids(model: Model, prompt: Any, name: str, add_end: bool) -> np.ndarray:
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise ValueError(f"{name} is a text, but the model has no tokenizer: pass token ids")
        check_text(model, prompt, name)
        prompt = model.tokenizer.encode(prompt, add_end=add_end)
    ids = np.asarray(prompt)
    if ids.ndim != 1 or ids.size == 0:
        raise ValueError(
            f"{name} has shape {ids.shape}; it must be a text or ids (time,), at least one token"
        )
    model.check_ids(name, ids)
    return ids.astype(np.int32)


def check_text(model: Model, text: str, name: str) -> None:
    """Raises ValueError for a text that is far beyond the model's context, without encoding it.

    Encoding ten megabytes takes seconds, in which Ctrl-C does not work.
    """
    context = model.config.context_length
    if model.tokenizer is not None and model.tokenizer.exceeds(text, context):
        problem = f"{name} has {len(text)} characters"
        raise ValueError(f"{problem}, far too many for the context length, {context} tokens")


def embedding_rows(
    model: Model, texts: Any, context: int, task: str | None = None
) -> tuple[list[Text], bool]:
    """Tokenizes texts like `prompt_rows`, with end tokens, after the task's prompt.

    context: most tokens of a text. Raises ValueError for a longer one, and for an unknown task.
    """
    number = task_number(model, task)
    rows, single = prompt_rows(model, with_prompt(model, task, texts), "text", add_end=True)
    for i, ids in enumerate(rows):
        if len(ids) > context:
            name = "text" if single else f"texts[{i}]"
            raise ValueError(f"{name} has {len(ids)} tokens; the context length is {context}")
    return [Text(ids, task=number) for ids in rows], single


def task_number(model: Model, task: str | None) -> int:
    """Returns a task's number in `model.tasks` from 1, 0 for None; raises ValueError."""
    if task is None:
        return 0
    if task not in model.tasks:
        known = f"one of {', '.join(model.tasks)}" if model.tasks else "None"
        rule = f"must be {known}" + ("" if model.tasks else ", as the model has no tasks")
        raise ValueError(f"task={task!r:.100} {rule}")
    return 1 + list(model.tasks).index(task)


def with_prompt(model: Model, task: str | None, texts: Any) -> Any:
    """Returns texts after the task's prompt; ids stay, since they are complete."""
    prompt = "" if task is None else model.tasks[task]
    if prompt and isinstance(texts, str):
        return prompt + texts
    if prompt and isinstance(texts, list | tuple):
        return [prompt + text if isinstance(text, str) else text for text in texts]
    return texts


def embedding_settings(
    model: Model, pooling: str | None, normalize: bool | None
) -> tuple[str, bool]:
    """Returns pooling and normalization, by default those of the model's file.

    Raises ValueError for an unknown pooling, or an unsupported one of the file.
    """
    if pooling is None:
        pooling = pooling_of(model.metadata, model.config.architecture)
    if normalize is None:
        normalize = normalizes(model.metadata)
    if pooling not in POOLINGS:
        raise ValueError(f"pooling={pooling!r} must be one of {', '.join(POOLINGS)}")
    return pooling, normalize


def check_request(
    model: Model, ids: np.ndarray, sampling: Sampling, shift: Any, context: int
) -> None:
    """Checks that a prompt and its sampling parameters fit the model and `context` tokens.

    Raises TypeError for another type of `shift`, ValueError for other problems.
    """
    model.check_generates()
    if shift is not None and not isinstance(shift, ContextShift):
        found = f"shift is of type {type(shift).__name__}"
        raise TypeError(f"{found}; it must be a ContextShift or None")
    if shift is not None and (len(ids) >= context or shift.keep > context // 2):
        problem = f"a prompt of {len(ids)} tokens with keep={shift.keep}"
        raise ValueError(f"{problem} leaves no room in the context length, {context}")
    if shift is None and len(ids) + sampling.max_new_tokens > context:
        raise ValueError(
            f"a prompt of {len(ids)} tokens and max_new_tokens={sampling.max_new_tokens} "
            f"exceed the context length, {context}"
        )
    if sampling.dry_multiplier and sampling.dry_sequence_breakers and model.tokenizer is None:
        raise ValueError("dry_sequence_breakers needs a tokenizer, which the model lacks")
    if sampling.stop and model.tokenizer is None:
        raise ValueError(f"stop={sampling.stop!r} needs a tokenizer, which the model lacks")
    if sampling.constraint is not None and model.tokenizer is None:
        raise ValueError("constraint needs a tokenizer, which the model lacks")
    vocab_size = model.config.vocab_size
    highest = max((token for token, _ in sampling.biases), default=0)
    if highest >= vocab_size:
        raise ValueError(f"logit_bias names token {highest}; ids must be 0 to {vocab_size - 1}")
    highest = max(sampling.stop_token_ids, default=0)
    if highest >= vocab_size:
        raise ValueError(f"stop_token_ids has {highest}; ids must be 0 to {vocab_size - 1}")


def draft_of(draft: Any, model: Model) -> Draft | None:
    """Converts the `draft` argument of `generate` to a Draft; None stays None.

    Accepts "lookup" (prompt lookup), a Model (a draft model), or one of the Draft classes.

    Raises:
      TypeError: any other argument. ValueError: a draft that does not fit the model.
    """
    if isinstance(draft, Model):
        draft = DraftModel(draft)
    elif isinstance(draft, str) and draft == "lookup":
        draft = PromptLookup()
    if draft is not None and not isinstance(draft, Draft):
        shown = repr(draft) if isinstance(draft, str) else f"a {type(draft).__name__}"
        raise TypeError(f"draft is {shown}; it must be 'lookup', a Model, or one of models.drafts")
    if isinstance(draft, DraftModel):
        theirs, ours = draft.model.config.vocab_size, model.config.vocab_size
        if theirs != ours:
            raise ValueError(f"draft has a vocabulary of {theirs} tokens, the model one of {ours}")
    if isinstance(draft, NextTokens):
        trunk, names = model.config, ("architecture", "hidden_size", "vocab_size")
        differing = [n for n in names if getattr(trunk, n) != getattr(draft.config, n)]
        if differing:
            raise ValueError(f"draft is the layer of another model: its {differing[0]} differs")
    return draft
