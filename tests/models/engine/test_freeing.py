"""Pages are freed when a call ends, and models with their last reference, without a collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import jax
import pytest

from jax_q4k import models

from .. import golden_files

PROMPT = [1, 5, 9]


@pytest.fixture(autouse=True)
def without_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def generates(model: models.Model) -> None:
    models.generate(model, [PROMPT, PROMPT], max_new_tokens=20)


def leaves_a_stream(model: models.Model) -> None:
    pieces = models.stream(model, PROMPT, max_new_tokens=40)
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]


def clears_a_prefix(model: models.Model) -> None:
    prefix = models.Prefix()
    for _ in range(2):
        models.generate(model, PROMPT * 9, max_new_tokens=8, prefix=prefix)
    prefix.clear()


def closes_an_engine(model: models.Model) -> None:
    with models.Engine(model, max_rows=2, pages=16, warm_up=False) as engine:
        engine.generate(PROMPT, max_new_tokens=8)
        engine.submit(PROMPT, max_new_tokens=100)


@pytest.mark.parametrize(
    "call",
    [generates, leaves_a_stream, clears_a_prefix, closes_an_engine],
    ids=lambda f: f.__name__,
)
def test_nothing_is_left_of_a_call(call: Callable[[models.Model], None]) -> None:
    model = models.from_gguf(golden_files.path("llama-gqa"))
    before = {id(array) for array in jax.live_arrays()}
    call(model)
    assert [array.shape for array in jax.live_arrays() if id(array) not in before] == []
    weak = weakref.ref(model)
    del model
    assert weak() is None


def test_a_finished_request_does_not_keep_its_engine() -> None:
    model = models.from_gguf(golden_files.path("llama-gqa"))
    before = {id(array) for array in jax.live_arrays()}
    engine = models.Engine(model, max_rows=2, pages=16, warm_up=False)
    requests = [engine.submit(PROMPT, max_new_tokens=4) for _ in range(3)]
    requests[2].cancel()
    outputs = [request.result() for request in requests]
    weak, thread = weakref.ref(engine), engine._thread
    del engine
    thread.join(10)
    assert weak() is None and not thread.is_alive()
    assert [array.shape for array in jax.live_arrays() if id(array) not in before] == []
    assert [request.result() for request in requests] == outputs
    assert not requests[0].cancel()
