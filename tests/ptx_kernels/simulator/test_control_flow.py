"""Branches, loops, exits, guards and special registers in handwritten PTX, against NumPy."""

from __future__ import annotations

import numpy as np

from ptx_kernels import simulator

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
