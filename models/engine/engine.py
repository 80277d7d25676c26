"""Defines Engine: many requests on one model, batched at every step."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import operator
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_q4k import current_selection, page_dtype

from ..kv_cache.shapes import PAGE_SIZE
from ..runner.adapters import Adapter
from ..runner.model import Model
from ..sampling import Sampling
from .adapters import MOST_ADAPTERS, MOST_RANK, Adapters, adapters_of, check_room
from .arguments import (
    check_request,
    draft_of,
    embedding_rows,
    embedding_settings,
    prompt_rows,
    samplings_of,
)
from .loop import EngineLoop
from .outputs import Output
from .pools import Pools
from .processes import (
    HEARTBEAT,
    Codec,
    Leader,
    check_agreement,
    check_processes,
    described,
    follow,
)
from .prompt_results import PROMPT_ALONE, PooledVector, TokenVectors, vectors_of
from .request import ContextShift, Hooks, Request
from .scheduler import Scheduler
from .sizing import engine_limits, engine_sizes, expected_step_seconds, is_recurrent
from .stages import standard_stages
from .stepper import Stepper, row_buckets

#: Engines that are not closed.
_OPEN: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Closes all engines: a thread that Python ends at its exit, inside of JAX, aborts."""
    for engine in list(_OPEN):
        with contextlib.suppress(EngineClosedError):
            engine.close()


class EngineClosedError(RuntimeError):
    """The engine was closed, or has failed."""


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """State of an engine, and totals since its start.

    Attributes:
      running, waiting: requests with and without a row.
      pages, free_pages, cached_pages: pages of the kind of layers with the fewest free ones; those
        that can be allocated; and those of these that hold a cached prefix.
      page_tokens: tokens per page.
      max_rows, max_context: most running requests, and most tokens of one.
      preemptions: requests that gave their pages back and were prefilled again.
      compilations: programs that were compiled, or loaded from disk, after the warm-up.
      prompt_tokens, reused_tokens, new_tokens: tokens of prompts, those of them found in the prefix
        cache, and tokens of answers.
      lost_tokens: cached tokens that could not be reused, by reason.
      steps: device steps.
      run_tokens, step_tokens: tokens that steps were to run, rejected drafts and tokens prefilled
        again included; number of steps by their tokens, rounded up to a power of 2.
      wait_seconds, host_seconds: time that the engine's thread waited for steps, and processor time
        that it used to plan and start them and to hand out their results.
    """

    running: int
    waiting: int
    pages: int
    free_pages: int
    cached_pages: int
    page_tokens: int
    max_rows: int
    max_context: int
    preemptions: int
    compilations: int
    prompt_tokens: int
    reused_tokens: int
    new_tokens: int
    lost_tokens: dict[str, int]
    steps: int
    run_tokens: int
    step_tokens: dict[int, int]
    wait_seconds: float
    host_seconds: float


