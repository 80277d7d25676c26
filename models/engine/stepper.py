"""Runs the scheduler's plans on the device."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from ..kv_cache.shapes import PAGE_SIZE
from ..runner.adapters import Stacks
from ..runner.engine_state import EngineState, Past, Sizes
from ..runner.engine_steps import (
    ALL,
    ARGMAX,
    COST_UNIT,
    BeginPieces,
    CopyStates,
    DecodeRows,
    FillHistory,
    ForwardRows,
    PrefillPieces,
    PutAdapter,
    RowFields,
    Sampled,
    SampleRows,
)
from ..runner.model import Model
from ..runner.program_cache import CachedPrograms
from ..runner.programs import AllWeights
from ..runner.speculative.drafts import Draft, DraftModel, NextTokens, cost_of, tokens_of
from ..sampling.grammars import allow_only
from ..sampling.packing import pack
from ..sampling.params import Processor, Sampling
from ..sampling.penalties import TokenHistory, processed
from ..sampling.stages import SamplingArrays, SamplingStages
from .executor import Array, Executor
from .outputs import TokenLogprobs
from .plan import Piece, Plan, Row
from .prompt_results import Started
from .prompt_results import start as start_results
from .request import Request
from .sequence import NO_PAGE
from .stages import joined, way_of

#: Drafts pay if this part of their tokens, when it is right, makes up for their cost.
MOST_RIGHT = 0.8

#: Tokens of a sequence that measures drafts.
_PAST = 64

#: Copies of recurrent states per call.
COPIES = 8

#: Target of a copy that is none.
_NOWHERE = 2**31 - 1


@dataclasses.dataclass
class Ticket:
    """A step in progress: results on the device, and the entries of the plan they belong to.

    Attributes:
      entries: (piece or row, its row in `sampled`, index into `sampled`).
      sampled: results of the programs.
      steps: largest number of tokens sampled for a row; 0 if the step only prefills.
      started: time of dispatch, `time.perf_counter()`.
      speculates: whether the rows have drafts.
      unsampled: rows whose tokens `Stepper.sample` samples; None if there are none.
      prompt_results: programs that compute what requests want of the pieces' tokens.
    """

    entries: list[tuple[Piece | Row, int, int]]
    sampled: list[Sampled]
    steps: int
    started: float
    speculates: bool = False
    unsampled: Unsampled | None = None
    prompt_results: list[Started] = dataclasses.field(default_factory=list)

    @property
    def owners(self) -> list[Request]:
        """Requests of the entries."""
        return [entry.sequence.owner for entry, _, _ in self.entries]

    def wait(self, index: int) -> None:
        """Waits for the end of a program; raises the error that ended it, if any."""
        with jax.transfer_guard_device_to_host("allow"):
            np.asarray(self.sampled[index].tokens)  # JAX keeps the copy

    def results(self, index: int) -> Iterator[Result]:
        """Yields what a program sampled for each entry."""
        with jax.transfer_guard_device_to_host("allow"):
            sampled = self.sampled[index]
            tokens = np.asarray(sampled.tokens)
            of_prompts: dict[int, Any] = {}
            for started in () if index else self.prompt_results:
                of_prompts |= started.values()
            for entry, row, program in self.entries:
                if program != index:
                    continue
                new = tokens[row].tolist()
                new = new[: new.index(-1)] if -1 in new else new
                drafted, accepted = (
                    0 if counts is None else int(np.asarray(counts)[row])
                    for counts in (sampled.drafted, sampled.accepted)
                )
                logprobs = _logprobs(sampled, row, len(new), entry.sequence.owner.top)
                yield Result(entry, new, logprobs, drafted, accepted, of_prompts.get(row))


class Unsampled(NamedTuple):
    """Decoded rows without their new tokens.

    Attributes:
      rows: the rows, at the places `at` of the program.
      program, way, step: program that samples, and its arguments.
    """

    rows: list[Row]
    at: list[int]
    program: SampleRows
    way: int
    step: np.ndarray


class Result(NamedTuple):
    """Tokens that a step sampled for one sequence.

    Attributes:
      tokens: new tokens; the last may be an end token.
      logprobs: their log-probabilities; None unless requested.
      drafted, accepted: number of draft tokens, and of those that were right.
      of_prompt: results of a piece for `PromptResults.put`; None without any.
    """

    entry: Piece | Row
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    drafted: int
    accepted: int
    of_prompt: Any = None


def _logprobs(
    sampled: Sampled, row: int, count: int, top: int | None
) -> list[TokenLogprobs] | None:
    """Returns log-probabilities of a row's first `count` tokens, each with the `top` best ones."""
    if sampled.logprobs is None or top is None:
        return None
    arrays = sampled.logprobs.chosen, sampled.logprobs.tokens, sampled.logprobs.likeliest
    chosen, ids, likeliest = (np.asarray(array)[row, :count] for array in arrays)
    return [
        TokenLogprobs(float(c), list(zip(i[:top].tolist(), p[:top].tolist(), strict=True)))
        for c, i, p in zip(chosen, ids, likeliest, strict=True)
    ]


