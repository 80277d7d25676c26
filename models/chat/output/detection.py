"""Detects the family of a chat template by rendering probes and parsing what it renders.

A probe is a conversation with an assistant's tool call. The family is the one whose parser finds
that call in the rendered answer. Texts in the template decide only if it does not render the call.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

from ...tokenizer import Tokenizer
from ..process import ChatTemplateError, ChatTemplateTimeoutError
from ..template import render, template_of
from .answer import Tags
from .events import CallArguments, CallBegin
from .families import FAMILIES, HARMONY, NONE, THOUGHTS, Family, with_thought

_REMEMBERED = 32
_MARK = "Zq8xProbe"  # does not occur in templates, and none modifies it
_ARGUMENTS = {"key_a": _MARK, "key_b": 7}
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": {"key_a": {"type": "string"}, "key_b": {"type": "integer"}},
            "required": ["key_a"],
        },
    },
}
_USER = {"role": "user", "content": "A"}


def family_of(source: Tokenizer | str, *, template: str | None = None) -> Family:
    """Returns the family of the answers of a chat template.

    Args:
      source: a tokenizer, whose file has the template, or the text of a template.
      template: name of one of the file's templates; None means the one that `render` takes for a
        conversation with tools.

    Returns:
      The family, `NONE` for templates without tools and thoughts, and for files without template.

    Raises:
      ChatTemplateError: the template takes longer than its limit.
    """
    try:
        text, tokens = template_of(source, template, [_TOOL])
    except ChatTemplateError:
        return NONE
    return _family_of(text, tuple(sorted(tokens.items())))


@functools.lru_cache(_REMEMBERED)
def _family_of(template: str, tokens: tuple[tuple[str, str], ...]) -> Family:
    probe = _Probe(template, dict(tokens))
    family = probe.family()
    return with_thought(family, family.thought or probe.thought())


class _Probe:
    """Probes of one template."""

    def __init__(self, template: str, tokens: Mapping[str, Any]) -> None:
        # Templates add them to other texts, and fail without them.
        self._template, self._tokens = template, {"bos_token": "", "eos_token": "", **tokens}
        self._call = self._rendered({"content": "", "tool_calls": [_call()]})
        self._text = self._rendered({"content": _MARK})

    def family(self) -> Family:
        """Returns the family whose parser reads the rendered call, or that the text names."""
        answer = self._answer()
        if answer is not None and _MARK in answer:
            for family in FAMILIES:
                if _reads(family, answer):
                    return family
        hints = ((hint, family) for family in FAMILIES for hint in family.hints)
        found = [(len(hint), family) for hint, family in hints if hint in self._template]
        return max(found, key=lambda pair: pair[0])[1] if found else NONE

    def thought(self) -> Tags | None:
        """Returns the marks around a rendered thought, or the first in the template's text."""
        message = {"content": "", "tool_calls": [_call("A")], "reasoning_content": _MARK}
        text = self._rendered(message) or ""
        for tags in THOUGHTS:
            if text.partition(_MARK)[0].rstrip().endswith(tags.begin):
                return tags
        for tags in THOUGHTS:
            if tags.begin in self._template and tags.end in self._template:
                return tags
        return None

    def _answer(self) -> str | None:
        """Returns the rendered call without the header of the assistant's turn."""
        if self._call is None or self._text is None:
            return None
        same = 0
        for a, b in zip(self._call, self._text, strict=False):
            if a != b:
                break
            same += 1
        return self._call[same:]

    def _rendered(self, message: dict[str, Any]) -> str | None:
        messages = [_USER, {"role": "assistant", **message}]
        try:
            return render(self._template, messages, False, tools=[_TOOL], **self._tokens)
        except ChatTemplateTimeoutError:  # says nothing about the template
            raise
        except (ValueError, TypeError):
            return None


def _call(text: str = _MARK) -> dict[str, Any]:
    function = {"name": "probe_tool", "arguments": json.dumps(_ARGUMENTS | {"key_a": text})}
    return {"id": "call00001", "type": "function", "function": function}


def _reads(family: Family, answer: str) -> bool:
    """Returns whether a family, by its first form of calls, reads the probe's call."""
    first = dataclasses.replace(family, syntaxes=family.syntaxes[:1])
    parser = first.parser([_TOOL], reasoning=family is HARMONY)
    events = [*parser.push(answer), *parser.finish()]
    if [e.name for e in events if isinstance(e, CallBegin)] != ["probe_tool"]:
        return False
    try:
        arguments = json.loads("".join(e.text for e in events if isinstance(e, CallArguments)))
    except ValueError:
        return False
    return bool(arguments == _ARGUMENTS)
