"""Shared memory and barriers in handwritten PTX, against NumPy."""

from __future__ import annotations

import numpy as np

from ptx_kernels import simulator

from .ptx_text import REVERSE, module, per_thread, store_u32

THREADS, BLOCKS = 128, 5
THREAD = np.arange(THREADS * BLOCKS, dtype=np.uint32)


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
    """Static variables have their declared alignment, dynamic ones 16 bytes.

    Both are stored to in 16 bytes, after other variables of odd sizes.
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
    """The first warp writes while the others go directly to the barrier.

    Then warp 0 reads the words of warp 1.
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
    """Warps 0 and 1 meet at barrier 1 while warp 2 already waits at barrier 2.

    Then warp 0 joins warp 2.
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
