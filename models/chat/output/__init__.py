"""Reads an assistant's raw text: reasoning and tool calls, by the family of its chat template."""

from __future__ import annotations

from .detection import family_of
from .events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from .families import FAMILIES, NONE, Family
from .history import check_history
from .parser import Parser

__all__ = [
    "FAMILIES",
    "NONE",
    "CallArguments",
    "CallBegin",
    "CallEnd",
    "Content",
    "Event",
    "Family",
    "Parser",
    "Reasoning",
    "check_history",
    "family_of",
]
