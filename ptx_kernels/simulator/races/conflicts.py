"""Table of kinds of accesses to the same bytes that race if they are concurrent."""

from __future__ import annotations

from typing import Literal

from .epoch import BLOCKS, LANES
from .strong import Strong

#: Plain loads and stores; atomic updates and strong stores, strong loads, each also at .cta scope
#: ("block"); reads of bulk copies.
Kind = Literal["read", "write", "update", "block update", "observe", "block observe", "fetch"]

READING = ("read", "observe", "block observe", "fetch")

#: kind of an access -> (kind of another, what this one does, minimum scope that is a race)
CONFLICTS: dict[Kind, tuple[tuple[Kind, str, int], ...]] = {
    "read": (
        ("write", "reads what {} wrote", LANES),
        ("update", "reads what {} updated by an atomic", LANES),
        ("block update", "reads what {} updated by an atomic", LANES),
    ),
    "write": (
        ("write", "writes what {} wrote", LANES),
        ("read", "writes what {} read", LANES),
        ("update", "writes what {} updated by an atomic", LANES),
        ("block update", "writes what {} updated by an atomic", LANES),
        ("observe", "writes what {} read", LANES),
        ("block observe", "writes what {} read", LANES),
        ("fetch", "writes what a copy of {} read", LANES),
    ),
    "update": (
        ("write", "updates by an atomic what {} wrote", LANES),
        ("read", "updates by an atomic what {} read", LANES),
        ("fetch", "updates by an atomic what a copy of {} read", LANES),
        ("block update", "updates by an atomic what {} updated by one of .cta scope", BLOCKS),
        ("block observe", "updates by an atomic what {} read with .cta scope", BLOCKS),
    ),
    "block update": (
        ("write", "updates by an atomic what {} wrote", LANES),
        ("read", "updates by an atomic what {} read", LANES),
        ("fetch", "updates by an atomic what a copy of {} read", LANES),
        ("update", "updates by an atomic of .cta scope what {} updated", BLOCKS),
        ("block update", "updates by an atomic of .cta scope what {} updated", BLOCKS),
        ("observe", "updates by an atomic of .cta scope what {} read", BLOCKS),
        ("block observe", "updates by an atomic of .cta scope what {} read", BLOCKS),
    ),
    "observe": (
        ("write", "reads what {} wrote", LANES),
        ("block update", "reads what {} updated by an atomic of .cta scope", BLOCKS),
    ),
    "block observe": (
        ("write", "reads what {} wrote", LANES),
        ("update", "reads with .cta scope what {} updated by an atomic", BLOCKS),
        ("block update", "reads with .cta scope what {} updated by an atomic", BLOCKS),
    ),
    "fetch": (
        ("write", "reads what {} wrote", LANES),
        ("update", "reads what {} updated by an atomic", LANES),
        ("block update", "reads what {} updated by an atomic", LANES),
    ),
}


def kind_of(strong: Strong) -> Kind:
    if strong.writes:
        return "update" if strong.semantics.wide else "block update"
    return "observe" if strong.semantics.wide else "block observe"
