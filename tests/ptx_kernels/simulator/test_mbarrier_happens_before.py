"""An mbarrier orders accesses before an arrival on a phase with those after a wait for it.

It orders no others.
"""

from __future__ import annotations

import numpy as np
import pytest

from ptx_kernels import simulator
from ptx_kernels.simulator import AsyncPending, MissingProxyFence, SharedRace, SimulationError

from .ptx_text import module

SHARED = "".join(
    f".shared .align 16 .b8 {name}[{size}];"
    for name, size in {"full": 8, "empty": 8, "words": 512, "more": 512}.items()
)
#: %r2 is the thread in its block, %r3 the warp, %r4 the lane. %r5 is the address of the thread's
#: word, %r6 that of its lane's word.
START = """
  shr.u32 %r3, %r2, 5; and.b32 %r4, %r2, 31; mov.u32 %r7, words; mad.lo.u32 %r5, %r2, 4, %r7;
  mad.lo.u32 %r6, %r4, 4, %r7; setp.eq.u32 %p0, %r2, 0; setp.eq.u32 %p1, %r3, 0;
  setp.eq.u32 %p2, %r3, 1;
  setp.eq.u32 %p3, %r4, 0;
  @%p0 mbarrier.init.shared.b64 [full], {full}; @%p0 mbarrier.init.shared.b64 [empty], {empty};
  bar.sync 0;
"""


def wait(barrier: str, parity: int = 0) -> str:
    return (
        f"AGAIN: mbarrier.try_wait.parity.shared.b64 %p7, [{barrier}], {parity}; @!%p7 bra AGAIN;\n"
    )


ARRIVE = "mbarrier.arrive.shared.b64 _, [{}];\n"
STORE = "st.shared.u32 [%r5], %r2;\n"  # the thread's own word, which for warp 0 is its lane's word
LOAD = "ld.shared.u32 %r10, [%r6];\n"  # this lane's word in warp 0


def launch(body: str, *, full: int = 32, empty: int = 32, warps: int = 2) -> None:
    first, *labels = body.split("AGAIN")  # each wait has two labels
    body = first + "".join(f"AGAIN{i // 2}{part}" for i, part in enumerate(labels))
    x = np.arange(256, dtype=np.uint32)
    text = module(
        START.format(full=full, empty=empty) + body + "ret;",
        "x",
        version="8.0",
        target=90,
        outside=SHARED,
    )
    simulator.launch(text, [simulator.DeviceBuffer("x", x)], (2,), (32 * warps,))


def roles(*bodies: str) -> str:
    """Makes a program in which warp i runs the i-th body."""
    branches = "".join(
        f"setp.eq.u32 %p6, %r3, {i}; @%p6 bra WARP{i};\n" for i in range(len(bodies))
    )
    return (
        branches + "ret;\n" + "".join(f"WARP{i}:\n{body}\nret;\n" for i, body in enumerate(bodies))
    )


def races(
    body: str, message: str, error: type[SimulationError] = SharedRace, **options: int
) -> None:
    with pytest.raises(error, match=f"(?s){message}.*block .0, 0, 0., thread"):
        launch(body, **options)


# --- arrivals of threads ---

LEADER = f"bar.warp.sync -1; @%p3 {ARRIVE.format('full')}"  # one lane for its warp


@pytest.mark.parametrize(
    ("produce", "full"),
    [
        (STORE + ARRIVE.format("full"), 32),
        (STORE + LEADER, 1),
        (STORE + "mbarrier.arrive.shared.b64 %rd6, [full];", 32),
    ],
    ids=["all arrive", "one for its warp", "with a state"],
)
def test_consumers_read_what_a_producer_stored(produce: str, full: int) -> None:
    launch(roles(produce, wait("full") + LOAD), full=full)
    launch(roles(produce, wait("full") + LOAD, wait("full") + LOAD), full=full, warps=3)
    for seed in range(4):
        with simulator.perturbation(seed):
            launch(roles(produce, wait("full") + LOAD, wait("full") + LOAD), full=full, warps=3)


