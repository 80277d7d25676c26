"""The executor's own numbers: small kernels against NumPy, on every generation of machine code."""

from __future__ import annotations

import numpy as np
import pytest

from .small_kernels import execute, f32, small_kernel

TARGETS = ("sm_75", "sm_80", "sm_90", "sm_120")
every_target = pytest.mark.parametrize("target", TARGETS)
since_ampere = pytest.mark.parametrize("target", TARGETS[1:])


@every_target
def test_integers(target):
    """Sums of 64 bits with carries, products' upper halves, shifts, extremes, bytes."""
    kernel = small_kernel(
        """
  ld.global.u32 %r3, [%d2]; ld.global.u32 %r4, [%d2+128];
  cvt.u64.u32 %d3, %r3; shl.b64 %d3, %d3, 32; or.b64 %d3, %d3, 4294967295;
  cvt.s64.s32 %d4, %r4; add.s64 %d3, %d3, %d4; shr.u64 %d5, %d3, 32; cvt.u32.u64 %r5, %d5;
  mul.hi.u32 %r6, %r3, %r4; mul.hi.s32 %r7, %r3, %r4; sub.u32 %r8, %r3, %r4;
  min.s32 %r9, %r3, %r4; max.u32 %r10, %r3, %r4; shr.s32 %r11, %r3, %r0;
  dp4a.u32.s32 %r12, %r3, %r4, %r8; prmt.b32 %r13, %r3, %r4, 0x8d62;
  mad.wide.u32 %d6, %r0, 4, %d1;
"""
        + "".join(f"  st.global.u32 [%d6+{128 * k}], %r{5 + k};\n" for k in range(9)),
        64,
        9 * 32,
    )
    rng = np.random.default_rng(0)
    x = rng.integers(0, 1 << 32, 64, np.uint32)
    got = execute(kernel, x, target).reshape(9, 32)
    a, b = x[:32], x[32:]
    i, j = a.view(np.int32), b.view(np.int32)
    wide = ((a.astype(np.uint64) << np.uint64(32)) | np.uint64(0xFFFFFFFF)) + j.astype(
        np.int64
    ).view(np.uint64)
    bytes_a, bytes_b = a.view(np.uint8).reshape(-1, 4), b.view(np.int8).reshape(-1, 4)
    products = (bytes_a.astype(np.int64) * bytes_b).sum(axis=1)
    every = np.concatenate([bytes_a, bytes_b.view(np.uint8)], axis=1)
    sign = np.where(every[:, [5, 0]].view(np.int8) < 0, 255, 0).astype(np.uint8)
    want = [
        wide >> np.uint64(32),
        (a.astype(np.uint64) * b) >> np.uint64(32),
        (i.astype(np.int64) * j) >> 32,
        a - b,
        np.minimum(i, j),
        np.maximum(a, b),
        i >> np.arange(32),
        (a - b) + products.astype(np.uint32),
        np.stack([every[:, 2], every[:, 6], sign[:, 0], sign[:, 1]], 1)
        .copy()
        .view(np.uint32)[:, 0],
    ]
    for row, of_row in zip(got, want, strict=True):
        np.testing.assert_array_equal(row, np.asarray(of_row).astype(np.uint32))


@every_target
def test_divisions_take_the_slow_way_where_they_must(target):
    """Quotients of subnormal, huge and special numbers have NumPy's bits."""
    kernel = small_kernel(
        """
  ld.global.f32 %f0, [%d2]; ld.global.f32 %f1, [%d2+256];
  div.rn.f32 %f2, %f0, %f1; fma.rn.f32 %f3, %f0, %f1, %f2;
  mad.wide.u32 %d6, %r0, 4, %d1; st.global.f32 [%d6], %f2; st.global.f32 [%d6+256], %f3;
""",
        128,
        128,
        threads=64,
        type_in=f32,
        type_out=f32,
    )
    rng = np.random.default_rng(1)
    x = (rng.standard_normal(128) * 2.0 ** rng.integers(-149, 127, 128)).astype(np.float32)
    x[:8], x[64:72] = [1, 0, -0.0, np.inf, 3, 1e-45, 7, np.nan], [3, 0, 2, np.inf, 0, 3e38, -3, 1]
    got = execute(kernel, x, target).reshape(2, 64)
    with np.errstate(all="ignore"):
        quotient = x[:64] / x[64:]
        product = x[:64].astype(np.longdouble) * x[64:].astype(np.longdouble)
        fused = (product + quotient).astype(np.float32)
    np.testing.assert_array_equal(got[0], quotient)
    np.testing.assert_array_equal(got[1], fused)


