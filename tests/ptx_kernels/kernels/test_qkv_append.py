"""Projections that rotate and store heads, in the simulator, against the kernels they replace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.helpers import nmse
from support.oracles import random_planes, rms_norm_oracle, rotated, stored, weights

from ptx_kernels import formats, simulator
from ptx_kernels.kernels.matvec import PRESETS, MatvecConfig, qkv_append_matvec, qkv_matvec
from ptx_kernels.kernels.rope_append import rope_append
from ptx_kernels.ptx import KernelError

EPS = 1e-5
INLINE = replace(PRESETS["inline_q8"], warps=2)
F32 = replace(PRESETS["tiled"], warps=2)


def shape(
    heads: int, kv_heads: int, head_dim: int, rope_dim: int, interleaved: bool, pages: str
) -> dict[str, Any]:
    sizes = dict(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rope_dim=rope_dim)
    return {**sizes, "interleaved": interleaved, "pages": pages, "num_pages": 3, "page_size": 16}


def operands(given: dict[str, Any], types: tuple[str, ...], columns: int, m: int) -> Any:
    """Pages, planes of the three matrices, x, norm weight, slots, angles, biases."""
    rng = np.random.default_rng([m, columns, given["head_dim"]])
    heads = given["num_heads"], given["num_kv_heads"], given["num_kv_heads"]
    rows = [count * given["head_dim"] for count in heads]
    pages = [
        stored(
            rng.standard_normal((3, heads[1], 16, given["head_dim"]), np.float32), given["pages"]
        )
        for _ in range(2)
    ]
    planes = [
        random_planes(rng, f, n, columns // formats.get(f).block_size)
        for f, n in zip(types, rows, strict=True)
    ]
    x, norm = rng.standard_normal((m, columns), np.float32), rng.uniform(0.5, 2, columns)
    slots = rng.permutation(48)[:m].astype(np.int32)
    if m > 2:
        slots[1:3] = -1, 48  # no slot
    radians = rng.uniform(0, 100, (m, given["rope_dim"] // 2))
    angles = [np.cos(radians).astype(np.float32), np.sin(radians).astype(np.float32)]
    biases = [rng.standard_normal(n, np.float32) for n in rows]
    return pages, planes, x, norm.astype(np.float32), slots, angles, biases


@pytest.mark.grid
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    "types, heads, kv_heads, head_dim, rope_dim, columns, m, pages, config",
    [
        (("Q4_K", "Q4_K", "Q6_K"), 4, 2, 32, 32, 512, 1, "bf16", INLINE),
        (("Q4_K", "Q6_K", "Q4_K"), 3, 1, 48, 48, 256, 2, "f16", replace(INLINE, rows_per_warp=4)),
        (("Q8_0", "Q8_0", "Q8_0"), 2, 2, 32, 32, 96, 8, "f32", replace(INLINE, rows_per_warp=8)),
        (("Q4_K", "Q4_K", "Q4_K"), 5, 1, 64, 64, 256, 3, "fp8", replace(INLINE, persistent=3)),
        (("Q5_K", "Q5_K", "Q5_K"), 2, 1, 32, 32, 256, 1, "f32", F32),
        # teams of the last block overlap the previous one
        (("Q4_K", "Q4_K", "Q4_K"), 3, 1, 48, 48, 256, 1, "f32", replace(INLINE, warps=5)),
        # two warps a row
        (("Q4_K",) * 3, 2, 1, 32, 32, 512, 2, "bf16", replace(INLINE, warps=4, warps_per_row=2)),
    ],
)
def test_equals_the_kernels_that_it_replaces(
    types, heads, kv_heads, head_dim, rope_dim, columns, m, pages, config, interleaved
) -> None:
    """Equal bit for bit: sums have the same order, and rounding is the same."""
    given = shape(heads, kv_heads, head_dim, rope_dim, interleaved, pages)
    pages, planes, x, norm, slots, angles, biases = operands(given, types, columns, m)
    common: dict[str, Any] = dict(columns=columns, m=m, norm=True, eps=EPS, biases=True)
    kernel = qkv_append_matvec(formats=types, config=config, **given, **common)
    flat = [plane for matrix in planes for plane in matrix]
    got = simulator.run(kernel, *pages, *flat, x, norm, slots, *angles, *biases)
    rows = tuple(count * head_dim for count in (heads, kv_heads, kv_heads))
    apart = qkv_matvec(formats=types, rows=rows, config=config, **common)
    ys = simulator.run(apart, *flat, x, norm, *biases)
    tokens = [y.reshape(m, -1, head_dim) for y in ys]
    rope = rope_append(
        tokens=m,
        dtype=given.pop("pages"),
        **given,
    )
    *want_pages, want_q = simulator.run(rope, *pages, *tokens, slots, *angles)
    for ours, theirs in zip(got, (*want_pages, want_q.reshape(m, -1)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    # and the results are right
    h = rms_norm_oracle(x, norm, EPS)
    q = (h @ weights(types[0], planes[0]).T + biases[0]).reshape(m, heads, head_dim)
    want = rotated(q, *angles, interleaved).reshape(m, -1)
    assert nmse(got[-1], want) <= (1e-9 if config.floats else 1e-3)


@pytest.mark.parametrize("m", [1, 5])
def test_a_part_of_a_head_is_rotated(m: int) -> None:
    types, given = ("Q4_K",) * 3, shape(2, 1, 64, 24, True, "f32")
    pages, planes, x, norm, slots, angles, _ = operands(given, types, 256, m)
    kernel = qkv_append_matvec(
        formats=types, columns=256, m=m, norm=True, eps=EPS, config=F32, **given
    )
    flat = [plane for matrix in planes for plane in matrix]
    *_, q = simulator.run(kernel, *pages, *flat, x, norm, slots, *angles)
    h = rms_norm_oracle(x, norm, EPS) @ weights("Q4_K", planes[0]).T
    want = rotated(h.reshape(m, 2, 64), *angles, True).reshape(m, -1)
    assert nmse(q, want) <= 1e-9


@pytest.mark.parametrize(
    "changes, config, message",
    [
        ({"pages": "int8"}, INLINE, "pages='int8' must have no scales"),
        ({"rope_dim": 16, "interleaved": False}, INLINE, "rope_dim=16 be head_dim=32"),
        ({"rope_dim": 34}, INLINE, "rope_dim=34 must be even and at most head_dim=32"),
        ({}, replace(INLINE, rows_per_warp=1), "rows_per_warp=1 must be even"),
        ({}, replace(INLINE, rows_per_warp=6), "rows_per_warp=6 must be even and divide"),
    ],
)
def test_shapes_that_no_warp_has_whole(
    changes: dict[str, Any], config: MatvecConfig, message: str
) -> None:
    given = shape(2, 1, 32, 32, True, "f32") | changes
    with pytest.raises(KernelError, match=message):
        qkv_append_matvec(formats=("Q4_K",) * 3, columns=256, m=1, config=config, **given)
