"""Measures prompt and decode speed in tokens per second, like llama.cpp's llama-bench.

Uses random tokens. Each program is compiled and run once before it is timed, and the clock stops
when the device is done.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_q4k as jq

from ..engine.session import PIECE
from ..kv_cache import PagedCache
from ..runner.model import Model
from ..runner.programs import compiler_options
from ..support.buckets import bucket


@dataclasses.dataclass(frozen=True)
class Test:
    """One benchmark: prompt processing or decoding of a number of tokens.

    Attributes:
      kind: "pp" processes a prompt of `tokens` tokens; "tg" decodes `tokens` tokens one at a time.
      depth: tokens in the cache before the test, which are not timed.
      batch: number of sequences.
    """

    kind: str
    tokens: int
    depth: int = 0
    batch: int = 1

    @property
    def name(self) -> str:
        """Name in the format of llama-bench: pp512, tg128 @ d2048."""
        return f"{self.kind}{self.tokens}" + (f" @ d{self.depth}" if self.depth else "")

    @property
    def length(self) -> int:
        """Total tokens of a sequence; decoding needs one token to start from."""
        return self.tokens + max(self.depth, self.kind == "tg")


@dataclasses.dataclass(frozen=True)
class Speed:
    """Result of a test: the seconds of each repetition, and speeds computed from them."""

    test: Test
    seconds: tuple[float, ...]

    @property
    def samples(self) -> list[float]:
        """Tokens per second of each repetition, over all sequences."""
        return [self.test.batch * self.test.tokens / seconds for seconds in self.seconds]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.samples)

    @property
    def deviation(self) -> float:
        """Standard deviation of the samples; 0 for a single one."""
        return statistics.stdev(self.samples) if len(self.seconds) > 1 else 0.0


def check(model: Model, test: Test) -> None:
    """Raises ValueError for an encoder, and if a test needs more tokens than the context length."""
    model.check_generates()
    if test.length > model.config.context_length:
        context = model.config.context_length
        raise ValueError(f"{test.name} takes {test.length} tokens; the context length is {context}")


def measure(
    model: Model, test: Test, repetitions: int, cache_dtype: Any = jnp.float32, seed: int = 0
) -> Speed:
    """Runs a test `repetitions` times, after one run for warm-up."""
    check(model, test)
    bench = _Bench(model, test, jq.page_dtype(cache_dtype), np.random.default_rng(seed))
    run = bench.prompts if test.kind == "pp" else bench.decoding
    return Speed(test, tuple(run(repetitions + 1)[1:]))


class _Bench:
    """Programs and data of a test; uses only `Decoder`."""

    def __init__(self, model: Model, test: Test, dtype: Any, rng: np.random.Generator) -> None:
        self.model, self.test, self.dtype, self.rng = model, test, dtype, rng
        on_gpu = next(iter(model.weights[0].devices())).platform == "gpu"
        options = compiler_options(on_gpu=on_gpu)

        def jit(program: Callable[..., Any]) -> Any:
            return jax.jit(program, donate_argnames="cache", compiler_options=options)

        def prefill(weights: Any, tokens: Any, lengths: Any, cache: Any) -> Any:
            logits, cache = model.decoder(weights).prefill(tokens, lengths, cache)
            return _likeliest(logits), cache

        def extend(weights: Any, tokens: Any, lengths: Any, cache: Any) -> Any:
            logits, cache = model.decoder(weights).extend(tokens, lengths, cache, every=False)
            return _likeliest(logits), cache

        def decode(weights: Any, token: Any, cache: Any) -> Any:
            decoder = model.decoder(weights)

            def step(_: Any, carried: Any) -> Any:
                logits, cache = decoder.decode(*carried)
                return _likeliest(logits), cache

            return jax.lax.fori_loop(0, test.tokens, step, (token, cache))

        self.prefill, self.extend, self.decode = jit(prefill), jit(extend), jit(decode)

    def prompts(self, times: int) -> list[float]:
        """Times prompt processing: in one pass, or in chunks if the cache already holds tokens.

        Returns the seconds of each of `times` runs.
        """
        test, before = self.test, None
        pieces = [self.chunk(test.tokens)]
        if test.depth:
            before = self.begun(test.depth, ahead=PIECE)[1]
            sizes = [min(PIECE, test.tokens - at) for at in range(0, test.tokens, PIECE)]
            pieces = [self.chunk(size, min(PIECE, test.tokens)) for size in sizes]
        program = self.prefill if before is None else self.extend

        def run(cache: PagedCache) -> Any:
            for tokens, lengths in pieces:
                token, cache = program(self.model.weights, tokens, lengths, cache=cache)
            return token, cache

        return _seconds(times, run, lambda: self.cache() if before is None else _copied(before))

    def decoding(self, times: int) -> list[float]:
        """Times `Test.tokens` decode steps; returns the seconds of each of `times` runs."""
        before = self.begun(max(self.test.depth, 1))

        def run(before: Any) -> Any:
            token, cache = before
            return self.decode(self.model.weights, token, cache=cache)

        return _seconds(times, run, lambda: _copied(before))

    def begun(self, depth: int, ahead: int = 1) -> tuple[jax.Array, PagedCache]:
        """Prefills sequences of `depth` tokens; returns the next tokens and the cache."""
        return self.prefill(self.model.weights, *self.chunk(depth), cache=self.cache(ahead))

    def cache(self, ahead: int = 1) -> PagedCache:
        """Creates an empty KV cache of the size that `generate` would use."""
        room, batch = bucket(self.test.length + 1), self.test.batch
        config = self.model.config
        return PagedCache.create(config, batch, room, dtype=self.dtype, ahead=ahead)

    def chunk(self, tokens: int, padded: int | None = None) -> tuple[jax.Array, jax.Array]:
        """Returns random tokens (batch, padded) and their lengths (batch,)."""
        padded = self.model.padded_length(tokens) if padded is None else padded
        ids = self.rng.integers(0, self.model.config.vocab_size, (self.test.batch, padded))
        return self.model.put((ids.astype(np.int32), np.full(len(ids), tokens, np.int32)))


def _likeliest(logits: jax.Array) -> jax.Array:
    return jq.argmax(logits).astype(jnp.int32)


def _copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def _seconds(times: int, run: Callable[[Any], Any], prepare: Callable[[], Any]) -> list[float]:
    """Returns the seconds of each of `times` calls run(prepare()), without prepare()."""
    seconds = []
    for _ in range(times):
        prepared = jax.block_until_ready(prepare())
        start = time.perf_counter()
        jax.block_until_ready(run(prepared))
        seconds.append(time.perf_counter() - start)
    return seconds
