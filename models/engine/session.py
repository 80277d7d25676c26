"""Runs the requests of `generate` and `stream`: an engine that its callers drive, without a thread.

A session begins with a call and ends when no call uses it any more; then its pages are freed.
Calls of other threads join it, so that their requests form one batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..config import rope
from ..kv_cache.shapes import PAGE_SIZE, window_pages
from ..runner.engine_state import Sizes, kinds_of
from ..runner.model import Model
from ..runner.speculative.drafts import Draft, tokens_of
from ..sampling.stages import SamplingStages
from ..support.buckets import bucket
from . import memory
from .loop import Driver, EngineLoop
from .pools import Pools
from .request import Request
from .scheduler import Limits, Scheduler
from .sizing import expected_step_seconds, is_recurrent, program_cost
from .stages import joined
from .stepper import Stepper

#: Maximum tokens of a piece behind a cached prefix.
PIECE = 128

#: Minimum length of a sequence's block table, in tokens; shorter ones would only cause more
#: compilations.
LEAST_LENGTH = 64

#: Rows that a session has at least, so that calls of other threads join without new programs.
LEAST_ROWS = 8

#: Places for recurrent states, and pages of windowed layers beyond those in use, with which a
#: prompt can continue an earlier part of the last text.
PLACES, REWIND_PAGES = 4, 32


#: A compiled prefill program also serves fewer tokens, if it pads them to at most this many times
#: as many. Otherwise another one is compiled.
MOST_PADDING = 8

#: Pages for LEAST_ROWS rows are allocated if they take at most this many bytes.
FEW_BYTES = 4 << 20


class Settings(NamedTuple):
    """Settings that the calls of a session have in common.

    Attributes:
      cache_dtype: dtype of the pages.
      selection: implementation of operations.
      is_long: whether rope frequencies are those of long contexts.
      jax_context: JAX's settings, which belong to a thread; the threads of a session run its steps
        for each other.
      draft: kind of drafts; None means no speculative decoding.
    """

    cache_dtype: Any
    selection: Any
    is_long: bool
    jax_context: Any
    draft: Draft | None = None


class Session:
    """Requests of several calls on one model, run by the callers' threads.

    Attributes:
      loop: scheduler and device state.
      users: number of calls that use the session.
    """

    def __init__(
        self, model: Model, settings: Settings, reuses: bool = False, kept: Kept | None = None
    ) -> None:
        """Prepares a session; the first request determines its sizes.

        reuses: whether prompts use pages of earlier texts. kept: state of an earlier session.
        """
        config, placement = model.config, model.placement
        self.users = 0
        self._rows = 0 if kept is None else kept.sizes.slots
        self._shapes: set[tuple[bool, int, int]] = set()  # of prefill programs so far
        self._model, self._settings, self._reuses = model, settings, reuses
        self._kinds = kinds_of(config, settings.draft)
        self._drafts = 0
        if settings.draft is not None:
            self._drafts = tokens_of(settings.draft, model.network.on_gpu)
        self._is_recurrent = is_recurrent(config)
        groups = 1 if placement is None else placement.groups
        context = config.context_length
        if not settings.is_long and config.original_context:
            unit = rope.CAPACITY_UNIT
            context = min(context, config.original_context // unit * unit)
        places = PLACES if self._is_recurrent and reuses and groups == 1 else 0
        self._least = Sizes(
            0, self._kinds, (0,) * len(self._kinds), 0, places, context, groups=groups
        )
        pools = [
            Pools(dict.fromkeys(self._kinds, 0), places if self._is_recurrent else None)
            for _ in range(groups)
        ]
        limits = Limits(
            0,
            ((1, PIECE),),
            step_tokens=2**31,
            program_cost=program_cost(model),
            fit=self._fit,
            reuses=reuses,
            draft_tokens=self._drafts,
        )
        sizes = self._least
        if kept is not None:
            pools, sizes = kept.pools, kept.sizes
            limits = dataclasses.replace(limits, rows=sizes.slots // groups)
        stepper = Stepper(
            model,
            sizes,
            (),
            cache_dtype=settings.cache_dtype,
            selection=settings.selection,
            padded=model.padded_batch,
            draft=settings.draft,
        )
        if kept is not None:
            stepper.put_state(kept.state)
        clock = not model.spans_processes
        scheduler = Scheduler(pools, limits, stepper.drafts_pay)
        self.loop = EngineLoop(
            scheduler,
            stepper,
            step_seconds=expected_step_seconds(model),
            clock=clock,
            make_room=self._make_room,
        )
        self._driver = Driver(self.loop)

    def wait(self, request: Request, condition: Any, timeout: float | None) -> bool:
        """Runs the session, or waits for the thread that does, until `condition` holds."""
        return self._driver.wait(request, condition, timeout)

    def keep(self) -> Kept:
        """Returns the cached pages, for a later session; this one must have no requests."""
        self.loop.settle()
        stepper = self.loop.stepper
        return Kept(self.loop.scheduler.pools, stepper.sizes, stepper.take_state())

    def close(self) -> None:
        """Frees the pages at once, although scheduler and loop refer to the session."""
        self.loop.forget()
        del self.loop, self._driver

    def _fit(self, lengths: list[int], whole: bool) -> tuple[int, int]:
        """Returns the shape of a prefill program for prompts that need these numbers of tokens."""
        model, groups = self._model, len(self.loop.scheduler.pools)
        time = model.padded_length(max(lengths))
        time = time if whole else min(time, PIECE)
        rows = model.padded_batch(len(lengths)) // groups
        known = [(r, t) for is_whole, r, t in self._shapes if is_whole == whole]
        known = [(r, t) for r, t in known if rows <= r and time <= t]
        found = min(known, key=lambda shape: shape[0] * shape[1], default=(rows, time))
        if found[0] * found[1] > MOST_PADDING * rows * time:
            found = rows, time
        self._shapes.add((whole, *found))
        return found

    def _make_room(self) -> None:
        """Grows the state if the session's requests need more than it has, and memory allows."""
        scheduler, stepper, old = self.loop.scheduler, self.loop.stepper, self.loop.stepper.sizes
        requests = list(self.loop.requests)
        needed = [request.stages for request in requests]
        needed += [] if stepper.standard is None else [stepper.standard]
        stages = stepper.standard = self._model.stage_sets.serving(joined(needed))
        rows, least = self._needed(requests, stages)
        self._rows = max(self._rows, rows)
        sizes = old._replace(
            slots=max(old.slots, least.slots),
            pages=tuple(map(max, old.pages, least.pages)),
            width=max(old.width, least.width),
            penalizes=old.penalizes or least.penalizes,
            history=old.history or least.history,
        )
        scheduler.limits = dataclasses.replace(scheduler.limits, rows=self._rows // sizes.groups)
        if sizes == old:
            return
        if old.slots and sizes.groups > 1:  # a slot's group is its number's share of all slots
            self.loop.restart_with(sizes)
        else:
            stepper.grow(sizes)
        for pools in scheduler.pools:
            for kind, count in zip(self._kinds, sizes.pages, strict=True):
                pools.pages[kind].grow(count)

    def _needed(self, requests: list[Request], stages: SamplingStages) -> tuple[int, Sizes]:
        """Returns how many rows run at a time, as memory allows, and the sizes for them.

        Every row has pages for its whole text, so that none is preempted.
        """
        model, dtype, groups = self._model, self._settings.cache_dtype, self._least.groups
        length = max(length_of(model, request) for request in requests) + self._drafts
        capacity = max(bucket(length), LEAST_LENGTH)
        longest = max(len(request.prompt) for request in requests)
        count = memory.rows_at_once(model, len(requests), longest, capacity, dtype)
        rows = model.padded_batch(count)
        # Slots without a sequence cost little, except for recurrent states.
        joining = groups == 1 and not self._is_recurrent and not self._reuses
        slots = max(rows, LEAST_ROWS) if joining else rows
        few = slots * memory.cache_bytes(model.config, capacity, dtype) <= FEW_BYTES
        paged = slots if few else rows
        if few and count == len(requests):
            rows = slots
        width = -(-capacity // PAGE_SIZE)
        pages = []
        for kind in self._kinds:
            of_row = window_pages(kind, PAGE_SIZE, PIECE)
            if self._reuses and kind is not None:
                of_row += REWIND_PAGES
            pages.append(paged // groups * min(width, of_row))
        return rows, self._least._replace(
            slots=slots,
            pages=tuple(pages),
            width=width,
            penalizes=stages.penalizes,
            history=bool(self._drafts) or stages.reads_history,
        )


class Kept(NamedTuple):
    """Cached pages of a session that has ended.

    Attributes:
      pools: which tokens they hold.
      sizes, state: the device arrays.
    """

    pools: Any
    sizes: Sizes
    state: Any


#: Running sessions of each model, by settings. A session holds its model, but only while calls run.
_RUNNING: weakref.WeakKeyDictionary[Model, dict[Settings, Session]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


@contextlib.contextmanager
def joined_session(model: Model, settings: Settings) -> Iterator[Session]:
    """Joins the model's running session with these settings for a call, or begins one."""
    with _LOCK:
        running = _RUNNING.setdefault(model, {})
        session = running.get(settings)
        if session is None:
            session = running[settings] = Session(model, settings)
        session.users += 1
    try:
        yield session
    finally:
        with _LOCK:
            session.users -= 1
            if not session.users:
                del running[settings]
                session.close()


def length_of(model: Model, request: Request) -> int:
    """Returns the most tokens of prompt and answer that are in the context at a time."""
    length = len(request.prompt) + request.sampling.max_new_tokens
    return length if request.shift is None else min(length, model.config.context_length)


def is_long(model: Model, length: int) -> bool:
    """Returns whether a text of `length` tokens has the rope frequencies of long contexts."""
    original = model.config.original_context
    capacity = max(bucket(length), LEAST_LENGTH)
    return original is not None and rope.is_long(capacity, original)
