"""Kernels launched on the GPU without JAX, compared with the simulator running the same PTX."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.format_lists import PRODUCTS
from support.helpers import nmse

from ptx_kernels import driver, formats, simulator
from ptx_kernels.kernels import KERNELS
from ptx_kernels.kernels.attention import paged_attention_rule
from ptx_kernels.kernels.gated_delta import gated_delta_rule_rule, gated_delta_step_rule
from ptx_kernels.kernels.gemm import F16_FORMATS, GemmConfig, gemm_rule
from ptx_kernels.kernels.matvec import PRESETS, matvec_rule
from ptx_kernels.kernels.operands import random_operands
from ptx_kernels.kernels.pages import PAGE_TYPES
from ptx_kernels.ptx import Kernel
from ptx_kernels.ptx.instructions import bf16_to_f32
from ptx_kernels.tuning import choose

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu():
    with driver.Device() as device:
        yield device


def matvec(format: str, n: int, columns: int, m: int) -> tuple[str, dict[str, Any]]:
    return "matvec", dict(
        format=format, n=n, columns=columns, m=m, config=choose(matvec_rule, format, n, columns, m)
    )


def gemm(format: str, n: int, columns: int, m: int) -> tuple[str, dict[str, Any]]:
    return "gemm", dict(
        format=format, n=n, columns=columns, m=m, config=choose(gemm_rule, format, n, columns, m)
    )


def decode(format: str, dtype: str, lookups: int) -> tuple[str, dict[str, Any]]:
    return "decode", dict(format=format, n=37, blocks=6, dtype=dtype, lookups=lookups)


def attention(
    dtype: str,
    head_dim: int,
    group: int,
    splits: int = 1,
    contiguous: bool = False,
    value_dim: int | None = None,
    cluster: bool = False,
    **options: Any,
) -> tuple[str, dict[str, Any]]:
    shape = 3, 2 * group, 2, head_dim, 192, dtype, value_dim
    config = replace(choose(paged_attention_rule, *shape), splits=splits, cluster=cluster)
    pages = (3, 192, 1) if contiguous else (40, 16, 12)
    return "paged_attention", dict(
        batch=3,
        num_heads=2 * group,
        num_kv_heads=2,
        head_dim=head_dim,
        num_pages=pages[0],
        page_size=pages[1],
        pages_per_sequence=pages[2],
        scale=head_dim**-0.5,
        dtype=dtype,
        contiguous=contiguous,
        value_dim=value_dim,
        config=config,
        **options,
    )


def delta(family: str, key_dim: int, value_dim: int, tiled: bool) -> tuple[str, dict[str, Any]]:
    """Four sequences of six heads; a prompt of 21 tokens, or one step."""
    sizes = dict(batch=4, num_k_heads=2, num_v_heads=6, key_dim=key_dim, value_dim=value_dim)
    options = dict(scale=key_dim**-0.5, tiled=tiled)
    if family == "gated_delta_rule":
        config = choose(gated_delta_rule_rule, 4, 6, key_dim, value_dim)
        return family, dict(time=21, config=config) | sizes | options
    config = choose(gated_delta_step_rule, key_dim, value_dim)
    return family, dict(width=4, eps=1e-6, config=config) | sizes | options


#: Ragged shapes: rows that do not fill a block, super-blocks that do not fill a loop iteration, a
#: sequence of length 0.
SHAPES = [
    *(
        ("quantize_q8_1", dict(rows=rows, columns=672, dtype=dtype))
        for rows, dtype in ((1, "f32"), (5, "bf16"), (3, "f16"))
    ),
    *(("quantize_f16", dict(rows=5, columns=768, dtype=dtype)) for dtype in ("f32", "bf16", "f16")),
    *(
        matvec(format, n, columns, m)
        for format in formats.names()
        for m in range(1, 9)
        for n, columns in ((33, 768), (1030, 5376))
    ),
    *(
        ("matvec", dict(format=format, n=33, columns=2304, m=m, config=config))
        for config in PRESETS.values()
        for format in (PRODUCTS if config.activations == "q8_1" else ("Q4_K", "Q5_0"))
        if not config.broadcast_header or format == "Q4_K"
        for m in (1, 3)
    ),
    *(
        gemm(format, n, columns, m)
        for format in PRODUCTS
        for m, n, columns in ((9, 33, 768), (16, 1030, 1280), (64, 100, 512), (130, 2112, 512))
    ),
    *(
        (
            "gemm",
            dict(
                format=format, n=n, columns=columns, m=m, config=GemmConfig(2, 1, 2, 32, 2, "f16")
            ),
        )
        for format in F16_FORMATS
        for m, n, columns in ((9, 33, 768), (130, 2112, 512))
    ),
    *(
        decode(format, dtype, lookups)
        for format in formats.names()
        for dtype, lookups in (("f32", 0), ("bf16", 0), ("f16", 0), ("f32", 9))
    ),
    *(
        (
            "append_kv",
            dict(
                tokens=11,
                num_pages=9,
                num_kv_heads=3,
                page_size=16,
                head_dim=head_dim,
                dtype=dtype,
                latent=head_dim == 576,
            ),
        )
        for dtype in ("f32", "bf16", "f16", "int8", "fp8")
        for head_dim in (96, 512, 576)
    ),
    *(
        (
            "qkv_append_matvec",
            dict(
                formats=("Q4_K", "Q4_K", "Q6_K"),
                num_heads=6,
                num_kv_heads=2,
                head_dim=96,
                rope_dim=96,
                interleaved=interleaved,
                num_pages=9,
                page_size=16,
                pages=pages,
                columns=1024,
                m=m,
                norm=True,
                eps=1e-6,
                config=PRESETS["inline_q8"],
            ),
        )
        for m in (1, 3)
        for pages, interleaved in (("bf16", True), ("f16", False), ("fp8", True))
    ),
    *(
        (
            "rope_append",
            dict(
                tokens=5,
                num_heads=6,
                num_kv_heads=2,
                head_dim=96,
                rope_dim=rope_dim,
                num_pages=9,
                page_size=16,
                dtype=dtype,
                interleaved=interleaved,
                qk_norm=not interleaved,
                eps=1e-6,
            ),
        )
        for dtype, rope_dim, interleaved in (
            ("f32", 96, True),
            ("bf16", 40, False),
            ("f16", 96, False),
            ("int8", 96, False),
            ("fp8", 96, True),
        )
    ),
    *(
        attention(dtype, head_dim, 4)
        for dtype in PAGE_TYPES
        for head_dim in (32, 80, 128, 256, 272, 512)
    ),
    *(attention(dtype, 512, 8) for dtype in PAGE_TYPES),
    *(attention(dtype, 576, 16, value_dim=512) for dtype in PAGE_TYPES),
    *(attention("bf16", 576, group, value_dim=512) for group in (1, 20, 40)),
    attention("int8", 288, 16, splits=5, value_dim=256, window=70, soft_cap=20.0, sinks=True),
    *(attention("bf16", 64, group) for group in (1, 3, 7, 9, 16)),
    *(attention(dtype, 128, 16, splits=3, sinks=True) for dtype in ("bf16", "int8", "fp8")),
    attention("f16", 96, 4, splits=5, contiguous=True, window=70, soft_cap=20.0, sinks=True),
    attention("int8", 112, 3, splits=3, window=100),
    *(attention(dtype, 128, 4, splits=8, cluster=True) for dtype in PAGE_TYPES),
    attention("bf16", 128, 4, splits=8, cluster=True, output="q8_1", sinks=True),
    attention("int8", 80, 7, splits=3, cluster=True, window=100, soft_cap=20.0),
    attention("bf16", 576, 20, splits=5, cluster=True, value_dim=512),
    *(
        delta(family, key_dim, value_dim, tiled)
        for family in ("gated_delta_rule", "gated_delta_step")
        for key_dim, value_dim, tiled in ((128, 128, True), (48, 80, False), (256, 256, True))
    ),
    *(
        ("merge_attention", dict(batch=2, num_heads=5, head_dim=80, splits=splits))
        for splits in (2, 37)
    ),
    ("argmax", dict(rows=3, columns=4001, splits=4)),
    ("top_k", dict(rows=3, columns=4001, count=40, splits=4)),
]


def label(shape: tuple[str, dict[str, Any]]) -> str:
    family, arguments = shape
    values = (str(value) for name, value in arguments.items() if name not in ("config", "scale"))
    return "-".join((family, *values))


def values_of(kernel: Kernel, results: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    return [
        bf16_to_f32(r) if b.type.name == "bf16" else r
        for r, b in zip(results, kernel.results, strict=True)
    ]


#: Families that use `ex2.approx` or `rsqrt.approx`, whose last bits depend on the device.
APPROXIMATE = ("paged_attention", "merge_attention", "gated_delta_rule", "gated_delta_step")
#: Float mma: the order and rounding of its sums depend on the device.
FLOAT_MMA = re.compile(r"\bmma\.sync\S*\.f32\.(bf16|f16)\.")


@pytest.mark.parametrize("shape", SHAPES, ids=label)
def test_gpu_agrees_with_the_simulator(shape, gpu):
    """Bits are equal if all rounding is explicit; otherwise only the last bits differ."""
    family, arguments = shape
    kernel = KERNELS[family](**arguments)
    for seed in (0, 1):
        operands = random_operands(kernel, seed)
        got = values_of(kernel, gpu.run(kernel, *operands))
        want = values_of(kernel, simulator.run(kernel, *operands))
        for result, expected in zip(got, want, strict=True):
            if family in APPROXIMATE or FLOAT_MMA.search(kernel.text):
                assert nmse(result, expected) <= 1e-10
            else:
                np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(
    "shape", [matvec("Q4_K", 4096, 4096, 1), attention("bf16", 128, 4)], ids=label
)
def test_runs_repeat_to_the_bit(shape, gpu):
    """Results that differ between runs with the same input reveal a race."""
    family, arguments = shape
    kernel = KERNELS[family](**arguments)
    operands = random_operands(kernel)
    first = gpu.run(kernel, *operands)
    for _ in range(20):
        for again, before in zip(gpu.run(kernel, *operands), first, strict=True):
            np.testing.assert_array_equal(again, before)


def test_facts_are_plausible(gpu):
    facts = gpu.facts
    assert facts.name and facts.arch.startswith("sm_")
    assert 1 <= facts.multiprocessors <= 1024
    assert 1 << 20 <= facts.l2_bytes < facts.memory_bytes


def test_timing_scales_with_the_work(gpu):
    """Eight times the rows take more than twice as long: the clock measures the device's work.

    It does not measure the launch.
    """
    medians = []
    for n in (16384, 131072):
        kernel = KERNELS["matvec"](**matvec("Q4_K", n, 1024, 1)[1])
        with gpu.scope():
            medians.append(gpu.time([(kernel, gpu.place(kernel, random_operands(kernel)))]).median)
    assert medians[1] > 2 * medians[0] > 0
