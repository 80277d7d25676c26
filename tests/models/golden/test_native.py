"""The golden models with the CPU kernels."""

import jax.numpy as jnp
import pytest
from support.helpers import nmse
from support.implementations import needs_native

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.network.build import build

from .. import golden_files

pytestmark = [needs_native, pytest.mark.cpu_kernels]


@pytest.mark.slow("repeats a model's logits in steps", quick=["llama-gqa", "gemma3", "qwen2-odd"])
@pytest.mark.parametrize("name", golden_files.NAMES)
def test_greedy_tokens(name):
    model, reference = golden_files.model(name), golden_files.reference(name)
    with jq.implementation("native", activations="f32"):
        out = models.generate(
            model, reference.prompt.tolist(), max_new_tokens=len(reference.greedy)
        )
    assert out.tokens == reference.greedy.tolist()


@pytest.mark.parametrize("name", golden_files.NAMES)
def test_logits(name):
    golden_files.check_logits(name)


@pytest.mark.slow("compiles a model of floats", quick=["float16"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_model_of_16_bit_weights_stays_in_16_bits(dtype):
    packed = golden_files.model("llama-gqa")
    tensors = {
        name: tensor.dequantize(dtype) if isinstance(tensor, jq.QuantizedArray) else tensor
        for name, tensor in models.named_tensors(packed).items()
    }
    model = models.Model(build(packed.config, tensors))
    programs = models.abstract_programs(model)
    for name, (jitted, arguments) in programs.items():
        assert "dot_general" not in jitted.trace(*arguments).lower().as_text(), name
    jitted, arguments = programs["generate"]
    compiled = jitted.trace(*arguments).lower().compile()
    assert compiled.memory_analysis().temp_size_in_bytes < max(
        leaf.nbytes for leaf in model.weights
    )
    prompt = golden_files.reference("llama-gqa").prompt[None]
    got = model.logits(prompt)
    with jq.implementation("xla"):
        assert nmse(got, model.logits(prompt)) <= 1e-8
