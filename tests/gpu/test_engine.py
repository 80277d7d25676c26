"""The engine on the GPU: tokens in batches, cached prefixes, preemption, and equal bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.paths import GOLDEN

pytestmark = pytest.mark.gpu

#: A file for each kind of cache and of products.
FILES = (
    "deepseek2",
    "gemma2",
    "gemma3",
    "gemma4-e",
    "gpt-oss",
    "lfm2",
    "llama-gqa",
    "phi3-long",
    "qwen2-bias",
    "qwen35",
    "qwen3moe",
    "qwen3next",
    "starcoder2",
)
#: Kinds without experts, which the deterministic mode excepts on GPUs.
DETERMINISTIC = ("gemma3", "lfm2", "llama-gqa", "qwen2-bias", "qwen35")


def load(name: str) -> tuple[Any, list[int], list[int]]:
    """Returns a model, a prompt, and llama.cpp's greedy tokens behind it."""
    from jax_q4k import models

    with np.load(GOLDEN / f"{name}.npz") as data:
        prompt, greedy = data["prompt"].tolist(), data["greedy_f32"].tolist()
    (path,) = GOLDEN.glob(f"{name}.*gguf")
    return models.load(path), prompt, greedy


@contextlib.contextmanager
def engine_of(model: Any, **options: Any) -> Iterator[Any]:
    """Runs an engine with float32 activations and few programs, which compile for long."""
    import jax_q4k as jq
    from jax_q4k import models
    from jax_q4k.models.engine import sizing

    small = {"max_rows": 4, "max_context": 192, "warm_up": False}
    with (
        jq.implementation("ptx", activations="f32"),
        mock.patch.object(sizing, "GPU_SHAPES", ((1, 16), (4, 64))),
        models.Engine(model, **(small | options)) as engine,
    ):
        yield engine
        engine.check()


@pytest.mark.parametrize("name", FILES)
def test_llama_cpps_tokens_in_a_batch(name: str) -> None:
    """Compares alone, from cached pages, and in a batch of which rows are preempted."""
    model, prompt, greedy = load(name)
    random = np.random.default_rng(0)
    others = [random.integers(3, model.config.vocab_size, n).tolist() for n in (5, 40, 70, 18)]
    options: Any = {"max_new_tokens": len(greedy), "ignore_end": True}
    with engine_of(model, pages=2 * -(-(70 + len(greedy)) // 16)) as engine:
        for _ in range(2):
            assert engine.generate(prompt, **options).tokens == greedy
        assert engine.stats().reused_tokens > 0
        outputs = engine.generate([others[0], prompt, *others[1:], prompt], **options)
        assert [outputs[i].tokens for i in (1, 5)] == [greedy, greedy]
        assert engine.stats().preemptions > 0


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_equal_bits_in_deterministic_mode(name: str) -> None:
    """Compares tokens and log-probabilities alone, in a batch, cached, and after preemption."""
    from jax_q4k import models

    model, _, _ = load(name)
    random = np.random.default_rng(1)
    prompts = [random.integers(3, model.config.vocab_size, n).tolist() for n in (20, 70, 90, 9)]
    samplings = [
        models.Sampling(
            max_new_tokens=30, ignore_end=True, temperature=0.9 * (i % 2), seed=i, logprobs=3
        )
        for i in range(len(prompts))
    ]

    def bits(outputs: list[Any]) -> list[Any]:
        return [(output.tokens, output.logprobs) for output in outputs]

    with engine_of(model, deterministic=True, pages=9) as engine:
        pairs = zip(prompts, samplings, strict=True)
        alone = bits([engine.generate(*pair) for pair in pairs])
        for chosen in ([1], [1], [0, 3]):
            some = [prompts[i] for i in chosen], [samplings[i] for i in chosen]
            assert bits(engine.generate(*some)) == [alone[i] for i in chosen]
        assert engine.stats().reused_tokens > 0 and engine.stats().preemptions == 0
        assert bits(engine.generate(prompts, samplings)) == alone
        assert engine.stats().preemptions > 0


def test_draws_are_the_cpus() -> None:
    """Draws with top-k, top-p and min-p; a GPU's logarithms may round differently, rarely."""
    import jax
    import jax.numpy as jnp

    from jax_q4k.ops.draw import DrawParameters, draw

    rows, vocab, random = 512, 5000, np.random.default_rng(2)
    logits = random.standard_normal((rows, vocab), np.float32) * 3
    parameters = DrawParameters(
        seed=np.arange(rows, dtype=np.uint32),
        temperature=random.choice([0.0, 0.7, 1.5], rows).astype(np.float32),
        top_k=random.choice([0, 1, 40, 2000], rows).astype(np.int32),
        top_p=random.choice([0.3, 0.9, 1.0], rows).astype(np.float32),
        min_p=random.choice([0.0, 0.05], rows).astype(np.float32),
        step=random.integers(0, 99, rows).astype(np.int32),
    )
    found = []
    for platform in ("cuda", "cpu"):
        arguments = jax.device_put((logits, parameters), jax.devices(platform)[0])
        found.append(np.asarray(jax.jit(lambda x, p: draw(x, DrawParameters(*p)))(*arguments)))
    differing = int(np.sum(found[0] != found[1]))
    assert differing <= 2, f"{differing} of {rows} rows differ"
    exact = (parameters.temperature == 0) | (parameters.top_k == 1)
    best = jnp.argmax(jnp.asarray(logits), axis=1)
    assert np.array_equal(found[0][exact], np.asarray(best)[exact])
