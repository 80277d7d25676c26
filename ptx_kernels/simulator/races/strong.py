"""Strong operations: accesses that may meet others without a race, and how they are ordered.

A release is an access with that word, or a fence before one; an acquire likewise, or a fence after
one (PTX ISA 9.1, 8.9). Both must have a scope that includes the other's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Semantics:
    """Memory semantics of an access or a fence; `wide`: its scope reaches beyond the block."""

    acquire: bool = False
    release: bool = False
    wide: bool = True


def semantics_of(opcode: str) -> Semantics:
    """`.cluster` is taken to be as narrow as `.cta`: blocks of a cluster meet at its barrier."""
    parts = opcode.split(".")
    return Semantics(
        acquire="acquire" in parts or "acq_rel" in parts,
        release="release" in parts or "acq_rel" in parts,
        wide="cta" not in parts and "cluster" not in parts,
    )


#: (items of a memory, item of each lane, its position in the frame, turns) -> what each lane found
#: there before; turns: positions among these lanes in the order in which they are served
Change = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Strong:
    """An atomic update, or a load or store with memory semantics.

    Attributes:
      returns: whether the thread learns what it found.
    """

    change: Change
    semantics: Semantics = Semantics()
    reads: bool = True
    writes: bool = True
    returns: bool = True


def unchanged(
    view: np.ndarray, index: np.ndarray, positions: np.ndarray, turns: np.ndarray
) -> np.ndarray:
    return view[index]
