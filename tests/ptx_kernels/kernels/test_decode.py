"""Decoding and embedding lookup, simulated, against the NumPy decoders: bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from oracles import loaded, random_planes, stored

from ptx_kernels import formats, simulator
from ptx_kernels.kernels.decode import decode


@pytest.mark.parametrize("kind", ["random", "extreme", "zero", "full"])
@pytest.mark.parametrize("format", formats.names())
def test_equals_numpy(format: str, kind: str) -> None:
    planes = random_planes(np.random.default_rng(1), format, 5, 3, kind=kind)
    (y,) = simulator.run(decode(format=format, n=5, blocks=3), *planes)
    np.testing.assert_array_equal(y, formats.get(format).decode(planes))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("format", formats.names())
def test_rounds_to_16_bits(format: str, dtype: str) -> None:
    planes = random_planes(np.random.default_rng(2), format, 3, 2)
    (y,) = simulator.run(decode(format=format, n=3, blocks=2, dtype=dtype), *planes)
    np.testing.assert_array_equal(
        y.view(np.uint16), stored(formats.get(format).decode(planes), dtype).view(np.uint16)
    )


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
