"""Packing is the inverse of the formats' decoders, for every bit."""

from __future__ import annotations

import numpy as np
import pytest

from jax_q4k.quantizers import pack
from ptx_kernels.formats import base, q4_k
from ptx_kernels.formats.unpack import k_scales


def integers(bits: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << bits, shape, np.uint8)


def test_f16_bytes():
    values = np.array([0, -0.0, 2.0**-24, -65504, 1 / 3], np.float16)
    np.testing.assert_array_equal(
        pack.f16_bytes(values.astype(np.float32)), values[:, None].view(np.uint8)
    )


def test_nibbles_drop_what_is_above_them():
    values = integers(5, 7, 32)
    np.testing.assert_array_equal(base.nibbles(np.asarray(pack.nibbles(values)), np), values & 15)


@pytest.mark.parametrize("count, width", [(8, 1), (4, 2), (2, 4)])
def test_bits_drop_what_is_above_them(count, width):
    values = integers(8, 5, count, 16)
    unpacked = base.bits(np.asarray(pack.bits(values, width)), count, width, np)
    np.testing.assert_array_equal(unpacked, values & ((1 << width) - 1))


@pytest.mark.parametrize("dtype, length", [(np.uint16, 2), (np.uint32, 4)])
def test_words_are_little_endian(dtype, length):
    words = np.random.default_rng(1).integers(0, 1 << 16, (3, 5)).astype(dtype)
    got = np.asarray(pack.little_endian(words))
    assert got.shape == (3, 5 * length)
    np.testing.assert_array_equal(got.view(np.dtype(dtype).newbyteorder("<")), words)


def test_fifth_bits_are_a_little_endian_word():
    quants = integers(5, 6, 32)
    words = np.asarray(pack.fifth_bits(quants)).view("<u4")[:, 0]
    np.testing.assert_array_equal((words[:, None] >> np.arange(32)) & 1, quants >> 4)


def test_k_scales():
    scale, minimum = integers(6, 100, 8), integers(6, 100, 8, seed=1)
    packed = np.asarray(pack.k_scales(scale, minimum))
    assert packed.shape == (100, 12)
    for got, want in zip(k_scales.unpack(packed, np), (scale, minimum), strict=True):
        np.testing.assert_array_equal(got, want)


def test_k_low_bits():
    quants = integers(5, 9, 8, 32)
    np.testing.assert_array_equal(
        q4_k.low_bits(np.asarray(pack.k_low_bits(quants)), np), quants & 15
    )
