"""Releases and acquires order blocks of a launch, and warps of a block, without a barrier."""

from __future__ import annotations

import numpy as np
import pytest
from support.paths import DATA

from ptx_kernels import simulator
from ptx_kernels.simulator import GlobalRace, SharedRace, SimulationError

from .ptx_text import module

CUDA = DATA / "cuda"
BLOCKS, THREADS = 5, 64

#: Every thread stores a word in y. Thread 0 counts its block in z[0]. The last block sums all
#: words: each of its threads adds one thread's words of all blocks, and stores the sum in z[1 +
#: thread].
LAST_BLOCK = """
  mul.wide.u32 %rd4, %r0, 4; add.u64 %rd5, %rd0, %rd4; st.global.u32 [%rd5], %r0;
  {gather}
  setp.eq.u32 %p0, %r2, 0;
  @!%p0 bra COUNTED;
  {before}
  {count}
  {after}
  setp.eq.u32 %p1, %r3, {last};
  selp.b32 %r4, 1, 0, %p1;
  st.shared.u32 [flag], %r4;
COUNTED:
  {share}
  ld.shared.u32 %r5, [flag];
  setp.eq.u32 %p2, %r5, 0;
  @%p2 ret;
  {merge}
  mov.b32 %r6, 0; mov.b32 %r7, 0; mul.wide.u32 %rd6, %r2, 4; add.u64 %rd7, %rd0, %rd6;
ADD:
  ld.global.u32 %r8, [%rd7]; add.u32 %r6, %r6, %r8; add.u64 %rd7, %rd7, {stride};
  add.u32 %r7, %r7, 1; setp.lt.u32 %p3, %r7, {blocks};
  @%p3 bra ADD;
  add.u64 %rd8, %rd1, %rd6; st.global.u32 [%rd8+4], %r6;
  @%p0 st.global.u32 [%rd1], {reset};
  ret;
"""
PARTS = {
    "gather": "bar.sync 0;",
    "before": "fence.acq_rel.gpu;",
    "count": "atom.global.add.u32 %r3, [%rd1], 1;",
    "after": "fence.acq_rel.gpu;",
    "share": "bar.sync 0;",
    "merge": "",
    "last": str(BLOCKS - 1),
    "reset": "%r6",
    "stride": str(4 * THREADS),
    "blocks": str(BLOCKS),
}
FENCED = "fence.acq_rel.gpu;"


def last_block(batch_lanes: int = 1 << 15, **changes: str) -> np.ndarray:
    """Returns z after a launch of the kernel with some parts replaced."""
    y, z = np.zeros(BLOCKS * THREADS, np.uint32), np.zeros(1 + THREADS, np.uint32)
    body = LAST_BLOCK.format(**PARTS | changes)
    text = module(body, "y, z", version="7.0", target=80, outside=".shared .b32 flag;")
    simulator.launch(text, [y, z], (BLOCKS,), (THREADS,), batch_lanes=batch_lanes)
    return z


WANT = np.arange(BLOCKS * THREADS).reshape(BLOCKS, THREADS).sum(0)


@pytest.mark.parametrize(
    "batch_lanes", [THREADS, 2 * THREADS, 1 << 15], ids=["one by one", "by twos", "together"]
)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"before": "membar.gl;", "after": "membar.sys;"},
        {"before": "fence.sc.gpu;", "after": "fence.gpu;"},
        {"before": "", "count": "atom.acq_rel.gpu.global.add.u32 %r3, [%rd1], 1;", "after": ""},
        {"before": "", "count": "atom.release.gpu.global.add.u32 %r3, [%rd1], 1;"},
        {"count": "atom.acquire.gpu.global.add.u32 %r3, [%rd1], 1;", "after": ""},
        {"count": "atom.global.inc.u32 %r3, [%rd1], 4;"},
    ],
    ids=["fences", "membars", "other fences", "acq_rel", "release", "acquire", "inc"],
)
def test_the_last_block_merges(batch_lanes: int, changes: dict[str, str]) -> None:
    np.testing.assert_array_equal(last_block(batch_lanes, **changes)[1:], WANT)
    for seed in range(4):
        with simulator.perturbation(seed):
            np.testing.assert_array_equal(last_block(batch_lanes, **changes)[1:], WANT)


