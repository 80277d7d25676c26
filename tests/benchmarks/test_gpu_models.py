"""Random models for timing, and the clock of the decode loop, at sizes that a CPU can run."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest

from benchmarks.gpu_models import (
    SMALL_MODEL,
    decode_rate,
    prompt_rate,
    prompt_table,
    table,
    weight_bytes_per_token,
)
from jax_q4k.models.config.tensors import expected_tensors
from ptx_kernels import formats
from tools.random_model import LLAMA_3_1_8B, random_model, random_weight, tensor_types


@pytest.mark.slow("computes with matrices of full size", quick=["Q4_K"])
@pytest.mark.parametrize("format", ["Q4_K", "Q6_K", "Q5_0", "Q8_0"])
def test_random_weights_have_unit_gain(format):
    values = np.asarray(random_weight(jax.random.key(0), format, 64, 1024).dequantize()) * 32
    assert abs(values.mean()) < 0.1
    assert 0.9 < values.std() < 1.1


def test_the_8b_shape_has_the_bytes_of_the_real_file():
    """Llama-3.1-8B in Q4_K_M reads 4.617 GB per token."""
    total = 0
    shapes = expected_tensors(LLAMA_3_1_8B)
    for name, kind in tensor_types(LLAMA_3_1_8B).items():
        if name == "token_embd.weight":
            continue
        size = math.prod(shapes[name][0])
        block = None if kind == "F32" else formats.get(kind)
        total += 4 * size if block is None else size // block.block_size * block.block_bytes
    assert round(total / 1e9, 3) == 4.617


@pytest.mark.slow("compiles a model of several layers")
def test_decode_rate():
    model = random_model(SMALL_MODEL)
    rate = decode_rate("small", model, tokens=8, segments=3, copy_bandwidth=1e10)
    assert 0 < rate.best <= rate.ms_per_token <= rate.worst
    assert rate.tokens == 24 and rate.context == 8
    embedding = model.decoder().embedding.get_value().nbytes
    assert (
        rate.weight_bytes
        == weight_bytes_per_token(model)
        == sum(w.nbytes for w in model.weights) - embedding
    )
    assert rate.copy_fraction == pytest.approx(
        rate.weight_bytes / (1e-3 * rate.ms_per_token) / 1e10
    )
    assert rate.tokens_per_second == pytest.approx(1e3 / rate.ms_per_token)
    assert "small" in table([rate])


@pytest.mark.slow("measures")
def test_a_step_of_a_batch_gives_every_sequence_a_token():
    rate = decode_rate("small", random_model(SMALL_MODEL), tokens=4, segments=2, batch=3)
    assert rate.batch == 3 and rate.tokens_per_second == pytest.approx(3e3 / rate.ms_per_token)


def test_prompt_rate():
    rate = prompt_rate("small", random_model(SMALL_MODEL), 24, passes=3)
    assert 0 < rate.best <= rate.ms <= rate.worst < 1e3 * rate.compile_seconds
    assert rate.tokens_per_second == pytest.approx(24e3 / rate.ms)
    assert "24" in prompt_table([rate])