@pytest.mark.parametrize(
    ("produce", "full", "which"),
    [
        (STORE + "setp.ne.u32 %p5, %r4, 5; @%p5 " + ARRIVE.format("full"), 31, "20"),
        (ARRIVE.format("full") + STORE, 32, "."),
        (STORE + "@%p3 " + ARRIVE.format("full"), 1, "4"),
        (STORE + LEADER.replace("arrive.", "arrive.relaxed.cta."), 1, "."),
    ],
    ids=[
        "one lane does not arrive",
        "before the store",
        "one for a warp that does not meet",
        "relaxed",
    ],
)
def test_a_missing_arrival_is_a_race(produce: str, full: int, which: str) -> None:
    races(
        roles(produce, wait("full") + LOAD),
        rf"shared words\+{which}: warp 1 reads what warp 0 wrote",
        full=full,
    )


def test_a_fence_makes_a_relaxed_arrival_release() -> None:
    relaxed = LEADER.replace("arrive.", "arrive.relaxed.cta.").replace(
        "@%p3", "fence.acq_rel.cta; @%p3"
    )
    launch(roles(STORE + relaxed, wait("full") + LOAD), full=1)
    test = wait("full").replace("try_wait.parity.", "try_wait.parity.relaxed.cta.")
    races(roles(STORE + LEADER, test + LOAD), "warp 1 reads what warp 0 wrote", full=1)
    launch(roles(STORE + LEADER, test + "fence.acq_rel.cta;" + LOAD), full=1)


def test_a_third_warp_is_concurrent() -> None:
    """Warp 2 stores without an arrival, so warp 0's phase does not order its store."""
    first = STORE + "bar.sync 0;"
    produce, late = STORE + ARRIVE.format("full"), wait("full") + "ld.shared.u32 %r10, [words+256];"
    told = r"words\+256: warp (1 reads what warp 2 wrote|2 writes what warp 1 read)"
    races(first + roles(produce, late, STORE), told, warps=3)
    launch(first + roles(produce, late, STORE + ARRIVE.format("full")), warps=3, full=64)


def test_a_wait_is_handed_on() -> None:
    """Passes through a barrier of two warps or another mbarrier, but not a relaxed arrival."""
    produce, met = STORE + ARRIVE.format("full"), "bar.sync 1, 64;"
    launch(roles(produce, wait("full") + met, met + LOAD), warps=3)
    launch(roles(produce, wait("full") + ARRIVE.format("empty"), wait("empty") + LOAD), warps=3)
    relaxed = ARRIVE.format("empty").replace("arrive.", "arrive.relaxed.cta.")
    last = roles(produce, wait("full") + relaxed, wait("empty") + LOAD)
    races(last, "warp 2 reads what warp 0 wrote", warps=3)


OVERWRITE = wait("empty") + STORE


def test_a_producer_overwrites_what_was_read() -> None:
    """Two warps read one stage: both must have read before the producer writes again."""
    produce, consume = (
        STORE + ARRIVE.format("full") + OVERWRITE,
        wait("full") + LOAD + ARRIVE.format("empty"),
    )
    launch(roles(produce, consume), empty=32)
    launch(roles(produce, consume, consume), empty=64, warps=3)
    told = r"words\+0: warp 0 writes what several warps read"
    races(roles(produce, consume, wait("full") + LOAD), told, empty=32, warps=3)
    races(roles(produce, wait("full") + LOAD, consume), told, empty=32, warps=3)
    races(
        roles(produce, consume, wait("full") + ARRIVE.format("empty") + LOAD),
        told,
        empty=64,
        warps=3,
    )
    one = wait("full") + LOAD + "@%p3 " + ARRIVE.format("empty")
    races(roles(produce, one), r"words\+4: warp 0 writes what warp 1 read", empty=1)
    launch(roles(produce, one.replace("@%p3", "bar.warp.sync -1; @%p3")), empty=1)


