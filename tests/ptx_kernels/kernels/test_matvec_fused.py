"""Mat-vecs with prologues and epilogues, gated and for several matrices.

They are compared with float64, and with the kernels that they replace.

Fused and unfused results are equal bit for bit if the same numbers are rounded in the same order.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.helpers import nmse
from support.oracles import (
    activation_operands,
    gated,
    quantized,
    random_planes,
    rms_norm_oracle,
    weights,
)

from ptx_kernels import formats, simulator
from ptx_kernels.kernels.matvec import PRESETS, MatvecConfig, gated_matvec, matvec, qkv_matvec
from ptx_kernels.kernels.quantize_q8_1 import quantize_q8_1
from ptx_kernels.kernels.rms_norm import RmsNormConfig, rms_norm
from ptx_kernels.ptx import KernelError

EPS = 1e-5
TIGHT, F32 = 1e-12, 1e-11
INLINE = PRESETS["inline_q8"]
Q8_1 = replace(INLINE, activations="q8_1")  # the same dot products, quantized by another kernel
GROUPS = replace(INLINE, warps=16, resident_blocks=2)  # a block has 32 rows


def planes_of(
    rng: np.random.Generator, format: str, n: int, columns: int
) -> tuple[np.ndarray, ...]:
    return random_planes(rng, format, n, columns // formats.get(format).block_size)


def bound(config: MatvecConfig) -> float:
    return F32 if config.activations == "f32" else TIGHT


@pytest.mark.parametrize(
    "config, m, n, columns",
    [
        (PRESETS["tiled"], 1, 5, 2304),
        (PRESETS["tiled"], 5, 17, 4096),  # more than 48 KB of shared memory
        (replace(PRESETS["chunked"], rows_per_warp=3), 1, 3, 18944),
        (replace(PRESETS["chunked"], rows_per_warp=2, lanes=32), 3, 2, 27648),
        (replace(PRESETS["chunked"], persistent=2, warps_per_row=4, lanes=8), 8, 9, 2560),
        (replace(PRESETS["tiled"], persistent=2, rows_per_warp=3), 2, 101, 256),
        (INLINE, 1, 2, 27648),
        (INLINE, 8, 37, 256),
        (replace(INLINE, persistent=3, warps_per_row=2), 3, 70, 512),
        # more values than lanes
        (
            replace(PRESETS["quarter_warp_dp4a"], rows_per_warp=5),
            8,
            21,
            256,
        ),
    ],
)
def test_bias_and_residual(config: MatvecConfig, m: int, n: int, columns: int) -> None:
    rng = np.random.default_rng([m, n, columns])
    planes = planes_of(rng, "Q4_K", n, columns)
    operands, x = activation_operands(config, rng.standard_normal((m, columns), np.float32) * 3)
    bias, residual = rng.standard_normal(n, np.float32), rng.standard_normal((m, n), np.float32)
    kernel = matvec(
        format="Q4_K", n=n, columns=columns, m=m, bias=True, residual=True, config=config
    )
    (y,) = simulator.run(kernel, *planes, *operands, bias, residual)
    assert nmse(y, x @ weights("Q4_K", planes).T + bias + residual) <= bound(config)


@pytest.mark.parametrize(
    "format, columns", [("Q8_0", 96), ("Q5_0", 8224), ("Q4_0", 8512), ("Q5_1", 16416)]
)
def test_chunks_of_small_blocks(format: str, columns: int) -> None:
    """Chunks have one super-block's columns or many; the last may end anywhere."""
    rng = np.random.default_rng(columns)
    config = replace(PRESETS["chunked"], rows_per_warp=2)
    planes, x = planes_of(rng, format, 3, columns), rng.standard_normal((1, columns), np.float32)
    (y,) = simulator.run(
        matvec(format=format, n=3, columns=columns, m=1, config=config), *planes, x
    )
    assert nmse(y, x.astype(np.float64) @ weights(format, planes).T) <= F32


@pytest.mark.parametrize(
    "format, m, columns",
    [("Q4_K", 1, 4096), ("Q5_K", 3, 256), ("Q6_K", 8, 768), ("Q8_0", 2, 32), ("Q5_0", 5, 1120)],
)
def test_inline_quantization_equals_a_kernel_of_its_own(format: str, m: int, columns: int) -> None:
    rng = np.random.default_rng(columns)
    planes, x = planes_of(rng, format, 20, columns), rng.standard_normal((m, columns), np.float32)
    arguments = dict(format=format, n=20, columns=columns, m=m)
    (fused,) = simulator.run(matvec(**arguments, config=INLINE), *planes, x)
    q8_1 = simulator.run(quantize_q8_1(rows=m, columns=columns), x)
    (chain,) = simulator.run(matvec(**arguments, config=Q8_1), *planes, *q8_1)
    np.testing.assert_array_equal(fused, chain)


