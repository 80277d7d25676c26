"""The engine's loop: plans a step, starts it, and hands out the results of the step before."""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
import time
from collections.abc import Callable

import jax_q4k as jq

from ..runner.engine_state import Sizes
from ..runner.engine_steps import MOST_STEPS
from ..sampling import ConstraintError
from .outputs import TokenLogprobs
from .plan import Piece, Plan
from .request import Request
from .scheduler import Scheduler
from .sequence import Sequence
from .stepper import Result, Stepper, Ticket

#: Target duration of a step in seconds while somebody reads a stream, and otherwise.
FLUENT_STEP, SLOW_STEP = 1 / 60, 0.1


class EngineLoop:
    """Scheduler, device state and requests of one engine.

    `submit` and `cancel` may be called from any thread; everything else from one thread at a time.
    One step is in flight: the next one is planned and started before its results are known.

    Attributes:
      requests: all unfinished requests, waiting ones included.
      new_tokens: tokens that were handed out.
      wait_seconds: time spent waiting for steps.
      host_seconds: processor time of planning, starting steps and handing out results.
      last_tokens: prompt and answer of the request that ended last.
      waiting_since: `time.monotonic()` when the loop began to wait for a step; None if it does not.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        stepper: Stepper,
        *,
        step_seconds: float,
        clock: bool = True,
        make_room: Callable[[], None] | None = None,
    ) -> None:
        """Prepares the loop.

        step_seconds: estimated time of a token, before one was measured.
        clock: whether measured times decide how many tokens a step samples. Processes that share
        devices must make the same calls, so they pass False.
        make_room: called when `requests` has new ones, before they are queued.
        """
        self.scheduler, self.stepper, self._make_room = scheduler, stepper, make_room
        self.requests: dict[Request, None] = {}
        self.new_tokens = self.run_tokens = 0
        self.step_tokens: collections.Counter[int] = collections.Counter()
        self.wait_seconds = self.host_seconds = 0.0
        self.last_tokens: list[int] = []
        self.waiting_since: float | None = None
        self._mail: collections.deque[tuple[str, Request]] = collections.deque()
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._in_flight: Ticket | None = None
        self._clock, self._step_seconds = clock, step_seconds
        self._last_results = 0.0

    def submit(self, request: Request) -> None:
        """Adds a request; the next step sees it."""
        self._mail.append(("submit", request))

    def cancel(self, request: Request) -> None:
        """Frees what a request holds, at the next step."""
        self._mail.append(("cancel", request))

    def now(self) -> float:
        """Returns a time in seconds that stands still while programs are compiled."""
        return time.perf_counter() - self.stepper.programs.compile_seconds

    @property
    def has_work(self) -> bool:
        return bool(self._mail or self._calls or self.requests or self._in_flight)

    def step(self) -> None:
        """Runs one step; does nothing without requests."""
        began = time.thread_time()
        with jq.explaining_loads():
            self._step()
        self.host_seconds += time.thread_time() - began

    def _step(self) -> None:
        self.read_mail()
        plan = self.scheduler.plan(self._steps())
        ticket = None if plan is None else self._dispatch(plan)
        before, self._in_flight = self._in_flight, ticket
        if before is not None:
            self._hand_out(before)
        if self._in_flight is not None and self._in_flight.unsampled is not None:
            self._sample(self._in_flight)
        if self._in_flight is not None and self._in_flight.speculates:
            self._finish_step()  # the next plan depends on how many drafts were right

    def call(
        self,
        function: Callable[[], None],
        is_running: Callable[[], bool],
        wake: Callable[[], None],
    ) -> None:
        """Calls a function between two steps, and waits for it; raises the error that it raises.

        is_running: whether another thread runs the loop. wake: wakes that thread.
        """
        ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                function()
            except Exception as error:
                ended.put(error)
            else:
                ended.put(None)

        self._calls.append(run)
        wake()
        while is_running():
            with contextlib.suppress(queue.Empty):
                if (error := ended.get(timeout=0.01)) is not None:
                    raise error
                return
        function()

    @property
    def adapters_in_use(self) -> set[int]:
        """Places of the adapters of all requests; `submit` must not be called meanwhile."""
        return {request.place for request in (*self.requests, *(one for _, one in self._mail))}

    def read_mail(self) -> None:
        """Carries out what other threads asked for."""
        new = []
        while self._mail:
            what, request = self._mail.popleft()
            if what == "submit" and not request.is_done:
                self.requests[request] = None
                request.compiled = self.stepper.programs.compile_seconds
                new.append(request)
            elif what == "cancel" and request in self.requests:
                self._end(request)
        new = [request for request in new if request in self.requests]
        if new and self._make_room is not None:
            self._make_room()
        for request in new:
            self._begin(request, request.prompt)
        while self._calls:
            self._calls.popleft()()

    def fail(self, error: BaseException) -> None:
        """Makes all requests raise `error`, and drops the device state."""
        self.read_mail()
        for request in self.requests:
            request.fail(error)
        for request in list(self.requests):
            self._end(request)
        self.recover()

    def abandon(self, error: BaseException) -> None:
        """Makes all requests raise `error` although a step never ends.

        May be called from any thread; the loop cannot be used afterwards.
        """
        for request in (*self.requests, *(request for _, request in self._mail)):
            request.fail(error)

    def forget(self) -> None:
        """Drops all requests without results; requests and the loop refer to each other.

        The loop cannot be used afterwards.
        """
        self._mail.clear()
        for request in self.requests:
            request.sequence = None
        self.requests.clear()
        self.scheduler.running.clear()
        self.scheduler.waiting.clear()
        self._in_flight = None

    def settle(self) -> None:
        """Waits for the step in flight, and carries out what other threads asked for."""
        self._finish_step()
        self.read_mail()

    def restart_with(self, sizes: Sizes) -> None:
        """Starts all sequences again with other sizes of the device state."""
        self._finish_step()
        self.stepper.reset()
        self.stepper.grow(sizes)
        self.scheduler.restart()

    def recover(self) -> None:
        """Starts all sequences again, after a step was interrupted and the device state is lost."""
        self._in_flight = None
        for request in list(self.requests):
            if request.is_done:
                self._end(request)
            elif (sequence := request.sequence) is not None:
                request.recover()
                # The interrupt may have come after the text got a token, before the sequence did.
                sequence.tokens[sequence.prompt_length :] = request.text.tokens[
                    sequence.steps_before :
                ]
        self.stepper.reset()
        self.scheduler.restart()

    def _dispatch(self, plan: Plan) -> Ticket | None:
        """Starts a step; returns None if user functions of a request failed."""
        for piece in plan.pieces:
            piece.sequence.owner.take_row()
        tokens = sum(piece.count for piece in plan.pieces) + sum(row.count for row in plan.rows)
        self.run_tokens += tokens
        self.step_tokens[1 << (max(tokens, 1) - 1).bit_length()] += 1
        try:
            return self.stepper.dispatch(plan)
        except Exception as error:
            owners = [] if self._in_flight is None else self._in_flight.owners
            owners += [piece.sequence.owner for piece in plan.pieces]
            owners += [row.sequence.owner for row in plan.rows]
            self._blame(owners, error)
            return None

    def _sample(self, ticket: Ticket) -> None:
        """Samples what depends on the tokens that were handed out last."""
        try:
            self.stepper.sample(ticket)
        except Exception as error:
            self._blame(ticket.owners, error)

    def _blame(self, owners: list[Request], error: Exception) -> None:
        """Ends the requests whose user functions failed in a step, and starts the others again.

        Raises `error` if none of the `owners` has such functions.
        """
        owners = [o for o in dict.fromkeys(owners) if o.sampling.processors and o in self.requests]
        errors = {o: self.stepper.tracing_error(o.sampling.processors) for o in owners}
        wrong = [owner for owner in owners if errors[owner] is not None] or owners
        if not wrong:
            raise error
        for request in wrong:
            request.fail(errors[request] or error)
            self._end(request)
        self.recover()

    def _finish_step(self) -> None:
        before, self._in_flight = self._in_flight, None
        if before is not None:
            self._hand_out(before)

    def _begin(self, request: Request, prompt: list[int]) -> None:
        """Queues a sequence for the request: its prompt, or what a context shift left of it."""
        before = len(request.text.tokens)
        limit = len(prompt) + request.sampling.max_new_tokens - before
        if request.shift is not None:
            limit = min(limit, self.stepper.sizes.context)
        uncounted = 0
        if request.sampling.penalize_new_only:
            kept = 0 if request.shift is None else request.shift.keep
            uncounted = len(prompt) - min(before, max(len(prompt) - kept, 0))
        request.sequence = Sequence(
            list(prompt),
            limit,
            priority=request.priority,
            salt=request.salt,
            owner=request,
            steps_before=before,
            constrained=request.matcher is not None,
            uncounted=uncounted,
            adapter=request.place,
            drafts=request.drafts,
            reads_prompt=request.prompt_results is not None and not before,
        )
        self.scheduler.add(request.sequence)

    def _end(self, request: Request) -> None:
        if request.sequence is not None:
            self.scheduler.remove(request.sequence)
            self.last_tokens = request.sequence.tokens
            request.sequence = None  # a cycle of references would keep the model
        del self.requests[request]

    def _steps(self) -> int:
        """Returns how many tokens the next step may sample per row."""
        streams = any(request.is_streamed for request in self.requests)
        longest = FLUENT_STEP if streams else SLOW_STEP
        return max(1, min(int(longest / self._step_seconds), MOST_STEPS))

    def _hand_out(self, ticket: Ticket) -> None:
        """Waits for a step's results and appends its tokens to their requests.

        The first tokens of prompts do not wait for the rows that decode after them.
        """
        began = max(self._last_results, ticket.started)
        for index in range(len(ticket.sampled)):
            waits = time.perf_counter()
            self.waiting_since = time.monotonic()
            try:
                ticket.wait(index)
            except Exception as error:
                self._blame(ticket.owners, error)
                return
            finally:
                self.waiting_since = None
            self.wait_seconds += time.perf_counter() - waits
            for result in ticket.results(index):
                self._push(result)
        self._last_results = time.perf_counter()
        if ticket.steps and self._clock:
            seconds = (self._last_results - began) / ticket.steps
            self._step_seconds = 0.5 * (self._step_seconds + seconds)

    def _push(self, result: Result) -> None:
        """Appends the tokens that a step sampled for a sequence, unless it left its slot since."""
        sequence, tokens = result.entry.sequence, result.tokens
        request = sequence.owner
        if result.entry.epoch != sequence.epoch or request not in self.requests:
            return
        if result.of_prompt is not None and isinstance(result.entry, Piece):
            request.prompt_results.put(result.entry.first, result.of_prompt)
        at = result.entry.samples_at
        if not tokens and at < sequence.limit:
            return
        timings = request.timings
        timings.reused_tokens = sequence.reused or 0
        timings.compile = self.stepper.programs.compile_seconds - request.compiled
        timings.drafted_tokens += result.drafted
        timings.accepted_tokens += result.accepted
        if not tokens:
            request.end_prompt()
            self._end(request)
            return
        known = len(sequence.tokens) - at  # a preempted sequence may sample tokens again
        new = tokens[known : sequence.limit - at]  # drafts may go beyond the limit
        taken = 0
        if new:
            logprobs = result.logprobs
            taken = self._take(request, new, None if logprobs is None else logprobs[known:])
        speculated = result.entry.speculates
        self.scheduler.commit(sequence, tokens[: known + taken], at, speculated=speculated)
        if new and request.matcher is not None and not request.is_done:
            self._force(request)
            if request.matcher.is_free:  # later steps need no masks
                request.matcher, sequence.constrained = None, False
        if request.is_done:
            self._end(request)
        elif len(sequence.tokens) >= sequence.limit:  # the context is full
            self.scheduler.remove(sequence)
            self._begin(request, request.shift.rest(sequence.tokens))

    def _take(
        self, request: Request, tokens: list[int], logprobs: list[TokenLogprobs] | None
    ) -> int:
        """Appends tokens to a request's text; returns how many of them belong to it."""
        try:
            taken = request.push(tokens, logprobs)
        except ConstraintError as error:
            request.fail(error)
            return 0
        self.new_tokens += taken
        return taken

    def _force(self, request: Request) -> None:
        """Appends the tokens that the request's constraint leaves no choice of."""
        sequence, matcher = request.sequence, request.matcher
        assert sequence is not None and matcher is not None
        if request.top is not None:
            return  # their log-probabilities are wanted
        forced = matcher.forced()[: sequence.limit - len(sequence.tokens)]
        if forced and (taken := self._take(request, forced, None)):
            # Prefill would count the last token, which is sampled, a second time.
            as_piece = not request.stages.penalizes
            self.scheduler.force(sequence, forced[:taken], as_piece=as_piece)


class Driver:
    """Lets one of the threads that wait for a loop's requests run it.

    While a thread drives, others only wait; when it has what it wanted, another one takes over.
    """

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._driving = threading.Lock()

    def wait(self, request: Request, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Drives the loop, or waits for the thread that does, until `condition` holds.

        Returns whether it holds; False only after `timeout` seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while not condition():
            if end is not None and time.monotonic() >= end:
                return False
            if self._driving.acquire(blocking=False):
                try:
                    self._drive(condition, end)
                finally:
                    self._driving.release()
                    self._wake_others(request)
            else:
                with request.changed:
                    # The driver may stop at any time without a result for this request.
                    if not condition():
                        request.changed.wait(0.05)
        return True

    def _drive(self, condition: Callable[[], bool], end: float | None) -> None:
        try:
            while not condition() and (end is None or time.monotonic() < end):
                self._loop.step()
        except Exception as error:
            self._loop.fail(error)
            raise
        except BaseException:  # Ctrl-C
            self._loop.recover()
            raise

    def _wake_others(self, request: Request) -> None:
        """Wakes the threads that wait for other requests, so that one of them drives."""
        for other in tuple(self._loop.requests):
            if other is not request:
                with other.changed:
                    other.changed.notify_all()
