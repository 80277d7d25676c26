"""fp8 conversions by plain instructions in the simulator, against ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ptx_kernels import simulator
from ptx_kernels.formats.unpack import e4m3
from ptx_kernels.ptx import Builder, f32, kernel, u8, u32


@kernel
def decode_all(k: Builder) -> None:
    codes, out = k.input("codes", u8, (256,)), k.output("out", f32, (256,))
    k.launch((1,), 64)
    values = [x * e4m3.UNIT for x in e4m3.decode([codes.cast(u32).at(k.thread_id).load()])]
    out.at(k.thread_id * 4).store(0, tuple(values))


@kernel
def encode_all(k: Builder, *, count: int) -> None:
    x, out = k.input("x", f32, (count,)), k.output("out", u8, (count,))
    k.launch((count // 32,), 32)
    i = k.block_id() * 32 + k.thread_id
    out.at(i).store(0, e4m3.encode(k, x.at(i).load()))


def test_decodes_every_code() -> None:
    codes = np.arange(256, dtype=np.uint8)
    (got,) = simulator.run(decode_all(), codes)
    np.testing.assert_array_equal(got, codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32))


def test_encodes_to_nearest_even_and_saturates() -> None:
    values = np.unique(
        np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    )
    middles = (values[1:] + values[:-1]) / 2  # ties
    x = np.concatenate(
        [
            values,
            middles,
            np.nextafter(middles, np.float32(0)),
            np.nextafter(middles, np.float32(1e9)),
        ]
    )
    x = np.concatenate(
        [
            x,
            np.float32([460, 480, 1e30, np.inf, 1e-30, 1e-45]),
            np.float32(2.0) ** np.arange(-12, 9),
        ]
    )
    x = np.concatenate([x, -x, [np.nan, -np.nan]]).astype(np.float32)
    x = np.resize(x, -(-x.size // 32) * 32)
    (got,) = simulator.run(encode_all(count=x.size), x)
    np.testing.assert_array_equal(
        got, np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    )