@pytest.mark.parametrize("m, columns", [(1, 4096), (2, 1280), (8, 256)])
@pytest.mark.parametrize("config", [INLINE, PRESETS["tiled"]], ids=["inline_q8", "tiled"])
def test_norm_equals_a_kernel_of_its_own(config: MatvecConfig, m: int, columns: int) -> None:
    rng = np.random.default_rng(columns)
    planes, x = (
        planes_of(rng, "Q4_K", 9, columns),
        rng.standard_normal((m, columns), np.float32) * 7,
    )
    weight = rng.standard_normal(columns, np.float32)
    arguments = dict(format="Q4_K", n=9, columns=columns, m=m)
    (fused,) = simulator.run(
        matvec(**arguments, norm=True, eps=EPS, config=config), *planes, x, weight
    )
    output, unfused = ("f32", config) if config.stage == "whole" else ("q8_1", Q8_1)
    norm = rms_norm(
        rows=m, columns=columns, eps=EPS, output=output, config=RmsNormConfig(config.warps)
    )
    (chain,) = simulator.run(
        matvec(**arguments, config=unfused), *planes, *simulator.run(norm, x, weight)
    )
    np.testing.assert_array_equal(fused, chain)
    if output == "f32":
        assert nmse(fused, rms_norm_oracle(x, weight, EPS) @ weights("Q4_K", planes).T) <= F32


