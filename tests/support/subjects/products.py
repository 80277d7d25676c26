"""Subjects for mat-vecs and gemm."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np

from ptx_kernels import formats, simulator
from ptx_kernels.kernels.gemm import GemmConfig, gated_gemm, gemm, qkv_gemm
from ptx_kernels.kernels.matvec import (
    PRESETS,
    MatvecConfig,
    gated_matvec,
    matvec,
    qkv_append_matvec,
    qkv_matvec,
)
from ptx_kernels.kernels.rms_norm import RmsNormConfig, rms_norm
from support.oracles import (
    activation_operands,
    dequantized,
    gated,
    half_operands,
    quantized,
    random_planes,
    rotated,
    weights,
)

from .base import Subject, rng_of


def matvec_subject(
    format: str,
    config: MatvecConfig,
    *,
    n: int = 6,
    columns: int = 2304,
    m: int = 2,
    tolerance: float = 1e-13,
) -> Subject:
    rng = rng_of(n, columns, m)
    planes = random_planes(rng, format, n, columns // formats.get(format).block_size)
    operands, x = activation_operands(
        config, (rng.standard_normal((m, columns), np.float32) + np.float32(0.5)) / 4
    )
    kernel = matvec(format=format, n=n, columns=columns, m=m, config=config)
    return Subject(kernel, (*planes, *operands), (x @ weights(format, planes).T,), tolerance)


def preset_subject(config: MatvecConfig) -> Subject:
    """Enough columns for more than one loop iteration, or more than one chunk."""
    more = config.stage == "chunks" or config.streams("Q4_K") * config.unroll > 4
    return matvec_subject("Q4_K", config, columns=4352 if more else 2304)


def normed_operands(
    config: MatvecConfig, m: int, columns: int, size: float = 0.125
) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Operands x and norm_weight (of about `size`) of a mat-vec with `norm` and eps = 0.5.

    Also returns the values that its products use. They are below 1, which reveals a maximum that
    starts at 1.
    """
    rng = rng_of(m, columns, 2)
    x, weight = (
        rng.standard_normal((m, columns), np.float32) + 1,
        rng.standard_normal(columns, np.float32) * np.float32(size),
    )
    norm = rms_norm(rows=m, columns=columns, eps=0.5, config=RmsNormConfig(config.warps))
    return (x, weight), activation_operands(config, simulator.run(norm, x, weight)[0])[1]


def fused_matvec_subject(config: MatvecConfig, output: str = "f32") -> Subject:
    """Rows are normalized, bias and residual added; q8_1 output on request."""
    rng, n, columns, m = rng_of(9), 64 if output == "q8_1" else 13, 1280, 2
    size = np.float32(2**-8)  # keeps results below 1
    planes = random_planes(rng, "Q4_K", n, 5)
    operands, x = normed_operands(config, m, columns, size)
    bias, residual = (size * rng.standard_normal(s, np.float32) for s in ((n,), (m, n)))
    build = functools.partial(
        matvec,
        format="Q4_K",
        n=n,
        columns=columns,
        m=m,
        norm=True,
        eps=0.5,
        bias=True,
        residual=True,
        config=config,
    )
    operands = (*planes, *operands, bias, residual)
    if output == "f32":
        return Subject(build(), operands, (x @ weights("Q4_K", planes).T + bias + residual,), 1e-11)
    return Subject(
        build(output=output), operands, quantized(simulator.run(build(), *operands)[0]), 0
    )


def gated_subject(
    config: MatvecConfig, activation: str, pair: tuple[str, str] = ("Q4_K", "Q4_K")
) -> Subject:
    n, columns, m = 7, 1280, 2
    planes = [random_planes(rng_of(10, i), format, n, 5) for i, format in enumerate(pair)]
    operands, x = activation_operands(
        config, rng_of(10).standard_normal((m, columns), np.float32) * np.float32(0.1)
    )
    gate, up = (x @ weights(format, mine).T for format, mine in zip(pair, planes, strict=True))
    kernel = gated_matvec(
        formats=pair, n=n, columns=columns, m=m, activation=activation, config=config
    )
    return Subject(
        kernel, (*planes[0], *planes[1], *operands), (gated(activation, gate, up),), 1e-11
    )


def qkv_subject(config: MatvecConfig) -> Subject:
    types, rows, columns, m = ("Q4_K", "Q6_K"), (16, 5), 1280, 2  # the first matrix fills its block
    matrices = [
        random_planes(rng_of(11, n), format, n, 5) for format, n in zip(types, rows, strict=True)
    ]
    operands, x = normed_operands(config, m, columns)
    biases = [rng_of(12, n).standard_normal(n, np.float32) for n in rows]
    kernel = qkv_matvec(
        formats=types,
        rows=rows,
        columns=columns,
        m=m,
        norm=True,
        eps=0.5,
        biases=True,
        config=config,
    )
    wants = (
        x @ weights(f, planes).T + b for f, planes, b in zip(types, matrices, biases, strict=True)
    )
    return Subject(
        kernel,
        (*(p for planes in matrices for p in planes), *operands, *biases),
        tuple(wants),
        1e-11,
    )


