"""Warnings of what llama.cpp makes of a file, by what llama.cpp 0.3.36's library answered."""

import dataclasses

import numpy as np
import pytest

from jax_q4k.models.config import Config
from jax_q4k.models.config.attention_fields import Latent
from jax_q4k.models.config.expert_fields import Experts
from jax_q4k.models.config.mixer_fields import Delta
from jax_q4k.models.files.llama_cpp import differences, warn_of_differences

SIZES = dict(
    hidden_size=64, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32
)


def config(architecture="qwen3", **fields):
    common = dict(vocab_size=96, context_length=64, norm_eps=1e-5)
    return Config(architecture=architecture, **SIZES, **common, **fields)


OUTPUT_BIAS = "blk.0.attn_output.bias"


@pytest.mark.parametrize(
    ("config", "metadata", "names", "expected"),
    [
        (config(), {}, ["blk.0.attn_q.bias", "token_embd.weight"], []),
        (config(), {}, [OUTPUT_BIAS], ["refuses it: it has no attn_output.bias in qwen3"]),
        (config("llama"), {}, [OUTPUT_BIAS, "rope_freqs.weight"], []),
        (
            config(),
            {},
            ["rope_freqs.weight"],
            ["refuses it: it has no rope_freqs.weight in qwen3"],
        ),
        (
            config(window=16, windowed_layers=(True, False)),
            {},
            [],
            ["has no sliding windows in qwen3: answers differ for texts over 16 tokens"],
        ),
        (
            config("llama"),
            {"llama.rope.rotated_layers": np.array([True, False])},
            [],
            ["rotates other layers: answers differ"],
        ),
        (
            config(),
            {"jax_q4k.rope_freqs": [1.0] * 16},
            [],
            ["has other frequencies of the rope, since GGUF's keys cannot say these"],
        ),
        (
            config(),
            {},
            ["rope_factors_long.weight"],
            ["refuses it: it has no rope_factors_long.weight in qwen3"],
        ),
        (config("phi3"), {}, ["rope_factors_long.weight", "rope_factors_short.weight"], []),
        (
            config("deepseek2", latent=Latent(rank=32, query_rank=0, value_dim=16)),
            {},
            [],
            ["refuses it: it needs a q_lora_rank except with 26, 27 or 48 layers"],
        ),
        (config("deepseek2", latent=Latent(rank=32, query_rank=24, value_dim=16)), {}, [], []),
        (
            config("qwen35", delta=Delta(2, 4, head_dim=16, width=4, value_dim=8)),
            {},
            [],
            ["refuses it: its value heads are as wide as key heads"],
        ),
        (
            config("command-r"),
            {},
            ["blk.0.attn_q_norm.weight"],
            ["refuses it: it normalizes heads only in models of 64 layers or more"],
        ),
        (
            config("qwen3moe", experts=Experts(4, 2, 32, normalize=False)),
            {},
            [],
            ["weights experts otherwise (norm_topk_prob): answers differ"],
        ),
        (config("glm4moe", experts=Experts(4, 2, 32, normalize=False)), {}, [], []),
        (
            config("lfm2moe", experts=Experts(4, 2, 32, scale=1.5)),
            {},
            [],
            ["ignores the scale of experts' weights: answers differ"],
        ),
        (
            config("deepseek2"),
            {"deepseek2.rope.scaling.type": "linear"},
            [],
            ["also scales attention by a linear rope's factor: answers differ"],
        ),
        (config("llama"), {"llama.rope.scaling.type": "linear"}, [], []),
        (
            config("lfm2"),
            {},
            ["blk.0.shortconv.in_proj.bias"],
            ["refuses it: it has no shortconv.in_proj.bias in lfm2"],
        ),
    ],
)
def test_differences(config, metadata, names, expected):
    assert differences(config, metadata, names) == expected


def test_one_warning_names_all():
    windowed = dataclasses.replace(config(), window=16, windowed_layers=(True, True))
    with pytest.warns(UserWarning) as warned:
        warn_of_differences("x.gguf", windowed, {}, [OUTPUT_BIAS])
    (one,) = warned
    text = str(one.message)
    assert text.startswith("x.gguf: llama.cpp refuses it: it has no attn_output.bias in qwen3; it")
    assert text.endswith("for texts over 16 tokens (see docs/models.md)")
