"""Fused tensor-core products, with epilogues, pairs and several matrices, against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.helpers import nmse
from support.oracles import dequantized, gated, half_operands, quantized, random_planes, weights

from ptx_kernels import formats, simulator
from ptx_kernels.devices import target
from ptx_kernels.kernels import KERNELS
from ptx_kernels.kernels.gemm import GemmConfig, fused_gemm_rule, gated_gemm, gemm, qkv_gemm
from ptx_kernels.machine_code.report import figures
from ptx_kernels.ptx import KernelError

TOLERANCE = 1e-12
F16_TOLERANCE = 1e-6  # weights keep 11 bits


def rng_of(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def planes_of(format: str, n: int, columns: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    blocks = columns // formats.get(format).block_size
    return random_planes(rng_of(n, columns, seed), format, n, blocks)


def rows_of(m: int, columns: int) -> np.ndarray:
    return rng_of(m, columns).standard_normal((m, columns), np.float32) * np.float32(0.1)


@pytest.mark.parametrize(
    ("format", "m", "n", "config"),
    [
        ("Q4_K", 3, 37, GemmConfig(2, 2, 1, 8, 3)),
        ("Q6_K", 20, 100, GemmConfig(2, 1, 2, 16, 2)),
        ("Q8_0", 8, 5, GemmConfig(1, 4, 1, 8, 2)),
    ],
)
def test_bias_and_residual(format: str, m: int, n: int, config: GemmConfig) -> None:
    planes, operands = planes_of(format, n, 768), quantized(rows_of(m, 768))
    bias = rng_of(1).standard_normal(n, np.float32)
    residual = rng_of(2).standard_normal((m, n), np.float32)
    kernel = gemm(format=format, n=n, columns=768, m=m, bias=True, residual=True, config=config)
    (y,) = simulator.run(kernel, *planes, *operands, bias, residual)
    want = dequantized(*operands) @ weights(format, planes).T + bias + residual
    assert nmse(y, want) <= TOLERANCE


@pytest.mark.parametrize("activation", ["silu", "gelu", "swiglu_oai"])
@pytest.mark.parametrize(
    ("pair", "m", "n", "config"),
    [
        (("Q4_K", "Q4_K"), 7, 37, GemmConfig(2, 1, 1, 8, 3)),
        (("Q4_K", "Q6_K"), 17, 20, GemmConfig(1, 2, 2, 16, 2)),
    ],
)
def test_gated(pair: tuple[str, str], m: int, n: int, config: GemmConfig, activation: str) -> None:
    planes = [planes_of(format, n, 512, i) for i, format in enumerate(pair)]
    operands = quantized(rows_of(m, 512))
    kernel = gated_gemm(formats=pair, n=n, columns=512, m=m, activation=activation, config=config)
    (y,) = simulator.run(kernel, *planes[0], *planes[1], *operands)
    x = dequantized(*operands)
    gate, up = (x @ weights(f, own).T for f, own in zip(pair, planes, strict=True))
    assert nmse(y, gated(activation, gate, up)) <= 1e-11


@pytest.mark.parametrize(
    ("m", "n", "config"),
    [
        (5, 64, GemmConfig(2, 1, 1, 8, 3)),
        (5, 96, GemmConfig(4, 1, 1, 8, 2)),  # the last block overlaps its neighbor
        (20, 32, GemmConfig(4, 1, 1, 16, 2)),  # fewer rows than a block's, activations overlap
        (40, 64, GemmConfig(2, 2, 1, 48, 2)),
    ],
)
def test_gated_and_quantized(m: int, n: int, config: GemmConfig) -> None:
    """Equals `quantize_q8_1` of the float32 results exactly."""
    pair = ("Q4_K", "Q4_K")
    planes = [planes_of("Q4_K", n, 512, i) for i in range(2)]
    operands = (*planes[0], *planes[1], *quantized(rows_of(m, 512)))
    arguments = dict(formats=pair, n=n, columns=512, m=m, config=config)
    (y,) = simulator.run(gated_gemm(**arguments), *operands)
    found = simulator.run(gated_gemm(**arguments, output="q8_1"), *operands)
    for got, want in zip(found, quantized(y), strict=True):
        np.testing.assert_array_equal(got, want)


def test_one_matrix_quantized() -> None:
    planes, operands = planes_of("Q6_K", 64, 512), quantized(rows_of(9, 512))
    arguments = dict(format="Q6_K", n=64, columns=512, m=9, config=GemmConfig(2, 2, 1, 16, 2))
    (y,) = simulator.run(gemm(**arguments), *planes, *operands)
    found = simulator.run(gemm(**arguments, output="q8_1"), *planes, *operands)
    for got, want in zip(found, quantized(y), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("config", [GemmConfig(2, 1, 1, 16, 2), GemmConfig(1, 2, 2, 16, 2)])
def test_f16_products(config: GemmConfig) -> None:
    """A pair, several matrices, and a residual."""
    config = replace(config, products="f16")
    planes = [planes_of(f, 40, 768, i) for i, f in enumerate(("Q4_K", "Q6_K"))]
    given, x = half_operands(rows_of(17, 768))
    ys = [x @ weights(f, own).T for f, own in zip(("Q4_K", "Q6_K"), planes, strict=True)]
    both, sizes = (*planes[0], *planes[1], *given), dict(columns=768, m=17, config=config)
    kernel = gated_gemm(formats=("Q4_K", "Q6_K"), n=40, **sizes)
    (y,) = simulator.run(kernel, *both)
    assert nmse(y, gated("silu", *ys)) <= F16_TOLERANCE
    found = simulator.run(qkv_gemm(formats=("Q4_K", "Q6_K"), rows=(40, 40), **sizes), *both)
    for got, want in zip(found, ys, strict=True):
        assert nmse(got, want) <= F16_TOLERANCE
    residual = rng_of(2).standard_normal((17, 40), np.float32)
    kernel = gemm(format="Q6_K", n=40, residual=True, **sizes)
    (y,) = simulator.run(kernel, *planes[1], *given, residual)
    assert nmse(y, ys[1] + residual) <= F16_TOLERANCE


@pytest.mark.parametrize(
    ("format", "m", "n", "columns", "config"),
    [
        ("Q4_K", 3, 100, 1280, GemmConfig(2, 1, 1, 8, 3, splits=2)),  # five steps of two blocks
        ("Q6_K", 20, 37, 768, GemmConfig(1, 2, 2, 16, 2, splits=2)),  # rows at odd places
        ("Q6_K", 9, 5, 768, GemmConfig(2, 1, 1, 16, 2, splits=4)),  # a block without columns
        ("Q4_K", 17, 40, 1024, GemmConfig(2, 1, 1, 16, 2, "f16", splits=4)),
    ],
)
def test_columns_split_over_a_cluster(
    format: str, m: int, n: int, columns: int, config: GemmConfig
) -> None:
    planes, f16 = planes_of(format, n, columns), config.products == "f16"
    operands, x = (
        half_operands(rows_of(m, columns)) if f16 else (quantized(rows_of(m, columns)),) * 2
    )
    x = x if f16 else dequantized(*operands)
    bias = rng_of(1).standard_normal(n, np.float32)
    residual = rng_of(2).standard_normal((m, n), np.float32)
    sizes = dict(format=format, n=n, columns=columns, m=m, config=config)
    kernel = gemm(**sizes, bias=True, residual=True)
    assert kernel.cluster == (1, 1, config.splits)
    (y,) = simulator.run(kernel, *planes, *operands, bias, residual)
    want = x @ weights(format, planes).T + bias + residual
    assert nmse(y, want) <= (F16_TOLERANCE if f16 else TOLERANCE)


def test_pairs_and_several_matrices_split() -> None:
    """Gated and quantized results equal `quantize_q8_1` of the float32 results exactly."""
    config = GemmConfig(2, 1, 1, 16, 2, splits=2)
    planes = [planes_of(f, 64, 768, i) for i, f in enumerate(("Q4_K", "Q6_K"))]
    operands = quantized(rows_of(17, 768))
    sizes, given = dict(columns=768, m=17, config=config), (*planes[0], *planes[1], *operands)
    pair = dict(formats=("Q4_K", "Q6_K"), n=64, **sizes)
    ys = [
        dequantized(*operands) @ weights(f, own).T
        for f, own in zip(pair["formats"], planes, strict=True)
    ]
    (y,) = simulator.run(gated_gemm(**pair), *given)
    assert nmse(y, gated("silu", *ys)) <= 1e-11
    for got, want in zip(
        simulator.run(gated_gemm(**pair, output="q8_1"), *given), quantized(y), strict=True
    ):
        np.testing.assert_array_equal(got, want)
    found = simulator.run(qkv_gemm(formats=("Q4_K", "Q6_K"), rows=(64, 64), **sizes), *given)
    for got, want in zip(found, ys, strict=True):
        assert nmse(got, want) <= TOLERANCE


@pytest.mark.parametrize(
    ("n", "m", "config"),
    [
        (256, 20, GemmConfig(4, 1, 1, 16, 2)),  # four blocks share a super-block
        (512, 7, GemmConfig(2, 2, 4, 8, 2)),  # two blocks share it
        (256, 5, GemmConfig(8, 1, 2, 8, 2)),  # one block has it
    ],
)
def test_gated_to_f16(n: int, m: int, config: GemmConfig) -> None:
    """Equals `quantize_f16` of the float32 results exactly."""
    planes = [planes_of("Q4_K", n, 256, i) for i in range(2)]
    operands = (*planes[0], *planes[1], *quantized(rows_of(m, 256)))
    arguments = dict(formats=("Q4_K", "Q4_K"), n=n, columns=256, m=m, config=config)
    (y,) = simulator.run(gated_gemm(**arguments), *operands)
    kernel = gated_gemm(**arguments, output="f16")
    assert kernel.cluster == (1, 256 // config.rows, 1)
    values, means, scale = simulator.run(kernel, *operands)
    want, _ = half_operands(y)
    np.testing.assert_array_equal(values, want[0])
    np.testing.assert_array_equal(scale, want[2])
    groups = want[0].reshape(m, -1, 32).astype(np.float64).mean(-1)
    np.testing.assert_allclose(means.astype(np.float64).sum(-1), groups, atol=2.0**-7)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(
    ("types", "rows", "m", "config"),
    [
        (("Q4_K", "Q4_K", "Q6_K"), (40, 16, 5), 6, GemmConfig(2, 1, 1, 8, 3)),
        (("Q5_K", "Q8_0"), (33, 20), 17, GemmConfig(1, 2, 1, 16, 2)),
    ],
)
def test_several_matrices(
    types: tuple[str, ...], rows: tuple[int, ...], m: int, config: GemmConfig, biases: bool
) -> None:
    matrices = [planes_of(format, n, 768) for format, n in zip(types, rows, strict=True)]
    operands = quantized(rows_of(m, 768))
    added = [rng_of(n).standard_normal(n, np.float32) for n in rows]
    kernel = qkv_gemm(formats=types, rows=rows, columns=768, m=m, biases=biases, config=config)
    given = [*(p for planes in matrices for p in planes), *operands, *(added if biases else [])]
    found = simulator.run(kernel, *given)
    x = dequantized(*operands)
    for y, format, planes, bias in zip(found, types, matrices, added, strict=True):
        assert nmse(y, x @ weights(format, planes).T + (bias if biases else 0)) <= TOLERANCE


def test_a_matrix_of_a_stack() -> None:
    stacks = [random_planes(rng_of(seed), "Q4_K", 3 * 20, 2) for seed in range(2)]
    planes = [[p.reshape(3, 20, *p.shape[1:]) for p in stack] for stack in stacks]
    operands, index = quantized(rows_of(5, 512)), np.array(1, np.int32)
    kernel = gated_gemm(
        formats=("Q4_K", "Q4_K"), n=20, columns=512, m=5, layers=3, config=GemmConfig(1, 1, 1, 8, 2)
    )
    (y,) = simulator.run(kernel, *planes[0], index, *planes[1], index, *operands)
    x = dequantized(*operands)
    gate, up = (x @ weights("Q4_K", [p[1] for p in own]).T for own in planes)
    assert nmse(y, gated("silu", gate, up)) <= 1e-11


#: Products in a layer of Llama-3.1-8B: family, arguments, shape for the rule.
LAYER = {
    "gate and up": (
        "gated_gemm",
        dict(formats=("Q4_K", "Q4_K"), n=14336, columns=4096, output="q8_1"),
        (("Q4_K", "Q4_K"), (14336,), 4096),
    ),
    "qkv": (
        "qkv_gemm",
        dict(formats=("Q4_K", "Q4_K", "Q6_K"), rows=(4096, 1024, 1024), columns=4096),
        (("Q4_K", "Q4_K", "Q6_K"), (4096, 1024, 1024), 4096),
    ),
    "output": (
        "gemm",
        dict(format="Q4_K", n=4096, columns=4096, residual=True),
        (("Q4_K",), (4096,), 4096),
    ),
    "down": (
        "gemm",
        dict(format="Q6_K", n=4096, columns=14336, residual=True),
        (("Q6_K",), (4096,), 14336),
    ),
}


@pytest.mark.slow("simulates or assembles large kernels", quick=["A100-int8-down-m=8"])
@pytest.mark.grid
@pytest.mark.parametrize("m", [4, 8, 16, 32, 64])
@pytest.mark.parametrize("name", LAYER)
@pytest.mark.parametrize(
    ("device", "products"),
    [("H200", "int8"), ("H200", "f16"), ("A100", "int8"), ("RTX 5090", "int8")],
)
def test_a_layer_fits_every_target(name: str, device: str, products: str, m: int) -> None:
    """Fits a block's shared memory, does not spill, and needs few instructions at m <= 8."""
    family, arguments, shape = LAYER[name]
    output, aim = arguments.get("output", "f32"), target(f"NVIDIA {device}")
    config = fused_gemm_rule(aim, *shape, m, output, products)
    kernel = KERNELS[family](**arguments, m=m, config=config)
    assert aim.facts is not None
    assert kernel.dynamic_shared_bytes <= aim.facts.block_shared_bytes
    found = figures(kernel, aim.facts.arch, predict_time=False)
    assert found.spill_bytes == 0
    if m <= 8 and products == "int8" and family != "qkv_gemm":  # which has one loop per matrix
        assert found.instructions_per_quant_byte is not None
        assert found.instructions_per_quant_byte <= 6.5


