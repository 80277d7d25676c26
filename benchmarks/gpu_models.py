"""Times whole models' decode loop under JAX: a compiled `while_loop`, as in `models.generate`."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_q4k.models.kv_cache import PagedCache
from jax_q4k.models.model import Model
from jax_q4k.models.sampling import Sampling
from jax_q4k.models.ways import Parameters
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
    """Greedy decoding of one sequence.

    Attributes:
      weight_bytes: read per token: all weights but the embedding, of which one row is read.
      context: tokens in the cache when timing began.
      ms_per_token: median over segments of the loop; best and worst beside it.
      copy_fraction: weight bytes per second over a copy's bandwidth; None where that was not
        measured.
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

    @property
    def tokens_per_second(self) -> float:
        return 1e3 / self.ms_per_token

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_per_second": self.tokens_per_second}


def weight_bytes_per_token(model: Model) -> int:
    """Bytes of weights that one decode step reads.

    A tied embedding is read whole, as the output matrix.
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
    cache_dtype: Any = jnp.bfloat16,
    copy_bandwidth: float | None = None,
) -> DecodeRate:
    """Times `segments` runs of `tokens` steps each, after one to warm up.

    The prompt is random and has `context` tokens.
    """
    programs = model.programs()
    room = (segments + 2) * tokens
    prompt = np.random.default_rng(0).integers(0, model.config.vocab_size, (1, context), np.int32)
    cache = PagedCache.create(model.config, 1, context + room, dtype=cache_dtype)
    started = time.perf_counter()
    lengths = jnp.full(1, context, jnp.int32)
    parameters = jax.device_put(Parameters.of([Sampling(max_new_tokens=room)]))
    state = programs.start(model.weights, jnp.asarray(prompt), lengths, cache, parameters)
    state = jax.block_until_ready(
        programs.loop(model.weights, state, parameters, jnp.int32(tokens))
    )
    compile_seconds = time.perf_counter() - started

    milliseconds = []
    for segment in range(segments):
        until = jnp.int32((segment + 2) * tokens)
        started = time.perf_counter()
        state = jax.block_until_ready(programs.loop(model.weights, state, parameters, until))
        milliseconds.append(1e3 * (time.perf_counter() - started) / tokens)
    if int(state.step) != (segments + 1) * tokens:
        raise RuntimeError(
            f"{name}: {int(state.step)} steps were made, not {(segments + 1) * tokens}"
        )
    median = statistics.median(milliseconds)
    read = weight_bytes_per_token(model)
    return DecodeRate(
        name=name,
        weight_bytes=read,
        context=context + tokens,
        tokens=segments * tokens,
        ms_per_token=median,
        best=min(milliseconds),
        worst=max(milliseconds),
        compile_seconds=compile_seconds,
        copy_fraction=read / (1e-3 * median) / copy_bandwidth if copy_bandwidth else None,
    )


def table(rows: list[DecodeRate]) -> str:
    cells = [
        (
            r.name,
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
        "decode, batch 1",
        "GB/token",
        "context",
        "ms/token",
        "best-worst",
        "tokens/s",
        "of copy",
        "compile s",
    )
    return plain_table(header, cells)


if __name__ == "__main__":
    part_of("gpu", __doc__)
