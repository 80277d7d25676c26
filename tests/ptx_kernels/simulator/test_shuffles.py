"""Shuffles and votes in handwritten PTX, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from .ptx_text import per_thread

THREADS, BLOCKS = 128, 5
THREAD = np.arange(THREADS * BLOCKS, dtype=np.uint32)


def reference_shuffle(
    mode: str, values: np.ndarray, b: np.ndarray, c: int
) -> tuple[np.ndarray, np.ndarray]:
    """PTX ISA 9.7.9.6, lane by lane."""
    result, inside = values.copy(), np.zeros(values.size, bool)
    clamp, segment = c & 31, c >> 8 & 31
    for i in range(values.size):
        lane, step = i % 32, int(b[i]) & 31
        highest, lowest = (lane & segment) | (clamp & ~segment & 31), lane & segment
        j = {
            "up": lane - step,
            "down": lane + step,
            "bfly": lane ^ step,
            "idx": lowest | (step & ~segment & 31),
        }[mode]
        inside[i] = j >= highest if mode == "up" else j <= highest
        result[i] = values[i - lane + j] if inside[i] else values[i]
    return result, inside


@pytest.mark.parametrize("c", [0x1F, 0, 0x1807, 0x181F, 0x1C03, 0x100F])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffle_modes(mode: str, c: int) -> None:
    for step in ("3", "17", "%r5"):
        body = f"""
  mul.lo.u32 %r3, %r0, 11; xor.b32 %r5, %r0, 13;
  shfl.sync.{mode}.b32 %r4|%p0, %r3, {step}, {c:#x}, -1;
  selp.b32 %r6, 0x80000000, 0, %p0; or.b32 %r4, %r4, %r6;"""
        b = (np.arange(64) ^ 13) if step == "%r5" else np.full(64, int(step))
        values, inside = reference_shuffle(mode, np.arange(64, dtype=np.uint32) * 11, b, c)
        np.testing.assert_array_equal(
            per_thread(body, "%r4", 64), values | inside.astype(np.uint32) << 31
        )


def test_shuffle_among_the_lanes_of_a_branch() -> None:
    body = """
  mov.b32 %r3, 0; setp.ge.u32 %p0, %r2, 8;
  @%p0 bra END;
  shfl.sync.idx.b32 %r3, %r0, 5, 0x1f, 0xff;
END:
  mov.b32 %r4, %r3;"""
    np.testing.assert_array_equal(per_thread(body, "%r4"), np.where(np.arange(32) < 8, 5, 0))


def test_shuffle_sum_of_floats() -> None:
    steps = "\n".join(
        f"shfl.sync.bfly.b32 %f1, %f0, {m}, 31, 0xffffffff; add.rn.f32 %f0, %f0, %f1;"
        for m in (16, 8, 4, 2, 1)
    )
    got = per_thread(f"cvt.rn.f32.u32 %f0, %r0;\n{steps}", "%f0", THREADS, BLOCKS, np.float32)
    np.testing.assert_array_equal(
        got, np.arange(THREAD.size, dtype=np.float32).reshape(-1, 32).sum(1).repeat(32)
    )


def test_votes() -> None:
    condition = (THREAD % 3 == 0) & (THREAD < 64)
    rows = condition.reshape(-1, 32)
    ballot = (rows.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1).astype(np.uint32)
    head = """
  div.u32 %r3, %r0, 3; mul.lo.u32 %r3, %r3, 3; setp.eq.u32 %p0, %r3, %r0;
  setp.lt.u32 %p1, %r0, 64; and.pred %p0, %p0, %p1;"""
    for vote, want in (
        ("any", rows.any(1)),
        ("all", rows.all(1)),
        ("uni", ~rows.any(1) | rows.all(1)),
    ):
        body = f"{head} vote.sync.{vote}.pred %p2, %p0, -1; selp.b32 %r4, 1, 0, %p2;"
        np.testing.assert_array_equal(per_thread(body, "%r4", THREADS, BLOCKS), want.repeat(32))
    body = f"{head} vote.sync.ballot.b32 %r4, %p0, 0xffffffff;"
    np.testing.assert_array_equal(per_thread(body, "%r4", THREADS, BLOCKS), ballot.repeat(32))
    body = f"{head} vote.sync.ballot.b32 %r4, !%p0, 0xffffffff;"
    np.testing.assert_array_equal(per_thread(body, "%r4", THREADS, BLOCKS), (~ballot).repeat(32))


def test_votes_on_what_all_lanes_agree_on_and_without_those_that_exited() -> None:
    for size, want in ((32, 3), (33, 0)):  # %r1 is the block's size
        body = f"""
  setp.eq.u32 %p0, %r1, {size}; vote.sync.any.pred %p1, %p0, -1; vote.sync.all.pred %p2, %p0, -1;
  selp.b32 %r3, 1, 0, %p1; selp.b32 %r4, 2, 0, %p2; or.b32 %r5, %r3, %r4;"""
        np.testing.assert_array_equal(per_thread(body, "%r5"), np.full(32, want))
    body = """
  setp.lt.u32 %p0, %r2, 5; @%p0 ret;
  setp.ge.u32 %p1, %r2, 5; vote.sync.all.pred %p2, %p1, -1; selp.b32 %r5, 1, 0, %p2;"""
    np.testing.assert_array_equal(per_thread(body, "%r5"), np.arange(32) >= 5)


def test_votes_of_half_warps() -> None:
    """Each lane names its own half: the other half's votes do not count."""
    body = """
  and.b32 %r3, %r0, 16; shl.b32 %r4, 0xffff, %r3; setp.lt.u32 %p0, %r2, 20;
  vote.sync.ballot.b32 %r5, %p0, %r4;
  vote.sync.all.pred %p1, %p0, %r4; selp.b32 %r6, 1, 0, %p1; shl.b32 %r6, %r6, 31;
  or.b32 %r5, %r5, %r6;"""
    np.testing.assert_array_equal(
        per_thread(body, "%r5"), np.where(np.arange(32) < 16, 0x8000FFFF, 0x000F0000)
    )
