"""Subjects for quantization, norms and decoding."""

from __future__ import annotations

import functools

import numpy as np

from ptx_kernels import formats, simulator
from ptx_kernels.kernels.decode import decode
from ptx_kernels.kernels.f16_rows import F16RowsConfig, f16_rows
from ptx_kernels.kernels.quantize_f16 import quantize_f16
from ptx_kernels.kernels.quantize_q8_1 import quantize_q8_1
from ptx_kernels.kernels.rms_norm import RmsNormConfig, rms_norm
from support.oracles import (
    half_operands,
    half_rows,
    loaded,
    quantized,
    random_planes,
    rms_norm_oracle,
    stored,
)

from .base import Subject, rng_of


def quantize_subject(dtype: str) -> Subject:
    """Three rows of three groups.

    One is all 0, one has 1 as its maximum, and one has a negative number as its maximum.
    """
    exact = rng_of(2).standard_normal((3, 96), np.float32)
    exact[0, 32:64], exact[1, :32], exact[2, 72] = 0, np.linspace(-0.9, 1, 32), -9
    x = stored(exact, dtype)
    return Subject(
        quantize_q8_1(rows=3, columns=96, dtype=dtype), (x,), quantized(loaded(x, dtype)), 0
    )


def rms_norm_subject(output: str, *, residual: bool = False) -> Subject:
    rng = rng_of(3)
    x, weight = rng.standard_normal((3, 416), np.float32) + 1, rng.standard_normal(416, np.float32)
    build = functools.partial(rms_norm, rows=3, columns=416, eps=1e-2, config=RmsNormConfig(2))
    want = rms_norm_oracle(x, weight, 1e-2)
    if residual:
        addend = rng.standard_normal((3, 416), np.float32)
        return Subject(build(residual=True), (x, weight, addend), (addend + want,), 1e-13)
    if output == "f32":
        return Subject(build(), (x, weight), (want,), 1e-13)
    (y,) = simulator.run(build(), x, weight)
    return Subject(build(output=output), (x, weight), quantized(y), 0)


def quantize_f16_subject(dtype: str) -> Subject:
    """Six super-blocks, two per row, in two blocks of warps.

    One is all 0, one has 1 as its maximum, and one has a negative number as its maximum.
    """
    x = rng_of(2).standard_normal((6, 256), np.float32)
    x[0], x[1], x[2, 72] = 0, np.linspace(-0.9, 1, 256), -9
    x = np.round(x.reshape(3, 512) * 2**16) / 2**16  # sums are exact, but too long for one f16
    x = stored(x, dtype)
    operands, _ = half_operands(loaded(x, dtype))
    return Subject(quantize_f16(rows=3, columns=512, dtype=dtype), (x,), operands, 0)


def f16_rows_subject(source: str) -> Subject:
    """Three rows, one all 0; with a norm or a gate, values times scales are compared."""
    rng, rows, columns = rng_of(6), 3, 432  # threads of two warps get 0 to 2 runs
    build = functools.partial(f16_rows, rows=rows, columns=columns, config=F16RowsConfig(2))
    x = rng.standard_normal((rows, columns), np.float32)
    if source == "f32":
        x[1] = 0
        return Subject(build(), (x,), half_rows(x), 0)

    def meant(values: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, ...]:
        return (values.astype(np.float64) * scale[:, None],)

    if source == "norm":
        weight = rng.standard_normal(columns, np.float32)
        want = rms_norm_oracle(x + 1, weight, 1e-2)
        return Subject(build(eps=1e-2), (x + 1, weight), (want,), 1e-7, meant)
    gate, up = (rng.standard_normal((rows, columns)).astype(np.float16) for _ in range(2))
    scales = [np.exp2(rng.integers(-2, 3, n)).astype(np.float32) for n in (rows, columns, columns)]
    g, u = (
        each.astype(np.float64) * scales[0][:, None] * scale
        for each, scale in zip((gate, up), scales[1:], strict=True)
    )
    operands = gate, up, scales[0], *(stored(scale, "bf16") for scale in scales[1:])
    want = g / (1 + np.exp(-g)) * u
    return Subject(build(activation=source), operands, (want,), 1e-7, meant)


def scaled_decode_subject(format: str) -> Subject:
    planes = random_planes(rng_of(7), format, 3, 5)
    values, scale = half_rows(formats.get(format).decode(planes))
    kernel = decode(format=format, n=3, blocks=5, dtype="f16", below=1 << 15)
    return Subject(kernel, planes, (values, stored(scale, "bf16")), 0)


def decode_subject(format: str, dtype: str = "f32") -> Subject:
    planes = random_planes(rng_of(4), format, 3, 2)
    want = formats.get(format).decode(planes)
    exact = stored(want, dtype)
    return Subject(decode(format=format, n=3, blocks=2, dtype=dtype), planes, (exact,), 0)


def embedding_subject() -> Subject:
    planes, ids = random_planes(rng_of(5), "Q4_K", 5, 2), np.array([4, 0, -1, 5], np.int32)
    want = np.concatenate(
        [formats.get("Q4_K").decode(planes)[ids[:2]], np.full((2, 512), np.nan, np.float32)]
    )
    return Subject(decode(format="Q4_K", n=5, blocks=2, lookups=4), (*planes, ids), (want,), 0)
