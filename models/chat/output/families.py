"""Families of chat templates: how each writes thoughts and tool calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .answer import AnswerReader, Tags
from .grammar import Rules, TokenId
from .harmony import HARMONY_SYNTAX, HarmonyReader, messages_rule
from .json_calls import JsonObject, NamedJson
from .literal_calls import LiteralCall
from .literals import GEMMA as GEMMA_LITERALS
from .literals import PYTHON
from .parser import Parser
from .source import Reading
from .syntax import Syntax
from .tagged_calls import Tagged
from .tools import Tool, tools_of


@dataclass(frozen=True)
class Family:
    """Form of a model's answers.

    Attributes:
      name: for messages and tests.
      syntaxes: forms of calls; templates and grammars use the first, parsers read all of them.
      thought: marks around thoughts; None if the model writes none.
      frame: marks around the text behind a thought, which are dropped.
      hints: texts of templates that tell a model this form but do not render calls.
      messages: answers are messages with headers, as those of gpt-oss.
      frames: marks that no other field has.
    """

    name: str
    syntaxes: tuple[Syntax, ...] = ()
    thought: Tags | None = None
    frame: Tags | None = None
    hints: tuple[str, ...] = ()
    messages: bool = False
    frames: tuple[str, ...] = ()

    @property
    def marks(self) -> frozenset[str]:
        """All texts that may mark a part of an answer; some are several control tokens."""
        parts = self.syntaxes, self.thought, self.frame, self.frames
        return frozenset(_texts(parts))

    def parser(
        self,
        tools: Sequence[Any] | None,
        *,
        reasoning: bool = True,
        inside: bool = False,
        splits_reasoning: bool = True,
    ) -> Parser:
        """Returns a parser of one answer.

        Args:
          tools: descriptions of the request's tools, as in OpenAI's API. Without them, no call is
            parsed.
          reasoning: the answer may have thoughts; otherwise their marks are content.
          inside: the prompt has begun a thought; see `opens_thought`.
          splits_reasoning: thoughts become `Reasoning`; otherwise they stay in the content, with
            their marks.
        """

        def read(parser: Parser) -> Reading[None]:
            if self.messages:
                return HarmonyReader(parser).read(inside)
            thought = self.thought if reasoning or inside else None
            syntaxes = self.syntaxes if parser.tools else ()
            return AnswerReader(parser, syntaxes, thought, self.frame).read(inside)

        return Parser(read, tools, splits_reasoning)

    def opens_thought(self, prompt: str) -> bool:
        """Returns whether a rendered prompt ends inside a thought."""
        return self.thought is not None and prompt.rstrip().endswith(self.thought.begin)

    def grammar(
        self,
        tools: Sequence[Any],
        *,
        parallel: bool,
        token_id: TokenId,
        content: Mapping[str, Any] | Literal["text"] | None = None,
        budget: int | None = None,
    ) -> str:
        """Returns a Lark grammar, in llguidance's dialect, of answers behind their thought.

        If answers are `messages`, it includes the thought. An answer calls a tool once, or once or
        more if `parallel`. Raw strings of tagged and literal calls follow the enums of a schema,
        but not its patterns and lengths.

        Args:
          token_id: returns the id of the control token that a text spells, or None.
          content: what an answer may be instead: JSON of a schema, or any text, which may also
            precede calls. None means that it must call a tool.
          budget: most tokens of a thought that the grammar includes; None means no limit.

        Raises:
          ValueError: there are no calls to write, since the family has none or there are no tools,
            and no content.
        """
        known = tools_of(tools)
        syntax = self.syntaxes[0] if known and self.syntaxes else None
        if syntax is None and content is None:
            raise ValueError(f"family {self.name!r}, {len(known)} tools: there is no call to write")
        rules = Rules(token_id)
        if self.messages:
            return rules.text(messages_rule(known, rules, content, budget))
        answers = []
        if syntax is not None:
            answers.append(syntax.grammar(known, rules, parallel))
        openers = [opener for one in self.syntaxes for opener in one.openers]
        if isinstance(content, Mapping):
            answers.append(self._framed(rules, rules.add_json(content)))
        elif content is not None:
            text = rules.add_text(without=openers, braces=not any(s.bare for s in self.syntaxes))
            answers.append(self._framed(rules, text))
            if syntax is not None and syntax.first_mark:
                answers[0] = self._calls_behind_text(syntax, known, rules, parallel, openers)
        return rules.text(" | ".join(answers))

    def _calls_behind_text(
        self,
        syntax: Syntax,
        tools: dict[str, Tool],
        rules: Rules,
        parallel: bool,
        openers: Sequence[str],
    ) -> str:
        """Returns a grammar expression of calls, and text before them."""
        mark = syntax.first_mark
        if rules.is_token(mark):
            text = rules.add_text(without=openers)
            return f"{self._framed(rules, text)} {syntax.grammar(tools, rules, parallel)}"
        text = rules.add_text(mark, without=openers)
        return f"{text} {syntax.grammar(tools, rules, parallel, begun=True)}"

    def _framed(self, rules: Rules, text: str) -> str:
        """Returns an expression of text in its frame, which may be missing."""
        if self.frame is None:
            return text
        framed = f"{rules.mark(self.frame.begin)} {text} {rules.mark(self.frame.end)}"
        return f"({text} | {framed})"


def _texts(value: Any) -> Iterator[str]:
    """Yields the texts in data classes, and in tuples of them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _texts(part)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _texts(getattr(value, field.name))