class Engine:
    """Runs many requests on one model: continuous batching over a shared pool of KV pages.

    Requests join and leave the batch at every step, whichever thread submits them. Prompts with
    equal beginnings share pages. If pages run out, the request that came last gives its pages back
    and continues later, with the same tokens. Use it as a context manager, or call `close`.

    If the model is on devices of several processes, all of them create the engine, with the same
    arguments. Process 0 takes the requests, and the engines of the others run the same programs
    until it closes its engine; meanwhile no process may use these devices for anything else.

    Attributes:
      model: the model.
      leads: whether the engine takes requests; only those of processes other than 0 do not.
    """

    def __init__(
        self,
        model: Model,
        *,
        max_rows: int = 16,
        pages: int | None = None,
        max_context: int | None = None,
        deterministic: bool = False,
        draft: Any = None,
        cache_dtype: Any = jnp.float32,
        warm_up: bool = True,
        constraints: bool = False,
        max_adapters: int = 0,
        max_adapter_rank: int = 16,
        process_timeout: float = 60.0,
    ) -> None:
        """Allocates the pages, compiles the programs, and starts the engine's thread.

        Args:
          max_rows: requests that run at a time; others wait.
          pages: KV pages of 16 tokens, shared by all requests; None takes as many as half of the
            free memory of a CPU or 90 % of a GPU's holds, at most `max_rows` full contexts.
          max_context: maximum tokens of a prompt and its answer together; None means the model's
            context length, or fewer if the pages hold less. Models with other rope factors in long
            contexts choose them by this number, not by a request's length.
          deterministic: makes tokens and log-probabilities independent of other requests, of cached
            prefixes and preemptions, bit by bit. Every product then has at least 16 rows, so that
            few requests take longer; a preempted request samples its tokens again, and answers are
            not reused as prefixes.
          draft: speculative decoding, as in `generate`; None means off. Steps with so many rows
            that drafts would cost more than they save, which the warm-up measures, and steps with
            constrained rows run without drafts. Over several processes the model's own
            multi-token-prediction layer cannot be used.
          cache_dtype: dtype of the pages, as in `generate`.
          warm_up: compiles all programs now. False compiles each when it is first needed.
          constraints: also compiles now what requests with a `Sampling.constraint` need.
          max_adapters: LoRA adapters that can be loaded at a time; see `load_adapter`. Requests
            with different ones, or none, run in one batch. It takes memory for as many, twice as
            many programs, and time of steps with an adapter. 0 means that none can be loaded.
          max_adapter_rank: largest rank of an adapter.
          process_timeout: seconds that process 0 waits in a step for the other processes that share
            the model's devices; then the engine has failed.

        Raises:
          TypeError: `model` is not a Model, or another type of `draft`. ValueError: a number out of
            range, or a draft that does not fit the model; adapters for a model on several devices;
            drafts of a deterministic engine for a model with recurrent layers or experts; processes
            that do not agree. All before anything is allocated.
        """
        if not isinstance(model, Model):
            raise TypeError(f"model is of type {type(model).__name__}; it must be a Model")
        if model.config.kind.bidirectional:
            raise ValueError(
                f"model is an encoder, {model.config.architecture}; EncoderEngine runs it"
            )
        self.model = model
        dtype = page_dtype(cache_dtype, "cache_dtype")
        context = _checked(max_context, "max_context", model.config.context_length)
        rows = _checked(max_rows, "max_rows", 1024) or 1
        pages = _checked(pages, "pages", 2**31 // PAGE_SIZE - 1)
        kind = draft_of(draft, model)
        if not process_timeout > 0:
            raise ValueError(f"process_timeout={process_timeout} must be above 0")
        rounds = is_recurrent(model.config) or model.config.experts is not None
        if deterministic and kind is not None and rounds:
            problem = "recurrent layers and experts round several tokens in another way than one"
            raise ValueError(f"deterministic cannot be combined with draft: {problem}")
        places = _checked(max_adapters, "max_adapters", MOST_ADAPTERS, 0) or 0
        rank = _checked(max_adapter_rank, "max_adapter_rank", MOST_RANK) or 1
        check_room(places, model)
        self._adapters = Adapters(model, places, rank)
        stacks = self._adapters.stacks()
        selection = current_selection()._replace(batch_invariant=deterministic)
        self._several = model.spans_processes
        self.leads = not self._several or jax.process_index() == 0
        if self._several:
            check_processes(model)
            options = rows, pages, context, dtype, deterministic, warm_up, constraints, selection
            check_agreement(repr((model.network.fingerprint(), described(kind), options)))
        self._limits = engine_limits(model, rows, kind, deterministic=deterministic)
        self._sizes = engine_sizes(model, self._limits, pages, context, dtype, kind)
        counts = dict(zip(self._sizes.kinds, self._sizes.pages, strict=True))
        snapshots = self._sizes.snapshots if is_recurrent(model.config) else None
        align = max(self._limits.align, PAGE_SIZE)
        pools = [Pools(counts, snapshots, align=align) for _ in range(self._sizes.groups)]
        end_ids = () if model.tokenizer is None else tuple(model.tokenizer.eos_token_ids)
        stepper = Stepper(
            model,
            self._sizes,
            row_buckets(self._sizes.slots, model.network.on_gpu, deterministic),
            cache_dtype=dtype,
            selection=selection,
            standard=standard_stages(end_ids),
            skips=True,
            draft=kind,
            deterministic=deterministic,
            adapters=stacks,
        )
        scheduler = Scheduler(pools, self._limits, stepper.drafts_pay)
        self._loop = EngineLoop(scheduler, stepper, step_seconds=expected_step_seconds(model))
        if warm_up:
            stepper.warm_up(self._limits.shapes, constraints=constraints)
            if places:
                stepper.put_adapter(1, self._adapters.nothing())
        self._warm = stepper.programs.compilations
        codec = Codec(stepper.common) if self._several else None
        leader = Leader(codec) if codec is not None and self.leads else None
        stepper.executor.peers = leader
        self._wake = threading.Condition()
        self._closing = self._is_stuck = False
        self._error: BaseException | None = None
        self._pid = os.getpid()
        run: Any = functools.partial(_run, weakref.ref(self), self._wake, self._loop, leader)
        if codec is not None and not self.leads:
            run = functools.partial(self._follow, codec)
        self._thread = threading.Thread(target=run, daemon=True, name="jax-q4k-engine")
        self._thread.start()
        if leader is not None:
            watched = weakref.ref(self), self._thread, self._loop, leader, process_timeout
            threading.Thread(target=_watch, args=watched, daemon=True).start()
        _OPEN.add(self)

    def submit(
        self,
        prompt: Any,
        sampling: Sampling | None = None,
        *,
        shift: ContextShift | None = None,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str | None = None,
        drafts: bool = True,
        **fields: Any,
    ) -> Request:
        """Adds a request and returns at once.

        Args:
          prompt: a text, or token ids.
          sampling: None means greedy sampling of up to 64 tokens.
          shift: context shift when the context is full; None means that prompt and new tokens must
            fit into the context.
          priority: requests with lower values are served first, and preempted last.
          cache_salt: requests share cached prefixes only with requests of the same salt, so that
            nobody learns by timing what others have asked.
          adapter: name of a LoRA adapter that `load_adapter` has loaded; None means none.
          drafts: whether the request takes part in the engine's speculative decoding, if it has
            any.
          fields: fields of `Sampling` that override `sampling`.

        Raises:
          ValueError, TypeError: as `generate` does, for arguments that cannot be run; nothing is
            added then. EngineClosedError: the engine is closed or has failed.
        """
        self._check_open()
        rows, single = prompt_rows(self.model, prompt)
        if not single:
            raise TypeError("prompt is a list of prompts; submit one, or call generate")
        (one,) = samplings_of(sampling, fields, 1)
        request = self._request(rows[0], one, shift)
        request.priority, request.salt = operator.index(priority), cache_salt.encode()
        request.adapter, request.drafts = adapter, drafts
        self._add([request])
        return request

    def submit_embedding(
        self,
        text: Any,
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        priority: int = 0,
    ) -> Request:
        """Adds a request for the embedding of a text, or of token ids, and returns at once.

        The `embedding` of its output is that of `models.embed`, whose arguments these are. It runs
        in the steps of all requests, and its pages are free when it ends.

        Raises:
          ValueError, TypeError: as `models.embed` does, and for a text beyond `max_context` or the
            pages. EngineClosedError: the engine is closed or has failed.
        """
        self._check_open()
        requests, single = self._embeddings(text, pooling, normalize)
        if not single:
            raise TypeError("text is a list of texts; submit one, or call embed")
        (request,) = requests
        request.priority = operator.index(priority)
        self._add([request])
        return request

    def embed(
        self, texts: Any, *, pooling: str | None = None, normalize: bool | None = None
    ) -> Any:
        """Computes embeddings of one text, or of each of a list of texts, like `models.embed`.

        Returns an array (rows, hidden_size), or (hidden_size,) for a single text; with
        pooling="none" a list of arrays (tokens, hidden_size), or one of them.
        """
        self._check_open()
        requests, single = self._embeddings(texts, pooling, normalize)
        vectors = [output.embedding for output in self._results(requests)]
        if single:
            return vectors[0]
        is_one_each = all(vector is not None and vector.ndim == 1 for vector in vectors)
        return np.stack(vectors) if is_one_each else vectors  # type: ignore[arg-type]

    def generate(
        self,
        prompts: Any,
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        shift: ContextShift | None = None,
        adapter: str | Sequence[str | None] | None = None,
        **fields: Any,
    ) -> Any:
        """Continues one prompt, or each of a list of prompts, like `models.generate`.

        adapter: name of the LoRA adapter, or a list with one for each prompt; None means none.

        Returns an Output, or a list of them in the order of the prompts.
        """
        rows, single = prompt_rows(self.model, prompts)
        samplings = samplings_of(sampling, fields, len(rows))
        adapters = adapters_of(adapter, len(rows))
        self._check_open()
        pairs = zip(rows, samplings, strict=True)
        requests = [self._request(ids, one, shift) for ids, one in pairs]
        for request, name in zip(requests, adapters, strict=True):
            request.adapter = name
        outputs = self._results(requests)
        return outputs[0] if single else outputs

    def load_adapter(self, name: str, adapter: Adapter, *, scale: float = 1.0) -> None:
        """Loads a LoRA adapter, which requests may then name; others run on meanwhile.

        Compiles nothing. An engine has room for `max_adapters`; the place of an unloaded one is
        free when the last request that uses it has ended.

        Args:
          name: 1 to 64 letters, digits and `._-/`.
          adapter: result of `models.read_lora`. The base model may have adapters of its own.
          scale: factor of the adapter, in addition to its own.

        Raises:
          ValueError: a name that is taken or malformed, no free place, a larger rank than
            `max_adapter_rank`, or an adapter of the output matrix or of another model. TypeError:
            not an Adapter. EngineClosedError: the engine is closed or has failed.
        """
        self._check_open()
        entry = self._adapters.entry(name, adapter, scale)

        def load() -> None:
            self._check_open()
            with self._wake:
                place = self._adapters.free_place(name, self._loop.adapters_in_use)
            self._loop.stepper.put_adapter(place, entry)
            with self._wake:
                self._adapters.add(name, place)

        self._loop.call(load, self._thread.is_alive, self._notify)

    def unload_adapter(self, name: str) -> None:
        """Makes an adapter's name unknown at once; requests that use it run to their end.

        Raises ValueError for a name that is not loaded.
        """
        with self._wake:
            self._check_open()
            self._adapters.remove(name)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""
        return self._adapters.names

    def stats(self) -> EngineStats:
        """Returns the engine's state and totals."""
        scheduler, stepper = self._loop.scheduler, self._loop.stepper
        pools = [pool for group in scheduler.pools for pool in group.pages.values()]
        pool = min(pools, key=lambda pool: pool.free / pool.count)
        counters = scheduler.counters
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(self._loop.requests) - len(scheduler.running),
            pages=pool.count,
            free_pages=pool.free,
            cached_pages=pool.cached,
            page_tokens=PAGE_SIZE,
            max_rows=self._limits.rows * len(scheduler.pools),
            max_context=self._sizes.context,
            preemptions=counters.preemptions,
            compilations=stepper.programs.compilations - self._warm,
            prompt_tokens=counters.prompt_tokens,
            reused_tokens=counters.reused_tokens,
            new_tokens=self._loop.new_tokens,
            lost_tokens=dict(counters.lost),
            steps=counters.steps,
            run_tokens=self._loop.run_tokens,
            step_tokens=dict(self._loop.step_tokens),
            wait_seconds=self._loop.wait_seconds,
            host_seconds=self._loop.host_seconds,
        )

    @property
    def is_open(self) -> bool:
        """Whether it takes requests: it is not closed, and has not failed."""
        return self._error is None and not self._closing and os.getpid() == self._pid

    def check(self) -> None:
        """Checks the books of pages and slots; raises AssertionError with what is wrong."""
        self._loop.call(self._loop.scheduler.check, self._thread.is_alive, self._notify)

    @property
    def failure(self) -> BaseException | None:
        """Error that ended the engine; None while it is open, and after `close`."""
        return self._error

    def close(self) -> None:
        """Ends the engine: requests that are not finished raise EngineClosedError.

        In a process that takes no requests, waits until process 0 closes its engine. Raises
        EngineClosedError there if one of the two has failed.
        """
        if os.getpid() != self._pid:
            return  # another thread of the parent may have held the lock
        with self._wake:
            self._closing = self.leads
            self._wake.notify_all()
        if threading.current_thread() is not self._thread:
            while self._thread.is_alive() and not self._is_stuck:
                self._thread.join(0.1 if self._several else None)
        if not self.leads and self._error is not None:
            raise EngineClosedError(_failed(self._error)) from self._error

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self.leads or kind is None:  # else the error must not wait for process 0
            self.close()

    def _results(self, requests: list[Request]) -> list[Output]:
        """Adds requests and waits for all of them."""
        self._add(requests)
        try:
            return [request.result() for request in requests]
        finally:
            for request in requests:
                request.cancel()

    def _embeddings(
        self, texts: Any, pooling: str | None, normalize: bool | None
    ) -> tuple[list[Request], bool]:
        """Returns a request for each text, and whether `texts` is a single one."""
        pooling, normalize = embedding_settings(self.model, pooling, normalize)
        rows, single = embedding_rows(self.model, texts, self._sizes.context)
        return [
            self._request(ids, PROMPT_ALONE, None, vectors_of(len(ids), pooling, normalize))
            for ids, *_ in rows
        ], single

    def _request(
        self,
        ids: np.ndarray,
        sampling: Sampling,
        shift: ContextShift | None,
        vectors: TokenVectors | PooledVector | None = None,
    ) -> Request:
        """Returns a request whose arguments fit the engine; vectors: an embedding."""
        context = self._sizes.context
        check_request(self.model, ids, sampling, shift, context)
        if sampling.processors and self._loop.stepper.executor.peers is not None:
            raise ValueError("processors cannot run in an engine over several processes")
        length = min(len(ids) + sampling.max_new_tokens, context)
        if not self._loop.scheduler.fits(length):
            raise ValueError(
                f"a prompt of {len(ids)} tokens and max_new_tokens={sampling.max_new_tokens} need "
                f"more than the engine's {self.stats().pages} pages of {PAGE_SIZE} tokens"
            )
        hooks = Hooks(self._cancel, self._wait, self._loop.now)
        return Request(self.model, ids.tolist(), sampling, shift, hooks, vectors)

    def _follow(self, codec: Codec) -> None:
        """Runs the thread of an engine that takes no requests."""
        try:
            if error := follow(self._loop.stepper.executor, codec):
                self._error = RuntimeError(f"process 0: {error}")
        except BaseException as failure:
            self._error = failure
        finally:
            self._closing = True

    def _abandon(self, problem: str) -> None:
        """Ends the engine although its thread does not end."""
        self._error = TimeoutError(problem)
        self._is_stuck = True
        error = EngineClosedError(_failed(self._error))
        error.__cause__ = self._error
        with self._wake:
            self._loop.abandon(error)

    def _add(self, requests: list[Request]) -> None:
        with self._wake:
            self._check_open()
            found = [self._adapters.find(request.adapter) for request in requests]
            for request, adapter in zip(requests, found, strict=True):
                request.place, request.salt = adapter.place, adapter.salt + request.salt
                self._loop.submit(request)
            self._wake.notify_all()

    def _cancel(self, request: Request) -> None:
        with self._wake:
            self._loop.cancel(request)
            self._wake.notify_all()

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify_all()

    def _wait(self, request: Request, condition: Any, timeout: float | None) -> bool:
        if condition():
            return True
        self._check_process()
        with request.changed:
            return request.changed.wait_for(condition, timeout)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise EngineClosedError("the engine runs in the process that created it, not in a fork")

    def _check_open(self) -> None:
        self._check_process()
        if not self.leads:
            raise RuntimeError(
                f"this is process {jax.process_index()}; process 0 takes the requests"
            )
        if self._error is not None:
            raise EngineClosedError(_failed(self._error)) from self._error
        if self._closing:
            raise EngineClosedError("the engine is closed")


