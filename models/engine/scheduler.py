"""Decides which sequences each engine step runs; pure Python, without clocks and without JAX.

Sequences are served in the order of priority and arrival. A step prefills pieces of prompts, then
decodes every sequence whose prompt is stored. When pages run out, the sequence that was last in
this order gives its pages back and is prefilled again later, with its tokens so far as the prompt.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from ..kv_cache.shapes import PAGE_SIZE
from ..runner.engine_steps import MOST_STEPS
from .plan import Piece, Plan, Row
from .pools import ROLLING, SNAPSHOT_INTERVAL, Hit, Pools
from .sequence import Kind, Sequence

#: How many pieces of shorter prompts may precede the first prompt's next piece.
MOST_PASSED = 8

#: How often a sequence is preempted while another one can be.
MOST_PREEMPTIONS = 3

#: In deterministic mode a prompt's pieces end at multiples of this many tokens.
BOUNDARY = 64


@dataclasses.dataclass(frozen=True)
class Limits:
    """Sizes of an engine's steps.

    Attributes:
      rows: maximum running sequences in each group.
      shapes: (rows, tokens) of the prefill programs, in any order; rows are per group.
      step_tokens: maximum tokens of a prefill program in steps that decode, too.
      program_cost: cost of a prefill program besides its tokens, in tokens: mostly reading the
        weights.
      fit: maps the numbers of tokens that prompts still need, and whether they are whole prompts,
        to a shape; None means that `shapes` are all there are. With it, `shapes` has one, of pieces
        behind a cached prefix.
      reuses: whether sequences use pages of others with the same beginning.
      draft_tokens: tokens per draft of speculative decoding. A step with drafts samples an unknown
        number of tokens, so that the next `plan` must wait for `commit`.
      deterministic: whether a sequence is computed in the same way whatever else runs: pieces end
        at multiples of BOUNDARY or at the prompt's end, pages and states that decoding computed are
        not reused, and a preempted sequence samples its tokens again instead of prefilling them.
    """

    rows: int
    shapes: tuple[tuple[int, int], ...]
    step_tokens: int
    program_cost: int = 12
    deterministic: bool = False
    fit: Callable[[list[int], bool], tuple[int, int]] | None = None
    reuses: bool = True
    draft_tokens: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError if no program is long enough for a piece from boundary to boundary."""
        if not any(time >= self.align for _, time in self.shapes):
            raise ValueError(f"no prefill shape of {self.shapes} has {self.align} tokens a row")

    @property
    def align(self) -> int:
        """Pieces end at multiples of this many tokens, or at the prompt's end."""
        return BOUNDARY if self.deterministic else 1

    @property
    def most_tokens(self) -> int:
        """Maximum tokens of one sequence in one step."""
        most_steps = MOST_STEPS + self.draft_tokens
        return max([time for _, time in self.shapes] + [most_steps])


@dataclasses.dataclass
class Counters:
    """Totals since the engine's start.

    Attributes:
      lost: cached tokens of full attention that another kind of layers could not use, by reason.
    """

    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    lost: dict[str, int] = dataclasses.field(default_factory=dict)


