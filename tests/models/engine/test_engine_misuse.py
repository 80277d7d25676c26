"""Wrong arguments of `Engine`, and what goes wrong while it runs: typed errors, and no hang."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.engine import loop
from jax_q4k.models.engine.request import Request
from jax_q4k.models.engine.scheduler import Scheduler
from jax_q4k.models.engine.stepper import Stepper

from ..golden_files import model
from .engine_runs import (
    Gate,
    alone,
    exactly,
    is_idle,
    prompts_of,
    samplings_of,
    tokens_of,
    wait_until,
)


@pytest.fixture(scope="module")
def engine() -> Iterator[models.Engine]:
    with exactly(model("llama-gqa"), pages=6) as made:
        yield made


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_rows": 0}, ValueError, "max_rows=0 must be 1 to"),
        ({"max_rows": -1}, ValueError, "max_rows=-1 must be 1 to"),
        ({"max_rows": 2.0}, TypeError, "max_rows=2.0 must be an integer"),
        ({"max_rows": True}, TypeError, "max_rows=True must be an integer"),
        ({"pages": 0}, ValueError, "pages=0 must be 1 to"),
        ({"pages": "9"}, TypeError, "pages='9' must be an integer"),
        ({"max_context": 0}, ValueError, "max_context=0 must be 1 to 2048"),
        ({"max_context": 2049}, ValueError, "max_context=2049 must be 1 to 2048"),
        ({"max_context": math.inf}, TypeError, "max_context=inf must be an integer"),
        ({"cache_dtype": jnp.int32}, TypeError, "cache_dtype"),
        ({"process_timeout": 0}, ValueError, "process_timeout=0 must be above 0"),
        ({"process_timeout": math.nan}, ValueError, "process_timeout=nan must be above 0"),
        ({"rows": 2}, TypeError, "rows"),
    ],
)
def test_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    loaded = model("llama-gqa")
    before = len(jax.live_arrays())
    with pytest.raises(error, match=message):
        models.Engine(loaded, **options)
    assert len(jax.live_arrays()) <= before


def test_other_things_than_a_model() -> None:
    with pytest.raises(TypeError, match="model is of type str; it must be a Model"):
        models.Engine("llama-gqa")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (([1] * 64,), {"max_new_tokens": 1}, ValueError, "exceed the context length, 64"),
        (([1] * 40,), {"max_new_tokens": 25}, ValueError, "exceed the context length, 64"),
        (([],), {}, ValueError, "at least one"),
        (([512],), {"max_new_tokens": 1}, ValueError, "512"),
        (([-1],), {"max_new_tokens": 1}, ValueError, "-1"),
        (([1.5],), {"max_new_tokens": 1}, TypeError, "prompt"),
        (("text",), {"max_new_tokens": 1}, ValueError, "no tokenizer"),
        ((b"text",), {}, TypeError, "bytes"),
        ((None,), {}, TypeError, "NoneType"),
        (([1], {"temperature": 1}), {}, TypeError, "it must be a Sampling"),
        (([1], models.Sampling(stop="x", max_new_tokens=3)), {}, ValueError, "needs a tokenizer"),
        (([1],), {"max_new_tokens": 0}, ValueError, "max_new_tokens=0"),
        (([1],), {"tokens": 3}, TypeError, "tokens"),
        (([1],), {"logit_bias": {512: 1.0}, "max_new_tokens": 3}, ValueError, "token 512"),
        (([1],), {"shift": 3, "max_new_tokens": 3}, TypeError, "must be a ContextShift"),
        (([1],), {"shift": models.ContextShift(40)}, ValueError, "leaves no room"),
    ],
)
def test_requests(
    engine: models.Engine,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    """Nothing is added, neither by `submit` nor by `generate`."""
    before = engine.stats()
    for call in (engine.submit, engine.generate):
        with pytest.raises(error, match=message):
            call(*arguments, **options)
    if isinstance(arguments[0], list) and len(arguments[0]) > 1:
        with pytest.raises(error, match=message):
            engine.generate([[1, 2], arguments[0]], **options)
    assert engine.stats() == before and not engine._loop.has_work


def test_several_prompts_for_submit(engine: models.Engine) -> None:
    for prompts in ([[1, 2], [3]], [[1, 2]]):
        with pytest.raises(TypeError, match="prompt is a list of prompts; submit one"):
            engine.submit(prompts)
    with pytest.raises(ValueError, match="sampling has 2 items for 1 prompts"):
        engine.generate([[1]], [models.Sampling()] * 2)


def test_more_than_all_pages() -> None:
    with exactly(model("llama-gqa"), pages=3) as small:
        with pytest.raises(
            ValueError, match=r"40 tokens and max_new_tokens=24 need.*3 pages of 16"
        ):
            small.submit([1] * 40, max_new_tokens=24)
        with pytest.raises(ValueError, match="3 pages"):
            small.submit([1] * 40, max_new_tokens=90, shift=models.ContextShift())
        assert small.stats().waiting == 0


def test_context_without_a_choice() -> None:
    """Takes no more context than the pages hold."""
    with exactly(model("llama-gqa"), pages=3, max_context=None) as small:
        assert small.stats().max_context == 48


def test_after_close() -> None:
    engine = exactly(model("llama-gqa"))
    engine.close()
    for call in (engine.submit, engine.generate):
        with pytest.raises(models.EngineClosedError, match="the engine is closed"):
            call([1])
    engine.check()
    assert engine.stats().running == 0
    assert issubclass(models.EngineClosedError, RuntimeError)


def raising(logits: jax.Array, tokens: jax.Array, length: jax.Array) -> jax.Array:
    raise ZeroDivisionError("in a processor")


def shortened(logits: jax.Array, tokens: jax.Array, length: jax.Array) -> jax.Array:
    return logits[1:]


def without_sevens(logits: jax.Array, tokens: jax.Array, length: jax.Array) -> jax.Array:
    return logits.at[7].set(-jnp.inf)


@pytest.mark.slow("compiles a program for each processor")
@pytest.mark.parametrize(
    ("wrong", "error"), [(raising, ZeroDivisionError), (shortened, ValueError)]
)
def test_processors_that_cannot_be_traced(
    engine: models.Engine, wrong: Any, error: type[Exception]
) -> None:
    """Only their request fails; others go on, also those with a processor of their own."""
    prompts = prompts_of(engine.model)[:2]
    samplings = samplings_of(2)
    samplings[1] = samplings[1].replaced(processors=without_sevens)
    want = tokens_of(alone(engine.model, prompts, samplings))
    engine.generate(prompts, samplings)
    with Gate(engine) as gate:
        first = engine.submit(prompts[0], samplings[0])
        gate.step(4)
        bad = engine.submit([1, 2, 3], max_new_tokens=5, processors=[without_sevens, wrong])
        last = engine.submit(prompts[1], samplings[1])
    with pytest.raises(error):
        bad.result(60)
    assert first.result(60).tokens == want[0] and last.result(60).tokens == want[1]
    with Gate(engine) as gate:  # in one step with another processor
        last = engine.submit(prompts[1], samplings[1])
        gate.step(4)
        bad = engine.submit([1, 2, 3], max_new_tokens=5, processors=wrong)
    with pytest.raises(error):
        bad.result(60)
    assert last.result(60).tokens == want[1]
    wait_until(lambda: is_idle(engine))
    engine.check()
    assert tokens_of(engine.generate(prompts, samplings)) == want


@pytest.mark.slow("compiles a program for each processor")
@pytest.mark.parametrize("steps", [1, 64])
def test_a_processor_that_fails_at_run_time(
    engine: models.Engine, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Only its request fails; others go on to the same tokens."""
    monkeypatch.setattr(loop, "FLUENT_STEP", 1e9 if steps > 1 else 0.0)
    monkeypatch.setattr(loop, "SLOW_STEP", 1e9 if steps > 1 else 0.0)
    prompts, samplings = prompts_of(engine.model)[:2], samplings_of(2)
    want = tokens_of(alone(engine.model, prompts, samplings))

    def check(length: Any) -> Any:
        if length > 6:
            raise ZeroDivisionError("no more tokens")
        return length

    def failing(logits: jax.Array, tokens: jax.Array, length: jax.Array) -> jax.Array:
        type_ = jax.ShapeDtypeStruct((), jnp.int32)
        checked = jax.pure_callback(check, type_, length, vmap_method="sequential")
        return logits + 0.0 * checked.astype(jnp.float32)

    for count in (30, 4):  # in the middle of its answer, and after the last token that it may get
        with Gate(engine):
            requests = [engine.submit(*both) for both in zip(prompts, samplings, strict=True)]
            bad = engine.submit([1, 2, 3, 4], max_new_tokens=count, processors=failing)
        with pytest.raises(Exception, match="no more tokens"):
            bad.result(60)
        assert [request.result(60).tokens for request in requests] == want
    wait_until(lambda: is_idle(engine))
    engine.check()
    assert tokens_of(engine.generate(prompts, samplings)) == want


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, SystemExit])
def test_a_step_that_fails(monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    """Every open request raises at once, in every way of waiting, and later calls do."""
    engine = exactly(model("llama-gqa"))
    fails = threading.Event()

    def dispatch(stepper: Stepper, plan: Any) -> Any:
        fails.wait()
        raise error("no more steps")

    async def read(request: Request) -> None:
        async for _ in request:
            pass

    with monkeypatch.context() as patched:
        patched.setattr(Stepper, "dispatch", dispatch)
        requests = [engine.submit([1, 2, i], max_new_tokens=20) for i in range(5)]
        cancelled = engine.submit([1], max_new_tokens=20)
        assert cancelled.cancel()
        with ThreadPoolExecutor(5) as pool:
            waits: list[Any] = [pool.submit(request.result) for request in requests[:3]]
            waits.append(pool.submit(lambda: list(requests[3])))
            waits.append(pool.submit(lambda: asyncio.run(read(requests[4]))))
            time.sleep(0.1)
            fails.set()
            for wait in waits:
                with pytest.raises(models.EngineClosedError, match="no more steps"):
                    wait.result(10)
    for request in requests:
        with pytest.raises(models.EngineClosedError, match="the engine has failed") as raised:
            request.result()
        assert isinstance(raised.value.__cause__, error) and not request.cancel()
    assert cancelled.result().finish_reason == "cancelled"
    wait_until(lambda: not engine._thread.is_alive())
    for call in (engine.submit, engine.generate):
        with pytest.raises(models.EngineClosedError, match="the engine has failed: no more steps"):
            call([1])
    engine.stats()
    engine.close()


def test_a_result_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the device arrives with the results, after the next step has started."""
    engine = exactly(model("llama-gqa"))
    hand_out = type(engine._loop)._hand_out

    def failing(loop: Any, ticket: Any) -> None:
        hand_out(loop, ticket)
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(type(engine._loop), "_hand_out", failing)
    requests = [engine.submit([1, 2, i], max_new_tokens=20) for i in range(3)]
    for request in requests:
        with pytest.raises(models.EngineClosedError, match="the device is lost"):
            request.result(60)
    *_, last = iter_until_error(requests[0])
    assert isinstance(last, models.EngineClosedError)
    engine.close()


def iter_until_error(request: Request) -> list[Any]:
    """Returns the pieces of a request and the error that ends them."""
    pieces: list[Any] = []
    try:
        pieces += request
    except Exception as error:
        pieces.append(error)
    return pieces


def test_exit_without_close() -> None:
    """The program ends in the middle of an answer; Python would end the thread inside of JAX."""
    program = """
from jax_q4k import models
engine = models.Engine(models.load("demo"), max_rows=2, warm_up=False)
requests = [engine.submit("The sea", max_new_tokens=400, ignore_end=True) for _ in range(2)]
next(iter(requests[0]))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_fork(engine: models.Engine) -> None:
    """The child's calls raise at once, and the parent goes on."""
    want = engine.generate([1, 2, 3], max_new_tokens=9).tokens
    with Gate(engine) as gate:
        request = engine.submit([1, 2, 3], max_new_tokens=9)
        gate.step(2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX warns of threads
            child = os.fork()
        if not child:
            status = 1
            try:
                calls: list[Any] = [engine.submit, engine.generate]
                calls += [lambda _: request.result(), lambda _: list(request)]
                for call in calls:
                    try:
                        call([1])
                    except models.EngineClosedError as error:
                        assert "not in a fork" in str(error)
                    else:
                        raise AssertionError("no error")
                engine.stats()
                engine.close()
                status = 0
            finally:
                os._exit(status)
        end = time.monotonic() + 20
        while not (found := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > end:
                os.kill(child, 9)
                os.waitpid(child, 0)
                pytest.fail("the child hangs")
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(found[1]) == 0
    assert request.result(60).tokens == want
    assert engine.generate([1, 2, 3], max_new_tokens=9).tokens == want


@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [
        (Scheduler, "plan", True),
        (Stepper, "dispatch", False),
        (Stepper, "dispatch", True),
        (Request, "push", False),
        (Request, "push", True),
    ],
    ids=["planned", "before a step", "after a step", "before a token", "after a token"],
)
@pytest.mark.usefixtures("exact")
def test_ctrl_c_in_a_call_that_shares_its_session(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: bool
) -> None:
    """The call of another thread goes on to the same tokens.

    That thread may drive both until it has its tokens; this one, which has more, then drives on.
    """
    loaded = model("llama-gqa")
    prompts = prompts_of(loaded)[:2]
    options: dict[str, Any] = {"max_new_tokens": 24, "ignore_end": True, "temperature": 0.8}
    longer = options | {"max_new_tokens": 48}
    want = [models.generate(loaded, prompts[0], **options).tokens]
    want.append(models.generate(loaded, prompts[1], **longer).tokens)
    function, calls = getattr(owner, name), [0]
    both = threading.Barrier(2)

    def interrupted(self: Any, *arguments: Any, **more: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return function(self, *arguments, **more)
        calls[0] += 1
        found = function(self, *arguments, **more) if after or calls[0] != 4 else None
        if calls[0] == 4:
            raise KeyboardInterrupt
        return found

    def other() -> list[int]:
        with jq.implementation(activations="f32"):
            both.wait()
            tokens: list[int] = models.generate(loaded, prompts[0], **options).tokens
            return tokens

    with monkeypatch.context() as patched, ThreadPoolExecutor(1) as pool:
        patched.setattr(owner, name, interrupted)
        patched.setattr(loop, "FLUENT_STEP", 0.0)  # a token a step
        patched.setattr(loop, "SLOW_STEP", 0.0)
        running = pool.submit(other)
        both.wait()
        pieces = models.stream(loaded, prompts[1], **longer)
        with pytest.raises(KeyboardInterrupt):
            while True:  # the stream makes this thread drive
                next(pieces)
        assert running.result(60) == want[0]
    assert models.generate(loaded, prompts[1], **longer).tokens == want[1]
