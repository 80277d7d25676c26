"""Times full models under JAX: prompts and decoding, as `models.generate` runs them."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_q4k import models
from jax_q4k.models.runner.model import Model
from ptx_kernels.machine_code.report import plain_table
from tools.random_model import LLAMA_3_1_8B

from .common import part_of

#: A model that a CPU decodes in seconds.
SMALL_MODEL = replace(
    LLAMA_3_1_8B,
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rope_dim=0,
)


@dataclass(frozen=True)
class DecodeRate:
    """Rate of greedy decoding for a batch of sequences.

    Attributes:
      weight_bytes: bytes read per step: all weights except the embedding, of which one row per
        sequence is read.
      context: tokens per sequence in the cache when timing began.
      ms_per_token: of a step, which gives every sequence a token: median over runs.
      best, worst: minimum and maximum of the same.
      copy_fraction: weight bytes per second over a copy's bandwidth; None if that was not measured.
    """

    name: str
    weight_bytes: int
    context: int
    tokens: int
    ms_per_token: float
    best: float
    worst: float
    compile_seconds: float
    copy_fraction: float | None
    batch: int = 1

    @property
    def tokens_per_second(self) -> float:
        return self.batch * 1e3 / self.ms_per_token

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_per_second": self.tokens_per_second}


@dataclass(frozen=True)
class PromptRate:
    """Rate of one prompt, including the first token after it.

    Attributes:
      tokens: of the prompt.
      ms: median, best and worst of some passes.
    """

    name: str
    tokens: int
    ms: float
    best: float
    worst: float
    compile_seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens * 1e3 / self.ms

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_per_second": self.tokens_per_second}


def weight_bytes_per_token(model: Model) -> int:
    """Returns the bytes of weights that one decode step reads.

    A tied embedding is read in full, as the output matrix.
    """
    total = sum(leaf.nbytes for leaf in model.weights)
    decoder = model.decoder()
    embedding: Any = decoder.embedding.get_value()
    return total if decoder.output is None else total - embedding.nbytes


def decode_rate(
    name: str,
    model: Model,
    *,
    context: int = 8,
    tokens: int = 64,
    segments: int = 5,
    batch: int = 1,
    cache_dtype: Any = jnp.bfloat16,
    copy_bandwidth: float | None = None,
) -> DecodeRate:
    """Times `segments` runs of `tokens` steps each after random prompts, after one to warm up.

    The prompts have `context` tokens.
    """
    started = time.perf_counter()
    _generate(model, batch, context, 1 + tokens, cache_dtype)
    compile_seconds = time.perf_counter() - started

    milliseconds = []
    for _ in range(segments):
        timings = _generate(model, batch, context, 1 + tokens, cache_dtype)
        if timings.decoded_tokens != batch * tokens:
            made = timings.decoded_tokens
            raise RuntimeError(f"{name}: {made} tokens were decoded, not {batch * tokens}")
        milliseconds.append(1e3 * timings.decode / tokens)
    median = statistics.median(milliseconds)
    read = weight_bytes_per_token(model)
    return DecodeRate(
        name=name,
        weight_bytes=read,
        context=context,
        tokens=segments * tokens,
        ms_per_token=median,
        best=min(milliseconds),
        worst=max(milliseconds),
        compile_seconds=compile_seconds,
        copy_fraction=read / (1e-3 * median) / copy_bandwidth if copy_bandwidth else None,
        batch=batch,
    )


def prompt_rate(
    name: str, model: Model, tokens: int, *, passes: int = 5, cache_dtype: Any = jnp.bfloat16
) -> PromptRate:
    """Times passes over a random prompt of `tokens` tokens, after one to warm up."""
    started = time.perf_counter()
    _generate(model, 1, tokens, 1, cache_dtype)
    compile_seconds = time.perf_counter() - started
    milliseconds = [
        1e3 * _generate(model, 1, tokens, 1, cache_dtype).first_token for _ in range(passes)
    ]
    median = statistics.median(milliseconds)
    return PromptRate(name, tokens, median, min(milliseconds), max(milliseconds), compile_seconds)


def _generate(
    model: Model, batch: int, length: int, new_tokens: int, cache_dtype: Any
) -> models.Timings:
    """Continues random prompts of `length` tokens greedily; returns the timings."""
    rng = np.random.default_rng(0)
    prompts = list(rng.integers(0, model.config.vocab_size, (batch, length), np.int32))
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "ignore_end": True}
    timings: models.Timings
    timings = models.generate(model, prompts, cache_dtype=cache_dtype, **options)[0].timings
    return timings


def table(rows: list[DecodeRate]) -> str:
    cells = [
        (
            r.name,
            str(r.batch),
            f"{r.weight_bytes / 1e9:.3f}",
            str(r.context),
            f"{r.ms_per_token:.3f}",
            f"{r.best:.3f}-{r.worst:.3f}",
            f"{r.tokens_per_second:.1f}",
            "-" if r.copy_fraction is None else f"{r.copy_fraction:.0%}",
            f"{r.compile_seconds:.1f}",
        )
        for r in rows
    ]
    header = (
        "decode",
        "batch",
        "GB/step",
        "context",
        "ms/step",
        "best-worst",
        "tokens/s",
        "of copy",
        "compile s",
    )
    return plain_table(header, cells)


def prompt_table(rows: list[PromptRate]) -> str:
    cells = [
        (
            r.name,
            str(r.tokens),
            f"{r.ms:.2f}",
            f"{r.best:.2f}-{r.worst:.2f}",
            f"{r.tokens_per_second:.0f}",
            f"{r.compile_seconds:.1f}",
        )
        for r in rows
    ]
    return plain_table(("prompt", "tokens", "ms", "best-worst", "tokens/s", "compile s"), cells)


if __name__ == "__main__":
    part_of("gpu", __doc__)
