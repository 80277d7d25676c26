"""Reads answers of conversations: thoughts and tool calls, by the family of the chat template."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Literal

from ..chat.output import (
    CallArguments,
    CallBegin,
    Content,
    Event,
    Family,
    Message,
    Reasoning,
)
from ..engine.answers import PieceReader, behind_thought
from ..sampling import Constraint
from ..sampling.json_schemas import prepared
from .constraints import Wanted
from .errors import ApiError
from .service import Service
from .tools import Tools, with_safe_schemas


@dataclasses.dataclass(frozen=True)
class Format:
    """Form of a request's answers.

    Attributes:
      family: family of the chat template.
      tools: those that the answers may call.
      is_inside: whether the prompt has begun a thought.
      splits: whether thoughts are apart from the content.
      spelled: names of the control tokens that mark thoughts and calls.
    """

    family: Family
    tools: Tools | None
    is_inside: bool
    splits: bool
    spelled: tuple[str, ...]

    @classmethod
    def of(
        cls, service: Service, prompt: Sequence[int], tools: Tools | None, *, splits: bool = True
    ) -> Format:
        """Returns the form of the answers to a prompt; raises ApiError for tools without one."""
        format, tokenizer = service.format, service.tokenizer()
        if tools is not None and tools.offered and not format.family.syntaxes:
            problem = "the model's chat template has no tool calls"
            raise ApiError(400, problem, param="tools", code="unsupported_parameter")
        is_inside = format.opens_thought(tokenizer, prompt)
        return cls(format.family, tools, is_inside, splits, format.control_tokens)

    def reader(self) -> PieceReader:
        """Returns the reader of one answer."""
        offered = None if self.tools is None else self.tools.offered
        parser = self.family.parser(
            offered or None, inside=self.is_inside, splits_reasoning=self.splits
        )
        return PieceReader(parser, is_single=self.tools is not None and not self.tools.parallel)

    async def wanted(
        self, service: Service, wanted: Wanted | None, budget: int | None = None
    ) -> Wanted | None:
        """Returns the constraint of the answers; raises ApiError.

        wanted: that of the text. budget: most tokens of a thought, which answers without thoughts
        keep anyway.
        """
        # Schemas of many tools take a while, for which the event loop serves others.
        loop, run = asyncio.get_running_loop(), self._wanted
        return await loop.run_in_executor(service.compiling, run, service, wanted, budget)

    def _wanted(self, service: Service, wanted: Wanted | None, budget: int | None) -> Wanted | None:
        tools = self.tools
        marks = self.family.thought
        has_thought = False
        if tools is not None and tools.required:
            wanted, has_thought = self._grammar(service, "tool_choice", None, budget)
        elif wanted is not None and (self.family.messages or (tools and tools.offered)):
            if wanted.constraint.kind == "json_schema":
                form = wanted.constraint
                wanted, has_thought = self._grammar(service, wanted.name, form, budget)
            elif tools and tools.offered:
                problem = f"{wanted.name} cannot be combined with tools, but a JSON schema can"
                raise ApiError(400, problem, param=wanted.name)
        elif budget is not None and self.family.messages and not self.is_inside:
            name = "thinking_budget_tokens"
            wanted, has_thought = self._grammar(service, name, "text", budget)
        elif tools is not None and tools.is_strict:
            wanted, has_thought = self._grammar(service, "tools", "text", budget)
        if marks is None or has_thought:
            return wanted
        if budget is not None and wanted is None:
            wanted = Wanted("thinking_budget_tokens", Constraint.anything())
        if wanted is None:
            return None
        given = wanted.constraint
        try:
            constraint = behind_thought(given, marks, is_inside=self.is_inside, budget=budget)
        except ValueError as error:
            raise ApiError(400, str(error), param="thinking_budget_tokens") from None
        return wanted._replace(constraint=constraint)

    def _grammar(
        self,
        service: Service,
        name: str,
        form: Constraint | Literal["text"] | None,
        budget: int | None,
    ) -> tuple[Wanted, bool]:
        """Returns the constraint of answers that may call tools, and whether it has the thought.

        name: parameter that asks for it. form: what answers may be instead: JSON of a schema, or
        any text. budget: most tokens of a thought.
        """

        def token_id(text: str) -> int | None:
            return next(iter(tokenizer.control_ids([text])), None)

        tokenizer, grammars = service.tokenizer(), service.ready().model.grammars
        assert grammars is not None
        tools = self.tools or Tools([], [])
        has_thought = self.family.messages and not self.is_inside
        try:
            content: Any = form
            if isinstance(form, Constraint):
                content = json.loads(prepared(form.source))
            offered = with_safe_schemas(tools, grammars)
            grammar = self.family.grammar(
                offered,
                parallel=tools.parallel,
                token_id=token_id,
                content=content,
                budget=budget if has_thought else None,
            )
            return Wanted(name, Constraint.grammar(grammar)), has_thought
        except (ValueError, ImportError) as error:  # without llguidance
            raise ApiError(400, f"{name}: {error}", param=name) from None


def assistant_of(answer: Message) -> dict[str, Any]:
    """Returns an answer as OpenAI's message of an assistant."""
    content = None if answer.calls and not answer.content else answer.content
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in answer.calls
        ]
    return message


def deltas_of(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Returns events as the deltas of OpenAI's streams."""
    return [delta for event in events if (delta := _delta_of(event)) is not None]


def _delta_of(event: Event) -> dict[str, Any] | None:
    if isinstance(event, Content):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.text}
    if isinstance(event, CallBegin):
        call = {"index": event.index, "id": event.id, "type": "function"}
        return {"tool_calls": [{**call, "function": {"name": event.name, "arguments": ""}}]}
    if isinstance(event, CallArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return None
