"""Rotates queries and keys and appends keys and values in the simulator, against float64 NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from support.helpers import nmse
from support.oracles import int8_vectors, loaded, rms_norm_oracle, rotated, stored

from ptx_kernels import simulator
from ptx_kernels.kernels.rope_append import rope_append
from ptx_kernels.ptx import KernelError

EPS = 1e-5
EXACT = {"f32": 1e-12, "f16": 1e-6, "bf16": 1e-5, "fp8": 2e-3}


def operands(
    tokens: int, heads: int, kv_heads: int, head_dim: int, rope_dim: int, dtype: str, qk_norm: bool
):
    rng = np.random.default_rng(tokens + head_dim)
    pages = [
        stored(rng.standard_normal((4, kv_heads, 16, head_dim), np.float32), dtype)
        for _ in range(2)
    ]
    q, k, v = (
        rng.standard_normal((tokens, h, head_dim), np.float32) for h in (heads, kv_heads, kv_heads)
    )
    slots = rng.permutation(64)[:tokens].astype(np.int32)
    radians = rng.uniform(0, 131072, (tokens, rope_dim // 2))
    angles = [np.cos(radians).astype(np.float32), np.sin(radians).astype(np.float32)]
    norms = list(rng.uniform(0.5, 2, (2, head_dim)).astype(np.float32)) if qk_norm else []
    return pages, [q, k, v], slots, angles, norms


@pytest.mark.grid
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    "tokens, heads, kv_heads, head_dim, rope_dim, dtype, qk_norm",
    [
        (1, 1, 1, 32, 32, "f32", True),  # half of the warp has no pair
        # the last lanes rotate nothing; a second run of pairs is partial
        (
            3,
            4,
            2,
            96,
            40,
            "f32",
            True,
        ),
        (2, 7, 1, 128, 64, "f16", False),
        (2, 2, 2, 256, 256, "bf16", True),
        (5, 3, 3, 80, 80, "f32", False),
        (2, 2, 1, 48, 48, "fp8", False),
        (2, 3, 1, 512, 512, "f32", True),
        (2, 2, 1, 512, 128, "bf16", True),
        (2, 2, 1, 496, 272, "f16", False),
        (2, 2, 1, 512, 384, "fp8", False),
    ],
)
def test_equals_numpy(
    tokens, heads, kv_heads, head_dim, rope_dim, dtype, qk_norm, interleaved
) -> None:
    pages, (q, k, v), slots, angles, norms = operands(
        tokens, heads, kv_heads, head_dim, rope_dim, dtype, qk_norm
    )
    kernel = rope_append(
        tokens=tokens,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope_dim=rope_dim,
        num_pages=4,
        page_size=16,
        dtype=dtype,
        interleaved=interleaved,
        qk_norm=qk_norm,
        eps=EPS,
        keys=dtype == "f16",
    )
    *got, q_out = simulator.run(kernel, *pages, q, k, v, slots, *angles, *norms)
    if qk_norm:
        q, k = (rms_norm_oracle(x, weight, EPS) for x, weight in zip((q, k), norms, strict=True))
    if dtype == "f16":
        q_out, k_out = got.pop(), q_out
        assert nmse(k_out, rotated(k, *angles, interleaved)) <= 1e-12
    assert nmse(q_out, rotated(q, *angles, interleaved)) <= 1e-12
    new = rotated(k, *angles, interleaved), v
    for result, before, values in zip(got, pages, new, strict=True):
        want = loaded(before, dtype).astype(np.float64)
        want[slots // 16, :, slots % 16] = values
        assert nmse(loaded(result, dtype), want) <= EXACT[dtype]
        untouched = np.ones((4, 16), bool)
        untouched[slots // 16, slots % 16] = False
        np.testing.assert_array_equal(
            result.swapaxes(1, 2)[untouched], before.swapaxes(1, 2)[untouched]
        )


@pytest.mark.parametrize(
    "head_dim, interleaved", [(32, True), (96, False), (256, True), (512, False)]
)
def test_int8_pages_get_a_scale_per_token_and_head(head_dim: int, interleaved: bool) -> None:
    _, (q, k, v), _, angles, norms = operands(3, 2, 2, head_dim, 32, "f32", True)
    pages, scales = (
        np.full((2, 2, 2, 16, head_dim), 99, np.int8),
        np.full((2, 2, 2, 16), 99, np.float32),
    )
    slots = np.array([17, -1, 3], np.int32)
    kernel = rope_append(
        tokens=3,
        num_heads=2,
        num_kv_heads=2,
        head_dim=head_dim,
        rope_dim=32,
        num_pages=2,
        page_size=16,
        dtype="int8",
        interleaved=interleaved,
        qk_norm=True,
        eps=EPS,
    )
    *got, q_out = simulator.run(kernel, *pages, *scales, q, k, v, slots, *angles, *norms)
    q, k = (rms_norm_oracle(x, weight, EPS) for x, weight in zip((q, k), norms, strict=True))
    assert nmse(q_out, rotated(q, *angles, interleaved)) <= 1e-12
    used = np.zeros((2, 16), bool)
    used[1, 1] = used[0, 3] = True
    for rows, steps, new in zip(
        got[:2], got[2:], (rotated(k, *angles, interleaved), v), strict=True
    ):
        want, want_steps = int8_vectors(new[[2, 0]].astype(np.float32))
        rows, steps = rows.swapaxes(1, 2), steps.swapaxes(1, 2)
        # the sums of a norm may round differently
        assert np.abs(rows[used].astype(int) - want).max() <= 1
        assert nmse(steps[used], want_steps) <= 1e-12
        assert (rows[~used] == 99).all() and (steps[~used] == 99).all()
    np.testing.assert_array_equal(rows[used], want)  # v is unchanged


def test_slots_outside_the_pages_are_skipped_but_their_queries_are_rotated() -> None:
    _, (q, k, v), _, angles, _ = operands(5, 2, 1, 32, 32, "f32", False)
    pages = np.zeros((2, 1, 32, 32), np.float32)
    slots = np.array([-1, 64, 63, 2**31 - 1, -(2**31)], np.int32)
    kernel = rope_append(
        tokens=5,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        rope_dim=32,
        num_pages=2,
        page_size=32,
        interleaved=False,
    )
    k_pages, v_pages, q_out = simulator.run(kernel, pages, pages, q, k, v, slots, *angles)
    assert nmse(q_out, rotated(q, *angles, False)) <= 1e-12
    np.testing.assert_array_equal(v_pages[1, 0, 31], v[2, 0])
    for result in (k_pages, v_pages):
        assert np.count_nonzero(result.any(-1)) == 1 and result[1, 0, 31].any()


@pytest.mark.parametrize("rope_dim", [31, 34])
def test_rotated_dimensions_that_do_not_fit(rope_dim: int) -> None:
    with pytest.raises(
        KernelError, match=f"rope_dim={rope_dim} must be even and at most head_dim=32"
    ):
        rope_append(
            tokens=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=32,
            rope_dim=rope_dim,
            num_pages=1,
            page_size=16,
            interleaved=True,
        )
