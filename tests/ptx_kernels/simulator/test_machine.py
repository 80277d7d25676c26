"""Control flow, warps, barriers and memory on hand-written PTX, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from ptx_kernels import simulator
from ptx_kernels.ptx import Buffer, Kernel, f32
from ptx_kernels.ptx.types import bf16

from .ptx_text import module, per_thread, store_u32

THREADS, BLOCKS = 128, 5
THREAD = np.arange(THREADS * BLOCKS, dtype=np.uint32)


def test_if_else_reconverges() -> None:
    body = """
  and.b32 %r3, %r0, 3;
  setp.lt.u32 %p0, %r3, 2;
  @%p0 bra THEN;
  mul.lo.u32 %r4, %r0, 7;
  bra.uni JOIN;
THEN:
  setp.eq.u32 %p1, %r3, 1;
  mov.b32 %r4, 100;
  @!%p1 bra JOIN;
  add.u32 %r4, %r4, %r0;
JOIN:
  activemask.b32 %r5;
  setp.eq.u32 %p2, %r5, 0xffffffff;
  @%p2 add.u32 %r4, %r4, 1000;"""
    part = THREAD & 3
    want = np.where(part >= 2, THREAD * 7, np.where(part == 1, 100 + THREAD, 100)) + 1000
    np.testing.assert_array_equal(per_thread(body, "%r4", THREADS, BLOCKS), want)


def test_loops_with_a_trip_count_per_lane() -> None:
    body = """
  and.b32 %r3, %r0, 15; mov.b32 %r4, 0; mov.b32 %r5, 0;
OUTER:
  setp.ge.u32 %p0, %r4, %r3;
  @%p0 bra END;
  mov.b32 %r6, 0;
INNER:
  add.u32 %r5, %r5, %r6; add.u32 %r6, %r6, 1;
  setp.le.u32 %p1, %r6, %r4;
  @%p1 bra INNER;
  add.u32 %r4, %r4, 1;
  bra OUTER;