def append_heads_subject(interleaved: bool) -> Subject:
    """Two tokens; heads of 32.

    The interleaved variant rotates only part of a head, and its second token has no slot.
    """
    types, heads, columns, m = ("Q4_K", "Q4_K", "Q6_K"), (2, 1, 1), 512, 2
    rope_dim, config = 24 if interleaved else 32, replace(PRESETS["tiled"], warps=2)
    rng = rng_of(14)
    matrices = [
        random_planes(rng, format, 32 * n, 2) for format, n in zip(types, heads, strict=True)
    ]
    operands, x = normed_operands(config, m, columns)
    biases = [rng.standard_normal(32 * n, np.float32) for n in heads]
    radians = rng.uniform(0, 1000, (m, rope_dim // 2))
    angles = [np.cos(radians).astype(np.float32), np.sin(radians).astype(np.float32)]
    pages = [rng.standard_normal((3, 1, 4, 32), np.float32) for _ in range(2)]
    slots = np.array([6, 12 if interleaved else 3], np.int32)
    kernel = qkv_append_matvec(
        formats=types,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        rope_dim=rope_dim,
        interleaved=interleaved,
        num_pages=3,
        page_size=4,
        columns=columns,
        m=m,
        norm=True,
        eps=0.5,
        biases=True,
        config=config,
    )
    q, k, v = (
        (x @ weights(f, planes).T + b).reshape(m, -1, 32)
        for f, planes, b in zip(types, matrices, biases, strict=True)
    )
    q, k = (rotated(y, *angles, interleaved) for y in (q, k))
    wants = [page.astype(np.float64) for page in pages]
    for want, new in zip(wants, (k, v), strict=True):
        for slot, vector in zip(slots, new, strict=True):
            if slot < 12:
                want[slot // 4, :, slot % 4] = vector
    planes = (p for matrix in matrices for p in matrix)
    given = (*pages, *planes, *operands, slots, *angles, *biases)
    return Subject(kernel, given, (*wants, q.reshape(m, -1)), 1e-11)


def gemm_subject(
    format: str, config: GemmConfig, *, n: int = 21, columns: int = 768, m: int = 19
) -> Subject:
    rng = rng_of(n, columns, m, 1)
    planes = random_planes(rng, format, n, columns // formats.get(format).block_size)
    if format == "MXFP4":
        planes = planes[0], planes[1] + np.uint8(9)  # exponents below and above 128
    x = rng.standard_normal((m, columns), np.float32) + np.float32(0.5)
    kernel = gemm(format=format, n=n, columns=columns, m=m, config=config)
    if config.products == "f16":
        operands, exact = half_operands(x)
        tolerance = 1e-7 if format == "Q6_K" else 1e-10  # tensor cores' rounding is unspecified
    else:
        operands, tolerance = quantized(x), 1e-12
        exact = dequantized(*operands)
    return Subject(kernel, (*planes, *operands), (exact @ weights(format, planes).T,), tolerance)


def gemm_epilogue_subject(config: GemmConfig) -> Subject:
    n, columns, m = 21, 1536, 7  # three steps; the last reuses the ring's first stage
    planes = random_planes(rng_of(13), "Q4_K", n, 6)
    operands = quantized(rng_of(14).standard_normal((m, columns), np.float32))
    bias = rng_of(15).standard_normal(n, np.float32)
    residual = rng_of(16).standard_normal((m, n), np.float32)
    kernel = gemm(format="Q4_K", n=n, columns=columns, m=m, bias=True, residual=True, config=config)
    want = dequantized(*operands) @ weights("Q4_K", planes).T + bias + residual
    return Subject(kernel, (*planes, *operands, bias, residual), (want,), 1e-12)


def gated_gemm_subject(config: GemmConfig) -> Subject:
    """Two formats with int8 output; the last block overlaps its neighbor."""
    pair, n, columns, m = ("Q4_K", "Q6_K"), 96, 1536, 7  # three steps of two stages
    planes = [random_planes(rng_of(17, i), format, n, 6) for i, format in enumerate(pair)]
    operands = quantized(rng_of(18).standard_normal((m, columns), np.float32) * np.float32(0.1))
    operands = (*planes[0], *planes[1], *operands)
    build = functools.partial(gated_gemm, formats=pair, n=n, columns=columns, m=m, config=config)
    (y,) = simulator.run(build(), *operands)

    def floats(values: np.ndarray, scale_sum: np.ndarray) -> tuple[np.ndarray, ...]:
        return dequantized(values, scale_sum), scale_sum

    # the gate is approximate, and a value near the middle of two steps may round either way
    return Subject(build(output="q8_1"), operands, floats(*quantized(y)), 2e-6, floats)


def qkv_gemm_subject(config: GemmConfig) -> Subject:
    types, rows, columns, m = ("Q4_K", "Q6_K"), (33, 21), 768, 7  # three steps of two stages
    matrices = [random_planes(rng_of(19, n), f, n, 3) for f, n in zip(types, rows, strict=True)]
    operands = quantized(rng_of(20).standard_normal((m, columns), np.float32))
    biases = [rng_of(21, n).standard_normal(n, np.float32) for n in rows]
    kernel = qkv_gemm(formats=types, rows=rows, columns=columns, m=m, biases=True, config=config)
    x = dequantized(*operands)
    wants = (
        x @ weights(f, planes).T + b for f, planes, b in zip(types, matrices, biases, strict=True)
    )
    given = (*(p for planes in matrices for p in planes), *operands, *biases)
    return Subject(kernel, given, tuple(wants), 1e-12)