class Stepper:
    """Makes calls of programs of the scheduler's plans.

    Attributes:
      executor: device state and programs.
      sizes: sizes of the state.
      buckets: numbers of rows that decode programs exist for, in ascending order.
      standard: sampling stages of the programs; requests that need more get programs of their own.
      draft_costs: measured extra time of a pass with drafts, in passes without, by the number of
        rows in ascending order.
    """

    def __init__(
        self,
        model: Model,
        sizes: Sizes,
        buckets: Sequence[int],
        *,
        cache_dtype: Any,
        selection: Any,
        standard: SamplingStages | None = None,
        skips: bool = False,
        padded: Callable[[int], int] | None = None,
        draft: Draft | None = None,
        deterministic: bool = False,
        adapters: tuple[int, Stacks] | None = None,
    ) -> None:
        """Prepares the programs; the state is created by the first step.

        standard: sampling stages of the programs that serve most requests; None means those that a
        step's requests need. skips: whether steps skip stages that their requests do not need.
        padded: maps a number of rows to that of a decode program; None means the next of `buckets`.
        draft: None means no speculative decoding. adapters: number of places for adapters, and
        their arrays; None means that there are none.
        """
        self.sizes = sizes
        self.buckets = tuple(buckets)
        drafter: Any = None
        if isinstance(draft, DraftModel):
            drafter = draft.model.weights
        elif isinstance(draft, NextTokens):
            drafter = dict(draft.weights)
        self._adapters, stacks = (0, None) if adapters is None else adapters
        weights = AllWeights(model.weights, stacks, drafter)
        self.draft_costs: dict[int, float] = {}
        self.draft = draft
        self._model, self._dtype = model, cache_dtype
        programs = CachedPrograms(model, weights, selection)
        self.executor = Executor(model, programs, self._creation())
        self.standard, self._skips = standard, skips
        self._deterministic, self._padded = deterministic, padded
        self._rows: set[int] = set()  # of decode programs so far

    @property
    def programs(self) -> CachedPrograms:
        """Compiled programs."""
        return self.executor.programs

    def dispatch(self, plan: Plan) -> Ticket:
        """Starts a step, without waiting for it.

        If some of the rows are constrained, `sample` must be called next.
        """
        entries: list[tuple[Piece | Row, int, int]] = []
        sampled: list[Sampled] = []
        unsampled = None
        prompt_results: list[Started] = []
        self._copy(plan.restores, saves=False)
        if plan.pieces:
            at = self._places(plan)
            found = self._prefill(plan, at)
            prompt_results = self._start_results(plan, at)
            # The executor keeps the vectors until the next pieces; a ticket must not, for longer.
            sampled.append(dataclasses.replace(found, vectors=None))
            entries += [(piece, row, 0) for piece, row in zip(plan.pieces, at, strict=True)]
        self._copy(plan.saves, saves=True)
        if plan.rows:
            rows = self._bucket(len(plan.rows))
            whole = rows == self.sizes.slots
            at = [row.slot if whole else i for i, row in enumerate(plan.rows)]
            index = len(sampled)
            if plan.is_constrained:
                unsampled = self._forward(plan.rows, rows, at)
            else:
                sampled.append(self._decode(plan.rows, rows, at, plan.speculates))
            entries += [(row, i, index) for row, i in zip(plan.rows, at, strict=True)]
        self._copy(plan.late_saves, saves=True)
        self._fetch(sampled)
        started = time.perf_counter()
        return Ticket(
            entries, sampled, plan.steps, started, plan.speculates, unsampled, prompt_results
        )

    def sample(self, ticket: Ticket) -> None:
        """Samples the tokens of a step's constrained rows, when those before them are known."""
        rest, ticket.unsampled = ticket.unsampled, None
        assert rest is not None
        mask = self._mask(rest.program, rest.at, rest.rows)
        sampled = self.executor.run(rest.program, np.int32(rest.way), rest.step, mask)
        self._fetch([sampled])
        ticket.sampled.append(sampled)

    def _fetch(self, sampled: list[Sampled]) -> None:
        if self._model.network.on_gpu:  # on a CPU the call costs more than the copy
            for result in sampled:
                result.tokens.copy_to_host_async()

    def _mask(
        self,
        program: PrefillPieces | SampleRows,
        at: list[int],
        entries: Sequence[Piece | Row],
    ) -> np.ndarray | None:
        """Returns which tokens each row may sample, for `_EngineProgram._sample`.

        None means that all rows may sample all tokens.
        """
        constrained = [
            (i, entry)
            for i, entry in zip(at, entries, strict=True)
            if entry.sequence.constrained and entry.samples
        ]
        if not constrained:
            return None
        mask = np.full((program.rows, program.mask_columns), -1, np.int32)
        for i, entry in constrained:
            sequence = entry.sequence
            if entry.samples_at < len(sequence.tokens):  # known already
                allow_only(mask[i], sequence.tokens[entry.samples_at])
            elif entry.epoch == sequence.epoch:
                sequence.owner.matcher.allow(mask[i])
        return mask

    def warm_up(self, shapes: Sequence[tuple[int, int]], *, constraints: bool = False) -> None:
        """Compiles the programs of all prefill `shapes` and row buckets.

        On a GPU it also runs each on padding: the first run loads kernels and makes CUDA graphs.
        constraints: whether to include the programs of constrained rows.
        """
        buckets = self.buckets if self.sizes.groups == 1 else (self.sizes.slots,)
        kinds = (DecodeRows, ForwardRows) if constraints else (DecodeRows,)
        programs: list[PrefillPieces | DecodeRows] = []
        for places in sorted({self._places_for(()), self._adapters}):
            options: Any = {"stages": self.standard, "adapters": places}
            programs += [
                self._sampling_program(
                    PrefillPieces, rows=rows * self.sizes.groups, time=time, **options
                )
                for rows, time in shapes
            ]
            programs += [
                self._sampling_program(kind, rows=rows, **options)
                for rows in buckets
                for kind in kinds
            ]
        if constraints:
            programs += [
                self._sampling_program(SampleRows, rows=rows, stages=self.standard)
                for rows in buckets
            ]
        self.executor.with_state()
        self._compile(programs)
        if self.draft is not None:
            self._measure_drafts(buckets)
        for program in programs if self._model.network.on_gpu else ():
            self.executor.run(program, *self._nothing_for(program))
        for saves in (True, False) if self.sizes.snapshots else ():
            self._copy_some([[] for _ in range(self.sizes.groups)], saves=saves)
        nothing, zero = np.zeros(self.sizes.width * PAGE_SIZE, np.int32), np.int32(0)
        self.executor.run(self._program(FillHistory), zero, nothing, zero, zero)
        jax.block_until_ready(self.executor.state)

    def drafts_pay(self, rows: int) -> bool:
        """Returns whether drafts save time if most of them are right, in a step of these rows."""
        if self.draft is None:
            return False
        tokens = tokens_of(self.draft, self._model.network.on_gpu)
        return self._draft_cost(rows) < MOST_RIGHT * tokens

    def _draft_cost(self, rows: int) -> float:
        """Returns the extra time of a pass with drafts of these rows, in passes without."""
        assert self.draft is not None
        on_gpu = self._model.network.on_gpu
        known = [cost for most, cost in self.draft_costs.items() if rows <= most]
        return known[0] if known else cost_of(tokens_of(self.draft, on_gpu), on_gpu, rows)

    def _measure_drafts(self, buckets: Sequence[int]) -> None:
        """Measures what drafts cost, and compiles their programs where they pay."""
        for rows in buckets:
            options = {"rows": rows, "stages": self.standard}
            plain, drafting = (
                self._sampling_program(DecodeRows, speculates=speculates, **options)
                for speculates in (False, True)
            )
            self._compile([drafting])
            if self._model.spans_processes:
                continue  # all processes must make the same calls
            alone = self._seconds(plain)
            self.draft_costs[rows] = max(self._seconds(drafting) - alone, 0.0) / alone
            if not self.drafts_pay(rows):
                self.draft_costs[self.sizes.slots] = math.inf  # still less with more rows
                break
        self.reset()
        self.executor.with_state()

    def _seconds(self, program: DecodeRows) -> float:
        """Returns the time of a pass over all rows of a program, the shortest of three.

        The rows' texts are zeros, in which prompt lookup finds a draft. The state is useless then.
        """
        assert self.standard is not None
        _, pages, parameters = _offsets(program.columns)
        step = np.zeros((program.rows, sum(program.columns)), np.int32)
        past = min(_PAST, self.sizes.width * PAGE_SIZE // 2)
        fields = RowFields(0, past, 1, 0, 1, 0, draft_cost=1)
        step[:, : len(fields)] = fields
        step[:, 0] = np.arange(program.rows)
        step[:, pages:parameters] = NO_PAGE
        sampling = SamplingArrays.of([Sampling(ignore_end=True)], (), self.standard, None)
        step[:, parameters:] = pack(sampling)
        times = []
        for _ in range(3):
            self.reset()
            jax.block_until_ready(self.executor.with_state())
            began = time.perf_counter()
            jax.block_until_ready(self.executor.run(program, np.int32(ARGMAX), step))
            times.append(time.perf_counter() - began)
        return min(times)

    def _compile(self, programs: Sequence[PrefillPieces | DecodeRows]) -> None:
        def compile(program: PrefillPieces | DecodeRows) -> None:
            self.executor.compile(program, *self._nothing_for(program))

        # XLA compiles without the interpreter lock.
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            list(pool.map(compile, programs))

    def _nothing_for(self, program: PrefillPieces | DecodeRows) -> tuple[Array | None, ...]:
        """Returns arguments of a program for `Executor.run`, with padding alone."""
        padding = self._step(program, [], [])

        def array(shape: tuple[int, ...], dtype: Any) -> Any:
            if shape == padding.shape:
                return padding
            return np.zeros(shape, dtype) if not shape else None  # a mask, or logits

        inputs = program.inputs(array)
        return inputs[1:] if isinstance(program, SampleRows) else inputs

    def put_adapter(self, place: int, entry: Stacks) -> None:
        """Stores an adapter at a place, counted from 1, for all steps that start later.

        entry: of `arrays_for`.
        """
        weights = self.programs.weights
        with self.programs.context():
            arguments = weights.adapters, np.int32(place - 1), entry
            stacks = self.programs.ready(self._program(PutAdapter), *arguments)(*arguments)
        self.programs.weights = weights._replace(adapters=stacks)

    def tracing_error(self, processors: Sequence[Processor]) -> Exception | None:
        """Returns the error that tracing user functions of logits raises, or None."""
        logits = jax.ShapeDtypeStruct((1, self._model.config.vocab_size), jnp.float32)
        tokens = jax.ShapeDtypeStruct((1, self.sizes.width * PAGE_SIZE), jnp.int32)
        history = TokenHistory(tokens, jax.ShapeDtypeStruct((1,), jnp.int32))  # type: ignore[arg-type]
        try:
            with self.programs.context():
                jax.eval_shape(functools.partial(processed, processors), logits, history)
        except Exception as error:
            return error
        return None

    def grow(self, sizes: Sizes) -> None:
        """Makes room for more; no entry of `sizes` may be smaller than before.

        Sequences keep their slots and pages.
        """
        old, self.sizes = self.take_state(), sizes
        self.executor.resize(self._creation())
        if old is None:
            return
        new = self.executor.with_state()

        def copied(new: jax.Array, old: jax.Array) -> jax.Array:
            return new if not new.ndim else new.at[tuple(map(slice, old.shape))].set(old)

        # Counts and history of running sequences are not needed if they were not kept so far.
        past = [
            after if before is None or after is None else copied(after, before)
            for after, before in (
                (new.past.seen, old.past.seen),
                (new.past.history, old.past.history),
            )
        ]
        nothing = Past()
        both = (dataclasses.replace(state, past=nothing) for state in (new, old))
        self.put_state(dataclasses.replace(jax.tree.map(copied, *both), past=Past(*past)))

    def take_state(self) -> EngineState | None:
        """Returns the state and drops it here."""
        state, self.executor.state = self.executor.state, None
        return state

    def put_state(self, state: EngineState | None) -> None:
        """Continues with a state that `take_state` returned; its sizes must be `sizes`."""
        self.executor.state = state

    def reset(self) -> None:
        """Drops the state; the next step creates an empty one."""
        self.executor.drop()

    def _prefill(self, plan: Plan, at: list[int]) -> Sampled:
        assert plan.shape is not None
        rows, time = plan.shape[0] * self.sizes.groups, plan.shape[1]
        stages, way = self._stages(plan.pieces)
        options: Any = {"rows": rows, "stages": stages, "time": time}
        options["adapters"] = self._places_for(plan.pieces)
        begins = plan.fresh and self.executor.state is None and self._model.placement is None
        if begins:
            program = self._sampling_program(BeginPieces, cache_dtype=self._dtype, **options)
        else:
            program = self._sampling_program(PrefillPieces, fresh=plan.fresh, **options)
        step = self._step(program, at, plan.pieces)
        _, first, tables, parameters = _offsets(program.columns)
        step[:, tables:parameters] = NO_PAGE
        for row, piece in zip(at, plan.pieces, strict=True):
            step[row, first : first + piece.count] = piece.tokens
            for i, pages in enumerate(piece.tables):
                start = tables + i * self.sizes.width
                step[row, start : start + len(pages)] = pages
        mask = self._mask(program, at, plan.pieces)
        if not begins:
            for piece in plan.pieces:
                self._fill_history(piece)
        sampled: Sampled = self.executor.run(program, np.int32(way), step, mask)
        return sampled

    def _start_results(self, plan: Plan, at: list[int]) -> list[Started]:
        """Starts what requests want of the tokens of the pieces, which ran last."""
        assert plan.shape is not None
        rows, time = plan.shape[0] * self.sizes.groups, plan.shape[1]

        def call(kind: Any, *arrays: Array, **fields: Any) -> Any:
            return self.executor.run(self._program(kind, rows=rows, time=time, **fields), *arrays)

        return start_results(list(zip(at, plan.pieces, strict=True)), (rows, time), call)

    def _decode(self, rows: list[Row], count: int, at: list[int], speculates: bool) -> Sampled:
        stages, way = self._stages(rows)
        options: Any = {"stages": stages, "adapters": self._places_for(rows)}
        options["speculates"] = speculates
        program = self._sampling_program(DecodeRows, rows=count, **options)
        step = self._rows_step(program, at, rows)
        sampled: Sampled = self.executor.run(program, np.int32(way), step)
        return sampled

    def _forward(self, rows: list[Row], count: int, at: list[int]) -> Unsampled:
        """Starts what precedes sampling."""
        stages, way = self._stages(rows)
        options: Any = {"rows": count, "stages": stages}
        adapters = self._places_for(rows)
        program = self._sampling_program(ForwardRows, adapters=adapters, **options)
        step = self._rows_step(program, at, rows)
        self.executor.run(program, step)
        samples = self._sampling_program(SampleRows, **options)
        return Unsampled(rows, at, samples, way, step)

    def _rows_step(self, program: DecodeRows, at: list[int], rows: list[Row]) -> np.ndarray:
        """Returns the argument of a program that decodes."""
        step = self._step(program, at, rows)
        _, pages, parameters = _offsets(program.columns)
        step[:, pages:parameters] = NO_PAGE
        for i, row in zip(at, rows, strict=True):
            for kind, new in enumerate(row.new_pages):
                start = pages + kind * program.pages_per_step
                step[i, start : start + len(new)] = new
        return step

    def _stages(self, entries: Sequence[Piece | Row]) -> tuple[SamplingStages, int]:
        """Returns the stages of the program for these rows, and which of them they need."""
        needed = joined(entry.sequence.owner.stages for entry in entries)
        standard = self.standard
        if standard is None or needed.joined(standard) != standard:
            return needed, ALL
        return standard, way_of(needed)

    def _step(
        self,
        program: PrefillPieces | DecodeRows,
        at: list[int],
        entries: Sequence[Piece | Row],
    ) -> np.ndarray:
        """Returns the program's argument with the fields and sampling parameters of its rows.

        at: row of each entry; the others are padding.
        """
        step = np.zeros((program.rows, sum(program.columns)), np.int32)
        step[:, 0] = self.sizes.slots
        parameters = sum(program.columns[:-1])
        for row, entry in zip(at, entries, strict=True):
            step[row, : len(RowFields._fields)] = self._fields(entry, program.rows)
            step[row, parameters:] = entry.sequence.owner.packed(program.stages)
        return step

    def _fields(self, entry: Piece | Row, rows: int) -> RowFields:
        """Returns the fields of a row in a program of `rows` rows."""
        sequence = entry.sequence
        if isinstance(entry, Piece):
            last = entry.first + entry.count
            following = sequence.tokens[last] if last < sequence.prefill_end else 0
            step = sequence.step_of(last)
            return RowFields(
                entry.slot,
                entry.first,
                entry.count,
                step,
                entry.samples,
                following,
                sequence.uncounted,
                sequence.adapter,
            )
        step, cost = sequence.step_of(entry.position + 1), 0
        if entry.speculates and sequence.drafts:
            cost = max(round(self._draft_cost(rows) / COST_UNIT), 1)
        fields = entry.slot, entry.position, entry.count, step, 1, 0
        return RowFields(*fields, adapter=sequence.adapter, draft_cost=cost)

    def _places(self, plan: Plan) -> list[int]:
        """Returns the row of each piece; each group of devices has its own part of the rows."""
        assert plan.shape is not None
        rows, used = plan.shape[0], [0] * self.sizes.groups
        places = []
        for piece in plan.pieces:
            group = piece.slot // (self.sizes.slots // self.sizes.groups)
            places.append(group * rows + used[group])
            used[group] += 1
        if rows * self.sizes.groups == self.sizes.slots:  # such programs take all slots in order
            return [piece.slot for piece in plan.pieces]
        return places

    def _bucket(self, rows: int) -> int:
        if self.sizes.groups > 1:
            return self.sizes.slots
        if self._padded is not None:
            # When sequences end, a program for fewer rows need not be compiled.
            known = [count for count in self._rows if rows <= count <= self.sizes.slots]
            found = min(known, default=min(self._padded(rows), self.sizes.slots))
            self._rows.add(found)
            return found
        return next((b for b in self.buckets if b >= rows), self.sizes.slots)

    def _fill_history(self, piece: Piece) -> None:
        """Stores the tokens of a cached prefix, before the first piece behind it runs."""
        stages = piece.sequence.owner.stages
        reads = stages.penalizes or stages.reads_history or self.draft is not None
        if not piece.first or piece.first != piece.sequence.cached or not reads:
            return
        tokens = np.zeros(self.sizes.width * PAGE_SIZE, np.int32)
        tokens[: piece.first] = piece.sequence.tokens[: piece.first]
        counts = np.int32(piece.first), np.int32(piece.sequence.uncounted)
        self.executor.run(self._program(FillHistory), np.int32(piece.slot), tokens, *counts)

    def _copy(self, pairs: list[tuple[int, int]], *, saves: bool) -> None:
        """Copies recurrent states between (source, target) slots and snapshots.

        Snapshots are numbered within the slot's group.
        """
        slots = self.sizes.slots // self.sizes.groups
        groups: list[list[tuple[int, int]]] = [[] for _ in range(self.sizes.groups)]
        for source, target in pairs:
            group, slot = divmod(source if saves else target, slots)
            groups[group].append((slot, target) if saves else (source, slot))
        for first in range(0, max(map(len, groups)), COPIES):
            self._copy_some([pairs[first : first + COPIES] for pairs in groups], saves=saves)

    def _copy_some(self, groups: list[list[tuple[int, int]]], *, saves: bool) -> None:
        """Copies up to COPIES states in each group."""
        sources = np.zeros((len(groups), COPIES), np.int32)
        targets = np.full((len(groups), COPIES), _NOWHERE, np.int32)
        for group, pairs in enumerate(groups):
            for i, pair in enumerate(pairs):
                sources[group, i], targets[group, i] = pair
        program = self._program(CopyStates, saves=saves)
        self.executor.run(program, sources.ravel(), targets.ravel())

    @property
    def common(self) -> dict[str, Any]:
        """Fields of programs that are the same in all of them."""
        return {
            "network": self._model.network,
            "draft": self.draft,
            "sizes": self.sizes,
            "skips": self._skips,
            "deterministic": self._deterministic,
        }

    def _program(self, kind: Any, **fields: Any) -> Any:
        return kind(self._model.network, draft=self.draft, **fields)

    def _places_for(self, entries: Sequence[Piece | Row]) -> int:
        """Returns the places for adapters of a program for these rows: none if no row has one."""
        # XLA fuses programs with and without adapters in other ways, which changes bits.
        needed = self._deterministic or any(entry.sequence.adapter for entry in entries)
        return self._adapters if needed else 0

    def _sampling_program(self, kind: Any, **fields: Any) -> Any:
        return kind(**self.common, **fields)

    def _creation(self) -> Callable[[], EngineState]:
        """Returns a function that creates the state; it holds no reference to this object."""
        args = self._model.config, self.sizes, self._dtype, _zeros, self._model.placement
        return functools.partial(EngineState.create, *args, draft=self.draft)


def row_buckets(slots: int, on_gpu: bool, deterministic: bool) -> tuple[int, ...]:
    """Returns the numbers of rows that an engine compiles decode programs for.

    A CPU computes up to 8 rows one by one and more in tiles of 16, so other numbers would only pad.
    """
    if deterministic:
        found = list(range(16, slots + 1, 16))
    elif on_gpu:
        found = [1 << i for i in range(slots.bit_length())]
    else:
        found = [1, 2, 3, 4, 6, 8, *range(16, slots + 1, 16)]
    return (*(rows for rows in found if rows < slots), slots)


def _offsets(columns: tuple[int, ...]) -> list[int]:
    """Returns the first column of each part."""
    return [sum(columns[:i]) for i in range(len(columns))]


def _zeros(shape: tuple[int, ...], dtype: Any, over: NamedSharding | None) -> jax.Array:
    return jnp.zeros(shape, dtype, device=over)