END:
  mov.b32 %r7, %r5;"""
    want = [sum(j for i in range(t & 15) for j in range(i + 1)) for t in THREAD.tolist()]
    np.testing.assert_array_equal(per_thread(body, "%r7", THREADS, BLOCKS), np.array(want))


def test_early_return_and_predicated_exit() -> None:
    text = module(
        f"""
  setp.ge.u32 %p0, %r0, 300;
  @%p0 ret;
  and.b32 %r3, %r0, 1; setp.eq.u32 %p1, %r3, 0;
  @%p1 exit;
  {store_u32("%r0")}
  ret;""",
        "y",
    )
    y = np.full(THREAD.size, 7, np.uint32)
    simulator.launch(text, [y], (BLOCKS,), (THREADS,))
    np.testing.assert_array_equal(y, np.where((THREAD < 300) & (THREAD % 2 == 1), THREAD, 7))


def test_guarded_instructions_keep_the_other_lanes() -> None:
    body = """
  mov.b32 %r3, 5; setp.lt.u32 %p0, %r2, 40;
  @%p0 mul.lo.u32 %r3, %r2, 3;
  @!%p0 add.u32 %r3, %r3, 1;"""
    thread = THREAD % THREADS
    np.testing.assert_array_equal(
        per_thread(body, "%r3", THREADS, BLOCKS), np.where(thread < 40, thread * 3, 6)
    )


def test_special_registers() -> None:
    extents = {"%tid": (4, 2, 8), "%ctaid": (3, 2, 2)}
    names = [f"{r}.{axis}" for r in ("%tid", "%ntid", "%ctaid", "%nctaid") for axis in "xyz"] + [
        "%laneid",
        "%warpid",
    ]
    for name in names:
        y = np.zeros(64 * 12, np.uint32)
        text = module(
            f"""
  mov.u32 %r3, %tid.x; mov.u32 %r4, %tid.y; mov.u32 %r5, %tid.z;
  mad.lo.u32 %r3, %r4, 4, %r3; mad.lo.u32 %r3, %r5, 8, %r3;
  mov.u32 %r6, %ctaid.x; mov.u32 %r7, %ctaid.y; mov.u32 %r8, %ctaid.z;
  mad.lo.u32 %r6, %r7, 3, %r6; mad.lo.u32 %r6, %r8, 6, %r6;
  mad.lo.u32 %r0, %r6, 64, %r3;
  mov.u32 %r9, {name};
  {store_u32("%r9")} ret;""",
            "y",
        )
        simulator.launch(text, [y], extents["%ctaid"], extents["%tid"])
        thread, block = np.arange(y.size) % 64, np.arange(y.size) // 64
        want = {
            "%tid.x": thread % 4,
            "%tid.y": thread // 4 % 2,
            "%tid.z": thread // 8,
            "%ctaid.x": block % 3,
            "%ctaid.y": block // 3 % 2,
            "%ctaid.z": block // 6,
            "%laneid": thread % 32,
            "%warpid": thread // 32,
            "%ntid.x": 4,
            "%ntid.y": 2,
            "%ntid.z": 8,
            "%nctaid.x": 3,
            "%nctaid.y": 2,
            "%nctaid.z": 2,
        }[name]
        np.testing.assert_array_equal(y, np.broadcast_to(want, y.size), err_msg=name)


def test_block_that_is_no_multiple_of_a_warp() -> None:
    np.testing.assert_array_equal(
        per_thread("add.u32 %r3, %r0, 1;", "%r3", 45, 3), np.arange(135) + 1
    )


# --- shuffles and votes ---


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


# --- shared memory and barriers ---

REVERSE = """
  .shared .align 16 .b8 tile[512];
  mov.u32 %r3, tile; mad.lo.u32 %r4, %r2, 4, %r3;
  st.shared.b32 [%r4], %r0;
  bar.sync 0;
  sub.u32 %r5, 127, %r2; mad.lo.u32 %r6, %r5, 4, %r3;
  ld.shared.b32 %r7, [%r6];"""


def test_shared_memory_belongs_to_the_block() -> None:
    got = per_thread(REVERSE, "%r7", THREADS, BLOCKS)
    np.testing.assert_array_equal(got, THREAD.reshape(BLOCKS, THREADS)[:, ::-1].reshape(-1))


def test_shared_memory_of_an_odd_size_belongs_to_the_block() -> None:
    body = """
  .shared .align 16 .b8 tile[20];
  add.u32 %r3, %r0, 100; st.shared.b32 [tile+16], %r3; cvt.u64.u32 %rd4, %r0;
  st.shared.b64 [tile], %rd4;
  ld.shared.b32 %r4, [tile+16]; ld.shared.b64 %rd5, [tile]; cvt.u32.u64 %r5, %rd5;
  sub.u32 %r6, %r4, %r5;"""
    np.testing.assert_array_equal(per_thread(body, "%r6", 1, 5), np.full(5, 100))


def test_dynamic_shared_memory_and_bytes() -> None:
    text = module(
        f"""
  .shared .align 4 .b8 first[6];
  mov.u32 %r3, pool; add.u32 %r4, %r3, %r2;
  st.shared.u8 [%r4], %r2;
  bar.sync 0;
  xor.b32 %r5, %r2, 64; add.u32 %r6, %r3, %r5;
  ld.shared.s8 %r7, [%r6];
  {store_u32("%r7")} ret;""",
        "y",
        outside=".extern .shared .align 16 .b8 pool[];",
    )
    y = np.zeros(256, np.int32)
    simulator.launch(text, [y], (1,), (256,), 256)
    np.testing.assert_array_equal(y, (np.arange(256) ^ 64).astype(np.uint8).view(np.int8))


def test_shared_variables_are_aligned() -> None:
    """Static ones as they say, dynamic ones to 16 bytes: 16-byte stores into both, behind others of
    odd sizes.
    """
    text = module(
        f"""
  .shared .b8 byte[1]; .shared .align 16 .b8 wide[16]; .shared .b8 last[3];
  st.shared.u8 [byte], %r0; st.shared.v4.b32 [wide], {{%r0, %r0, %r0, %r0}};
  st.shared.v4.b32 [pool], {{%r0, %r0, %r0, %r0}}; ld.shared.b32 %r3, [pool+12];
  {store_u32("%r3")} ret;""",
        "y",
        outside=".extern .shared .align 16 .b8 pool[];",
    )
    y = np.zeros(3, np.uint32)
    simulator.launch(text, [y], (3,), (1,), 16)
    np.testing.assert_array_equal(y, [0, 1, 2])


def test_warps_arrive_from_different_branches() -> None:
    """The first warp writes while the others go straight to the barrier; then warp 0 reads what
    warp 1 wrote.
    """
    body = """
  .shared .align 16 .b8 tile[256];
  mov.u32 %r3, tile; setp.ge.u32 %p0, %r2, 32; mov.b32 %r7, 0;
  @%p0 bra MEET;
  mad.lo.u32 %r4, %r2, 4, %r3; st.shared.b32 [%r4], %r0;