@every_target
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_lanes_part_and_meet(target, seed):
    """Each lane takes as many turns as Collatz's sequence has; warps meet in shared memory."""
    kernel = small_kernel(
        """
  ld.global.u32 %r3, [%d2]; mov.u32 %r4, 0;
$turn:
  setp.eq.u32 %p0, %r3, 1;
  @%p0 bra $end;
  and.b32 %r5, %r3, 1; setp.eq.u32 %p1, %r5, 0;
  @%p1 bra $even;
  mad.lo.u32 %r3, %r3, 3, 1;
  bra.uni $next;
$even:
  shr.u32 %r3, %r3, 1;
$next:
  add.u32 %r4, %r4, 1;
  bra.uni $turn;
$end:
  shl.b32 %r6, %r0, 2; mov.u32 %r7, memory; add.u32 %r6, %r6, %r7;
  st.shared.u32 [%r6], %r4;
  bar.sync 0;
  mov.u32 %r8, 95; sub.u32 %r8, %r8, %r0; shl.b32 %r8, %r8, 2; add.u32 %r8, %r8, %r7;
  ld.shared.u32 %r9, [%r8];
  mad.wide.u32 %d6, %r0, 4, %d1; st.global.u32 [%d6], %r9;
""",
        96,
        96,
        threads=96,
    )

    def turns(n: int) -> int:
        return 0 if n == 1 else 1 + turns(3 * n + 1 if n % 2 else n // 2)

    got = execute(kernel, np.arange(1, 97, dtype=np.uint32), target, seed=seed)
    np.testing.assert_array_equal(got, [turns(n) for n in range(96, 0, -1)])


@since_ampere
@pytest.mark.parametrize("late", [True, False])
def test_copies_arrive(late, target):
    """The second of two groups is awaited later; missing bytes are zeros."""
    kernel = small_kernel(
        """
  mov.u32 %r7, memory; shl.b32 %r3, %r0, 2; add.u32 %r3, %r3, %r7;
  cp.async.ca.shared.global [%r3], [%d2], 4; cp.async.commit_group;
  cp.async.ca.shared.global [%r3+128], [%d2+128], 4, 2; cp.async.commit_group;
  cp.async.wait_group 1; ld.shared.u32 %r4, [%r3];
  cp.async.wait_group 0; ld.shared.u32 %r5, [%r3+128];
  mad.wide.u32 %d6, %r0, 4, %d1; st.global.u32 [%d6], %r4; st.global.u32 [%d6+128], %r5;
""",
        64,
        64,
        least=80,
    )
    x = np.random.default_rng(2).integers(0, 1 << 32, 64, np.uint32)
    want = np.concatenate([x[:32], x[32:] & 0xFFFF])
    np.testing.assert_array_equal(execute(kernel, x, target, late=late), want)


@since_ampere
def test_warps_exchange(target):
    """Shuffles within segments, votes and reductions."""
    kernel = small_kernel(
        """
  ld.global.u32 %r3, [%d2];
  shfl.sync.bfly.b32 %r4, %r3, 5, 0x1f, 0xffffffff;
  shfl.sync.down.b32 %r5|%p1, %r3, 3, 0x181f, 0xffffffff; selp.u32 %r6, 1, 0, %p1;
  shfl.sync.up.b32 %r7, %r3, 2, 0x1000, 0xffffffff;
  setp.gt.s32 %p2, %r3, 0; vote.sync.ballot.b32 %r8, %p2, 0xffffffff;
  redux.sync.max.s32 %r9, %r3, 0xffffffff;
  mad.wide.u32 %d6, %r0, 4, %d1;
"""
        + "".join(
            f"  st.global.u32 [%d6+{128 * k}], %r{r};\n" for k, r in enumerate((4, 5, 6, 7, 8, 9))
        ),
        32,
        192,
        least=80,
    )
    x = np.random.default_rng(3).integers(-100, 100, 32).astype(np.int32)
    got = execute(kernel, x.view(np.uint32), target).view(np.int32).reshape(6, 32)
    lane = np.arange(32)
    inside = lane % 8 + 3 < 8
    ballot = int(sum(1 << int(k) for k in lane[x > 0]))
    want = [
        x[lane ^ 5],
        np.where(inside, x[np.where(inside, lane + 3, lane)], x),
        inside,
        np.where(lane % 16 >= 2, x[lane - 2], x),
        np.full(32, np.uint32(ballot).view(np.int32)),
        np.full(32, x.max()),
    ]
    for row, of_row in zip(got, want, strict=True):
        np.testing.assert_array_equal(row, of_row)


@since_ampere
def test_products_of_matrices(target):
    """ldmatrix, plain and transposed, and mma of halves give NumPy's product."""
    kernel = small_kernel(
        """
  mov.u32 %r7, memory; shl.b32 %r3, %r0, 4; add.u32 %r3, %r3, %r7;
  mul.wide.u32 %d3, %r0, 16; add.u64 %d3, %d3, %d0;
  ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%d3];
  st.shared.v4.u32 [%r3], {%r10, %r11, %r12, %r13};
  ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%d3+512];
  st.shared.v4.u32 [%r3+512], {%r10, %r11, %r12, %r13};
  bar.sync 0;
  ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r3];
  ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r14, %r15}, [%r3+512];
  mov.f32 %f0, 0f00000000;
  mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1, %f2, %f3, %f4},
    {%r10, %r11, %r12, %r13}, {%r14, %r15}, {%f0, %f0, %f0, %f0};
  mad.wide.u32 %d6, %r0, 16, %d1; st.global.v4.f32 [%d6], {%f1, %f2, %f3, %f4};
""",
        256,
        128,
        type_out=f32,
        least=80,
    )
    rng = np.random.default_rng(4)
    halves = rng.integers(-8, 8, 512).astype(np.float16)
    got = execute(kernel, halves.view(np.uint32), target).reshape(8, 4, 2, 2)  # g, t, half, column
    # matrices 0 to 3 are the quarters of a: upper left, lower left, upper right, lower right
    quarters = halves[:256].reshape(2, 2, 8, 8)
    a = quarters.transpose(1, 2, 0, 3).reshape(16, 16).astype(np.float64)
    b = halves[256:384].reshape(16, 8).astype(np.float64)
    np.testing.assert_array_equal(got.transpose(2, 0, 1, 3).reshape(16, 8), a @ b)


@pytest.mark.parametrize(("left", "of_left"), [("u8", np.uint8), ("s8", np.int8)])
def test_products_of_turing(left, of_left):
    """mma of 8 rows of bytes, and of 16 rows and 8 columns of halves."""
    kernel = small_kernel(
        f"""
  ld.global.u32 %r3, [%d2]; ld.global.u32 %r4, [%d2+128];
  mul.wide.u32 %d3, %r0, 8; add.u64 %d4, %d3, %d0; ld.global.v2.u32 {{%r5, %r6}}, [%d4+256];
  mma.sync.aligned.m8n8k16.row.col.s32.{left}.s8.s32 {{%r7, %r8}}, {{%r3}}, {{%r4}}, {{%r5, %r6}};
  add.u64 %d5, %d3, %d1; st.global.v2.u32 [%d5], {{%r7, %r8}};
  ld.global.v2.u32 {{%r5, %r6}}, [%d4+512]; ld.global.u32 %r3, [%d2+768]; mov.f32 %f0, 0f00000000;
  mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {{%f1, %f2, %f3, %f4}},
    {{%r5, %r6}}, {{%r3}}, {{%f0, %f0, %f0, %f0}};
  mad.wide.u32 %d6, %r0, 16, %d1; st.global.v4.f32 [%d6+256], {{%f1, %f2, %f3, %f4}};
""",
        224,
        192,
    )
    rng = np.random.default_rng(6)
    integers = rng.integers(0, 1 << 32, 128, np.uint32)
    halves = rng.integers(-8, 8, 192).astype(np.float16)
    got = execute(kernel, np.concatenate([integers, halves.view(np.uint32)]), "sm_75")
    # a lane has four bytes of a row of a, four of a column of b, and two sums of a row
    a = integers[:32].view(of_left).reshape(8, 16).astype(np.int64)
    b = integers[32:64].view(np.int8).reshape(8, 16).astype(np.int64).T
    want = a @ b + integers[64:].view(np.int32).reshape(8, 8)
    np.testing.assert_array_equal(got[:64].view(np.int32).reshape(8, 8), want.astype(np.int32))
    a = halves[:128].reshape(8, 4, 2, 2).transpose(2, 0, 1, 3).reshape(16, 8).astype(np.float64)
    b = halves[128:].reshape(8, 8).astype(np.float64).T
    sums = got[64:].view(np.float32).reshape(8, 4, 2, 2).transpose(2, 0, 1, 3).reshape(16, 8)
    np.testing.assert_array_equal(sums, a @ b)


@pytest.mark.parametrize("target", ["sm_90", "sm_120"])
@pytest.mark.parametrize("seed", [None, 0])
def test_blocks_of_a_cluster_read_each_other(target, seed):
    kernel = small_kernel(
        """
  mad.wide.u32 %d3, %r1, 128, %d2; ld.global.u32 %r3, [%d3];
  mov.u32 %r7, memory; shl.b32 %r4, %r0, 2; add.u32 %r4, %r4, %r7; st.shared.u32 [%r4], %r3;
  barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
  mov.u32 %r5, %cluster_ctarank; xor.b32 %r5, %r5, 1;
  mapa.shared::cluster.u32 %r6, %r4, %r5; ld.shared::cluster.u32 %r8, [%r6];
  barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
  mul.wide.u32 %d4, %r1, 128; mad.wide.u32 %d6, %r0, 4, %d1; add.u64 %d6, %d6, %d4;
  st.global.u32 [%d6], %r8;
""",
        128,
        128,
        blocks=4,
        cluster=2,
    )
    x = np.random.default_rng(5).integers(0, 1 << 32, 128, np.uint32)
    want = x.reshape(2, 2, 32)[:, ::-1].ravel()
    np.testing.assert_array_equal(execute(kernel, x, target, seed=seed), want)
