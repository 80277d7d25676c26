"""Concurrent accesses by lanes of a warp, warps of a block, and blocks of a launch."""

from __future__ import annotations

import re

import numpy as np
import pytest

from ptx_kernels import simulator
from ptx_kernels.simulator import GlobalRace, SharedRace

from .ptx_text import module

OWN = "mul.wide.u32 %rd4, %r0, 4; add.u64 %rd5, %rd0, %rd4;"  # address of this thread's word
# address of the word of this thread in its block
SAME_IN_BLOCK = "mul.wide.u32 %rd4, %r2, 4; add.u64 %rd6, %rd0, %rd4;"
# address of its neighbor's word
NEXT = f"{OWN} xor.b32 %r5, %r0, 1; mul.wide.u32 %rd4, %r5, 4; add.u64 %rd6, %rd0, %rd4;"
OTHER_WARP = NEXT.replace("%r0, 1", "%r0, 32")
TILE = (
    ".shared .align 16 .b8 tile[256]; mov.u32 %r3, tile; mad.lo.u32 %r4, %r2, 4, %r3; "
    "xor.b32 %r5, %r4, 4;"
    "xor.b32 %r6, %r4, 128;"
)


def launch(body: str, *, grid: int = 2, block: int = 64, **options: int) -> np.ndarray:
    y = np.zeros(grid * block, np.uint32)
    simulator.launch(module(body + "\n  ret;", "y"), [y], (grid,), (block,), **options)
    return y


def races(error: type[simulator.SimulationError], body: str, *parts: str, **options: int) -> None:
    with pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, parts))):
        launch(body, **options)


# --- between blocks ---


@pytest.mark.parametrize("batch_lanes", [64, 1024], ids=["one after the other", "together"])
@pytest.mark.parametrize("value", ["%r0", "7"], ids=["values differ", "one value"])
def test_two_blocks_write_one_word(batch_lanes: int, value: str) -> None:
    races(
        GlobalRace,
        f"{SAME_IN_BLOCK} mov.u32 %r3, {value}; st.global.b32 [%rd6], %r3;",
        "offset 0 of y: this block writes",
        "what block (",
        "blocks run in any order",
        "line 11: st.global.b32 [%rd6], %r3;",
        "thread (0, 0, 0)",
        batch_lanes=batch_lanes,
    )


@pytest.mark.parametrize("batch_lanes", [64, 1024])
def test_a_block_reads_what_another_wrote(batch_lanes: int) -> None:
    body = f"{OWN} st.global.b32 [%rd5], %r0; bar.sync 0; ld.global.u32 %r3, [%rd0+{{}}];"
    races(
        GlobalRace,
        body.format(0),
        "offset 0 of y: this block reads what block (0, 0, 0) wrote",
        "block (1, 0, 0), thread (0, 0, 0)",
        batch_lanes=batch_lanes,
    )


def test_the_other_block_is_named_whichever_batch_it_ran_in() -> None:
    body = (
        f"{OWN} st.global.b32 [%rd5], %r0; setp.ge.u32 %p0, %r0, 192; "
        "@%p0 ld.global.u32 %r3, [%rd0+256];"
    )
    races(GlobalRace, body, "what block (1, 0, 0) wrote", "block (3, 0, 0)", grid=4, batch_lanes=64)


def test_a_block_overwrites_what_others_read() -> None:
    body = (
        "setp.lt.u32 %p0, %r0, {}; @%p0 ld.global.u32 %r3, [%rd0+256]; "
        + OWN
        + " bar.sync 0; st.global.b32 [%rd5], %r0;"
    )
    races(
        GlobalRace,
        body.format(1),
        "this block writes what block (0, 0, 0) read",
        "block (1, 0, 0)",
        batch_lanes=64,
    )
    races(
        GlobalRace, body.format(1), "this block writes what block (0, 0, 0) read", batch_lanes=1024
    )
    races(
        GlobalRace, body.format(999), "this block writes what several blocks read", batch_lanes=1024
    )


def test_bytes_of_one_word_are_apart() -> None:
    """Four blocks write one byte each of the same words."""
    body = (
        "mul.wide.u32 %rd4, %r2, 4; add.u64 %rd5, %rd0, %rd4; mov.u32 %r3, %ctaid.x; "
        "cvt.u64.u32 %rd4, %r3;"
        "add.u64 %rd5, %rd5, %rd4; st.global.u8 [%rd5], %r3; ld.global.u8 %r4, [%rd5];"
    )
    assert (launch(body, grid=4)[:64] == 0x03020100).all()
    word = f"{body} ld.global.u32 %r4, [%rd6];".replace(
        "add.u64 %rd5, %rd5", "mov.b64 %rd6, %rd5; add.u64 %rd5, %rd5"
    )
    races(GlobalRace, word, "offset 0 of y: this block reads what block (1, 0, 0) wrote", grid=4)