MEET:
  bar.sync 0;
  shr.u32 %r5, %r2, 5; and.b32 %r6, %r2, 31; mad.lo.u32 %r6, %r6, 4, %r3;
  setp.ne.u32 %p1, %r5, 1;
  @%p1 bra AGAIN;
  ld.shared.b32 %r7, [%r6]; add.u32 %r8, %r7, 1000; st.shared.b32 [%r6+128], %r8;
AGAIN:
  bar.sync 0;
  setp.ne.u32 %p2, %r5, 0;
  @!%p2 ld.shared.b32 %r7, [%r6+128];"""
    lane, warp, block = THREAD % 32, THREAD % THREADS // 32, THREAD // THREADS
    value = block * THREADS + lane
    want = np.where(warp == 0, value + 1000, np.where(warp == 1, value, 0))
    np.testing.assert_array_equal(per_thread(body, "%r7", THREADS, BLOCKS), want)


def test_named_barriers_one_after_the_other() -> None:
    """Warps 0 and 1 meet at barrier 1, where warp 2 waits at barrier 2 already; then warp 0 joins
    it.
    """
    body = """
  mov.b32 %r3, 0; setp.ge.u32 %p0, %r2, 64; setp.ge.u32 %p1, %r2, 32;
  @%p0 bra LAST;
  bar.sync 1, 64;
  add.u32 %r3, %r3, 1;
  @%p1 bra END;
LAST:
  bar.sync 2, 64;
  add.u32 %r3, %r3, 2;
END:
  mov.b32 %r4, %r3;"""
    np.testing.assert_array_equal(per_thread(body, "%r4", 96), np.repeat([3, 1, 2], 32))


def test_named_barrier_of_two_warps() -> None:
    body = """
  .shared .align 16 .b8 tile[256];
  mov.u32 %r3, tile; mov.b32 %r7, 9; setp.ge.u32 %p0, %r2, 64;
  @%p0 bra END;
  mad.lo.u32 %r4, %r2, 4, %r3; st.shared.b32 [%r4], %r0;
  bar.sync 1, 64;
  xor.b32 %r5, %r2, 32; mad.lo.u32 %r5, %r5, 4, %r3; ld.shared.b32 %r7, [%r5];
