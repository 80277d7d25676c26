"""Requests of `Engine` as users see them: streams, cancellation, prefixes, statistics, the end."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import gc
import json
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import jax
import pytest
from support.paths import GOLDEN

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.engine.request import Changes

from ..golden_files import model
from .engine_runs import Gate, alone, exactly, is_idle, prompts_of, tokens_of, wait_until

SPM = json.loads((GOLDEN / "text-spm.json").read_text())
PROMPT = SPM["prompt_text"]
LONG = models.Sampling(max_new_tokens=90, ignore_end=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[models.Engine]:
    with exactly(model("text-spm"), max_context=128, pages=16) as made:
        yield made


@pytest.fixture(autouse=True)
def _leaves_nothing(engine: models.Engine) -> Iterator[None]:
    """Checks after each test that it left no request and no page behind."""
    yield
    wait_until(lambda: is_idle(engine))
    engine.check()


def test_text(engine: models.Engine) -> None:
    request = engine.submit(PROMPT, max_new_tokens=32)
    out = request.result()
    assert out.tokens == SPM["greedy_f32"] and request.is_done
    tokenizer = engine.model.tokenizer
    assert tokenizer is not None
    assert out.text == tokenizer.decode(out.tokens, strip_prefix=False)
    assert out.finish_reason == "length" and out.logprobs is None
    assert request.result() is out and request.result(timeout=0) is out
    timings = out.timings
    assert timings.prompt_tokens == len(SPM["prompt"]) and timings.new_tokens == 32
    assert timings.first_token > 0 and timings.decode > 0 and timings.decoded_tokens == 31


def test_pieces(engine: models.Engine) -> None:
    """Pieces are those of `models.stream`, in each of several loops, during and after the text."""
    with jq.implementation(activations="f32"):
        want = list(models.stream(engine.model, PROMPT, max_new_tokens=32))
    request = engine.submit(PROMPT, max_new_tokens=32)
    pairs = list(zip(request, request, strict=True))
    for got in ([a for a, _ in pairs], [b for _, b in pairs], list(request)):
        assert [(p.token, p.text) for p in got] == [(p.token, p.text) for p in want]
        assert [p.output for p in got[:-1]] == [None] * 32 and got[-1].output == request.result()
    assert "".join(piece.text for piece in request) == request.result().text


def test_pieces_come_as_the_tokens_do(engine: models.Engine) -> None:
    with Gate(engine) as gate:
        request = engine.submit(PROMPT, max_new_tokens=8)
        pieces = iter(request)
        gate.step(2)  # the second step is planned before the first one's results are read
        assert next(pieces).token == SPM["greedy_f32"][0] and not request.is_done
    assert len(list(pieces)) == 8


def test_async_loops(engine: models.Engine) -> None:
    """Two loops over a request, and one over another, run in one event loop."""

    async def read(request: models.Request) -> list[models.Piece]:
        return [piece async for piece in request]

    async def both() -> tuple[list[models.Piece], ...]:
        one, two = engine.submit(PROMPT, max_new_tokens=32), engine.submit("The", max_new_tokens=9)
        return await asyncio.gather(read(one), read(two), read(one))

    first, other, again = asyncio.run(both())
    assert [piece.token for piece in first] == [*SPM["greedy_f32"], None]
    assert first == again and len(other) == 10
    assert first[-1].output is not None and first[-1].output.finish_reason == "length"


def test_async_loops_that_end_early(engine: models.Engine) -> None:
    """A reader that breaks, or whose event loop is closed, does not disturb the engine."""

    async def some(request: models.Request) -> None:
        async for _ in request:
            break

    request = engine.submit(PROMPT, LONG)
    asyncio.run(some(request))
    assert not request._listeners
    left, loop = engine.submit(PROMPT, LONG), asyncio.new_event_loop()
    reader = left.__aiter__()
    loop.run_until_complete(reader.__anext__())
    loop.close()  # without a chance for the reader to end
    assert len(left.result(60).tokens) == len(request.result(60).tokens) == 90
    assert engine.submit(PROMPT, max_new_tokens=32).result(60).tokens == SPM["greedy_f32"]


def test_timeout(engine: models.Engine) -> None:
    with Gate(engine):
        request = engine.submit(PROMPT, max_new_tokens=32)
        for seconds in (0, 0.05):
            began = time.monotonic()
            with pytest.raises(TimeoutError, match="not finished after"):
                request.result(seconds)
            assert seconds <= time.monotonic() - began < 5
    assert request.result(60).tokens == SPM["greedy_f32"]


@pytest.mark.parametrize("phase", ["waiting", "prefill", "decoding"])
def test_cancel(engine: models.Engine, phase: str) -> None:
    """A cancelled request gives its pages back within two steps, in each phase."""
    (prompt,) = prompts_of(engine.model, [(0, 100)], seed=len(phase))
    sampling = models.Sampling(max_new_tokens=28, ignore_end=True)
    (want,) = alone(engine.model, [prompt], [sampling])
    with Gate(engine) as gate:
        others = [engine.submit(PROMPT, LONG) for _ in range(2 if phase == "waiting" else 1)]
        gate.step(3)
        request = engine.submit(prompt, sampling)
        gate.step(5 if phase == "decoding" else 1)
        sequence = request.sequence
        assert sequence is not None
        if phase == "waiting":
            assert engine.stats().waiting == 1 and sequence.slot is None
        elif phase == "prefill":
            assert sequence.is_prefilling and sequence.stored in (48, 64)
        else:
            assert sequence.is_decoding and request.text.tokens
        assert request.cancel() and not request.cancel() and request.is_done
        out = request.result(0)
        gate.step(2)
        assert not engine.stats().waiting and engine.stats().running == len(others)
        assert sequence.slot is None and not sequence.pages
        stats = engine.stats()
        held = [other.sequence.page_list(None) for other in others if other.sequence is not None]
        assert stats.pages - stats.free_pages == sum(map(len, held))
    assert out.finish_reason == "cancelled" and out.tokens == want.tokens[: len(out.tokens)]
    assert bool(out.tokens) == (phase == "decoding")
    assert all(len(other.result(60).tokens) == 90 for other in others)


def test_cancel_of_what_is_finished(engine: models.Engine) -> None:
    request = engine.submit(PROMPT, max_new_tokens=2)
    out = request.result()
    assert not request.cancel() and request.result() is out and out.finish_reason == "length"


def test_a_stream_ends_when_its_request_is_cancelled(engine: models.Engine) -> None:
    request, pieces = engine.submit(PROMPT, LONG), []
    for piece in request:
        pieces.append(piece)
        request.cancel()
    assert pieces[-1].output is not None and pieces[-1].output.finish_reason == "cancelled"
    assert [piece.token for piece in pieces[:-1]] == pieces[-1].output.tokens


def test_generate(engine: models.Engine) -> None:
    """One prompt gives an Output, several a list in order, with a seed each."""
    prompts = [PROMPT, SPM["prompt"][:5], "The"]
    sampling = models.Sampling(max_new_tokens=9, temperature=1.5, seed=2**32 - 2)
    each = [dataclasses.replace(sampling, seed=seed) for seed in (2**32 - 2, 2**32 - 1, 0)]
    pairs = zip(prompts, each, strict=True)
    want = [engine.submit(prompt, one).result().tokens for prompt, one in pairs]
    assert len(set(map(tuple, want))) == 3
    assert tokens_of(engine.generate(prompts, sampling)) == want
    assert tokens_of(engine.generate(prompts, each)) == want
    assert tokens_of(engine.generate(prompts[:1], sampling)) == want[:1]
    assert engine.generate(PROMPT, sampling).tokens == want[0]
    assert engine.generate(PROMPT, sampling, max_new_tokens=3).tokens == want[0][:3]


def test_stop_strings(engine: models.Engine) -> None:
    whole = engine.generate(PROMPT, max_new_tokens=32)
    stop = whole.text[20:23]
    out = engine.generate(PROMPT, max_new_tokens=32, stop=["none", stop])
    assert out.finish_reason == "stop" and out.text == whole.text.partition(stop)[0]
    assert out.tokens == whole.tokens[: len(out.tokens)] and len(out.tokens) < 32
    with jq.implementation(activations="f32"):
        want = models.generate(engine.model, PROMPT, max_new_tokens=32, stop=["none", stop])
    assert (out.tokens, out.text) == (want.tokens, want.text)


def test_end_tokens(engine: models.Engine) -> None:
    """The end token ends a text unless it is ignored, with and without one in the first step."""
    assert engine.model.tokenizer is not None
    (end,) = engine.model.tokenizer.eos_token_ids
    out = engine.generate(PROMPT, max_new_tokens=9, logit_bias={end: 1e4})
    assert out.tokens == [] and out.text == "" and out.finish_reason == "end"
    out = engine.generate(PROMPT, max_new_tokens=9, logit_bias={end: 1e4}, ignore_end=True)
    assert out.tokens == [end] * 9 and out.finish_reason == "length"
    sampling = models.Sampling(max_new_tokens=40, temperature=3.0, logit_bias={end: 22.0}, seed=1)
    want = alone(engine.model, [PROMPT] * 4, seeds := _seeds(sampling, 4))
    got = engine.generate([PROMPT] * 4, seeds)
    assert tokens_of(got) == tokens_of(want)
    assert [out.finish_reason for out in got] == [out.finish_reason for out in want]
    assert any(out.finish_reason == "end" and out.tokens for out in got)


def _seeds(sampling: models.Sampling, count: int) -> list[models.Sampling]:
    return [dataclasses.replace(sampling, seed=sampling.seed + i) for i in range(count)]


def test_equal_prompts_share_pages(engine: models.Engine) -> None:
    """Later prompts wait for the pages that the first one is computing."""
    (prompt,) = prompts_of(engine.model, [(0, 50)], seed=9)
    before = engine.stats()
    outs = engine.generate([prompt] * 4, temperature=1.0, max_new_tokens=5, ignore_end=True)
    assert [out.timings.reused_tokens for out in outs] == [0, 48, 48, 48]
    after = engine.stats()
    assert after.reused_tokens - before.reused_tokens == 3 * 48
    assert after.prompt_tokens - before.prompt_tokens == 4 * 50
    assert after.new_tokens - before.new_tokens == 4 * 5
    assert len(set(map(tuple, tokens_of(outs)))) > 1


def test_requests_of_many_threads(engine: models.Engine) -> None:
    prompts = prompts_of(engine.model, [(16, 3 + i) for i in range(8)], seed=2)
    sampling = models.Sampling(max_new_tokens=12, temperature=0.7, ignore_end=True)
    want = engine.generate(prompts, [sampling] * 8)
    with ThreadPoolExecutor(8) as pool:
        requests = list(pool.map(lambda prompt: engine.submit(prompt, sampling), prompts))
        outs = list(pool.map(lambda request: request.result(60), requests))
    assert tokens_of(outs) == tokens_of(want)


def test_statistics(engine: models.Engine) -> None:
    before = engine.stats()
    assert (before.pages, before.page_tokens, before.max_rows, before.max_context) == (
        16,
        16,
        2,
        128,
    )
    (prompt,) = prompts_of(engine.model, [(0, 40)], seed=30)
    with Gate(engine) as gate:
        requests = [engine.submit(prompt, LONG, max_new_tokens=80) for _ in range(3)]
        gate.step(5)
        during = engine.stats()
        assert (during.running, during.waiting, during.steps - before.steps) == (2, 1, 6)
        # The second prompt shares two pages with the first, and each has one of its own.
        assert during.pages - during.free_pages == 4
    for request in requests:
        request.result(60)
    wait_until(lambda: is_idle(engine))
    after = engine.stats()
    assert after.new_tokens - before.new_tokens == 240 and after.lost_tokens == {}
    assert after.prompt_tokens - before.prompt_tokens == 120
    assert after.reused_tokens - before.reused_tokens == 64
    assert after.cached_pages >= 7 and after.preemptions == before.preemptions


@pytest.mark.slow("compiles programs of another context length")
@pytest.mark.parametrize("name", ["llama-gqa", "qwen35", "gemma3"])
def test_context_shift(name: str) -> None:
    short = copy.copy(model(name))
    short.config = dataclasses.replace(short.config, context_length=48)
    prompts = prompts_of(short, ((16, 20), (16, 4), (0, 40)))
    samplings = [models.Sampling(max_new_tokens=n, ignore_end=True) for n in (100, 70, 8)]
    shift = models.ContextShift(keep=3)
    want = tokens_of(alone(short, prompts, samplings, shift=shift))
    with exactly(model(name), max_context=48, pages=5) as engine:
        assert tokens_of(engine.generate(prompts, samplings, shift=shift)) == want
        assert tokens_of(engine.generate(prompts, samplings, shift=shift)) == want
        wait_until(lambda: is_idle(engine))
        engine.check()


@pytest.mark.slow("compiles programs for one row")
def test_one_row() -> None:
    prompts = prompts_of(model("llama-gqa"))[:4]
    samplings = [models.Sampling(max_new_tokens=9, ignore_end=True)] * 4
    want = tokens_of(alone(model("llama-gqa"), prompts, samplings))
    with exactly(model("llama-gqa"), max_rows=1) as engine:
        assert engine.stats().pages == 4
        assert tokens_of(engine.generate(prompts, samplings)) == want


def _bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.slow("compiles programs of an engine")
def test_an_engine_that_nobody_holds_ends() -> None:
    """Its thread ends and its memory is freed, with and without `close`, but not too early."""
    loaded = model("llama-gqa")
    exactly(loaded).close()
    before = _bytes()
    for closes in (True, False):
        engine: Any = exactly(loaded)
        engine.generate([1, 2, 3], max_new_tokens=3)
        wait_until(functools.partial(is_idle, engine))
        assert _bytes() > before
        request, thread, gone = engine.submit([1, 2], LONG, max_new_tokens=40), engine._thread, None
        if closes:
            engine.close()
            engine.close()
            assert not thread.is_alive()
            with pytest.raises(models.EngineClosedError, match="the engine is closed"):
                request.result()
        else:
            gone = weakref.ref(engine)
        del engine
        if gone is not None:
            assert len(request.result(60).tokens) == 40
        del request
        thread.join(20)
        assert not thread.is_alive()
        gc.collect()
        assert gone is None or gone() is None
        assert _bytes() <= before


@pytest.mark.slow("compiles programs of an engine")
def test_close_from_several_threads() -> None:
    engine = exactly(model("llama-gqa"))
    requests = [engine.submit([1, 2, i], LONG, max_new_tokens=50) for i in range(6)]
    threads = [threading.Thread(target=engine.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    for request in requests:
        with pytest.raises(models.EngineClosedError):
            request.result(1)
        assert not request.cancel() and request.is_done


def test_an_event_loop_is_woken_for_what_it_waits_for(engine: models.Engine) -> None:
    """While it waits for the end of a request, its tokens do not wake it."""
    options: dict[str, Any] = {"max_new_tokens": 30, "ignore_end": True}

    async def wakes(*, ends: bool) -> tuple[int, int]:
        request = engine.submit([5, 6, 7], **options)
        with Changes([request]) as changes:
            loop = mock.Mock(wraps=changes._loop)
            changes._loop = loop
            waits = 0
            while not request.is_done:
                tokens = len(request.text.tokens)
                assert await changes.until(
                    lambda tokens=tokens: (
                        request.is_done or (not ends and len(request.text.tokens) > tokens)
                    ),
                    ends=ends,
                    seconds=60,
                )
                waits += 1
            assert not await changes.until(lambda: False, seconds=0.01)
        return waits, loop.call_soon_threadsafe.call_count

    assert asyncio.run(wakes(ends=True)) in ((1, 0), (1, 1))
    waits, calls = asyncio.run(wakes(ends=False))
    assert 2 <= waits <= 31 and waits - 1 <= calls
