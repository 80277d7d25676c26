"""Strong operations: accesses that may be concurrent without a race, and their semantics.

A release is an access with `.release`, or a fence before an access. An acquire is an access with
`.acquire`, or a fence after an access (PTX ISA 9.1, 8.9). The scope of each must include the
other's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Semantics:
    """Memory semantics of an access or a fence: release, acquire, and scope.

    `wide`: the scope reaches beyond the thread block.
    """

    acquire: bool = False
    release: bool = False
    wide: bool = True


def semantics_of(opcode: str) -> Semantics:
    """Parses the memory semantics of an opcode. `.cluster` counts as `.cta`.

    Thread blocks of a cluster synchronize only at the cluster's barrier.
    """
    parts = opcode.split(".")
    return Semantics(
        acquire="acquire" in parts or "acq_rel" in parts,
        release="release" in parts or "acq_rel" in parts,
        wide="cta" not in parts and "cluster" not in parts,
    )


#: (items of a memory, item of each lane, its position in the frame, turns) -> each lane's previous
#: item. turns: positions among these lanes, in the order in which they are served.
Change = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Strong:
    """An atomic update, or a load or store with memory semantics.

    Attributes:
      returns: whether the thread receives the previous value.
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