END:
  mov.b32 %r8, %r7;"""
    np.testing.assert_array_equal(
        per_thread(body, "%r8", THREADS), np.where(THREAD[:128] < 64, THREAD[:128] ^ 32, 9)
    )


# --- global memory ---


@pytest.mark.parametrize(
    ("type", "dtype"),
    [
        ("u8", np.uint8),
        ("s8", np.int8),
        ("u16", np.uint16),
        ("s16", np.int16),
        ("b16", np.uint16),
        ("u32", np.uint32),
    ],
)
def test_narrow_loads_extend_and_stores_truncate(type: str, dtype: type) -> None:
    size = np.dtype(dtype).itemsize
    a = np.random.default_rng(0).integers(0, 256, 64 * size, np.uint8)
    b, y = np.zeros(64 * size, np.uint8), np.zeros(64, np.uint32)
    text = module(f"""
  mul.wide.u32 %rd4, %r0, {size}; add.u64 %rd5, %rd0, %rd4; add.u64 %rd6, %rd1, %rd4;
  ld.global.{type} %r3, [%rd5];
  st.global.{type} [%rd6], %r3;
  {store_u32("%r3", "%rd2")} ret;""")
    simulator.launch(text, [a, b, y], (2,), (32,))
    np.testing.assert_array_equal(b, a)
    np.testing.assert_array_equal(y, a.view(dtype).astype(np.int64).astype(np.uint32))


@pytest.mark.parametrize(
    ("vector", "registers"),
    [
        ("v4.u32", "%r4, %r5, %r6, %r7"),
        ("v2.u64", "%rd5, %rd6"),
        ("v4.f32", "%f0, %f1, %f2, %f3"),
        ("v2.u32", "%r4, %r5"),
        ("v4.u16", "%h0, %h1, %h2, %h3"),
        ("v4.b8", "%h0, %h1, %h2, %h3"),
    ],
)
def test_vectors_copy_every_bit(vector: str, registers: str) -> None:
    lanes = int(vector[1])
    size = lanes * int(vector.split(".")[1][1:]) // 8
    a = np.random.default_rng(1).integers(0, 256, 96 * size, np.uint8)
    a[:size] = 0xFF  # a NaN in any float type
    y = np.zeros_like(a)
    text = module(
        f"""
  mul.wide.u32 %rd4, %r0, {size}; add.u64 %rd8, %rd0, %rd4; add.u64 %rd9, %rd1, %rd4;
  ld.global.nc.L1::no_allocate.L2::128B.{vector} {{{registers}}}, [%rd8];
  st.global.{vector} [%rd9], {{{registers}}}; ret;""",
        "a, y",
    )
    simulator.launch(
        text,
        [
            simulator.DeviceBuffer("a", a, "in"),
            simulator.DeviceBuffer("y", y, "out", initialized=False),
        ],
        (3,),
        (32,),
    )
    np.testing.assert_array_equal(y, a)


def test_of_lanes_that_store_to_one_place_the_highest_wins() -> None:
    y = np.zeros(2, np.uint32)
    simulator.launch(
        module(
            "st.global.b32 [%rd0], %r0; mov.u64 %rd3, %rd0; setp.lt.u32 %p0, %r2, 7; "
            "cvt.u64.u32 %rd4, %r0; and.b64 %rd4, %rd4, 0; add.u64 %rd5, %rd0, %rd4; "
            "@%p0 st.global.b32 [%rd5+4], %r0; ret;",
            "y",
        ),
        [y],
        (1,),
        (32,),
    )
    np.testing.assert_array_equal(y, [31, 6])


def test_lanes_that_load_from_several_buffers() -> None:
    a, b = np.arange(64, dtype=np.uint32), np.arange(64, dtype=np.uint32) + 1000
    y = np.zeros(64, np.uint32)
    text = module(f"""
  and.b32 %r3, %r0, 1; setp.eq.u32 %p0, %r3, 0; selp.b64 %rd3, %rd0, %rd1, %p0;
  mul.wide.u32 %rd4, %r0, 4; add.u64 %rd5, %rd3, %rd4; ld.global.b32 %r4, [%rd5];
  {store_u32("%r4", "%rd2")} ret;""")
    simulator.launch(text, [a, b, y], (2,), (32,))
    np.testing.assert_array_equal(y, np.where(np.arange(64) % 2, b, a))


def test_lanes_that_store_to_several_buffers() -> None:
    a, b = np.zeros(64, np.uint32), np.zeros(64, np.uint32)
    text = module(
        "and.b32 %r3, %r0, 1; setp.eq.u32 %p0, %r3, 0; selp.b64 %rd3, %rd0, %rd1, %p0; "
        "mul.wide.u32 %rd4, %r0, 4; add.u64 %rd5, %rd3, %rd4; st.global.b32 [%rd5], %r0; ret;",
        "a, b",
    )
    simulator.launch(text, [a, b], (2,), (32,))
    np.testing.assert_array_equal(
        [a, b], [np.where(np.arange(64) % 2 == i, np.arange(64), 0) for i in range(2)]
    )


def test_an_array_given_twice_has_one_address() -> None:
    y = np.zeros(64, np.uint32)
    text = module(
        (
            "sub.u64 %rd3, %rd0, %rd1; cvt.u32.u64 %r3, %rd3; add.u32 %r3, %r3, 5; "
            f"{store_u32('%r3')} ret;"
        ),
        "a, b",
    )
    simulator.launch(text, [y, y], (2,), (32,))
    assert (y == 5).all()


def test_offsets_beyond_32_bits_reach_their_bytes() -> None:
    large = np.zeros((3 << 30) + (2 << 30), np.uint8)  # the system allocates the touched pages only
    large[(4 << 30) + 5] = 77
    y = np.zeros(32, np.uint32)
    text = module(
        f"""
  mov.b64 %rd4, 0x100000000; add.u64 %rd5, %rd0, %rd4; ld.global.u8 %r3, [%rd5+5];
  {store_u32("%r3", "%rd1")} ret;""",
        "a, y",
    )
    simulator.launch(text, [simulator.DeviceBuffer("a", large, "in"), y], (1,), (32,))
    assert (y == 77).all()


def test_packing_and_unpacking() -> None:
    body = """
  cvt.u16.u32 %h0, %r0; mov.b16 %h1, 0x1234; mov.b32 %r3, {%h0, %h1};
  mov.b32 {%h2, %h3}, %r3; cvt.u32.u16 %r4, %h2; cvt.u32.u16 %r5, %h3; add.u32 %r6, %r4, %r5;
  mov.b64 %rd4, {%r3, %r6}; mov.b64 {%r7, %r8}, %rd4; add.u32 %r9, %r7, %r8;"""
    thread = np.arange(64, dtype=np.uint32)
    np.testing.assert_array_equal(
        per_thread(body, "%r9", 64), (thread | 0x12340000) + thread + 0x1234
    )


def test_moves_between_classes_keep_bits() -> None:
    body = (
        "cvt.rn.f32.u32 %f0, %r0; mov.b32 %r3, %f0; mov.b32 %f1, %r3; neg.f32 %f2, %f1; "
        "mov.b32 %r4, %f2;"
    )
    got = per_thread(body, "%r4").view(np.float32)
    np.testing.assert_array_equal(got, -np.arange(32, dtype=np.float32))


# --- launches ---


@pytest.mark.parametrize("batch_lanes", [1, 128, 300, 1 << 20])
def test_batches_do_not_change_results(batch_lanes: int) -> None:
    body = (
        f"{REVERSE} cvt.rn.f32.u32 %f0, %r7; rsqrt.approx.f32 %f1, %f0; "
        "fma.rn.f32 %f2, %f1, %f0, %f1;"
    )
    whole = per_thread(body, "%f2", THREADS, BLOCKS, np.float32)
    split = per_thread(body, "%f2", THREADS, BLOCKS, np.float32, batch_lanes=batch_lanes)
    np.testing.assert_array_equal(split.view(np.uint32), whole.view(np.uint32))


def scale_kernel() -> Kernel:
    """x *= s[0] in place; y = x before."""
    text = module(
        """
  mul.wide.u32 %rd4, %r0, 4; add.u64 %rd5, %rd2, %rd4; add.u64 %rd6, %rd3, %rd4;
  ld.global.nc.f32 %f0, [%rd0]; ld.global.f32 %f1, [%rd5]; st.global.f32 [%rd6], %f1;
  mul.rn.f32 %f2, %f1, %f0; st.global.f32 [%rd5], %f2; ret;""",
        "s, x_in, x, y",
    )
    return Kernel(
        "k",
        text,
        (
            Buffer("s", f32, (1,), "in"),
            Buffer("x", f32, (64,), "inout"),
            Buffer("y", f32, (64,), "out"),
        ),
        (2, 1, 1),
        (32, 1, 1),
    )


def test_run_returns_results_and_leaves_operands() -> None:
    x, s = np.arange(64, dtype=np.float32), np.array([3], np.float32)
    before = x.copy()
    scaled, copy = simulator.run(scale_kernel(), s, x)
    np.testing.assert_array_equal(scaled, before * 3)
    np.testing.assert_array_equal(copy, before)
    np.testing.assert_array_equal(x, before)


def test_run_takes_operands_at_any_address() -> None:
    x, s = np.arange(65, dtype=np.float32)[1:], np.array([0, 3], np.float32)[1:]
    assert x.ctypes.data % 16 and s.ctypes.data % 16
    scaled, copy = simulator.run(scale_kernel(), s, x)
    np.testing.assert_array_equal([scaled, copy], [x * 3, x])


def test_run_checks_operands() -> None:
    x, s = np.zeros(64, np.float32), np.ones(1, np.float32)
    with pytest.raises(TypeError, match="takes 2 operands, got 1"):
        simulator.run(scale_kernel(), s)
    with pytest.raises(TypeError, match="operand x must be f32, got float64"):
        simulator.run(scale_kernel(), s, x.astype(np.float64))
    with pytest.raises(ValueError, match=r"operand x must have shape \(64,\), got \(8, 8\)"):
        simulator.run(scale_kernel(), s, x.reshape(8, 8))


def test_bf16_buffers_travel_as_bits() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    text = module(
        "mul.wide.u32 %rd4, %r0, 2; add.u64 %rd5, %rd0, %rd4; add.u64 %rd6, %rd1, %rd4;"
        "ld.global.b16 %h0, [%rd5]; st.global.b16 [%rd6], %h0; ret;",
        "x, y",
    )
    kernel = Kernel(
        "k",
        text,
        (Buffer("x", bf16, (32,), "in"), Buffer("y", bf16, (32,), "out")),
        (1, 1, 1),
        (32, 1, 1),
    )
    x = np.linspace(-2, 2, 32).astype(ml_dtypes.bfloat16)
    (y,) = simulator.run(kernel, x)
    assert y.dtype == np.uint16
    np.testing.assert_array_equal(y.view(ml_dtypes.bfloat16), x)
    with pytest.raises(TypeError, match="operand x must be bf16, got float16"):
        simulator.run(kernel, x.astype(np.float16))


def test_comments_are_no_instructions() -> None:
    body = (
        "mov.b32 %r3, 1; // mov.b32 %r3, 2; {\n /* bar.sync 0;\n } */ add.u32 %r3, %r3, 4; /* ; */"
    )
    np.testing.assert_array_equal(per_thread(body, "%r3"), np.full(32, 5))


def test_instructions_are_counted_per_lane_that_executes_them() -> None:
    text = module(
        "setp.lt.u32 %p0, %r2, 5;\n@!%p0 bra END;\nmov.u32 %r3, 1;\nmov.u32 %r4, 2;\nEND:\nret;",
        "y",
    )
    statistics = simulator.launch(text, [np.zeros(1, np.uint32)], (3,), (32,), batch_lanes=64)
    assert statistics == simulator.Statistics(3 * (8 * 32 + 2 * 5), 2)