@pytest.mark.parametrize("batch_lanes", [THREADS, 1 << 15], ids=["one by one", "together"])
@pytest.mark.parametrize(
    "changes",
    [
        {"before": ""},
        {"after": ""},
        {"before": "", "after": ""},
        {"before": "fence.acq_rel.cta;"},
        {"after": "membar.cta;"},
        {"before": "fence.acq_rel.cluster;"},
        {"gather": ""},
        {"gather": "bar.warp.sync -1;"},
        {"gather": FENCED + "bar.sync 0;", "before": ""},
        {"count": "atom.global.add.u32 %r3, [%rd1], 1;" + FENCED, "before": ""},
        {"before": "", "count": "atom.acquire.gpu.global.add.u32 %r3, [%rd1], 1;"},
        {"after": "", "count": "atom.release.gpu.global.add.u32 %r3, [%rd1], 1;"},
        {"after": "", "merge": FENCED},
    ],
    ids=[
        "no fence before",
        "no fence after",
        "no fence",
        "a narrow fence before",
        "a narrow fence after",
        "a cluster of one block",
        "others' words not gathered",
        "words of one warp gathered",
        "fences before the barrier only",
        "the first fence too late",
        "no release",
        "no acquire",
        "a fence of others than who counted",
    ],
)
def test_the_last_block_needs_every_part(batch_lanes: int, changes: dict[str, str]) -> None:
    with pytest.raises(
        GlobalRace,
        match="(?s)offset .* of y: this block .* block.*blocks run in any order.*ld.global",
    ):
        last_block(batch_lanes, **changes)


@pytest.mark.parametrize(
    ("batch_lanes", "how"),
    [
        (THREADS, " what block .0, 0, 0. updated"),
        (1 << 15, ", at the same instruction, what several blocks updated"),
    ],
)
def test_a_narrow_counter_is_a_race(batch_lanes: int, how: str) -> None:
    for count in (
        "atom.acq_rel.cta.global.add.u32 %r3, [%rd1], 1;",
        "red.relaxed.cta.global.add.u32 [%rd1], 1;",
    ):
        with pytest.raises(
            GlobalRace, match=f"offset 0 of z: this block updates by an atomic of .cta scope{how}"
        ):
            last_block(batch_lanes, count=count + "mov.b32 %r3, 0;" * count.startswith("red"))


def test_a_barrier_after_the_count_is_needed() -> None:
    """The flag passes through a shuffle, so only the order of the partial results is missing."""
    body = """
      setp.eq.u32 %p0, %r2, 0; mov.b32 %r3, 0; mul.wide.u32 %rd4, %r0, 4; add.u64 %rd5, %rd0, %rd4;
      st.global.u32 [%rd5], %r0; bar.warp.sync -1;
      @%p0 atom.acq_rel.gpu.global.add.u32 %r3, [%rd1], 1;
      shfl.sync.idx.b32 %r4, %r3, 0, 31, -1; {}
      setp.ne.u32 %p1, %r4, 1; @%p1 ret; xor.b32 %r5, %r0, 32;
      mul.wide.u32 %rd4, %r5, 4; add.u64 %rd5, %rd0, %rd4; ld.global.u32 %r6, [%rd5]; ret;
    """

    def launch(between: str) -> None:
        y, z = np.zeros(64, np.uint32), np.zeros(1, np.uint32)
        simulator.launch(module(body.format(between), "y, z"), [y, z], (2,), (32,))

    launch("bar.warp.sync -1;")
    launch("bar.sync 0;")
    with pytest.raises(
        GlobalRace,
        match=r"offset 4 of y: this block reads what block .0, 0, 0. wrote.*\n.*\n.*(1, 0, 0)",
    ):
        launch("")


COUNT_96 = "atom.global.add.u32 %r3, [%rd0], 1;"


def reset(count: str, who: str) -> int:
    """Three warps count, then one thread resets the counter."""
    y = np.zeros(2, np.uint32)
    body = (
        f"{count} atom.global.add.u32 %r4, [%rd0+4], 1; setp.eq.u32 %p0, {who}; "
        "@%p0 st.global.u32 [%rd0], 7; ret;"
    )
    simulator.launch(module(body, "y"), [y], (3,), (32,))
    return int(y[0])


def test_a_counter_is_reset_by_who_counted_last() -> None:
    """An atomic update happens after those whose result it returned, even without a fence.

    A `red` returns nothing.
    """
    assert reset(COUNT_96, "%r3, 95") == 7
    with pytest.raises(
        GlobalRace, match="offset 0 of y: lane 0 writes what lane 31 updated by an atomic"
    ):
        reset(COUNT_96, "%r3, 64")
    with pytest.raises(
        GlobalRace,
        match="offset 0 of y: this block writes what several blocks updated by an atomic",
    ):
        reset(COUNT_96, "%r3, 3")
    with pytest.raises(
        GlobalRace,
        match="offset 0 of y: this block writes what several blocks updated by an atomic",
    ):
        reset("red.global.add.u32 [%rd0], 1;", "%r0, 95")


