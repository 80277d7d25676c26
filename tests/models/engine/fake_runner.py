"""Runs the scheduler's plans on fake memory, which knows the token that each place holds.

Memory holds entries instead of keys, values and states. An entry names its position, its token and,
by a hash, all tokens before it. Whatever a step reads is compared with the sequence's own entries,
so a page or state that is wrong, missing, released or overwritten raises AssertionError.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import zlib
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from jax_q4k.models.engine.plan import Piece, Plan, Row
from jax_q4k.models.engine.pools import Pools
from jax_q4k.models.engine.scheduler import BOUNDARY, Limits, Scheduler
from jax_q4k.models.engine.sequence import NO_PAGE, Kind, Sequence
from jax_q4k.models.kv_cache.shapes import PAGE_SIZE

VOCAB, END = 150, 7

#: Programs of a small engine; (1, 16) reaches no boundary of deterministic mode.
LIMITS = Limits(rows=4, shapes=((1, 16), (1, 64), (4, 16)), step_tokens=64)
DETERMINISTIC = dataclasses.replace(LIMITS, deterministic=True)


class Entry(NamedTuple):
    """Keys and values of one token, or the recurrent state after it.

    Attributes:
      history: hash of the salt and of all tokens up to this one.
      is_decoded: whether a decode step computed it, if that matters: in deterministic mode.
    """

    position: int
    token: int
    history: int
    is_decoded: bool = False


def entries_of(tokens: Iterable[int], salt: bytes = b"") -> list[Entry]:
    """Returns the entries of a text's tokens."""
    entries: list[Entry] = []
    for token in tokens:
        entries.append(_entry_after(entries, token, salt))
    return entries


def alone(prompt: SequenceOf[int], limit: int, salt: bytes = b"") -> list[int]:
    """Returns prompt and new tokens of a text that nothing else disturbs."""
    entries = entries_of(prompt, salt)
    tokens = list(prompt)
    while len(tokens) < limit:
        tokens.append(next_token(entries[-1]))
        entries.append(_entry_after(entries, tokens[-1], salt))
        if tokens[-1] == END:
            break
    return tokens


def next_token(entry: Entry) -> int:
    """Returns the token that follows; depends on all tokens before it."""
    return entry.history // 1024 % VOCAB


def _entry_after(entries: list[Entry], token: int, salt: bytes) -> Entry:
    before = entries[-1].history if entries else zlib.crc32(salt)
    return Entry(len(entries), token, hash((before, token)))


class _Slot:
    """A row of the device's state: page tables, entries stored so far, and the last new token."""

    def __init__(self, sequence: Sequence, first: int) -> None:
        self.owner = sequence, sequence.epoch
        self.entries = entries_of(sequence.tokens[:first], sequence.salt)
        self.tables: dict[Kind, list[int]] = {}
        self.token = -1