THINK = Tags("<think>", "</think>")
_COHERE_ACTIONS = Syntax(
    JsonObject("tool_name", "parameters", number="tool_call_id"),
    section=("<|START_ACTION|>", "[", "\n"),
    section_end=("\n", "]", "<|END_ACTION|>"),
    separator=(",", "\n"),
)

_MISTRAL_LIST = Syntax(
    JsonObject(), section=("[TOOL_CALLS]", "["), section_end=("]",), separator=(",", " ")
)
_MISTRAL_NAMED = Syntax(NamedJson(("[ARGS]",), optional="[CALL_ID]"), call=("[TOOL_CALLS]",))

_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>",), ("<｜tool▁calls▁end｜>",)
_DEEPSEEK_CALL = ("<｜tool▁call▁begin｜>",), ("<｜tool▁call▁end｜>",)
_DEEPSEEK_V3 = Syntax(
    NamedJson(
        prefix=("function", "<｜tool▁sep｜>"), after=("\n", "```json", "\n"), end=("\n", "```")
    ),
    *_DEEPSEEK_SECTION,
    *_DEEPSEEK_CALL,
)
_DEEPSEEK_V31 = Syntax(NamedJson(("<｜tool▁sep｜>",)), *_DEEPSEEK_SECTION, *_DEEPSEEK_CALL)


_FUNCTION = Tagged(
    name="<function=",
    name_end=">",
    key="<parameter=",
    key_end=">",
    value_end="</parameter>",
    end="</function>",
)
#: Form of Qwen3-Coder's calls if the model forgets the first mark, as it often does.
_FORGOTTEN = Syntax(
    dataclasses.replace(_FUNCTION, name="", lines=True),
    call=("<function=",),
    call_end=("</tool_call>",),
)


def _functions(begin: str, end: str, *, lines: bool) -> Syntax:
    """Returns the form that Qwen3-Coder introduced."""
    body = dataclasses.replace(_FUNCTION, lines=lines)
    return Syntax(body, call=(begin, "\n"), call_end=("\n", end), separator=("\n",))


def _json_list(section: tuple[str, ...], end: tuple[str, ...], body: JsonObject) -> Syntax:
    return Syntax(body, section=section, section_end=end, separator=(",", " "))


_HERMES_SYNTAX = Syntax(
    JsonObject(),
    call=("<tool_call>", "\n"),
    call_end=("\n", "</tool_call>"),
    separator=("\n",),
)