def test_wide_accesses_before_narrow_ones() -> None:
    """A 16-byte store is tracked per byte once one of its bytes is accessed."""
    wide = (
        "setp.eq.u32 %p0, %r0, 64; @!%p0 bra END; "
        "st.global.v4.b32 [%rd0], {%r0, %r0, %r0, %r0}; END: ret;"
    )
    narrow = "mov.b32 %r3, 1; setp.eq.u32 %p0, %r0, 0; @%p0 st.global.u8 [%rd0+{}], %r3;"
    races(GlobalRace, f"{narrow.format(15)} {wide}", "what block (0, 0, 0) wrote")
    launch(f"{narrow.format(16)} {wide}")


def test_launches_do_not_race() -> None:
    y = simulator.DeviceBuffer("y", np.zeros(64, np.uint32))
    text = module(
        f"{OWN} ld.global.u32 %r3, [%rd0+4]; bar.sync 0; st.global.b32 [%rd5], %r3; ret;", "y"
    )
    for _ in range(2):
        simulator.launch(text, [y], (1,), (64,))


def test_inputs_are_read_by_all() -> None:
    x = simulator.DeviceBuffer("x", np.arange(64, dtype=np.uint32), "in")
    y = np.zeros(128, np.uint32)
    store = OWN.replace("%rd0", "%rd1") + "st.global.b32 [%rd5], %r3;"
    text = module(f"ld.global.u32 %r3, [%rd0+8]; {store} ret;", "x, y")
    simulator.launch(text, [x, y], (2,), (64,))
    assert (y == 2).all()


# --- between warps ---


def test_warps_meet_in_global_memory() -> None:
    where = "offset 128 of y: warp 0 reads what warp 1 wrote, without a barrier between"
    two = f"{OTHER_WARP} st.global.b32 [%rd5], %r0; {{}} ld.global.u32 %r3, [%rd6];"
    races(GlobalRace, two.format(""), where, "ld.global.u32 %r3, [%rd6];")
    races(GlobalRace, two.format("bar.warp.sync -1;"), where)
    launch(two.format("bar.sync 0;"))


def test_a_barrier_of_some_warps_orders_those() -> None:
    """Warps 0 and 1 meet at their own barrier.

    Warp 2 does not join; warp 3 meets warp 1 at the next barrier.
    """
    body = (
        "setp.eq.u32 %p0, %r2, 0; @%p0 st.global.b32 [%rd0], %r2; shr.u32 %r3, %r2, 5; "
        "setp.lt.u32 %p1, %r3, 2;"
        "@%p1 bar.sync 1, 64; and.b32 %r4, %r3, 1; setp.eq.u32 %p2, %r4, 1; @%p2 bar.sync 2, 64;"
        "setp.eq.u32 %p3, %r3, {}; @%p3 ld.global.u32 %r5, [%rd0];"
    )
    pairs = body.replace("@%p1 bar", "@!%p1 bar.sync 3, 64; @%p1 bar").replace(
        "@%p2 bar.sync 2, 64;", ""
    )
    # 0 and 1, 2 and 3 meet
    races(GlobalRace, pairs.format(3), "warp 3 reads what warp 0 wrote", grid=1, block=128)
    lanes = (
        f"{TILE.replace('256', '512')} st.shared.b32 [%r4], %r2; setp.lt.u32 %p1, %r2, 64; "
        "@%p1 bar.sync 1, 64;"
    )
    launch(body.format(1), grid=1, block=128)
    launch(body.format(3), grid=1, block=128)
    races(GlobalRace, body.format(2), "warp 2 reads what warp 0 wrote", grid=1, block=128)
    for seed in range(8):  # also if warp 2 comes later
        with simulator.perturbation(seed):
            launch(body.format(3), grid=1, block=128)
            races(GlobalRace, body.format(2), "without a barrier between", grid=1, block=128)
            races(
                SharedRace,
                f"{lanes} @!%p1 ld.shared.b32 %r7, [%r5];",
                "lanes of one warp",
                grid=1,
                block=128,
            )


# --- within a warp ---


