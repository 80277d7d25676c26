"""Reads an assistant's raw text: reasoning and tool calls, by the family of its chat template."""

from __future__ import annotations

from .answer_format import AnswerFormat
from .detection import family_of
from .events import (
    Call,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Message,
    Reasoning,
    message_of,
)
from .families import FAMILIES, NONE, Family
from .history import check_history
from .parser import Parser

__all__ = [
    "FAMILIES",
    "NONE",
    "AnswerFormat",
    "Call",
    "CallArguments",
    "CallBegin",
    "CallEnd",
    "Content",
    "Event",
    "Family",
    "Message",
    "Parser",
    "Reasoning",
    "check_history",
    "family_of",
    "message_of",
]
