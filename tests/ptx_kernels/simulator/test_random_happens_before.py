"""Random programs, compared with happens-before as sets of events.

Both find the same first racing access, or none.

The simulator uses vector clocks, merged records and a log of some accesses; this model stores all
events.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from ptx_kernels import simulator
from ptx_kernels.simulator import GlobalRace, SharedRace

from .ptx_text import module

BLOCKS, THREADS = 3, 64
#: (block, thread): two of one warp and one of another in each block, and one more in the first warp
#: of the last block.
ACTORS = [(b, t) for b in range(BLOCKS) for t in (0, 5, 32)]
GLOBAL, SHARED = ("data", "more", "flag"), ("tile", "mark")
ATOMS = [
    (order, scope)
    for order in ("relaxed", "acquire", "release", "acq_rel")
    for scope in ("cta", "gpu")
]
KINDS = (
    "load",
    "store",
    "red",
    "atom",
    "strong load",
    "strong store",
    "fence",
    "barrier",
    "warp barrier",
)
LIKELY = (5, 4, 1, 6, 3, 3, 5, 1.5, 1)


@dataclass(frozen=True)
class Operation:
    """Operation of one actor, or for barriers of its block or warp."""

    kind: str
    actor: tuple[int, int]
    place: str  # of the access
    order: str
    wide: bool

    @property
    def text(self) -> str:
        block, thread = self.actor
        offset = GLOBAL.index(self.place) if self.place in GLOBAL else SHARED.index(self.place)
        where = f"[{'%rd0' if self.place in GLOBAL else 'words'}+{4 * offset}]"
        space = "global" if self.place in GLOBAL else "shared"
        scope = "gpu" if self.wide else "cta"
        if self.kind == "barrier":
            return "bar.sync 0;"
        if self.kind == "warp barrier":
            return f"setp.eq.u32 %p0, %r4, {block * 2 + thread // 32}; @%p0 bar.warp.sync -1;"
        return (
            f"setp.eq.u32 %p0, %r0, {block * THREADS + thread}; @%p0 "
            + {
                "load": f"ld.{space}.u32 %r5, {where};",
                "store": f"st.{space}.u32 {where}, 1;",
                "red": f"red.{self.order}.{scope}.{space}.add.u32 {where}, 1;",
                "atom": f"atom.{self.order}.{scope}.{space}.add.u32 %r5, {where}, 1;",
                "strong load": f"ld.{self.order}.{scope}.{space}.u32 %r5, {where};",
                "strong store": f"st.{self.order}.{scope}.{space}.u32 {where}, 1;",
                "fence": f"fence.acq_rel.{scope};",
            }[self.kind]
        )

    @property
    def strong(self) -> bool:
        return self.kind not in ("load", "store")

    @property
    def reads(self) -> bool:
        """Whether the operation only reads."""
        return self.kind in ("load", "strong load")

    @property
    def memory(self) -> tuple:
        """The accessed variable; each block has its own shared variables."""
        return (self.place,) if self.place in GLOBAL else (self.place, self.actor[0])


Events = frozenset[int]
NONE: Events = frozenset()


@dataclass
class Actor:
    """An actor's events.

    known: events before the actor's next one. fenced: events known at its last fence, by whether
    the scope is wide. observed: events that its next fence acquires, by the same.
    """

    known: Events = NONE
    fenced: dict[bool, Events] = field(default_factory=lambda: {False: NONE, True: NONE})
    observed: dict[bool, Events] = field(default_factory=lambda: {False: NONE, True: NONE})


class Model:
    def __init__(self) -> None:
        self.actors = {actor: Actor() for actor in ACTORS}
        self.events: list[Operation] = []
        self.left: dict[
            tuple, dict[int | None, Events]
        ] = {}  # per place: for everyone (None), and for blocks

    def race(self, operation: Operation) -> bool:
        """Executes an operation; returns whether it races with a preceding one."""
        if "barrier" in operation.kind:
            block, thread = operation.actor
            met = [
                actor
                for actor in ACTORS
                if operation.kind == "barrier"
                or (actor[0] == block and actor[1] // 32 == thread // 32)
            ]
            for own in {actor[0] for actor in met}:
                mates = [self.actors[a] for a in met if a[0] == own]
                union = NONE.union(*(mate.known for mate in mates))
                for mate in mates:
                    mate.known = union
            return False
        actor = self.actors[operation.actor]
        if operation.kind == "fence":
            actor.known |= actor.observed[operation.wide]
            for wide in (False, True) if operation.wide else (False,):
                actor.fenced[wide] = actor.known
            return False
        number = len(self.events)
        found = any(self._conflicts(operation, actor, i) for i in range(number))
        self.events.append(operation)
        self._synchronize(operation, actor, number)
        return found

    def _conflicts(self, operation: Operation, actor: Actor, number: int) -> bool:
        other = self.events[number]
        if (
            other.memory != operation.memory
            or number in actor.known
            or self._was_found(actor, number)
        ):
            return False
        if operation.reads and other.reads:
            return False
        # a race only if one scope does not include the other actor
        if operation.strong and other.strong:
            return operation.actor[0] != other.actor[0] and not (operation.wide and other.wide)
        return True

    def _was_found(self, actor: Actor, number: int) -> bool:
        """Whether an atomic that the actor knows of came after this update.

        The atomic has then seen the update.
        """
        update = self.events[number]
        return (
            update.strong
            and not update.reads
            and any(
                later.kind == "atom" and (later.memory, later.wide) == (update.memory, update.wide)
                for i, later in enumerate(self.events)
                if i > number and i in actor.known
            )
        )

    def _synchronize(self, operation: Operation, actor: Actor, number: int) -> None:
        block, kind = operation.actor[0], operation.kind
        left = self.left.setdefault(operation.memory, {})
        if kind in ("atom", "strong load"):
            narrow = left.get(block, NONE)
            both = narrow | left.get(None, NONE) if operation.wide else narrow
            if operation.order in ("acquire", "acq_rel"):
                actor.known |= both
            else:
                actor.observed = {
                    True: actor.observed[True] | both,
                    False: actor.observed[False] | narrow,
                }
        actor.known |= {number}
        if kind in ("store", "strong store"):
            left.clear()
        if kind in ("atom", "red", "strong store"):
            released = operation.order in ("release", "acq_rel")
            left[block] = left.get(block, NONE) | (actor.known if released else actor.fenced[False])
            if operation.wide:
                left[None] = left.get(None, NONE) | (
                    actor.known if released else actor.fenced[True]
                )


def program(rng: np.random.Generator, length: int) -> list[Operation]:
    operations = []
    for _ in range(length):
        kind = str(rng.choice(KINDS, p=np.array(LIKELY) / sum(LIKELY)))
        actor = ACTORS[rng.integers(len(ACTORS))]
        flags = kind in ("atom", "strong load", "strong store", "red") and rng.random() < 0.8
        place = str(rng.choice(["flag", "mark"] if flags else ["data", "more", "tile", "flag"]))
        order, scope = ATOMS[rng.integers(len(ATOMS))]
        if kind == "strong load" and order in ("release", "acq_rel"):
            order = "acquire"
        if kind in ("red", "strong store") and order in ("acquire", "acq_rel"):
            order = "release"
        wide = scope == "gpu" or rng.random() < 0.5
        operations.append(Operation(kind, actor, place, order, wide))
    return operations


def first_race(operations: list[Operation]) -> int | None:
    model = Model()
    return next((i for i, operation in enumerate(operations) if model.race(operation)), None)


def simulated_race(operations: list[Operation]) -> int | None:
    """Writes one operation a line, so that the text's order is the execution order."""
    start = (
        "shr.u32 %r4, %r0, 5; setp.lt.u32 %p1, %r2, 2; shl.b32 %r6, %r2, 2; mov.u32 %r7, words; "
        "add.u32 %r6, %r6, %r7;"
        "@%p1 st.shared.u32 [%r6], %r2; bar.sync 0;\n"
    )
    text = module(
        start + "\n".join(o.text for o in operations) + "\nret;",
        "y",
        outside=".shared .b32 words[2];",
    )
    first = text.split("\n").index(start.rstrip("\n")) + 2
    try:
        simulator.launch(text, [np.zeros(4, np.uint32)], (BLOCKS,), (THREADS,))
    except (GlobalRace, SharedRace) as error:
        assert error.line is not None
        return error.line - first
    return None


@pytest.mark.parametrize("seed", range(4))
def test_the_first_race_is_found(seed: int) -> None:
    """Removes each racing access, so that later ones are compared too."""
    rng = np.random.default_rng(seed)
    races, clean = 0, 0
    for _ in range(2):
        operations = program(rng, 60)
        while (race := first_race(operations)) is not None:
            assert simulated_race(operations) == race, "\n".join(
                o.text for o in operations[: race + 1]
            )
            del operations[race]
            races += 1
        assert simulated_race(operations) is None, "\n".join(o.text for o in operations)
        clean += len(operations)
    assert races > 10 and clean > 40