HERMES = Family("hermes", (_HERMES_SYNTAX,), hints=("<tool_call>",))
QWEN_XML = Family(
    "qwen_xml",
    (_functions("<tool_call>", "</tool_call>", lines=True), _FORGOTTEN),
    hints=("<tool_call>\n<function=",),
)
SEED = Family("seed", (_functions("<seed:tool_call>", "</seed:tool_call>", lines=False),))
LLAMA = Family(
    "llama",
    (
        Syntax(
            JsonObject("name", "parameters"),
            section=("<|python_tag|>",),
            separator=(";", " "),
            bare=True,
        ),
    ),
)
MISTRAL_LIST = Family("mistral_list", (_MISTRAL_LIST, _MISTRAL_NAMED), hints=("[TOOL_CALLS] [",))
MISTRAL = Family("mistral", (_MISTRAL_NAMED, _MISTRAL_LIST), hints=("[TOOL_CALLS]",))
GEMMA = Family(
    "gemma",
    (
        Syntax(
            LiteralCall(GEMMA_LITERALS, "call:", "{", "}", ":", ","),
            call=("<|tool_call>",),
            call_end=("<tool_call|>",),
        ),
    ),
)
HARMONY = Family(
    "harmony",
    (HARMONY_SYNTAX,),
    thought=Tags("<|channel|>analysis<|message|>", "<|end|>"),
    messages=True,
    frames=("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>"),
)
DEEPSEEK_V3 = Family("deepseek_v3", (_DEEPSEEK_V3, _DEEPSEEK_V31), hints=("<｜tool▁sep｜>",))
DEEPSEEK_V31 = Family("deepseek_v31", (_DEEPSEEK_V31, _DEEPSEEK_V3))
KIMI = Family(
    "kimi",
    (
        Syntax(
            NamedJson(
                prefix=("functions.",),
                optional=":",
                written=":0",
                after=("<|tool_call_argument_begin|>",),
            ),
            section=("<|tool_calls_section_begin|>",),
            section_end=("<|tool_calls_section_end|>",),
            call=("<|tool_call_begin|>",),
            call_end=("<|tool_call_end|>",),
        ),
    ),
    hints=("<|tool_calls_section_begin|>",),  # templates print ids of earlier calls
)
GLM = Family(
    "glm",
    (
        Syntax(
            Tagged(
                name="",
                name_end="",
                key="<arg_key>",
                key_end="</arg_key>",
                value=("\n", "<arg_value>"),
                value_end="</arg_value>",
                end="</tool_call>",
            ),
            call=("<tool_call>",),
            separator=("\n",),
        ),
    ),
)
COMMAND_R = Family(
    "command_r",
    (
        Syntax(
            JsonObject("tool_name", "parameters"),
            section=("Action:", " ", "```json", "\n", "[", "\n"),
            section_end=("\n", "]", "```"),
            separator=(",", "\n"),
        ),
        _COHERE_ACTIONS,
    ),
    hints=("Action:",),
)
COMMAND_R7B = Family(
    "command_r7b",
    (_COHERE_ACTIONS,),
    frame=Tags("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    hints=("<|START_ACTION|>",),
)
LFM2 = Family(
    "lfm2",
    (
        Syntax(
            LiteralCall(PYTHON),
            section=("<|tool_call_start|>", "["),
            section_end=("]", "<|tool_call_end|>"),
            separator=(",", " "),
        ),
        _json_list(("<|tool_call_start|>", "["), ("]", "<|tool_call_end|>"), JsonObject()),
        Syntax(JsonObject(), call=("<|tool_call_start|>",), call_end=("<|tool_call_end|>",)),
    ),
    hints=("<|tool_list_start|>",),
)
GRANITE = Family(
    "granite",
    (
        _json_list(("<|tool_call|>", "["), ("]",), JsonObject()),
        _json_list(("<tool_call>", "["), ("]",), JsonObject()),
    ),
    frame=Tags("<response>", "</response>"),
    hints=("<|tool_call|>",),
)
PHI = Family("phi", (Syntax(JsonObject(), call=("<|tool_call|>",), call_end=("<|/tool_call|>",)),))
NEMOTRON = Family(
    "nemotron", (_json_list(("<TOOLCALL>", "["), ("]", "</TOOLCALL>"), JsonObject()),)
)
APRIEL = Family(
    "apriel", (_json_list(("<tool_calls>", "["), ("]", "</tool_calls>"), JsonObject()),)
)
GIGACHAT = Family(
    "gigachat",
    (
        Syntax(
            JsonObject(), call=("<|message_sep|>", "\n\n", "function call", "<|role_sep|>", "\n")
        ),
    ),
)
MINIMAX = Family(
    "minimax",
    (
        Syntax(
            Tagged(
                name='<invoke name="',
                name_end='">',
                key='<parameter name="',
                key_end='">',
                value_end="</parameter>",
                end="</invoke>",
            ),
            section=("<minimax:tool_call>", "\n"),
            section_end=("\n", "</minimax:tool_call>"),
            separator=("\n",),
        ),
    ),
)
NONE = Family("none")

#: Families with calls, in the order in which detection tries them.
FAMILIES = (
    HARMONY,
    GEMMA,
    MINIMAX,
    SEED,
    QWEN_XML,
    GLM,
    KIMI,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    MISTRAL,
    MISTRAL_LIST,
    COMMAND_R7B,
    COMMAND_R,
    LFM2,
    GRANITE,
    PHI,
    NEMOTRON,
    APRIEL,
    GIGACHAT,
    HERMES,
    LLAMA,
)

#: Marks of thoughts that templates use.
THOUGHTS = (
    THINK,
    Tags("[THINK]", "[/THINK]"),
    Tags("<|channel>thought", "<channel|>"),
    Tags("<|START_THINKING|>", "<|END_THINKING|>"),
    Tags("<seed:think>", "</seed:think>"),
)


def with_thought(family: Family, thought: Tags | None) -> Family:
    """Returns a family whose answers may have thoughts."""
    return family if family.messages else dataclasses.replace(family, thought=thought)
