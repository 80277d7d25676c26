"""Generates text on JAX's GPU and compares its tokens with plain JAX's logits on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import numpy as np

import jax_q4k as jq
from jax_q4k import models

from ...runner.model import Model
from .results import Result, failed, ok

#: What a run does without, to find the part that fails.
Part = Literal["clusters", "prefetch", "decoded products", "graph", "kernels"]

#: Prompt, of more than 64 tokens, and number of new tokens; few of both in the simulator.
GENERATED = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, "
    "must be in want of a wife. However little known the feelings or views of such a man may be on "
    "his first entering a neighbourhood, this truth is so well fixed in the minds of the "
    "surrounding families, that he is considered",
    32,
)
SIMULATED = "The sea", 2

#: How far a greedy token's logit may be below the largest one: rounding of sums, and of int8 and
#: f16, which are the default.
_BARS: dict[Literal["f32"] | None, float] = {"f32": 1e-3, None: 0.5}


def generates(
    simulated: bool, progress: Callable[[str], object], without: Part | None = None
) -> Result:
    """Generates with float32 and default activations; each token must be the most likely one.

    Args:
      simulated: on the CPU, with kernels in the simulator and float32 activations only.
      without: the part that is switched off.
    """
    model = models.load("demo")
    if not simulated and not _is_on_gpu(model):
        return failed("nothing ran, because JAX put the demo model on no GPU")
    prompt, count = SIMULATED if simulated else GENERATED
    rates = []
    bars = list(_BARS.items())[: 1 if simulated else None]
    names = [activations or "default" for activations, _ in bars]
    for name, (activations, bar) in zip(names, bars, strict=True):
        progress(f"generates with {name} activations")
        with jq.implementation(
            "xla" if without == "kernels" else "sim" if simulated else "ptx",
            activations=activations,
            clusters=without != "clusters",
            prefetch=without != "prefetch",
            graphs=without != "graph",
            decoded_products=False if without == "decoded products" else None,
        ):
            output = models.generate(model, prompt, max_new_tokens=count)
        rates.append(f"{output.timings.tokens_per_second:.0f}")
        gaps = _gaps(prompt, output.tokens)
        if not np.all(gaps <= bar):
            wrong = np.flatnonzero(~(gaps <= bar))
            return failed(
                f"{len(wrong)} of {len(gaps)} tokens with {name} activations are not those "
                f"of plain JAX, from token {wrong[0] + 1} on"
            )
    speed = "" if simulated else f" ({' and '.join(rates)} tokens/s)"
    return ok(f"tokens with {' and '.join(names)} activations are those of plain JAX{speed}")


def _is_on_gpu(model: Model) -> bool:
    return model.network.on_gpu


def _gaps(prompt: str, tokens: list[int]) -> np.ndarray:
    """Returns how far each greedy token's logit is below plain JAX's largest, on the CPU."""
    with jax.default_device(jax.devices("cpu")[0]), jq.implementation("xla", activations="f32"):
        model = _on_cpu()
        assert model.tokenizer is not None
        ids = model.tokenizer.encode(prompt)
        logits = np.asarray(model.logits(np.array([[*ids, *tokens]])))[0, len(ids) - 1 : -1]
    return logits.max(axis=-1) - logits[np.arange(len(tokens)), tokens]


def _on_cpu() -> Model:
    model = models.load("demo")
    assert {device.platform for device in model.weights[0].devices()} == {"cpu"}
    return model