class Scheduler:
    """Queue of waiting sequences and the running ones of all groups.

    Attributes:
      waiting: sequences without a slot, sorted by `Sequence.order`.
      running: sequences by slot; group g has the slots from g * limits.rows on.
      counters: totals for `Engine.stats`.
    """

    def __init__(
        self,
        pools: SequenceOf[Pools],
        limits: Limits,
        drafts_pay: Callable[[int], bool] = lambda rows: True,
    ) -> None:
        """Creates a scheduler for one group of devices per entry of `pools`.

        drafts_pay: whether drafts can save time in a step that decodes a number of rows.
        """
        self.pools = tuple(pools)
        self.limits = limits
        self._drafts_pay = drafts_pay
        self.waiting: list[Sequence] = []
        self.running: dict[int, Sequence] = {}
        self.counters = Counters()
        self._arrivals = 0

    # Calls of the engine.

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence to the queue.

        Raises ValueError if its `limit` needs more pages than a group has.
        """
        if not self.fits(sequence.limit):
            raise ValueError(
                f"{sequence.limit} tokens of prompt and new tokens need more pages than there are"
            )
        self._arrivals += 1
        sequence.arrival = self._arrivals
        bisect.insort(self.waiting, sequence, key=lambda s: s.order)

    def fits(self, length: int) -> bool:
        """Returns whether the pages hold a sequence of `length` tokens if it runs alone."""
        return self.pools[0].fits(length + self.limits.draft_tokens, self.limits.most_tokens)

    def remove(self, sequence: Sequence) -> None:
        """Ends a sequence; results of steps in flight are dropped by its epoch."""
        sequence.epoch += 1
        if sequence.slot is None:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            return
        self._leave(sequence)

    def restart(self) -> None:
        """Puts all running sequences back into the queue, and forgets all cached pages.

        For an engine that lost its device state; their tokens so far are prefilled again.
        """
        for sequence in list(self.running.values()):
            self._preempt(sequence)
        for pools in self.pools:
            pools.forget()

    def commit(
        self, sequence: Sequence, tokens: SequenceOf[int], at: int, *, speculated: bool = False
    ) -> None:
        """Appends sampled tokens that the host knows now; their pages become findable.

        at: index of the first of them in the sequence's tokens; those known before are ignored.
        speculated: whether a step with drafts sampled them.
        """
        sequence.tokens += tokens[len(sequence.tokens) - at :]
        if speculated:
            sequence.stored = at + len(tokens) - 1
        # The last token is not stored yet, nor are those that a constraint forced.
        known = min(len(sequence.tokens) - 1, sequence.stored)
        pools = self._pools_of(sequence)
        if self.limits.reuses and not self.limits.deterministic:
            pools.register(sequence, known)
            pools.name_snapshots(sequence, known)

    def force(self, sequence: Sequence, tokens: SequenceOf[int], *, as_piece: bool) -> None:
        """Appends tokens that are known without sampling, before they are stored.

        as_piece: whether they may be prefilled like a prompt; if that is not faster, or is not
        allowed, steps store them one by one.
        """
        sequence.tokens += tokens
        count, limits = len(sequence.tokens) - sequence.stored, self.limits
        if as_piece and not limits.deterministic and limits.fit is None:
            programs = tuple((r * t + limits.program_cost, t) for r, t in limits.shapes)
            saved = count * (1 + limits.program_cost / len(self.running))
            if _least_cost(programs, limits.align, count) < saved:
                sequence.prefill_end = len(sequence.tokens)

    def plan(self, steps: int = 1) -> Plan | None:
        """Returns the next step, or None if no sequence can run.

        The caller must run it before it asks for another one.

        steps: maximum tokens to sample per sequence if no prompt waits, 1 to MOST_STEPS.
        """
        admitted = self._admit()
        decoding = sorted((s for s in self.running.values() if s.is_decoding), key=_order)
        pieces, shape = self._choose_pieces(bool(decoding))
        if pieces or self.waiting or any(s.constrained for s in decoding):
            steps = 1
        speculates = self._speculates(decoding)
        drafts = self.limits.draft_tokens if speculates else 0
        while steps > 1 and not self._have_pages(decoding, steps, drafts):
            steps //= 2  # rather than preempt one of them
        # Those first in order allocate first; those that are preempted meanwhile are left out.
        counts = {s: self._steps_of(s, steps) for s in decoding}
        # A fresh piece reads no pages, so it needs only those that the next token reads.
        fresh = self.limits.fit is not None and not any(first for _, first, _ in pieces)
        spans = [(s, s.stored, counts[s] + drafts) for s in decoding]
        spans += [(s, n - 1, 1) if fresh else (s, at, n) for s, at, n in pieces]
        for sequence, first, count in sorted(spans, key=lambda span: span[0].order):
            if sequence.slot is not None:
                self._extend(sequence, first, first + count)
        rows, late_saves = [], []
        for sequence in decoding:
            if sequence.slot is not None:
                rows.append(self._row(sequence, counts[sequence], speculates))
                late_saves += [] if speculates else self._save_rolling(sequence)
        planned, saves = [], []
        for sequence, first, count in pieces:
            if sequence.slot is not None:
                planned.append(self._piece(sequence, first, count))
                saves += self._save(sequence)
        # A place that was evicted again within the step only gets the last state.
        saves = list(
            {(slot // self.limits.rows, place): (slot, place) for slot, place in saves}.values()
        )
        restores = [(place, s.slot) for place, s in admitted if s.slot is not None]
        if not rows and not planned:
            return None
        self.counters.steps += 1
        most = max((row.count for row in rows), default=0)
        shape = shape if planned else None
        speculates = speculates and bool(rows)
        return Plan(restores, shape, fresh, planned, saves, rows, most, late_saves, speculates)

    def check(self) -> None:
        """Checks the books of all pools and slots; raises AssertionError with what is wrong."""
        groups: list[list[Sequence]] = [[] for _ in self.pools]
        for slot, sequence in self.running.items():
            assert sequence.slot == slot, "a sequence has another slot"
            groups[slot // self.limits.rows].append(sequence)
        for sequence in self.waiting:
            assert sequence.slot is None and not any(sequence.pages.values()), "waits with pages"
        for pools, sequences in zip(self.pools, groups, strict=True):
            pools.check(sequences)

    # Admission.

    def _admit(self) -> list[tuple[int, Sequence]]:
        """Gives waiting sequences slots as long as their prompts have room, in order.

        Returns (place, sequence) for those whose recurrent state is a snapshot.
        """
        restores = []
        for sequence in list(self.waiting):
            found = self._find_place(sequence)
            if found is None:
                break
            slot, hit = found
            if self._is_being_computed(sequence, hit):
                continue
            self.waiting.remove(sequence)
            self._start(sequence, slot, hit)
            if hit.place is not None:
                restores.append((hit.place, sequence))
        return restores

    def _find_place(self, sequence: Sequence) -> tuple[int, Hit] | None:
        """Returns a slot with enough free pages for the prompt, and what is cached there.

        Prefers the group in which the prompt is stored first: that with the longest cached part,
        unless other prompts are before it. Then that with the fewest tokens.
        """
        best: tuple[tuple[int, int], int, Hit] | None = None
        for group, pools in enumerate(self.pools):
            first = group * self.limits.rows
            slots = [s for s in range(first, first + self.limits.rows) if s not in self.running]
            if not slots:
                continue
            hit = self._hit(pools, sequence)
            others = [s for s in self.running.values() if self._group_of(s) == group]
            before = sum(s.prefill_end - s.stored for s in others if s.is_prefilling)
            rank = before - hit.length, sum(len(s.tokens) for s in others)
            if (best is None or rank < best[0]) and self._has_room(pools, group, sequence, hit):
                best = rank, slots[0], hit
        return None if best is None else best[1:]

    def _hit(self, pools: Pools, sequence: Sequence) -> Hit:
        """Returns which part of the prompt to take from the prefix cache."""
        if not self.limits.reuses:
            return Hit()
        hit = pools.hit(sequence)  # also makes its keys
        if not sequence.can_reuse:
            return Hit()
        if self.limits.fit is not None:  # a whole prompt takes one program
            programs = -(-(sequence.prefill_end - hit.length) // self.limits.shapes[0][1])
            if hit.length < (programs - 1) * self.limits.program_cost:
                return Hit()
        return hit

    def _has_room(self, pools: Pools, group: int, sequence: Sequence, hit: Hit) -> bool:
        most = self.limits.most_tokens
        others = [s for s in self.running.values() if self._group_of(s) == group]
        needed = pools.room_for(sequence, hit, most)
        if not others:
            return True  # it fits alone, see `add`
        growing = sum(s.limit > s.prefill_end for s in others)  # a page each for new tokens
        for kind, pool in pools.pages.items():
            reserved = sum(pools.outstanding(s, kind, most) for s in others) + growing
            if needed[kind] + reserved > pool.free:
                return False
        return True

    def _is_being_computed(self, sequence: Sequence, hit: Hit) -> bool:
        """Returns whether a running prompt will store pages that this one could reuse."""
        if not sequence.can_reuse:
            return False
        last = (sequence.prefill_end - 1) // PAGE_SIZE if self.limits.reuses else 0
        for other in self.running.values():
            if not other.is_prefilling or other.salt != sequence.salt:
                continue
            at = max(hit.length, other.stored) // PAGE_SIZE  # the next page that it will store
            if at < min(last, len(other.keys)) and other.keys[at] == sequence.keys[at]:
                return True
        return False

    def _start(self, sequence: Sequence, slot: int, hit: Hit) -> None:
        self.running[slot] = sequence
        sequence.slot, sequence.stored, sequence.cached = slot, hit.length, hit.length
        pools = self._pools_of(sequence)
        pools.take(sequence, hit)
        if sequence.reused is None:
            sequence.reused = hit.length
            self.counters.prompt_tokens += sequence.prefill_end
            self.counters.reused_tokens += hit.length
            if hit.lost:
                lost = self.counters.lost
                lost[hit.lost] = lost.get(hit.lost, 0) + hit.known - hit.length
        if pools.keeps_states:
            sequence.snapshots = self._snapshot_points(sequence, hit)

    def _snapshot_points(self, sequence: Sequence, hit: Hit) -> list[int]:
        """Returns the lengths at which prefill stores the recurrent state.

        These are the prompt's last page boundary, the end of the part that full attention has
        cached, where prompts may part again, and multiples of SNAPSHOT_INTERVAL.
        """
        align = max(self.limits.align, PAGE_SIZE)
        end = (sequence.prefill_end - 1) // align * align
        points = {end, min(hit.known // align * align, end)}
        points.update(range(SNAPSHOT_INTERVAL, end, SNAPSHOT_INTERVAL))
        return sorted(point for point in points if point > hit.length)

    # Pieces.

    def _choose_pieces(
        self, decodes: bool
    ) -> tuple[list[tuple[Sequence, int, int]], tuple[int, int] | None]:
        """Returns (sequence, first token, count) of the next pieces, and their program's shape.

        Chooses the shape that shortens what remains the most for its cost.
        """
        waiting = sorted((s for s in self.running.values() if s.is_prefilling), key=_order)
        if not waiting:
            return [], None
        groups, shapes, align = len(self.pools), self.limits.shapes, self.limits.align
        if self.limits.fit is not None:
            whole = not waiting[0].stored
            waiting = [s for s in waiting if (not s.stored) == whole]
            shapes = (self.limits.fit([s.prefill_end - s.stored for s in waiting], whole),)
        firsts = list({self._group_of(s): s for s in reversed(waiting)}.values())  # of each group
        overdue = [s for s in firsts if s.passed >= MOST_PASSED]
        best: tuple[float, tuple[int, int], list[tuple[Sequence, int, int]]] | None = None
        if decodes:
            smallest = min(rows * time for rows, time in shapes if time >= align)
            most = max(self.limits.step_tokens, smallest)
            shapes = tuple((rows, time) for rows, time in shapes if rows * time <= most)

        def cost(rows: int, time: int) -> int:
            return groups * rows * time + self.limits.program_cost

        programs = tuple((cost(*shape), shape[1]) for shape in shapes)
        for rows, time in sorted(shapes, key=lambda shape: shape[0] * shape[1]):
            chosen = self._chosen(waiting, rows)
            pieces = [(s, s.stored, self._length_of(s, time)) for s in chosen]
            if any(not count for s, _, count in pieces if s in overdue):
                continue
            saved = sum(
                self._rest_cost(s, first, programs) - self._rest_cost(s, first + count, programs)
                for s, first, count in pieces
            )
            useful = saved / cost(rows, time)
            if useful and (best is None or useful > best[0]):
                best = useful, (rows, time), pieces
        assert best is not None, "no prefill shape reaches the next boundary"
        _, shape, pieces = best
        pieces = [piece for piece in pieces if piece[2]]
        for first in firsts:
            first.passed += 1  # until it has a piece, see `_piece`
        return pieces, shape

    def _rest_cost(
        self, sequence: Sequence, first: int, programs: tuple[tuple[int, int], ...]
    ) -> int:
        """Returns the least cost of prefilling the sequence alone, from a position on."""
        ends = [point for point in sequence.snapshots if point > first] + [sequence.prefill_end]
        parts = [last - start for start, last in itertools.pairwise([first, *ends])]
        return sum(_least_cost(programs, self.limits.align, part) for part in parts)

    def _chosen(self, waiting: list[Sequence], rows: int) -> list[Sequence]:
        """Returns up to `rows` sequences per group: the first in order, but the shortest last.

        The shortest remaining prompt takes the last place, so that it does not wait for long ones.
        """
        chosen = []
        for group in range(len(self.pools)):
            own = [s for s in waiting if self._group_of(s) == group]
            if len(own) > rows and own[0].passed < MOST_PASSED:
                shortest = min(own[rows - 1 :], key=lambda s: (s.prefill_end - s.stored, s.order))
                own = [*own[: rows - 1], shortest]
            chosen += own[:rows]
        return chosen

    def _length_of(self, sequence: Sequence, time: int) -> int:
        """Returns how many tokens of the sequence a program of `time` tokens a row stores.

        0 if the next end that alignment allows is farther away.
        """
        first = sequence.stored
        last = min(first + time, sequence.prefill_end)
        for point in sequence.snapshots:
            if first < point < last:
                last = point
                break
        if last < sequence.prefill_end:
            last = last // self.limits.align * self.limits.align
        return max(last - first, 0)

    def _piece(self, sequence: Sequence, first: int, count: int) -> Piece:
        """Returns the piece, and counts its tokens as stored."""
        pools, last = self._pools_of(sequence), first + count
        assert sequence.slot is not None
        tables = tuple(tuple(sequence.pages[kind]) for kind in pools.kinds)
        sequence.stored = last
        sequence.passed = 0
        if self.limits.reuses:
            pools.register(sequence, last)
        samples = last == sequence.prefill_end < sequence.limit
        return Piece(sequence, sequence.epoch, sequence.slot, first, count, samples, tables)

    def _save(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Returns the (slot, place) of a snapshot due after the sequence's piece, if any."""
        assert sequence.slot is not None
        if not sequence.snapshots or sequence.snapshots[0] != sequence.stored:
            return []
        place = self._pools_of(sequence).snapshot(sequence, sequence.snapshots.pop(0))
        return [] if place is None else [(sequence.slot, place)]

    # Decoding.

    def _speculates(self, decoding: list[Sequence]) -> bool:
        """Returns whether a step decodes these sequences with drafts."""
        if not self.limits.draft_tokens or any(s.constrained for s in decoding):
            return False  # masks exist for one token, not for drafts
        return any(s.drafts for s in decoding) and self._drafts_pay(len(decoding))

    def _steps_of(self, sequence: Sequence, steps: int) -> int:
        """Returns how many tokens to sample for a sequence."""
        count = min(steps, sequence.limit - sequence.stored - 1)
        if self._rolls(sequence):
            count = min(count, ROLLING - sequence.stored % ROLLING)  # a snapshot is due there
        return count

    def _rolls(self, sequence: Sequence) -> bool:
        """Returns whether decoding stores recurrent states."""
        # States of decoding differ from those of prefill by rounding.
        return self._pools_of(sequence).keeps_states and not self.limits.deterministic

    def _row(self, sequence: Sequence, count: int, speculates: bool) -> Row:
        """Returns the row, and counts its tokens as stored."""
        assert sequence.slot is not None
        position, kinds = sequence.stored, self._pools_of(sequence).kinds
        first = -(-position // PAGE_SIZE)
        new = tuple(tuple(sequence.pages[kind][first:]) for kind in kinds)
        sequence.stored += count
        entry = sequence, sequence.epoch, sequence.slot
        return Row(*entry, position, count, new, speculates)

    def _save_rolling(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Returns the (slot, place) of a snapshot due after the sequence's row, if any."""
        if not self._rolls(sequence) or sequence.stored % ROLLING:
            return []
        place = self._pools_of(sequence).rolling_snapshot(sequence, sequence.stored)
        return [] if place is None or sequence.slot is None else [(sequence.slot, place)]

    # Pages.

    def _have_pages(self, decoding: list[Sequence], steps: int, drafts: int) -> bool:
        """Returns whether every sequence can sample up to `steps` tokens without a preemption.

        drafts: draft tokens that a step may store behind these.
        """
        missing: collections.Counter[tuple[Pools, Kind]] = collections.Counter()
        for sequence in decoding:
            pools = self._pools_of(sequence)
            last = sequence.stored + self._steps_of(sequence, steps) + drafts
            for kind in pools.kinds:
                missing[pools, kind] += pools.missing(sequence, kind, last)
        return all(count <= pools.pages[kind].free for (pools, kind), count in missing.items())

    def _extend(self, sequence: Sequence, first: int, last: int) -> None:
        """Allocates the pages of a step; preempts later sequences, or this one, for them."""
        while not self._pools_of(sequence).extend(sequence, first, last):
            group = self._group_of(sequence)
            others = [s for s in self.running.values() if self._group_of(s) == group]
            others = [s for s in others if s.order >= sequence.order]
            fresh = [s for s in others if s.preemptions < MOST_PREEMPTIONS]
            victim = max(fresh or others, key=_order)
            self._preempt(victim)
            if victim is sequence:
                return

    def _preempt(self, sequence: Sequence) -> None:
        """Takes a sequence's slot and pages away, and puts it back into the queue."""
        self._leave(sequence)
        if not self.limits.deterministic:
            sequence.prefill_end = len(sequence.tokens)
        sequence.epoch += 1
        sequence.preemptions += 1
        self.counters.preemptions += 1
        bisect.insort(self.waiting, sequence, key=lambda s: s.order)

    def _leave(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self._pools_of(sequence).release(sequence)
        del self.running[sequence.slot]
        sequence.slot, sequence.snapshots = None, []

    def _group_of(self, sequence: Sequence) -> int:
        assert sequence.slot is not None
        return sequence.slot // self.limits.rows

    def _pools_of(self, sequence: Sequence) -> Pools:
        return self.pools[self._group_of(sequence)]


@functools.lru_cache(maxsize=1 << 14)
def _least_cost(programs: tuple[tuple[int, int], ...], align: int, tokens: int) -> int:
    """Returns the least cost of prefilling so many tokens of one sequence.

    programs: (cost, tokens a row) of the prefill programs. Pieces end at multiples of `align`.
    """
    if not tokens:
        return 0
    cost, longest = max(programs, key=lambda program: program[1])
    longest = longest // align * align
    if tokens > longest:
        count = (tokens - 1) // longest
        return count * cost + _least_cost(programs, align, tokens - count * longest)
    rests = [
        (cost, 0 if time >= tokens else tokens - time // align * align)
        for cost, time in programs
        if time >= min(tokens, align)
    ]
    return min(cost + _least_cost(programs, align, rest) for cost, rest in rests)


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