class FakeRunner:
    """Runs a scheduler's plans with one step in flight, as the engine does.

    Attributes:
      pages: entries of each page, for each group and kind of layers.
      snapshots: recurrent state in each place, for each group.
      alive: sequences that are neither complete nor cancelled.
      complete: sequences that ended by an end token or their limit.
      step_count: number of plans that ran.
      has_failed: whether a step raised an error; later ones would raise misleading ones.
      first_steps: number of the step after which each sequence's first new token was known.
      collected: number of prompt tokens that have results, of sequences that read their prompts.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.pages: list[dict[Kind, list[list[Entry | None]]]] = [
            {
                kind: [[None] * PAGE_SIZE for _ in range(pool.count)]
                for kind, pool in p.pages.items()
            }
            for p in scheduler.pools
        ]
        self.snapshots: list[dict[int, Entry]] = [{} for _ in scheduler.pools]
        self.alive: list[Sequence] = []
        self.complete: list[Sequence] = []
        self.step_count = 0
        self.has_failed = False
        self.first_steps: dict[Sequence, int] = {}
        self.collected: dict[Sequence, int] = {}
        self._slots: dict[int, _Slot] = {}
        self._states: dict[int, Entry] = {}
        self._in_flight: list[tuple[Piece | Row, list[int]]] = []

    # Calls of tests.

    def submit(self, prompt: SequenceOf[int], new_tokens: int, **fields: object) -> Sequence:
        sequence = Sequence(list(prompt), len(prompt) + new_tokens, **fields)  # type: ignore[arg-type]
        self.scheduler.add(sequence)
        self.alive.append(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.alive.remove(sequence)
        _compare(sequence)

    def step(self, steps: int = 1) -> Plan | None:
        """Plans and runs a step, then commits the results of the step before it."""
        self.has_failed = True
        plan = self.scheduler.plan(steps)
        arrived, self._in_flight = self._in_flight, [] if plan is None else self._run(plan)
        assert plan or arrived or not self.alive, "no step although sequences wait"
        self._commit(arrived)
        self.scheduler.check()
        self.has_failed = False
        return plan

    def finish(self, steps: int = 1) -> list[Plan]:
        """Runs steps until all sequences are complete; returns their plans."""
        plans: list[Plan | None] = []
        # A lone sequence needs a step a token, and two more until its end is known.
        most = 100 + 4 * sum(sequence.limit + 2 for sequence in self.alive)
        while self.alive:
            plans.append(self.step(steps))
            assert len(plans) < most, f"{len(self.alive)} sequences are not served"
        plans += [self.step(), self.step()]  # rows in flight of sequences that ended
        return [plan for plan in plans if plan is not None]

    def cached_length(self, group: int, tokens: SequenceOf[int], salt: bytes = b"") -> int:
        """Returns how much of a prompt can be reused, by looking at all memory that is findable.

        This is the largest length at which every kind of layers has all that the next token reads.
        """
        pools, entries = self.scheduler.pools[group], entries_of(tokens, salt)
        findable: dict[Kind, set[Entry | None]] = {
            kind: {e for page in pool._key_of for e in self.pages[group][kind][page]}
            for kind, pool in pools.pages.items()
        }
        states = {self.snapshots[group][place] for place in _findable_places(pools)}
        step = BOUNDARY if self.scheduler.limits.deterministic else PAGE_SIZE
        for length in range((len(tokens) - 1) // step * step, 0, -step):
            read = {
                k: entries[0 if k is None else max(length - k + 1, 0) : length] for k in findable
            }
            if pools.snapshots is not None and entries[length - 1] not in states:
                continue
            if all(findable[kind].issuperset(needed) for kind, needed in read.items()):
                return length
        return 0

    # The device.

    def _run(self, plan: Plan) -> list[tuple[Piece | Row, list[int]]]:
        """Runs the parts of a plan in order; returns entries of the plan and their new tokens."""
        self.step_count += 1
        self._check_shape(plan)
        results: list[tuple[Piece | Row, list[int]]] = []
        for place, slot in plan.restores:
            self._states[slot] = self.snapshots[self._group(slot)][place]
        for piece in plan.pieces:
            token = self._prefill(piece)
            results.append((piece, [token] if piece.samples else []))
        self._save(plan.saves)
        for row in plan.rows:
            results.append((row, self._decode(row)))
        self._save(plan.late_saves)
        return results

    def _check_shape(self, plan: Plan) -> None:
        limits, groups = self.scheduler.limits, len(self.scheduler.pools)
        slots = [part.slot for part in (*plan.pieces, *plan.rows)]
        assert len(set(slots)) == len(slots), "a slot has two parts of a step"
        assert plan.steps == max((row.count for row in plan.rows), default=0)
        assert (plan.shape is None) == (not plan.pieces)
        if plan.shape is not None:
            rows, time = plan.shape
            assert plan.shape in limits.shapes
            assert not plan.rows or rows * time <= limits.step_tokens
            assert all(0 < piece.count <= time for piece in plan.pieces)
            owners = [self._group(piece.slot) for piece in plan.pieces]
            assert all(owners.count(group) <= rows for group in range(groups))

    def _prefill(self, piece: Piece) -> int:
        """Stores a piece's tokens; returns the token that follows them."""
        sequence, last = piece.sequence, piece.first + piece.count
        if self.scheduler.limits.deterministic:
            assert piece.first % BOUNDARY == 0
            assert last == sequence.prefill_end or last % BOUNDARY == 0
            assert last <= sequence.prompt_length, "an answer is prefilled"
        slot = self._slots.get(piece.slot)
        if slot is None or slot.owner != (sequence, piece.epoch):
            slot = self._slots[piece.slot] = _Slot(sequence, piece.first)
        assert piece.first == len(slot.entries), "a piece leaves tokens out"
        slot.tables = dict(zip(self._kinds, map(list, piece.tables), strict=True))
        for token in piece.tokens:
            self._store(piece.slot, sequence, token)
        self._read(piece.slot, sequence, piece.first, last)
        slot.token = next_token(slot.entries[-1])
        return slot.token

    def _decode(self, row: Row) -> list[int]:
        """Stores the last token and samples the next ones.

        Goes on after an end token, as rows of a larger batch do; the host drops these tokens.
        """
        slot, tokens = self._slots[row.slot], []
        assert slot.owner == (row.sequence, row.epoch) and row.position == len(slot.entries)
        for kind, pages in zip(self._kinds, row.new_pages, strict=True):
            assert not pages or len(slot.tables[kind]) == -(-row.position // PAGE_SIZE)
            slot.tables[kind] += pages
        for position in range(row.position, row.position + row.count):
            self._store(row.slot, row.sequence, slot.token, self.scheduler.limits.deterministic)
            self._read(row.slot, row.sequence, position, position + 1)
            slot.token = next_token(slot.entries[-1])
            tokens.append(slot.token)
        return tokens

    def _store(self, number: int, sequence: Sequence, token: int, is_decoded: bool = False) -> None:
        slot, group = self._slots[number], self._group(number)
        entry = _entry_after(slot.entries, token, sequence.salt)._replace(is_decoded=is_decoded)
        for kind, table in slot.tables.items():
            page = table[entry.position // PAGE_SIZE]
            assert page != NO_PAGE, "a token has no page"
            self.pages[group][kind][page][entry.position % PAGE_SIZE] = entry
        if self.scheduler.pools[group].snapshots is not None:
            # a slot's state is reset at a text's beginning
            before = self._states.get(number) if slot.entries else None
            assert before == (slot.entries[-1] if slot.entries else None), "another text's state"
            self._states[number] = entry
        slot.entries.append(entry)

    def _read(self, number: int, sequence: Sequence, first: int, last: int) -> None:
        """Checks everything that tokens `first` to `last - 1` read."""
        slot, group = self._slots[number], self._group(number)
        for kind, table in slot.tables.items():
            begin = 0 if kind is None else max(first - kind + 1, 0)
            for at in range(begin // PAGE_SIZE, -(-last // PAGE_SIZE)):
                page, start = table[at], at * PAGE_SIZE
                assert page == sequence.pages[kind][at] != NO_PAGE, "the page was given back"
                inside = slice(max(begin - start, 0), min(last - start, PAGE_SIZE))
                want = slot.entries[start + inside.start : start + inside.stop]
                got = self.pages[group][kind][page][inside]
                assert got == want, f"page {page} of {kind} holds {got} instead of {want}"

    def _save(self, saves: SequenceOf[tuple[int, int]]) -> None:
        places = [(self._group(slot), place) for slot, place in saves]
        assert len(set(places)) == len(places), "two states are saved to one place"
        for slot, place in saves:
            self.snapshots[self._group(slot)][place] = self._states[slot]

    @property
    def _kinds(self) -> tuple[Kind, ...]:
        return self.scheduler.pools[0].kinds

    def _group(self, slot: int) -> int:
        return slot // self.scheduler.limits.rows

    # The host.

    def _commit(self, results: SequenceOf[tuple[Piece | Row, list[int]]]) -> None:
        for entry, tokens in results:
            sequence = entry.sequence
            if sequence.epoch != entry.epoch:
                continue  # cancelled or preempted since
            if isinstance(entry, Piece) and not sequence.can_reuse:
                self._collect(entry)
            if not tokens:
                if entry.samples_at == sequence.limit:
                    self._end(sequence)
                continue
            if END in tokens:
                tokens = tokens[: tokens.index(END) + 1]
            self.scheduler.commit(sequence, tokens, entry.samples_at)
            if sequence.constrained and END not in tokens:
                self._force(sequence)
            self.first_steps.setdefault(sequence, self.step_count)
            if tokens[-1] == END or len(sequence.tokens) >= sequence.limit:
                self._end(sequence)

    def _collect(self, piece: Piece) -> None:
        """Counts prompt tokens that have results; those of a preempted prompt begin again."""
        before = self.collected.get(piece.sequence, 0) if piece.first else 0
        assert piece.first == before, "results of prompt tokens are missing, or come twice"
        self.collected[piece.sequence] = piece.first + piece.count

    def _end(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.alive.remove(sequence)
        self.complete.append(sequence)
        _compare(sequence, is_complete=True)
        if sequence.reads_prompt:
            assert self.collected[sequence] == sequence.prompt_length

    def _force(self, sequence: Sequence) -> None:
        """Tells some of the next tokens before they are sampled, as a constraint does."""
        known, chance = len(sequence.tokens), random.Random(len(sequence.tokens))
        prompt = sequence.tokens[: sequence.prompt_length]
        rest = alone(prompt, sequence.limit, sequence.salt)[known:]
        forced = rest[: chance.choice((0, 0, 1, 3, 9, 25))]
        forced = forced[: forced.index(END)] if END in forced else forced
        if forced:
            self.scheduler.force(sequence, forced, as_piece=chance.random() < 0.8)


def _compare(sequence: Sequence, *, is_complete: bool = False) -> None:
    """Checks a sequence's tokens, or those so far, against the tokens that it gets alone."""
    prompt = sequence.tokens[: sequence.prompt_length]
    want = alone(prompt, sequence.limit, sequence.salt)
    got = sequence.tokens
    assert got == (want if is_complete else want[: len(got)]), f"{got} instead of {want}"


def _findable_places(pools: Pools) -> list[int]:
    return [] if pools.snapshots is None else list(pools.snapshots._key_of)


def make_runner(
    kinds: SequenceOf[Kind] = (None,),
    *,
    pages: int | dict[Kind, int] = 64,
    snapshots: int | None = None,
    groups: int = 1,
    limits: Limits = LIMITS,
) -> FakeRunner:
    """Returns a runner and scheduler for layers of these kinds.

    pages: number of pages of every kind, or of each. snapshots: places for recurrent states, None
    without recurrent layers.
    """
    counts = pages if isinstance(pages, dict) else dict.fromkeys(kinds, pages)
    align = BOUNDARY if limits.deterministic else PAGE_SIZE
    pools = [Pools(dict(counts), snapshots, align=align) for _ in range(groups)]
    return FakeRunner(Scheduler(pools, limits))


@functools.cache
def _prompt(length: int, new_tokens: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    while True:
        tokens = rng.choices(range(END + 1, VOCAB), k=length)
        if END not in alone(tokens, length + new_tokens):
            return tuple(tokens)


def prompt_of(length: int, new_tokens: int, seed: int = 0) -> list[int]:
    """Returns random tokens that `new_tokens` tokens follow without an end token."""
    return list(_prompt(length, new_tokens, seed))
