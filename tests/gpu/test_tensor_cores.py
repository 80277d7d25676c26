"""mma, ldmatrix, cp.async.bulk and mbarrier on the GPU, compared with the simulator."""

from __future__ import annotations

import numpy as np
import pytest
from support.helpers import nmse
from support.tensor_kernels import STEPS, WARPS, WORDS, load_matrices, pipeline, product

from ptx_kernels import driver, simulator
from ptx_kernels.ptx.instructions import f32_to_bf16

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu():
    with driver.Device() as device:
        yield device


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("types", [("s8", "s8"), ("u8", "s8"), ("s8", "u8"), ("u8", "u8")], ids=str)
def test_integer_products(types: tuple[str, str], count: int, gpu) -> None:
    rng = np.random.default_rng(count)
    a = rng.integers(0, 1 << 32, (WARPS, 2 * count, 32), np.uint32)
    b = rng.integers(0, 1 << 32, (WARPS, count, 32), np.uint32)
    c = rng.integers(-(1 << 31), 1 << 31, (WARPS, 4, 32)).astype(np.int32)
    built = product(a_type=types[0], b_type=types[1], count=count)
    np.testing.assert_array_equal(gpu.run(built, a, b, c)[0], simulator.run(built, a, b, c)[0])


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("type_", ["f16", "bf16"])
def test_float_products(type_: str, count: int, gpu) -> None:
    """Products agree, but not bit for bit.

    The order and rounding of additions depend on the tensor core.
    """
    rng = np.random.default_rng(count)
    encode = f32_to_bf16 if type_ == "bf16" else lambda x: x.astype(np.float16).view(np.uint16)
    a = encode(rng.standard_normal((WARPS, 2 * count, 64), np.float32)).view(np.uint32)
    b = encode(rng.standard_normal((WARPS, count, 64), np.float32)).view(np.uint32)
    c = rng.standard_normal((WARPS, 4, 32), np.float32)
    built = product(a_type=type_, b_type=type_, count=count)
    assert nmse(gpu.run(built, a, b, c)[0], simulator.run(built, a, b, c)[0]) <= 1e-12


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_load_alike(count: int, transpose: bool, gpu) -> None:
    x = np.random.default_rng(0).integers(0, 1 << 32, (33, 4), np.uint32)
    built = load_matrices(count=count, transpose=transpose)
    np.testing.assert_array_equal(gpu.run(built, x)[0], simulator.run(built, x)[0])


def test_a_pipeline_of_bulk_copies(gpu) -> None:
    x = np.arange(2 * STEPS * WORDS, dtype=np.uint32).reshape(2, STEPS, WORDS)
    np.testing.assert_array_equal(gpu.run(pipeline(), x)[0], x + 1)
