"""Reads answers of gpt-oss, which are messages with a header each (OpenAI's harmony format).

A header names a channel and, for a call, the tool: analysis is a thought, final is the answer, and
commentary is a call or text for the user. A prompt ends with "<|start|>assistant".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .grammar import Rules
from .json_calls import object_schema
from .json_text import read_value
from .literals import read_name
from .parser import Parser
from .source import Reading, Sink, Source
from .syntax import Body, Header, Syntax
from .tools import Tool

_MESSAGE = "<|message|>"
_STARTS = ("<|start|>", "<|channel|>")
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_MARKS = (*_STARTS, _MESSAGE, *_ENDS)
_FUNCTIONS = "functions."
_HEADER = re.compile(
    r"(?:<\|start\|>assistant)?(?:[ ]*to=(?P<role>[\w.-]+))?"
    r"(?:<\|channel\|>(?P<channel>analysis|commentary|final)(?:[ ]+to=(?P<to>[\w.-]+))?)?"
    r"[ ]*(?:<\|constrain\|>)?[ ]*(?:json|code|text)?[ ]*<\|message\|>"
)
#: Headers as the model writes them behind a prompt.
_OPENING = "<|channel|>"


@dataclass(frozen=True)
class _Message:
    channel: str
    raw: str
    call: Header | None


@dataclass(frozen=True)
class HarmonyBody(Body):
    """Arguments of a call: JSON; the header of the message names the tool."""

    def read_header(self, source: Source, tools: dict[str, Tool]) -> Reading[Header | None]:
        raise NotImplementedError  # HarmonyReader reads headers
        yield

    def read_arguments(self, source: Source, tool: Tool, sink: Sink) -> Reading[bool]:
        return (yield from read_value(source, sink))

    def read_tail(self, source: Source, header: Header) -> Reading[bool]:
        yield from source.spaces()
        return (yield from source.choose(_ENDS)) is not None

    def rule(self, tool: Tool, rules: Rules) -> str:
        header = f"commentary to={_FUNCTIONS}{tool.name} "
        marks = rules.marks((_OPENING, header, "<|constrain|>", "json", _MESSAGE))
        return f"{marks} {rules.add_json(object_schema(tool))}"


HARMONY_SYNTAX = Syntax(HarmonyBody())


def messages_rule(
    tools: dict[str, Tool],
    rules: Rules,
    content: Mapping[str, Any] | Literal["text"] | None,
    budget: int | None,
) -> str:
    """Returns a grammar expression of an answer; the arguments are as in `Family.grammar`.

    Each message but the first, whose role is in the prompt, begins with its role.
    """
    start = f"({rules.marks(('<|start|>', 'assistant'))})?"

    def message(channel: str, text: str) -> str:
        return f"{start} {rules.marks((_OPENING, channel, _MESSAGE))} {text}"

    thought = rules.add_text("<|end|>", without=_MARKS, most_tokens=budget)
    preamble = rules.add_text("<|end|>", without=_MARKS)
    before = f"({message('analysis', thought)})?"
    answers = []
    if tools:
        call = f"{start} {HARMONY_SYNTAX.grammar(tools, rules, parallel=False)}"
        answers.append(call if content is None else f"({message('commentary', preamble)})? {call}")
    if isinstance(content, Mapping):
        answers.append(message("final", rules.add_json(content)))
    elif content is not None:
        answers.append(message("final", rules.add_text(without=_MARKS)))
    return f"{before} ({' | '.join(answers)})"


class HarmonyReader:
    """Reader of one answer."""

    def __init__(self, parser: Parser) -> None:
        self._parser, self._source = parser, parser.source

    def read(self, inside: bool) -> Reading[None]:
        """Reads the answer; `inside` a thought if the prompt's end is a header of analysis."""
        source, content = self._source, self._parser.content
        if inside:
            yield from self._read_body(_Message("analysis", "", None))
        starts: tuple[str, ...] = ("to=", *_STARTS)
        while (yield from source.spaces(content.add)):
            message = yield from source.attempt(self._read_header(starts))
            if message is not None:
                yield from self._read_body(message)
            else:
                yield from self._read_text()
            starts = _STARTS

    def _read_header(self, starts: tuple[str, ...]) -> Reading[_Message | None]:
        start = yield from self._source.choose(starts)
        if start is None or (header := (yield from read_name(self._source, _MESSAGE))) is None:
            return None
        raw = start + header + _MESSAGE
        match = _HEADER.fullmatch(raw)
        if match is None:
            return None
        channel, recipient = match["channel"] or "commentary", match["role"] or match["to"] or ""
        if not recipient.startswith(_FUNCTIONS):
            return _Message("analysis" if recipient else channel, raw, None)
        tool = self._parser.tools.get(recipient.removeprefix(_FUNCTIONS))
        following = yield from self._source.spaces()
        if tool is None or following not in ("{", "<"):
            return None
        return _Message(channel, raw, Header(tool, None if following == "{" else "{}"))

    def _read_body(self, message: _Message) -> Reading[None]:
        parser = self._parser
        parser.content.gap()
        if message.call is not None:
            yield from parser.read_call(HARMONY_SYNTAX, message.call)
            return
        thinks = message.channel == "analysis"
        raw = thinks and not parser.splits
        if raw:
            parser.content.add(message.raw)
        elif thinks:
            parser.reasoning.gap()
        sink = parser.reasoning.add if thinks else parser.content.add
        stop = yield from self._source.until((*_ENDS, "<|start|>"), sink)
        if stop == "<|start|>":  # the end of this message is missing
            self._source.at -= len(stop)
        elif stop is not None and raw:
            parser.content.add(stop)
        if stop is not None and not raw:
            (parser.reasoning if thinks else parser.content).gap()

    def _read_text(self) -> Reading[None]:
        """Reads text that is no message, up to where one may begin."""
        source, content = self._source, self._parser.content
        mark = yield from source.choose(_STARTS)
        if mark is not None:
            content.add(mark)
        stop = yield from source.until(_STARTS, content.add)
        if stop is not None:
            source.at -= len(stop)