def test_sums_by_red_are_read_by_the_last_block() -> None:
    """Several blocks update a word; all updates must happen before the last block's read."""
    body = """
      red.global.add.u32 [%rd0], %r0; {} setp.ne.u32 %p0, %r2, 0; @%p0 ret;
      {} atom.global.add.u32 %r3, [%rd0+4], 1; fence.acq_rel.gpu;
      setp.ne.u32 %p1, %r3, 3; @%p1 ret; ld.global.u32 %r4, [%rd0]; st.global.u32 [%rd0+8], %r4;
      ret;
    """

    def launch(gather: str, fence: str) -> int:
        y = np.zeros(3, np.uint32)
        simulator.launch(
            module(body.format(gather, fence), "y"), [y], (4,), (64,), batch_lanes=128, strict=False
        )
        return int(y[2])

    assert launch("bar.sync 0;", FENCED) == sum(range(256))
    for gather, fence in (("bar.sync 0;", ""), ("", FENCED)):
        with pytest.raises(
            GlobalRace, match="offset 0 of y: .* reads what several blocks updated by an atomic"
        ):
            launch(gather, fence)


def test_the_last_block_may_overwrite_a_word_that_all_blocks_read() -> None:
    body = """
      ld.global.u32 %r4, [%rd0]; bar.sync 0; setp.ne.u32 %p0, %r2, 0; @%p0 ret;
      setp.eq.u32 %p2, %r0, {skipped}; @!%p2 fence.acq_rel.gpu;
      atom.global.add.u32 %r3, [%rd0+4], 1; fence.acq_rel.gpu;
      setp.ne.u32 %p1, %r3, 3; @%p1 ret; st.global.u32 [%rd0], 9; ret;
    """

    def launch(skipped: int) -> int:
        y = np.zeros(2, np.uint32)
        simulator.launch(module(body.format(skipped=skipped), "y"), [y], (4,), (64,), strict=False)
        return int(y[0])

    assert launch(999) == 9
    for block in range(3):
        with pytest.raises(
            GlobalRace, match="offset 0 of y: this block writes what several blocks read"
        ):
            launch(64 * block)


PASS_ON = """
  setp.ne.u32 %p0, %r2, 0; @%p0 ret;
  setp.eq.u32 %p1, %r0, 0; setp.eq.u32 %p2, %r0, 32; setp.eq.u32 %p3, %r0, 64;
  @%p1 st.global.u32 [%rd0], 5; @%p1 {first} [%rd0+4], 1;
  @%p2 {look} %r3, [%rd0+4]; @%p2 st.global.u32 [%rd0+16], %r3; @%p2 {second} [%rd0+8], 1;
  @%p3 {look} %r4, [%rd0+8]; @%p3 ld.global.u32 %r5, [%rd0]; @%p3 st.global.u32 [%rd0+12], %r5; ret;
"""


def pass_on(first: str, second: str, look: str, between: str = "") -> int:
    """Block 0 stores a word and a flag; block 1 reads it and sets another, which block 2 reads."""
    y = np.zeros(5, np.uint32)
    body = PASS_ON.format(first=first, second=second, look=look).replace(
        "ret;\n  setp", f"ret; {between}\n  setp"
    )
    simulator.launch(module(body, "y"), [y], (3,), (32,), batch_lanes=32)
    return int(y[3])


def test_loads_and_stores_release_and_acquire() -> None:
    """Blocks run in sequence here; the second flag implies that the first was set."""
    release, acquire = "st.release.gpu.global.u32", "ld.acquire.gpu.global.u32"
    assert pass_on(release, release, acquire) == 5
    for parts in [
        ("st.relaxed.gpu.global.u32", release, acquire),
        (release, "st.relaxed.gpu.global.u32", acquire),
        (release, release, "ld.relaxed.gpu.global.u32"),
        ("st.release.cta.global.u32", release, acquire),
    ]:
        with pytest.raises(GlobalRace, match="what block .0, 0, 0. (wrote|updated)"):
            pass_on(*parts)
    with pytest.raises(
        GlobalRace, match="offset 4 of y: this block reads what block .0, 0, 0. wrote"
    ):
        pass_on("st.global.u32", release, acquire)