@pytest.mark.parametrize(
    "config, m, n",
    [
        (GROUPS, 1, 96),
        (replace(GROUPS, persistent=2), 3, 160),
        # 64 rows a block
        (
            replace(Q8_1, warps=16, rows_per_warp=4, resident_blocks=1, persistent=1),
            8,
            160,
        ),
        (
            replace(
                PRESETS["multi_warp"],
                warps=32,
                warps_per_row=2,
                rows_per_warp=2,
                resident_blocks=2,
                persistent=1,
            ),
            2,
            64,
        ),
        # more rounds than a block holds results for: it holds 16 rounds, or one
        (replace(INLINE, rows_per_warp=4, unroll=1, resident_blocks=2, persistent=1), 1, 576),
        (replace(INLINE, warps=32, rows_per_warp=2, resident_blocks=1, persistent=1), 8, 192),
    ],
)
def test_quantized_output_equals_a_kernel_of_its_own(config: MatvecConfig, m: int, n: int) -> None:
    rng = np.random.default_rng([m, n])
    planes = planes_of(rng, "Q4_K", n, 512)
    operands, _ = activation_operands(config, rng.standard_normal((m, 512), np.float32))
    arguments = dict(format="Q4_K", n=n, columns=512, m=m, bias=True, config=config)
    operands = (*planes, *operands, rng.standard_normal(n, np.float32))
    fused = simulator.run(matvec(**arguments, output="q8_1"), *operands)
    chain = simulator.run(
        quantize_q8_1(rows=m, columns=n), *simulator.run(matvec(**arguments), *operands)
    )
    for got, want in zip(fused, chain, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.slow("simulates or assembles large kernels", quick=["pair0-silu-m=1-n=37-config0"])
@pytest.mark.parametrize(
    "pair, activation, m, n, config",
    [
        (("Q4_K", "Q4_K"), "silu", 1, 37, PRESETS["quarter_warp_dp4a"]),
        (("Q4_K", "Q6_K"), "gelu", 8, 9, PRESETS["batched"]),
        (("Q4_K", "Q4_K"), "gelu", 3, 6, replace(PRESETS["multi_warp_dp4a"], persistent=2)),
        (("Q5_K", "Q4_K"), "silu", 2, 5, PRESETS["chunked"]),
        (("MXFP4", "MXFP4"), "swiglu_oai", 1, 7, PRESETS["quarter_warp_dp4a"]),
        (("Q4_K", "Q4_K"), "silu", 2, 40, replace(INLINE, persistent=2)),
    ],
)
def test_gated(
    pair: tuple[str, str], activation: str, m: int, n: int, config: MatvecConfig
) -> None:
    rng = np.random.default_rng([m, n])
    columns = 8448 if config.stage == "chunks" else 512
    gate, up = (planes_of(rng, format, n, columns) for format in pair)
    operands, x = activation_operands(config, rng.standard_normal((m, columns), np.float32) * 0.2)
    kernel = gated_matvec(
        formats=pair, n=n, columns=columns, m=m, activation=activation, config=config
    )
    (y,) = simulator.run(kernel, *gate, *up, *operands)
    want = gated(activation, x @ weights(pair[0], gate).T, x @ weights(pair[1], up).T)
    assert nmse(y, want) <= bound(config)


def test_gated_from_a_norm_to_int8() -> None:
    """Runs the first half of a feed-forward network in one launch.

    Its q8_1 output equals the quantized f32 output bit for bit.
    """
    rng = np.random.default_rng(0)
    m, n, columns = 2, 64, 512
    gate, up = (planes_of(rng, "Q4_K", n, columns) for _ in range(2))
    x, weight = (
        rng.standard_normal((m, columns), np.float32),
        rng.standard_normal(columns, np.float32),
    )
    arguments = dict(
        formats=("Q4_K", "Q4_K"), n=n, columns=columns, m=m, norm=True, eps=EPS, config=GROUPS
    )
    (y,) = simulator.run(gated_matvec(**arguments), *gate, *up, x, weight)
    norm = rms_norm(rows=m, columns=columns, eps=EPS, config=RmsNormConfig(GROUPS.warps))
    _, seen = activation_operands(GROUPS, simulator.run(norm, x, weight)[0])
    assert (
        nmse(y, gated("silu", seen @ weights("Q4_K", gate).T, seen @ weights("Q4_K", up).T))
        <= TIGHT
    )
    for got, want in zip(
        simulator.run(gated_matvec(**arguments, output="q8_1"), *gate, *up, x, weight),
        quantized(y),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "types, rows, m, norm, config",
    [
        (("Q4_K", "Q4_K", "Q6_K"), (40, 9, 9), 1, False, PRESETS["quarter_warp_dp4a"]),
        (("Q4_K", "Q5_K", "Q6_K"), (33, 16, 5), 8, True, INLINE),
        (
            ("Q6_K", "Q4_K"),
            (3, 50),
            3,
            True,
            replace(PRESETS["tiled"], lanes=16, rows_per_warp=2, persistent=3),
        ),
        (
            ("Q4_K", "Q4_K", "Q4_K", "Q5_K"),
            (2, 7, 2, 3),
            2,
            False,
            replace(PRESETS["multi_warp_dp4a"], persistent=9),
        ),
        (("Q4_K", "Q4_K"), (4, 4), 2, False, replace(PRESETS["chunked"], rows_per_warp=1)),
    ],
)
def test_qkv_equals_a_product_for_each_matrix(
    types, rows, m: int, norm: bool, config: MatvecConfig
) -> None:
    rng = np.random.default_rng(rows)
    columns = 8448 if config.stage == "chunks" else 512
    matrices = [planes_of(rng, format, n, columns) for format, n in zip(types, rows, strict=True)]
    operands, x = activation_operands(config, rng.standard_normal((m, columns), np.float32))
    if norm:
        operands = (*operands, rng.standard_normal(columns, np.float32))
    biases = [rng.standard_normal(n, np.float32) for n in rows]
    arguments = dict(columns=columns, m=m, norm=norm, eps=EPS, config=config)
    kernel = qkv_matvec(formats=types, rows=rows, biases=True, **arguments)
    results = simulator.run(
        kernel, *[plane for planes in matrices for plane in planes], *operands, *biases
    )
    assert [y.shape for y in results] == [(m, n) for n in rows]
    for y, format, planes, bias in zip(results, types, matrices, biases, strict=True):
        alone = matvec(format=format, n=len(bias), bias=True, **arguments)
        np.testing.assert_array_equal(y, simulator.run(alone, *planes, *operands, bias)[0])
        if not norm:
            assert nmse(y, x @ weights(format, planes).T + bias) <= bound(config)


def build(family=matvec, config: MatvecConfig = INLINE, **arguments) -> None:
    sizes = dict(formats=("Q4_K", "Q4_K")) if family is gated_matvec else dict(format="Q4_K")
    family(**{**sizes, **dict(n=64, columns=256, m=1), **arguments}, config=config)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            dict(norm=True, config=Q8_1),
            "norm=True needs activations='inline_q8' or stage='whole'.*not 'q8_1' and 'none'",
        ),
        (dict(norm=True, config=PRESETS["chunked"]), "norm=True needs .* not 'f32' and 'chunks'"),
        (
            dict(m=8, columns=4096, config=PRESETS["tiled"]),
            "m=8 rows of columns=4096 take 131072 bytes of shared",
        ),
        (
            dict(norm=True, columns=32768),
            "columns=32768 must be a multiple of 4, and of 8 warps at most 16384",
        ),
        (
            dict(output="q8_1"),
            r"output='q8_1' needs n=64 and a block's rows, .* = 16, to be multiples of 32",
        ),
        (dict(output="q8_1", n=48, config=GROUPS), "output='q8_1' needs n=48"),
        (dict(output="f16"), "output='f16' must be f32 or q8_1"),
        (
            dict(family=gated_matvec, activation="relu"),
            "activation='relu' must be one of silu, gelu, swiglu_oai",
        ),
    ],
)
def test_bad_arguments_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        build(**arguments)


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="format='Q9_K' must be one of "):
        build(family=gated_matvec, formats=("Q4_K", "Q9_K"))


def test_qkv_refuses_what_are_not_two_to_four_matrices() -> None:
    for types, rows in [
        (("Q4_K",), (8,)),
        (("Q4_K", "Q4_K"), (8, 8, 8)),
        (("Q4_K",) * 5, (8,) * 5),
    ]:
        with pytest.raises(KernelError, match="must be 2 to 4 matrices"):
            qkv_matvec(formats=types, rows=rows, columns=256, m=1, config=Q8_1)
