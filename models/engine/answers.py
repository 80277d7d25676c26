"""Splits answers of chats into text, thoughts and tool calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..chat.output import (
    AnswerFormat,
    CallBegin,
    CallEnd,
    Event,
    Message,
    Parser,
    Reasoning,
    message_of,
)
from ..chat.output.answer import Tags
from ..sampling import Constraint, Sampling, Thought
from ..tokenizer import Tokenizer
from .outputs import Piece


class PieceReader:
    """Converts the pieces of one answer to events.

    Attributes:
      calls: number of tool calls so far.
      reasoning_tokens: number of tokens up to the end of the last thought.
      has_begun: whether there were events.
      is_done: whether the call that is wanted is complete; what follows is ignored.
    """

    def __init__(self, parser: Parser, *, is_single: bool = False) -> None:
        """Prepares reading. is_single: one tool call is wanted."""
        self._parser, self._is_single, self._tokens = parser, is_single, 0
        self.calls = self.reasoning_tokens = 0
        self.has_begun = self.is_done = False

    def read(self, pieces: Sequence[Piece]) -> list[Event]:
        """Returns the events of pieces; the answer is over with its output."""
        events: list[Event] = []
        for piece in pieces:
            self._tokens += piece.token is not None
            events += self._counted(self._parser.push(piece.text))
            events += self.finish() if piece.output is not None else []
        return events

    def finish(self) -> list[Event]:
        """Ends the answer, if its output has not; returns the last events."""
        return self._counted(self._parser.finish())

    def _counted(self, events: list[Event]) -> list[Event]:
        self.has_begun = self.has_begun or bool(events)
        for i, event in enumerate(events):
            if self.is_done:
                return events[:i]
            if isinstance(event, Reasoning):
                self.reasoning_tokens = self._tokens
            self.calls += isinstance(event, CallBegin)
            self.is_done = self._is_single and isinstance(event, CallEnd)
        return events


class ChatAnswer:
    """An answer to a chat's prompt, whose thoughts are apart from its text.

    Attributes:
      sampling: the parameters with which to generate it: its text has the marks of thoughts, and
        a constraint applies behind a thought.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], sampling: Sampling) -> None:
        """Prepares an answer.

        prompt: token ids, which may end inside a thought. Raises ChatTemplateError: the tokenizer's
        template takes longer than its limit.
        """
        format = AnswerFormat.of(tokenizer)
        family, is_inside = format.family, format.opens_thought(tokenizer, prompt)
        constraint = sampling.constraint
        if constraint and not constraint.thought and family.thought is not None:
            constraint = behind_thought(constraint, family.thought, is_inside=is_inside)
        spelled = (*sampling.spelled_tokens, *format.control_tokens)
        self.sampling = sampling.replaced(constraint=constraint, spelled_tokens=spelled)
        self._reader = PieceReader(family.parser(None, inside=is_inside))
        self._events: list[Event] = []

    def split(self, piece: Piece) -> Piece:
        """Returns a piece of the generated text, and its output, with thoughts apart."""
        events = self._reader.read([piece])
        self._events += events
        new, output = message_of(events), piece.output
        if output is not None:
            whole = message_of(self._events)
            output = dataclasses.replace(output, text=whole.content, reasoning=whole.reasoning)
        return dataclasses.replace(piece, text=new.content, reasoning=new.reasoning, output=output)

    def message(self) -> Message:
        """Ends the answer; returns all of it."""
        self._events += self._reader.finish()
        return message_of(self._events)


def behind_thought(
    constraint: Constraint, marks: Tags, *, is_inside: bool, budget: int | None = None
) -> Constraint:
    """Returns a constraint that applies behind an answer's thought.

    is_inside: whether the prompt has begun the thought. budget: most tokens of the thought; None
    means no limit. Raises ConstraintError for a budget out of range.
    """
    return constraint.following(Thought(marks.end, None if is_inside else marks.begin, budget))
