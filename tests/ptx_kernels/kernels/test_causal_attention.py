"""Prompt attention on tensor cores in the simulator, against float64, and its machine code."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from support.helpers import nmse
from support.oracles import bf16_parts
from support.oracles import causal_attention as oracle
from support.subjects import causal_subject

from ptx_kernels import simulator
from ptx_kernels.devices import DEVICES, target
from ptx_kernels.kernels.attention import (
    CausalAttentionConfig,
    SplitKeysConfig,
    causal_attention,
    causal_attention_rule,
    split_keys,
)
from ptx_kernels.limits import causal_attention_takes
from ptx_kernels.machine_code import ptxas, sass
from ptx_kernels.ptx import Kernel, KernelError

#: Maximum NMSE by (parts, key_parts): relative errors of 4e-3, 1e-5 and 1e-6.
TOLERANCES = {(1, 1): 1.6e-5, (2, 1): 1e-10, (2, 2): 1e-10, (3, 1): 1e-12, (3, 3): 1e-12}
SMALL = CausalAttentionConfig(warps=1, tokens=16)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8])
def test_groups_of_heads(group: int) -> None:
    rng = np.random.default_rng(group)
    q = rng.standard_normal((1, 21, 2 * group, 32), np.float32)
    k, v = rng.standard_normal((2, 1, 21, 2, 32), np.float32)
    sizes = dict(batch=1, time=21, num_heads=2 * group, num_kv_heads=2, head_dim=32, value_dim=32)
    kernel = causal_attention(**sizes, scale=0.3, config=CausalAttentionConfig(2, 16))
    lengths = np.array([20], np.int32)
    (got,) = simulator.run(kernel, q, *bf16_parts(k, 2), *bf16_parts(v, 2), lengths)
    want = oracle(q, k, v, lengths, 0.3)
    assert nmse(got[:, :20], want[:, :20]) <= TOLERANCES[2, 2]


@pytest.mark.parametrize("parts, tolerance", TOLERANCES.items())
def test_the_error_follows_from_the_parts(parts: tuple[int, int], tolerance: float) -> None:
    sums = {"parts": parts[0], "key_parts": parts[1], "tolerance": tolerance}
    assert causal_subject(SMALL, **sums).passes()
    if parts[0] < 3:  # one part less misses it
        assert not causal_subject(SMALL, **(sums | {"tolerance": tolerance * 1e-4})).passes()


@pytest.mark.parametrize(
    "head_dim, value_dim",
    [(64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (256, 256), (16, 48)],
)
def test_sizes_of_heads(head_dim: int, value_dim: int) -> None:
    config = CausalAttentionConfig(warps=4, tokens=32)
    sizes = {"head_dim": head_dim, "value_dim": value_dim}
    assert causal_subject(config, time=18, **sizes).passes()


@pytest.mark.grid
@pytest.mark.parametrize("time", [1, 2, 15, 16, 17, 33, 48])
@pytest.mark.parametrize("window", [None, 1, 5, 16, 40])
def test_windows(time: int, window: int | None) -> None:
    for config in (SMALL, CausalAttentionConfig(warps=2, tokens=32, stages=3)):
        subject = causal_subject(config, time=max(time, 5), head_dim=16, value_dim=16)
        assert subject.passes()
        options: dict[str, Any] = {"window": window} if window else {}
        assert causal_subject(
            config, time=max(time, 5), head_dim=16, value_dim=16, **options
        ).passes()


@pytest.mark.parametrize("options", [{"soft_cap": 0.7}, {"sinks": True}])
def test_soft_caps_and_sinks(options: dict[str, Any]) -> None:
    assert causal_subject(SMALL, **options).passes()
    assert causal_subject(SMALL, window=7, **options).passes()


def test_scores_far_below_and_above_zero() -> None:
    """First weights must neither stay nor vanish if later scores are much larger."""
    q = np.ones((1, 40, 1, 16), np.float32)
    k = np.linspace(-400, 400, 40, dtype=np.float32)[None, :, None, None] * q / 16
    v = np.random.default_rng(0).standard_normal((1, 40, 1, 16), np.float32)
    lengths = np.array([40], np.int32)
    sizes = dict(batch=1, time=40, num_heads=1, num_kv_heads=1, head_dim=16, value_dim=16)
    for sign in (1, -1):
        kernel = causal_attention(**sizes, scale=1.0, parts=3, key_parts=3, config=SMALL)
        keys = (sign * k).astype(np.float32)
        (got,) = simulator.run(kernel, q, *bf16_parts(keys, 3), *bf16_parts(v, 3), lengths)
        assert nmse(got, oracle(q, keys, v, lengths, 1.0)) <= 1e-8  # scores of 400 have an ulp


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_keys_and_values_are_split_exactly(parts: int) -> None:
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((2, 5, 3, dim), np.float32) for dim in (48, 16))
    k[0, 0, 0, :2] = 0.0, -3e-20
    sizes = dict(batch=2, time=5, num_kv_heads=3, head_dim=48, value_dim=16)
    kernel = split_keys(**sizes, parts=parts, config=SplitKeysConfig(warps=1))
    got = simulator.run(kernel, k, v)
    for result, want in zip(got, bf16_parts(k, parts) + bf16_parts(v, parts), strict=True):
        np.testing.assert_array_equal(result.view(np.uint16), want)


def test_sizes_that_are_not_split() -> None:
    sizes = dict(batch=2, time=5, num_kv_heads=3, head_dim=20, value_dim=16)
    with pytest.raises(KernelError, match="head_dim=20 and value_dim=16 must be multiples of 8"):
        split_keys(**sizes)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_heads": 3}, "num_heads=3 must be a multiple of num_kv_heads=2"),
        ({"head_dim": 40}, "head_dim=40 and value_dim=32 must be multiples of 16, at most 256"),
        ({"value_dim": 272}, "head_dim=32 and value_dim=272 must be multiples of 16"),
        ({"head_dim": 208, "parts": 3}, "head_dim=208 and value_dim=32 .* at most 192"),
        ({"soft_cap": 0.0}, "soft_cap=0.0 must be positive"),
        ({"parts": 4}, "parts=4 and key_parts=2 must be 1, 2 or 3"),
        ({"config": CausalAttentionConfig(tokens=24)}, "tokens=24 must be a multiple of 16"),
        ({"config": CausalAttentionConfig(stages=1)}, "stages=1 at least 2"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], message: str) -> None:
    sizes = dict(batch=1, time=9, num_heads=4, num_kv_heads=2, head_dim=32, value_dim=32)
    with pytest.raises(KernelError, match=message):
        causal_attention(**(sizes | {"scale": 1.0} | changes))


@pytest.mark.slow("simulates or assembles large kernels", quick=["RTX 4090"])
@pytest.mark.parametrize("device", [*DEVICES, "NVIDIA of tomorrow"])
def test_the_rule_s_blocks_have_room(device: str) -> None:
    chosen = target(device)
    room = chosen.facts.block_shared_bytes if chosen.facts else 99 << 10
    for parts, dims in itertools.product((1, 2, 3), ((64, 64), (192, 128), (192, 192), (256, 256))):
        if not causal_attention_takes(*dims, parts):
            continue
        for time in (1, 5, 512, 8192):
            shape = 1, time, 32, 8, *dims
            config = causal_attention_rule(chosen, 8, 4 * time, *dims, parts, parts)
            assert config.shared_bytes(*dims, parts, parts) <= room
            names = "batch", "time", "num_heads", "num_kv_heads", "head_dim", "value_dim"
            sizes = dict(zip(names, shape, strict=True))
            kernel = causal_attention(
                **sizes, scale=1.0, parts=parts, key_parts=parts, config=config
            )
            assert kernel.dynamic_shared_bytes == config.shared_bytes(*dims, parts, parts)


def _instructions_per_mma(kernel: Kernel, arch: str) -> float:
    """Instructions per mma in the loop over tokens that all rows see."""
    code = sass.disassemble(ptxas.assemble(kernel.text, arch).cubin)
    loops = [
        (loop.issued(), sum(i.name == "HMMA" for i in loop.instructions))
        for loop in sass.innermost_loops(code)
    ]
    return min(issued / mma for issued, mma in loops if mma)


@pytest.mark.slow(
    "assembles a large kernel for each case", quick=["parts=1-sm_90", "parts=3-sm_100"]
)
@pytest.mark.grid
@pytest.mark.parametrize("arch", ptxas.TARGETS)
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_instructions_per_mma(parts: int, arch: str) -> None:
    sizes = dict(batch=1, time=512, num_heads=32, num_kv_heads=8, head_dim=128, value_dim=128)
    config = causal_attention_rule(target(), 8, 2048, 128, 128, parts, parts)
    kernel = causal_attention(**sizes, scale=0.1, parts=parts, key_parts=parts, config=config)
    assert _instructions_per_mma(kernel, arch) <= (4.0, 3.0, 3.0)[parts - 1]
