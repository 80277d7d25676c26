"""Kernels that read one matrix of a stack, in the simulator: bits equal those for a lone matrix."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from support.assembled import spilled
from support.format_lists import PRODUCTS
from support.oracles import half_operands, quantized, random_planes

from ptx_kernels import formats, simulator
from ptx_kernels.kernels import CASES, KERNELS
from ptx_kernels.kernels.decode import decode
from ptx_kernels.kernels.gemm import GemmConfig, gemm
from ptx_kernels.kernels.matvec import PRESETS, gated_matvec, matvec, qkv_matvec
from ptx_kernels.kernels.operands import random_operands
from ptx_kernels.machine_code.work import traffic
from ptx_kernels.ptx import Kernel, KernelError

LAYERS = 3
#: Index -> the layer that it selects.
INDICES = {1: 1, -1: 2, LAYERS: 2, -LAYERS - 1: 0, np.iinfo(np.int32).min: 0}

Planes = tuple[np.ndarray, ...]


def stack(format: str, n: int, columns: int, seed: int = 0) -> Planes:
    blocks = columns // formats.get(format).block_size
    layers = [random_planes(np.random.default_rng([seed, i]), format, n, blocks) for i in range(3)]
    return tuple(map(np.stack, zip(*layers, strict=True)))


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape, np.float32)


def check(
    build: Callable[..., Kernel],
    stacks: Sequence[Planes],
    others: Sequence[np.ndarray],
    indices: Sequence[int],
) -> None:
    """Compares `build(layers=3)` with an index per stack with `build()` on those layers."""
    given = [a for s, i in zip(stacks, indices, strict=True) for a in (*s, np.array(i, np.int32))]
    one = [plane[INDICES[i]] for s, i in zip(stacks, indices, strict=True) for plane in s]
    for got, want in zip(
        simulator.run(build(layers=LAYERS), *given, *others),
        simulator.run(build(), *one, *others),
        strict=True,
    ):
        assert np.isfinite(want.astype(np.float32)).all() and np.any(want != 0)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("format", PRODUCTS)
def test_matvec_of_an_odd_number_of_blocks(format: str) -> None:
    columns, config = 3 * formats.get(format).block_size, PRESETS["dp4a"]
    build = functools.partial(matvec, format=format, n=5, columns=columns, m=2, config=config)
    check(build, [stack(format, 5, columns)], quantized(normal(2, columns)), [1])


@pytest.mark.parametrize("index", INDICES)
def test_an_index_counts_from_the_end_or_is_the_nearest(index: int) -> None:
    build = functools.partial(
        matvec, format="Q4_K", n=4, columns=256, m=1, config=PRESETS["fused_f32"]
    )
    check(build, [stack("Q4_K", 4, 256)], [normal(1, 256)], [index])


def test_matrices_of_a_launch_have_an_index_each() -> None:
    common = dict(columns=512, m=2, config=PRESETS["dp4a"])
    pair, x = [stack("Q4_K", 6, 512), stack("Q6_K", 6, 512, 1)], quantized(normal(2, 512))
    build = functools.partial(gated_matvec, formats=("Q4_K", "Q6_K"), n=6, **common)
    check(build, pair, x, [1, -1])
    build = functools.partial(qkv_matvec, formats=("Q4_K", "Q6_K"), rows=(6, 6), **common)
    check(build, pair, x, [-1, 1])


@pytest.mark.parametrize("products", ["int8", "f16"])
def test_gemm(products: str) -> None:
    config = GemmConfig(1, 1, 1, 16, 2, products)
    x = normal(9, 256)
    others = quantized(x) if products == "int8" else half_operands(x)[0]
    build = functools.partial(gemm, format="Q6_K", n=6, columns=256, m=9, config=config)
    check(build, [stack("Q6_K", 6, 256)], others, [1])


def test_gemm_refuses_matrices_that_begin_within_a_word() -> None:
    shape = dict(n=5, columns=256, m=9, layers=LAYERS, config=GemmConfig(1, 1, 1, 16, 2))
    with pytest.raises(KernelError, match=r"a stack's matrices Q6_K \(5, 256\)"):
        gemm(format="Q6_K", **shape)
    gemm(format="Q4_K", **shape)


def test_decode() -> None:
    build = functools.partial(decode, format="Q6_K", n=3, blocks=1)
    check(build, [stack("Q6_K", 3, 256)], [], [-1])
    build = functools.partial(build, lookups=2)
    check(build, [stack("Q6_K", 3, 256)], [np.array([2, 0], np.int32)], [1])


def test_offsets_beyond_32_bits() -> None:
    """A layer of 5 GB has a 64-bit stride."""
    text = gemm(format="Q4_K", n=1 << 20, columns=9216, m=16, layers=LAYERS).text
    assert (9216 // 256 * 144) << 20 > 1 << 32 and "mad.lo.u64" in text


def test_a_launch_moves_one_layer_and_random_operands_know_the_index() -> None:
    arguments = dict(format="Q4_K", n=16, columns=256, m=1, config=PRESETS["dp4a"])
    one, stacked = matvec(**arguments), matvec(**arguments, layers=LAYERS)
    assert traffic(stacked) == traffic(one) + 4
    plane, index, *_ = operands = random_operands(stacked)
    assert plane.shape == (LAYERS, 16, 1, 144) and -LAYERS <= index < LAYERS
    assert np.isfinite(simulator.run(stacked, *operands)[0]).all()


@pytest.mark.slow("simulates or assembles large kernels")
def test_none_spills() -> None:
    """Mat-vecs of eight rows use all registers, and must have room for a stack's addresses, too."""
    labels = {
        KERNELS[case.family](**case.arguments, layers=LAYERS).text: case.label
        for case in CASES
        if case.family.endswith("matvec")
        and case.arguments["m"] == 8
        and "experts" not in case.arguments  # these are other stacks
    }
    assert len(labels) == 7 and spilled(labels) == {}
