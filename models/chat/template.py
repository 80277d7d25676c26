"""Renders chat templates in a separate process.

A template is an untrusted Jinja program from a model's file. It runs in jinja2's
`ImmutableSandboxedEnvironment` in a separate process, which is ended if it exceeds its limits of
time, memory or output, because no check inside that process can stop `'x' * 10**10` or nested
loops. Processes are kept: a job takes about 1 ms, and starting one about 60 ms.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..tokenizer import Tokenizer
from .process import PROCESSES, ChatTemplateError, Deadline
from .template_capabilities import TemplateCapabilities
from .token_escaping import SpecialTokenEscaper

#: Number of templates whose probe results are cached.
_REMEMBERED = 32


@dataclass(frozen=True)
class Limits:
    """Limits of rendering one prompt, all above 0.

    seconds: wall-clock time of all that a prompt needs: probes of the template, waiting for a
    process, its start. characters: length of the output.
    megabytes: address space of the process, enforced on Linux.
    """

    seconds: float = 10.0
    characters: int = 4_000_000
    megabytes: int = 512

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name}={value!r} must be above 0 and finite")


DEFAULT_LIMITS = Limits()


def render(
    source: Tokenizer | str,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    *,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    now: datetime.datetime | None = None,
    template: str | None = None,
    limits: Limits = DEFAULT_LIMITS,
    **variables: Any,
) -> str:
    """Renders the prompt for a conversation as text; `encode` returns token ids instead.

    If messages spell control tokens, the text contains them. `encode` keeps them as plain text.

    Args:
      source: a tokenizer, whose file has the template, or the text of a template. That text must
        come from the operator, never from a request.
      messages: dicts with "role" and "content", plain JSON data as in OpenAI's API, never
        interpreted as a template. Contents are strings or lists of parts; arguments of tool calls
        are JSON strings or objects. Each is converted to a format that the template supports. If it
        has no system role (Gemma 2), the system message is prepended to the first user message.
      add_generation_prompt: end with the header of the assistant's turn.
      continue_final_message: end inside the last message, an assistant's, right behind its text, so
        that the answer continues it; then there is no header.
      tools: function descriptions, as in OpenAI's API.
      now: time that the template may print; None means the current time.
      template: name of one of the file's templates. None means "tool_use" if there are tools and
        such a template, else the default template.
      limits: limits of the rendering process.
      variables: further variables that the template reads, such as `enable_thinking` or
        `documents`, as plain JSON data; `documents` is none by default.

    Raises:
      ChatTemplateError: the template is missing or malformed, exceeds its limits, or raises an
        error, whose message is included.
      TypeError, ValueError: messages, tools or variables are not JSON data, are nested too deeply,
        or have a format that the template does not support.
    """
    text, tokens = template_of(source, template, tools)
    ending = add_generation_prompt, continue_final_message
    job = _Job(text, tokens | variables, *ending, now, limits)
    return job.render(_checked(messages), _checked_tools(tools), None)


def encode(
    source: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    *,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    now: datetime.datetime | None = None,
    template: str | None = None,
    limits: Limits = DEFAULT_LIMITS,
    **variables: Any,
) -> list[int]:
    """Returns the prompt for a conversation as token ids; arguments and errors as in `render`.

    Only the template's own text becomes control tokens. Control tokens spelled in messages or
    tools, such as "<|im_end|>", are encoded as text.
    """
    if not isinstance(source, Tokenizer):
        raise TypeError(f"source is of type {type(source).__name__}, expected Tokenizer")
    text, tokens = template_of(source, template, tools)
    ending = add_generation_prompt, continue_final_message
    job = _Job(text, tokens | variables, *ending, now, limits)
    checked, described = _checked(messages), _checked_tools(tools)
    try:
        marks = SpecialTokenEscaper(source.control_tokens, [checked, described])
        rendered = job.render(checked, described, marks)
    except RecursionError:
        raise ValueError("messages are nested too deeply") from None
    return source.encode(rendered, add_special=False, parse_special=True, marks=marks.meanings)


@dataclass(frozen=True)
class _Job:
    """A rendering job: a template, and its inputs except messages and tools."""

    template: str
    variables: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool
    now: datetime.datetime | None
    limits: Limits

    def render(
        self,
        messages: list[Mapping[str, Any]],
        tools: list[Any] | None,
        marks: SpecialTokenEscaper | None,
    ) -> str:
        """Renders the prompt; escapes special tokens in messages and tools if `marks` is set."""
        found = _found(self.template, _digest(self.variables))
        if not isinstance(self.now, datetime.datetime | None):
            raise TypeError(f"now is of type {type(self.now).__name__}, expected datetime")
        deadline = Deadline(self.limits.seconds)
        end = ""
        if self.continue_final_message:
            end = secrets.token_hex(16)
            messages = _with_end(messages, end)

        def probe(context: dict[str, Any]) -> str | None:
            return self._run(context, deadline).get("text")

        adapted: Any = TemplateCapabilities(self.template, probe, found).adapt(messages)
        if marks is not None:
            adapted, tools = marks.escaped(adapted), marks.escaped(tools)
        context = {
            "tools": tools,
            "messages": adapted,
            "add_generation_prompt": self.add_generation_prompt and not end,
        }
        answer = self._run(context, deadline, "" if marks is None else "".join(marks.meanings))
        if "error" in answer:
            raise ChatTemplateError(f"chat template: {answer['error']}")
        text, ends, _ = answer["text"].rpartition(end) if end else (answer["text"], "-", "")
        if not ends:
            raise ChatTemplateError("chat template: it does not show the end of the last message")
        return text

    def _run(self, context: dict[str, Any], deadline: Deadline, marks: str = "") -> dict[str, str]:
        limits = self.limits
        job = {
            "template": self.template,
            "context": {"tools": None, "documents": None, **self.variables, **context},
            "now": None if self.now is None else self.now.isoformat(),
            "marks": marks,
            "characters": limits.characters,
            "megabytes": limits.megabytes,
        }
        return PROCESSES.run(job, deadline)


@functools.lru_cache(_REMEMBERED)
def _found(template: str, variables: str) -> dict[str, str]:
    """Returns the mutable dict that caches a template's probe results.

    variables: digest of the template's variables.
    """
    return {}


def _digest(variables: dict[str, Any]) -> str:
    """Returns a digest of the names and values of variables; templates may use both."""
    said = repr(sorted(variables.items(), key=lambda item: item[0]))
    return hashlib.sha256(said.encode(errors="surrogatepass")).hexdigest()


def template_of(
    source: Tokenizer | str, name: str | None, tools: object
) -> tuple[str, dict[str, str]]:
    """Returns a template's text, and the special tokens that it may use by name."""
    if isinstance(source, str):
        if name is not None:
            raise ChatTemplateError(f"template {name!r}: a template text has no named templates")
        return source, {}
    if not isinstance(source, Tokenizer):
        raise TypeError(f"source is of type {type(source).__name__}, expected Tokenizer or str")
    file, templates = source.vocabulary.file, source.chat_templates
    if name is None:
        name = "tool_use" if tools and "tool_use" in templates else "default"
        if name not in templates and not templates:
            raise ChatTemplateError(f"{file}: tokenizer.chat_template: is missing")
    if name not in templates:
        available = ", ".join(sorted(templates)) or "none"
        raise ChatTemplateError(f"{file}: has no chat template {name!r}; available: {available}")
    return templates[name], source.special_tokens


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise TypeError(f"messages is of type {type(messages).__name__}, expected a list of dicts")
    checked = list(messages)
    for i, message in enumerate(checked):
        name = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise TypeError(f"{name} is of type {type(message).__name__}, expected a dict")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str):
            raise TypeError(f"{name}: role is of type {type(role).__name__}, expected str")
        if isinstance(content, bool | int | float | bytes):
            kind = type(content).__name__
            raise TypeError(f"{name}: content is of type {kind}, expected str or a list of parts")
    return checked


def _with_end(messages: list[Mapping[str, Any]], end: str) -> list[Mapping[str, Any]]:
    """Returns the messages with `end` behind the text of the last one, which is the assistant's."""
    last = messages[-1] if messages else {}
    content = last.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    text = parts[-1].get("text") if parts and isinstance(parts[-1], Mapping) else None
    if last.get("role") != "assistant" or not isinstance(text, str):
        raise ValueError("continue_final_message needs an assistant's text as the last message")
    ended = {**last, "content": [*parts[:-1], {**parts[-1], "text": text + end}]}
    if isinstance(content, str):
        ended["content"] = content + end
    return [*messages[:-1], ended]


def _checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Any] | None:
    if tools is None:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(t, Mapping) for t in tools):
        raise TypeError("tools must be a list of dicts, or None")
    return list(tools)
