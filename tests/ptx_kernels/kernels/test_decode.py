"""Decoding and embedding lookup in the simulator equal the NumPy decoders bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from support.oracles import half_rows, loaded, random_planes, stored

from ptx_kernels import formats, simulator
from ptx_kernels.kernels.decode import decode
from ptx_kernels.limits import MAX_F16_ROW
from ptx_kernels.ptx import KernelError


@pytest.mark.grid
@pytest.mark.parametrize("kind", ["random", "extreme", "zero", "full"])
@pytest.mark.parametrize("format", formats.names())
def test_equals_numpy(format: str, kind: str) -> None:
    planes = random_planes(np.random.default_rng(1), format, 5, 3, kind=kind)
    (y,) = simulator.run(decode(format=format, n=5, blocks=3), *planes)
    np.testing.assert_array_equal(y, formats.get(format).decode(planes))


@pytest.mark.grid
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("format", formats.names())
def test_rounds_to_16_bits(format: str, dtype: str) -> None:
    planes = random_planes(np.random.default_rng(2), format, 3, 2)
    (y,) = simulator.run(decode(format=format, n=3, blocks=2, dtype=dtype), *planes)
    np.testing.assert_array_equal(
        y.view(np.uint16), stored(formats.get(format).decode(planes), dtype).view(np.uint16)
    )


@pytest.mark.grid
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("format", formats.names())
def test_looks_rows_up(format: str, dtype: str) -> None:
    planes = random_planes(np.random.default_rng(3), format, 9, 1)
    ids = np.array([8, 0, 3, 3, -1, 9, 2**31 - 1, -(2**31)], np.int32)
    (y,) = simulator.run(decode(format=format, n=9, blocks=1, dtype=dtype, lookups=8), *planes, ids)
    want = loaded(stored(formats.get(format).decode(planes), dtype), dtype)
    np.testing.assert_array_equal(loaded(y, dtype)[:4], want[ids[:4]])
    assert np.isnan(loaded(y, dtype)[4:]).all()


def test_a_row_that_takes_several_blocks_of_threads() -> None:
    planes = random_planes(np.random.default_rng(4), "Q4_K", 2, 37)
    (y,) = simulator.run(decode(format="Q4_K", n=2, blocks=37), *planes)
    np.testing.assert_array_equal(y, formats.get("Q4_K").decode(planes))


@pytest.mark.grid
@pytest.mark.parametrize("below", [1, 1 << 15])
@pytest.mark.parametrize("kind", ["random", "extreme", "zero", "full"])
@pytest.mark.parametrize("format", formats.names())
def test_rows_over_a_power_of_two(format: str, kind: str, below: int) -> None:
    """Each row has its own scale, however small or large its weights are."""
    planes = random_planes(np.random.default_rng(5), format, 5, 3, kind=kind)
    kernel = decode(format=format, n=5, blocks=3, dtype="f16", below=below)
    values, scale = simulator.run(kernel, *planes)
    weights = formats.get(format).decode(planes)
    want = half_rows(weights, below)
    np.testing.assert_array_equal(values, want[0])
    np.testing.assert_array_equal(loaded(scale, "bf16"), want[1])
    exact = values.astype(np.float64) * loaded(scale, "bf16")[:, None]
    normal = np.abs(values) >= 2.0**-14  # f16 values with all 11 bits
    assert (np.abs(exact - weights) <= 2.0**-11 * np.abs(weights))[normal].all()
    assert np.abs(values.astype(np.float32)).max(initial=0) <= below


@pytest.mark.parametrize("blocks", [37, 65])  # a thread has no part, one, or two
def test_rows_over_a_power_of_two_that_are_long(blocks: int) -> None:
    planes = random_planes(np.random.default_rng(6), "Q6_K", 2, blocks, kind="extreme")
    values, scale = simulator.run(
        decode(format="Q6_K", n=2, blocks=blocks, dtype="f16", below=1 << 15), *planes
    )
    want = half_rows(formats.get("Q6_K").decode(planes))
    np.testing.assert_array_equal(values, want[0])
    np.testing.assert_array_equal(loaded(scale, "bf16"), want[1])


def test_a_scale_that_is_not_finite_spoils_its_row_alone() -> None:
    block = formats.get("Q4_K")
    raw = np.random.default_rng(7).integers(0, 256, (3, 2, block.block_bytes), np.uint8)
    for field in block.scale_fields:
        block.store_scale(raw, field, np.array([[1, 1], [1, np.inf], [1, 1]]) * 0.01)
    planes = [np.ascontiguousarray(p) for p in block.split(raw)]
    kernel = decode(format="Q4_K", n=3, blocks=2, dtype="f16", below=1 << 15)
    _, scale = simulator.run(kernel, *planes)
    np.testing.assert_array_equal(np.isnan(loaded(scale, "bf16")), [False, True, False])


def test_scaled_rows_fit_a_block() -> None:
    sizes = dict(format="Q4_K", n=2, dtype="f16", below=1 << 15)
    decode(blocks=MAX_F16_ROW // 256, **sizes)
    with pytest.raises(KernelError, match="must be at most 32768 and 0 for scaled rows"):
        decode(blocks=MAX_F16_ROW // 256 + 1, **sizes)
    with pytest.raises(KernelError, match="below=3 must be a power of two from 1 to 32768"):
        decode(format="Q4_K", n=2, blocks=1, dtype="f16", below=3)