@pytest.mark.parametrize(
    ("between", "ordered"),
    [
        ("", False),
        ("shfl.sync.bfly.b32 %r7, %r2, 1, 31, -1;", False),
        ("vote.sync.any.pred %p0, %p1, -1;", False),
        ("bar.warp.sync -1;", True),
        ("bar.sync 0;", True),
    ],
    ids=["nothing", "shuffle", "vote", "bar.warp.sync", "bar.sync"],
)
def test_order_between_the_lanes_of_a_warp(between: str, ordered: bool) -> None:
    start = "setp.lt.u32 %p1, %r2, 5;"
    shared = f"{start} {TILE} st.shared.b32 [%r4], %r2; {between} ld.shared.b32 %r7, [%r5];"
    through_global = (
        f"{start} {NEXT} st.global.b32 [%rd5], %r2; {between} ld.global.b32 %r7, [%rd6];"
    )
    if ordered:
        launch(shared)
        launch(through_global)
        return
    told = "lane 0 reads what lane 1 wrote, lanes of one warp, without a warp barrier between"
    races(
        SharedRace,
        shared,
        f"shared tile+4: {told}",
        "ld.shared.b32 %r7, [%r5];",
        "thread (0, 0, 0)",
    )
    races(GlobalRace, through_global, f"offset 4 of y: {told}", "thread (0, 0, 0)")


def test_lanes_overwrite_what_others_of_their_warp_read() -> None:
    start = f"{TILE} st.shared.b32 [%r4], %r2; bar.sync 0;"
    one = "ld.shared.b32 %r7, [%r5]; {} st.shared.b32 [%r4], %r7;"
    races(SharedRace, start + one.format(""), "lane 0 writes what lane 1 read")
    launch(start + one.format("bar.warp.sync -1;"))
    several = (
        "setp.lt.u32 %p0, %r2, 32; @!%p0 bra END; ld.shared.b32 %r7, [tile]; {}"
        "setp.eq.u32 %p1, %r2, 3; @%p1 st.shared.b32 [tile], %r7; END: ret;"
    )
    races(
        SharedRace,
        start + several.format(""),
        "lane 3 writes what several lanes read",
        "thread (3, 0, 0)",
    )
    launch(start + several.format("bar.warp.sync -1;"))
    # both warps, then one
    again = several.replace("setp.lt.u32 %p0", "ld.shared.b32 %r7, [tile]; setp.lt.u32 %p0")
    races(
        SharedRace,
        start + again.format("bar.warp.sync -1;"),
        "warp 0 writes what several warps read",
    )


def test_a_lane_may_use_its_own_words() -> None:
    launch(f"{TILE} st.shared.b32 [%r4], %r2; ld.shared.b32 %r7, [%r4]; st.shared.b32 [%r4], %r7;")
    launch(
        f"{OWN} st.global.b32 [%rd5], %r2; ld.global.b32 %r7, [%rd5]; st.global.b32 [%rd5], %r7;"
    )


def test_one_lane_wins_where_a_warp_stores_to_one_word() -> None:
    """PTX does not specify which; reading the word back is a race for the others."""
    only = "setp.lt.u32 %p0, %r2, 32; @!%p0 bra END; {} END: ret;"
    launch(f"{TILE} {only.format('st.shared.b32 [tile], %r2;')}")
    races(
        SharedRace,
        f"{TILE} {only.format('st.shared.b32 [tile], %r2; ld.shared.b32 %r7, [tile];')}",
        "one warp",
    )
    y = launch(only.format("st.global.b32 [%rd0], %r2;"), grid=1)
    assert y[0] == 31
    races(
        GlobalRace,
        "st.global.b32 [%rd0], %r2;",
        "writes, at the same instruction, what warp 1 wrote",
        grid=1,
    )


def test_a_partial_warp_barrier_orders_its_members() -> None:
    launch(
        f"{TILE} and.b32 %r7, %r2, 31; setp.lt.u32 %p0, %r7, 16; @!%p0 bra END;"
        "st.shared.b32 [%r4], %r2; bar.warp.sync 0xffff; ld.shared.b32 %r8, [%r5]; END:"
    )
    halves = (
        f"{TILE} st.shared.b32 [%r4], %r2; and.b32 %r7, %r2, 16; setp.eq.u32 %p0, %r7, 0;"
        "@%p0 bar.warp.sync 0xffff; xor.b32 %r4, %r4, {}; @{}%p0 ld.shared.b32 %r8, [%r4];"
    )
    launch(halves.format(4, ""))
    races(SharedRace, halves.format(4, "!"), "lane 16 reads what lane 17 wrote")