@pytest.mark.parametrize(
    ("family", "arguments", "message"),
    [
        ("gemm", dict(n=40, output="q8_1"), "output='q8_1' needs n=40 and a block's rows"),
        ("gemm", dict(output="bf16"), "output='bf16' must be one of f32, q8_1, f16"),
        ("gemm", dict(output="f16"), "output='f16' needs n=32 and a block's rows"),
        ("gemm", dict(config=GemmConfig(2, 1, 1, 8, 2, splits=3)), "splits=3 must be 1, 2, 4 or 8"),
        (
            "gemm",
            dict(n=256, output="f16", config=GemmConfig(2, 1, 1, 8, 2, splits=2)),
            "splits=2: blocks share rows of an f16 result already",
        ),
        (
            "gemm",
            dict(output="q8_1", config=GemmConfig(1, 1, 1, 8, 2)),
            "16 \\* tiles \\* row_warps = 16, to be multiples of 32",
        ),
        ("gemm", dict(experts=2, residual=True), "experts=2: a stack's products have no epilogue"),
        ("gated_gemm", dict(activation="relu"), "activation='relu' must be one of silu"),
        ("gated_gemm", dict(formats=("Q4_K",)), "must be those of gate and up"),
        ("qkv_gemm", dict(formats=("Q4_K",), rows=(32,)), "must be 2 to 4 matrices"),
    ],
)
def test_bad_arguments_are_refused(family: str, arguments: dict, message: str) -> None:
    given = dict(columns=256, m=8, config=GemmConfig(2, 1, 1, 8, 2))
    given |= {
        "gemm": dict(format="Q4_K", n=32),
        "gated_gemm": dict(formats=("Q4_K", "Q4_K"), n=32),
        "qkv_gemm": dict(formats=("Q4_K", "Q6_K"), rows=(32, 32)),
    }[family]
    with pytest.raises(KernelError, match=message):
        KERNELS[family](**(given | arguments))