def _run(
    engine: weakref.ref[Engine], wake: threading.Condition, loop: EngineLoop, leader: Leader | None
) -> None:
    """Runs the engine's thread until the engine is closed or collected.

    leader: sends its calls to other processes; None means that there are none.
    """
    failure: BaseException | None = None
    idle = None if leader is None else HEARTBEAT
    try:
        while (has_work := _has_work(engine, wake, loop, idle)) is not None:
            if has_work:
                loop.step()
            elif leader is not None:
                leader.send_beat()
    except BaseException as raised:
        failure = raised
        if (found := engine()) is not None:
            found._error = failure
    error = EngineClosedError("the engine is closed" if failure is None else _failed(failure))
    error.__cause__ = failure
    loop.stepper.executor.peers = None
    with wake:
        loop.fail(error)
    # After an error of the devices nothing can be sent, and this process should end.
    if leader is not None and not isinstance(failure, jax.errors.JaxRuntimeError):
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            leader.send_end("" if failure is None else repr(failure))


def _watch(
    engine: weakref.ref[Engine],
    thread: threading.Thread,
    loop: EngineLoop,
    leader: Leader,
    seconds: float,
) -> None:
    """Ends the engine if its thread waits for other processes for too long."""
    while thread.is_alive():
        thread.join(0.5)
        began = leader.waiting_since or loop.waiting_since
        if began is not None and time.monotonic() >= began + seconds:
            if (found := engine()) is not None:
                problem = f"another process has not done its part of a step for {seconds:g} s"
                found._abandon(f"{problem}; it may have ended")
            return


def _failed(error: BaseException) -> str:
    """Returns a message about the error that ended an engine."""
    problem = "the engine has failed"
    if isinstance(error, jax.errors.JaxRuntimeError) and jax.process_count() > 1:
        problem += "; another process may have ended"
    return f"{problem}: {str(error) or repr(error)}"


def _has_work(
    engine: weakref.ref[Engine], wake: threading.Condition, loop: EngineLoop, idle: float | None
) -> bool | None:
    """Waits for requests; returns None when the engine is closed or collected.

    idle: seconds after which False is returned if there are no requests.
    """
    began = time.monotonic()
    with wake:
        while True:
            found = engine()
            if found is None or found._closing:
                return None
            if loop.has_work:
                return True
            if idle is not None and time.monotonic() >= began + idle:
                return False
            del found
            wake.wait(1.0)


def _checked(value: int | None, name: str, most: int, least: int = 1) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name}={value!r} must be an integer or None")
    if not least <= value <= most:
        raise ValueError(f"{name}={value} must be {least} to {most}")
    return int(value)
