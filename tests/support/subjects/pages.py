"""Subjects for a paged cache."""

from __future__ import annotations

import numpy as np

from ptx_kernels.kernels.append_kv import append_kv
from ptx_kernels.kernels.rope_append import rope_append
from support.oracles import (
    int8_vectors,
    rms_norm_oracle,
    rotated,
    stored,
)

from .base import Subject, rng_of


def append_subject(dtype: str, *, latent: bool = False) -> Subject:
    """Seven tokens, of which the second and third have no slot; latent tokens have no values.

    One of these slots is negative, the other is the first beyond the pages. Many values are halfway
    between two of a narrower type.
    """
    rng, kinds = rng_of(6), "k" if latent else "kv"
    pages = [cached(rng.standard_normal((3, 2, 4, 32), np.float32), dtype) for _ in kinds]
    shape = (7, 2, 32)
    new = [
        (rng.integers(-4096, 4097, shape) * 2.0 ** rng.integers(-20, -4, shape)).astype(np.float32)
        for _ in kinds
    ]
    slots = np.array([7, -1, 12, 2, 0, 11, 5], np.int32)
    wants = [tuple(part.copy() for part in page) for page in pages]
    for want, values in zip(wants, new, strict=True):
        for token in (0, 3, 4, 5, 6):
            for part, held in zip(want, cached(values[token], dtype), strict=True):
                part[slots[token] // 4, :, slots[token] % 4] = held
    sizes = dict(tokens=7, num_pages=3, num_kv_heads=2, page_size=4, head_dim=32)
    kernel = append_kv(**sizes, dtype=dtype, latent=latent)
    return Subject(kernel, (*page_operands(pages), *new, slots), page_operands(wants), 0)


def cached(x: np.ndarray, dtype: str) -> tuple[np.ndarray, ...]:
    """Encodes float vectors like pages: (rows,), or (rows, scales) for int8."""
    return int8_vectors(x) if dtype == "int8" else (stored(x, dtype),)


def page_operands(pages: list[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    """Orders operands like the kernel: (k rows, v rows, k scales, v scales), or keys only."""
    return tuple(part for parts in zip(*pages, strict=True) for part in parts)


def rope_subject(
    interleaved: bool,
    qk_norm: bool,
    dtype: str = "f32",
    q_rest: int = 0,
    v_eps: float | None = None,
) -> Subject:
    """Four tokens of 96 dimensions, 40 of them rotated; the second and third have no slot."""
    rng = rng_of(9)
    exact = [rng.standard_normal((3, 2, 4, 96), np.float32) for _ in range(2)]
    q, k, v = (rng.standard_normal((4, heads, 96), np.float32) for heads in (4, 2, 2))
    rest = [rng.standard_normal((4, 4, q_rest), np.float32)] if q_rest else []
    slots = np.array([5, -1, 12, 11], np.int32)
    radians = rng.uniform(0, 1000, (4, 20))
    angles = [np.cos(radians).astype(np.float32), np.sin(radians).astype(np.float32)]
    norms = list(rng.uniform(0.5, 2, (2, 96)).astype(np.float32)) if qk_norm else []
    normed = (
        [rms_norm_oracle(x, w, 1e-2) for x, w in zip((q, k), norms, strict=True)]
        if qk_norm
        else [q, k]
    )
    q_want, k_want = (rotated(x, *angles, interleaved) for x in normed)
    v_want = v if v_eps is None else rms_norm_oracle(v, np.ones(96), v_eps)
    pages = [cached(page, dtype) for page in exact]
    wants = [tuple(part.copy() for part in page) for page in pages]
    for want, values in zip(wants, (k_want, v_want), strict=True):
        for token in (0, 3):
            for part, held in zip(
                want, cached(values[token].astype(np.float32), dtype), strict=True
            ):
                part[slots[token] // 4, :, slots[token] % 4] = held
    kernel = rope_append(
        tokens=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=96,
        rope_dim=40,
        num_pages=3,
        page_size=4,
        dtype=dtype,
        interleaved=interleaved,
        qk_norm=qk_norm,
        q_rest=q_rest,
        eps=1e-2,
        v_eps=v_eps,
    )
    q = np.concatenate([q, *rest], axis=-1)
    operands = (*page_operands(pages), q, k, v, slots, *angles, *norms)
    if dtype == "int8":  # a value near the middle of two steps may round either way
        return Subject(
            kernel,
            operands,
            (*dequantized_pages(*page_operands(wants)), q_want),
            1e-6,
            dequantized_pages,
        )
    return Subject(kernel, operands, (*page_operands(wants), q_want, *rest), 1e-12)


def latent_rope_subject(interleaved: bool, dtype: str = "f32") -> Subject:
    """Four latent tokens, 64 elements and a key of 96; the second and third have no slot.

    Three heads of 37 + 96 elements.
    """
    rng = rng_of(17)
    pages = cached(rng.standard_normal((3, 1, 4, 160), np.float32), dtype)
    rest, q = (rng.standard_normal((4, 3, n), np.float32) for n in (37, 96))
    k, slots = rng.standard_normal((4, 1, 160), np.float32), np.array([5, -1, 12, 11], np.int32)
    radians = rng.uniform(0, 1000, (4, 48))
    angles = [np.cos(radians).astype(np.float32), np.sin(radians).astype(np.float32)]
    norm = rng.uniform(0.5, 2, 64).astype(np.float32)
    key = rotated(k[..., 64:], *angles, interleaved)
    new = np.concatenate([rms_norm_oracle(k[..., :64], norm, 1e-2), key], axis=-1)
    wants = tuple(part.copy() for part in pages)
    for token in (0, 3):
        held = cached(new[token].astype(np.float32), dtype)
        for part, values in zip(wants, held, strict=True):
            part[slots[token] // 4, :, slots[token] % 4] = values
    kernel = rope_append(
        tokens=4,
        num_heads=3,
        num_kv_heads=1,
        head_dim=160,
        rope_dim=96,
        num_pages=3,
        page_size=4,
        dtype=dtype,
        interleaved=interleaved,
        qk_norm=True,
        eps=1e-2,
        latent=True,
        q_rest=37,
    )
    operands = (*pages, np.concatenate([rest, q], axis=-1), k, slots, *angles, norm)
    queries = rotated(q, *angles, interleaved), rest
    if dtype == "int8":  # a value near the middle of two steps may round either way
        return Subject(
            kernel, operands, (*dequantized_rows(*wants), *queries), 1e-6, dequantized_rows
        )
    return Subject(kernel, operands, (*wants, *queries), 1e-12)


def dequantized_rows(
    rows: np.ndarray, scales: np.ndarray, *others: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Converts int8 latent pages to floats."""
    return (rows * scales[..., None].astype(np.float64), *others)


def dequantized_pages(
    k: np.ndarray, v: np.ndarray, k_scales: np.ndarray, v_scales: np.ndarray, *others: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Converts int8 pages to floats."""
    return (
        k * k_scales[..., None].astype(np.float64),
        v * v_scales[..., None].astype(np.float64),
        *others,
    )