def test_phases_follow_one_another() -> None:
    """A later phase also acquires the releases of preceding phases, but not vice versa."""
    later = "st.shared.u32 [%r5+256], %r2; setp.lt.u32 %p5, %r4, {}; @%p5 " + ARRIVE.format("full")
    produce, both = STORE + ARRIVE.format("full") + later, LOAD + "ld.shared.u32 %r10, [%r6+256];"
    launch(roles(produce.format(32), wait("full", 1) + both))
    told = r"words\+256: warp 1 reads what warp 0 wrote"
    # arrivals on a phase that is not complete
    races(roles(produce.format(31), wait("full") + both), told)


# --- bulk copies ---

COPY = (
    "@%p3 mbarrier.arrive.expect_tx.shared.b64 _, [full], 128;\n"
    "@%p3 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [words], [%rd0], "
    "128, [full];\n"
)


def test_who_waits_reads_what_was_copied() -> None:
    launch(roles(COPY, wait("full") + LOAD), full=1)
    hand_on = wait("full") + LOAD + ARRIVE.format("empty")
    launch(roles(COPY, hand_on, wait("empty") + LOAD), full=1, warps=3)
    relaxed = hand_on.replace("arrive.", "arrive.relaxed.cta.")
    told = r"words\+0: warp 2 reads what a bulk copy wrote, without a wait for its mbarrier"
    races(roles(COPY, relaxed, wait("empty") + LOAD), told, full=1, warps=3)
    races(
        roles(COPY, "", LOAD),
        r"words\+0: reads 4 bytes that the copy",
        AsyncPending,
        full=1,
        warps=3,
    )


def test_a_copy_releases_nothing_that_its_thread_did_since() -> None:
    after = "@%p3 st.shared.u32 [more], %r2;\n"
    read = "ld.shared.u32 %r10, [more];"
    races(
        roles(COPY + after, wait("full") + read), r"more\+0: warp 1 reads what warp 0 wrote", full=1
    )
    launch(roles(after + COPY, wait("full") + read), full=1)


# --- the async proxy ---

FENCE = "fence.proxy.async.shared::cta;\n"


@pytest.mark.parametrize(
    "access", [STORE, STORE + "bar.warp.sync -1;" + LOAD], ids=["stored", "read"]
)
def test_copies_over_what_threads_accessed_need_a_proxy_fence(access: str) -> None:
    """The fence must be after the access and before the copy, in either thread."""
    met, told = (
        "bar.warp.sync -1;",
        "words.0: this copy writes what thread {} (wrote|read), without a fence.proxy.async",
    )
    for between in (FENCE + met, met + FENCE, met + "fence.proxy.async;"):
        launch(roles(access + between + COPY, wait("full") + LOAD), full=1)
    for before, after in (("", met), ("", met + "fence.acq_rel.gpu;"), (FENCE, met)):
        races(roles(before + access + after + COPY, ""), told.format(0), MissingProxyFence, full=1)
    own = "@%p3 " + FENCE  # lane 0 fences only its own accesses
    races(roles(access + own + met + COPY, ""), told.format(1), MissingProxyFence, full=1)
    # the fence is no barrier
    races(roles(access + FENCE + COPY, ""), "lane 0 writes what lane 1 (wrote|read)", full=1)


def test_a_stage_is_filled_again() -> None:
    """Consumers read a stage and arrive; the fence may be theirs or the producer's."""
    consume = wait("full") + LOAD + "{}" + ARRIVE.format("empty") + wait("full", 1) + LOAD
    for mine, theirs in ((FENCE, ""), ("", FENCE)):
        body = roles(COPY + wait("empty") + mine + COPY, *[consume.format(theirs)] * 2)
        launch(body, full=1, empty=64, warps=3)
    body = roles(COPY + wait("empty") + COPY, consume.format(""))
    told = r"words\+0: this copy writes what thread 32 read, without a fence.proxy.async between"
    races(body, told, MissingProxyFence, full=1)
    one = roles(COPY + wait("empty") + COPY, consume.format(FENCE), consume.format(""))
    races(
        one,
        r"this copy writes what thread \d+ read, without a",
        MissingProxyFence,
        full=1,
        empty=64,
        warps=3,
    )
    unasked = roles(COPY + wait("empty") + FENCE + COPY, consume.format(""), wait("full") + LOAD)
    races(unasked, "warp 0 writes what several warps read, without a barrier", full=1, warps=3)
