"""The golden models on the GPU, every operation by PTX kernels."""
from __future__ import annotations

import numpy as np
import pytest
from helpers import GOLDEN, nmse

pytestmark = pytest.mark.gpu

MODELS = ("llama-gqa", "llama3-rope", "qwen2-bias", "qwen2-odd", "qwen3-qknorm")


@pytest.fixture(scope="module", params=MODELS)
def golden(request):
    """(model, arrays of its .npz)."""
    from jax_q4k import models

    with np.load(GOLDEN / f"{request.param}.npz") as arrays:
        return models.from_gguf(GOLDEN / f"{request.param}.Q4_K_M.gguf"), dict(arrays)


def test_greedy_tokens_with_float_activations(golden):
    """With unquantized activations every token of the reference comes out, through prefill and paged decode."""
    import jax_q4k as jq
    from jax_q4k import models

    model, want = golden
    with jq.implementation("ptx", activations="f32"):
        out = models.generate(model, want["prompt"].tolist(), max_new_tokens=len(want["greedy_f32"]))
    assert list(out.tokens) == want["greedy_f32"].tolist()


def test_logits_with_quantized_activations(golden):
    """Eight tokens a call, so that the int8 kernels run: as close as llama.cpp's own quantized activations."""
    import jax.numpy as jnp

    import jax_q4k as jq

    model, want = golden
    with jq.implementation("ptx", activations="q8_1"):
        got = np.asarray(model.logits(jnp.asarray(want["prompt"][None, :8])))[0]
    assert nmse(got, want["logits_f32"][:8]) <= 1e-2


def test_logits_agree_with_plain_jax(golden):
    import jax.numpy as jnp

    import jax_q4k as jq

    model, want = golden
    tokens = jnp.asarray(want["prompt"][None])
    results = []
    for implementation in ("ptx", "xla"):
        with jq.implementation(implementation, activations="f32"):
            results.append(np.asarray(model.logits(tokens)))
    assert nmse(*results) <= 1e-6


def test_decode_follows_the_prompt_with_quantized_activations(golden):
    """Generation on the default path: the first token is the reference's, as its margin exceeds the error."""
    from jax_q4k import models

    model, want = golden
    out = models.generate(model, want["prompt"].tolist(), max_new_tokens=8)
    assert len(out.tokens) == 8
    logits = want["logits_f32"][len(want["prompt"]) - 1]
    top = np.sort(logits)[-2:]
    if top[1] - top[0] > 0.2 * logits.std():  # beyond what an NMSE of 1e-2 could turn over
        assert out.tokens[0] == want["greedy_f32"][0]
