"""Chat templates, rendered in a process of their own.

A template is a Jinja program that comes with a model's file, so it is not to be trusted. It runs in
jinja2's `ImmutableSandboxedEnvironment` inside a process of its own, which ends when it exceeds its
time, memory or output: no check inside the process that renders can bound `'x' * 10**10` or nested
loops. Starting that process takes some 50 ms.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..tokenizer import Tokenizer

_WORKER = Path(__file__).with_name("worker.py")


class ChatTemplateError(ValueError):
    """A chat template that is missing, malformed, refuses the messages or exceeds its limits."""


@dataclass(frozen=True)
class Limits:
    """Bounds of rendering one prompt.

    seconds: wall clock, the process's start included. characters: of output. megabytes: of the
    process's address space, enforced on Linux.
    """

    seconds: float = 10.0
    characters: int = 4_000_000
    megabytes: int = 512


DEFAULT_LIMITS = Limits()


def render(
    source: Tokenizer | str,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    *,
    limits: Limits = DEFAULT_LIMITS,
    **variables: Any,
) -> str:
    """The prompt for a conversation; encode it with `parse_special=True, add_special=False`.

    Messages that spell control tokens then contain them: a caller who minds must look for them
    first.

    Args:
      source: a tokenizer, whose file brings the template, or a template's text. Take that text from
        the operator, never from a request.
      messages: dicts with "role" and "content", plain JSON data; never read as a template.
        Where it says that it has no system role (Gemma), that message begins the user's first.
      add_generation_prompt: end with the header of the assistant's turn.
      limits: of the process that renders.
      variables: further ones that the template reads, such as `enable_thinking`, plain JSON data;
        `tools` and `documents` are none unless they are given.

    Raises:
      ChatTemplateError: the template is missing, malformed, exceeds its limits or raises an error
        of its own, whose message is in it.
      TypeError, ValueError: messages or variables are not JSON data.
    """
    template, tokens = _template_of(source)
    context = {
        "tools": None,
        "documents": None,
        **tokens,
        **variables,
        "messages": _checked(messages),
        "add_generation_prompt": add_generation_prompt,
    }
    job = {
        "template": template,
        "context": context,
        "characters": limits.characters,
        "megabytes": limits.megabytes,
    }
    return _run(json.dumps(job, allow_nan=False).encode(), limits.seconds)


def _template_of(source: Tokenizer | str) -> tuple[str, dict[str, str]]:
    """A template's text, and the special tokens that it may name."""
    if isinstance(source, str):
        return source, {}
    if not isinstance(source, Tokenizer):
        raise TypeError(f"source is of type {type(source).__name__}, expected Tokenizer or str")
    if source.chat_template is None:
        file = source.vocabulary.file
        raise ChatTemplateError(f"{file}: tokenizer.chat_template: is missing")
    ids = {"bos_token": source.bos_token_id, "eos_token": source.eos_token_id}
    texts = {name: "" if token is None else source.token(token) for name, token in ids.items()}
    return source.chat_template, texts


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise TypeError(f"messages is of type {type(messages).__name__}, expected a list of dicts")
    checked = list(messages)
    for i, message in enumerate(checked):
        if not isinstance(message, Mapping):
            kind = type(message).__name__
            raise TypeError(f"messages[{i}] is of type {kind}, expected a dict")
    return [dict(message) for message in checked]


def _run(job: bytes, seconds: float) -> str:
    """Renders a job in a process of its own, and returns the text."""
    command = [sys.executable, "-P", str(_WORKER)]  # -P: its own folder stays off the module path
    try:
        done = subprocess.run(command, input=job, capture_output=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise ChatTemplateError(f"chat template took longer than {seconds} s") from None
    if done.returncode:
        last = done.stderr[-500:].decode(errors="replace").strip()
        raise ChatTemplateError(
            f"chat template ended its process with status {done.returncode}: {last}"
        )
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise ChatTemplateError(f"chat template: {answer['error']}")
    return answer["text"]