def test_a_plain_store_leaves_nothing_to_acquire() -> None:
    """Block 0 releases, then overwrites the flag with a weak store.

    A block that reads this store acquires nothing.
    """
    body = """
      setp.ne.u32 %p0, %r2, 0; @%p0 ret; setp.eq.u32 %p1, %r0, 0;
      @%p1 st.global.u32 [%rd0], 5; @%p1 st.release.gpu.global.u32 [%rd0+4], 1; {} @%p1 bra END;
      ld.acquire.gpu.global.u32 %r3, [%rd0+4]; ld.global.u32 %r4, [%rd0];
    END: ret;
    """
    for again, races in (("", False), ("@%p1 st.relaxed.gpu.global.u32 [%rd0+4], 2;", True)):
        text = module(body.format(again), "y")
        if not races:
            simulator.launch(text, [np.zeros(2, np.uint32)], (2,), (32,), batch_lanes=32)
            continue
        with pytest.raises(
            GlobalRace, match="offset 0 of y: this block reads what block .0, 0, 0. wrote"
        ):
            simulator.launch(text, [np.zeros(2, np.uint32)], (2,), (32,), batch_lanes=32)


LAST_WARP = """
  shr.u32 %r3, %r2, 5; and.b32 %r4, %r2, 31; mov.u32 %r5, words; mad.lo.u32 %r6, %r3, 4, %r5;
  setp.eq.u32 %p0, %r2, 0; mov.b32 %r7, 0; @%p0 st.shared.u32 [count], %r7; bar.sync 0;
  setp.ne.u32 %p1, %r4, 0; @%p1 ret;
  st.shared.u32 [%r6], %r3; {before} {count} %r8, [count], 1; {after}
  setp.ne.u32 %p2, %r8, 3; @%p2 ret;
  ld.shared.v4.u32 {{%r10, %r11, %r12, %r13}}, [words]; add.u32 %r10, %r10, %r11;
  add.u32 %r12, %r12, %r13;
  add.u32 %r10, %r10, %r12; st.global.u32 [%rd0], %r10; ret;
"""


@pytest.mark.parametrize(
    ("before", "count", "after", "ordered"),
    [
        ("fence.acq_rel.cta;", "atom.shared.add.u32", "fence.acq_rel.cta;", True),
        ("membar.gl;", "atom.shared.add.u32", "membar.cta;", True),
        ("", "atom.acq_rel.cta.shared.add.u32", "", True),
        ("", "atom.shared.add.u32", "fence.acq_rel.cta;", False),
        ("fence.acq_rel.cta;", "atom.shared.add.u32", "", False),
        ("", "atom.shared.add.u32", "", False),
    ],
)
def test_the_last_warp_merges(before: str, count: str, after: str, ordered: bool) -> None:
    text = module(
        LAST_WARP.format(before=before, count=count, after=after),
        "y",
        outside=".shared .align 16 .b8 words[16]; .shared .b32 count;",
    )
    y = np.zeros(1, np.uint32)
    if ordered:
        simulator.launch(text, [y], (1,), (128,))
        assert y[0] == 6
    else:
        with pytest.raises(
            SharedRace, match=r"shared words\+0: warp . reads what warp . wrote, without a barrier"
        ):
            simulator.launch(text, [y], (1,), (128,))


def test_the_error_names_the_place() -> None:
    with pytest.raises(SimulationError) as caught:
        last_block(before="")
    for part in (
        "kernel k: offset 0 of y",
        "line 31: ld.global.u32",
        "block (4, 0, 0), thread (0, 0, 0)",
    ):
        assert part in str(caught.value)


def test_a_block_that_came_too_early_is_concurrent() -> None:
    for batch_lanes in (THREADS, 1 << 15):
        with pytest.raises(
            GlobalRace, match="offset .* of y: this block (reads|writes) what block"
        ):
            last_block(batch_lanes, last="0")


def test_nvcc_compiles_the_same_fences() -> None:
    """Every fence of the compiled kernel is needed: removing any of them is a race.

    test_nvcc runs the kernel unchanged.
    """
    text = (CUDA / "last_block.ptx").read_text()
    x = np.ones(1000, np.float32)
    assert text.count("membar.gl;") == 2
    for which in range(2):
        parts = text.split("membar.gl;")
        parts[which : which + 2] = [parts[which] + parts[which + 1]]
        arguments = [
            x,
            np.zeros(4, np.float32),
            np.zeros(1, np.uint32),
            np.zeros(1, np.float32),
            np.int32(1000),
        ]
        with pytest.raises(GlobalRace, match="blocks run in any order"):
            simulator.launch("membar.gl;".join(parts), arguments, (4,), (128,))
