"""Clusters: special registers, barriers, and the shared memory of other blocks."""

from __future__ import annotations

import numpy as np
import pytest

from ptx_kernels import simulator
from ptx_kernels.ptx import Builder, Kernel, KernelError, kernel, u32
from ptx_kernels.simulator import AbsentBlock, SharedRace

from .ptx_text import module
from .refusals import refuses

BARRIER = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n"
TILE = (
    ".shared .align 16 .b8 tile[256]; mov.u32 %r3, tile; mad.lo.u32 %r4, %r2, 4, %r3;\n"
    "mov.u32 %r5, %cluster_ctarank; xor.b32 %r6, %r5, 1;\n"
    "mapa.shared::cluster.u32 %r7, %r4, %r6;\n"
)
STORE, LOAD = "st.shared.b32 [%r4], %r0;\n", "ld.shared::cluster.b32 %r8, [%r7];\n"
KEEP = "mul.wide.u32 %rd4, %r0, 4; add.u64 %rd5, %rd0, %rd4; st.global.b32 [%rd5], %r8;\n"


def text(body: str, cluster: str = "2, 1, 1", *, version: str = "8.0", target: int = 90) -> str:
    directives = f") .explicitcluster .reqnctapercluster {cluster} {{"
    return module(body + "ret;", "y", version=version, target=target).replace(") {", directives, 1)


def launch(body: str, cluster: str = "2, 1, 1", *, grid: int = 4, **options: object) -> np.ndarray:
    y = np.zeros(grid * 64, np.uint32)
    simulator.launch(text(body, cluster), [y], (grid,), (64,), **options)
    return y


@pytest.mark.parametrize("seed", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("batch_lanes", [1, 128, 1 << 15])
def test_blocks_read_each_others_shared_memory(seed: int | None, batch_lanes: int) -> None:
    body = f"{TILE}{STORE}{BARRIER}{LOAD}{BARRIER}{KEEP}"
    if seed is None:
        got = launch(body, batch_lanes=batch_lanes)
    else:
        with simulator.perturbation(seed):
            got = launch(body, batch_lanes=batch_lanes)
    np.testing.assert_array_equal(got, np.arange(256).reshape(2, 2, 64)[:, ::-1].ravel())


def test_blocks_write_each_others_shared_memory() -> None:
    """Needs one barrier so that blocks have started, and a second one before the loads."""
    write = "st.shared::cluster.b32 [%r7], %r0;\n"
    got = launch(f"{TILE}{BARRIER}{write}{BARRIER}ld.shared.b32 %r8, [%r4];\n{KEEP}")
    np.testing.assert_array_equal(got, np.arange(256).reshape(2, 2, 64)[:, ::-1].ravel())


def test_only_some_blocks_run_with_their_clusters() -> None:
    got = launch(f"{TILE}{STORE}{BARRIER}{LOAD}{BARRIER}{KEEP}", only=[2])
    assert not got[:128].any() and got[128:].all()


def test_special_registers() -> None:
    """A grid of 4 x 2 x 2 blocks in clusters of 2 x 1 x 2."""
    names = ["%cluster_ctarank", "%cluster_nctarank"] + [
        f"%{name}.{axis}"
        for name in ("cluster_ctaid", "cluster_nctaid", "clusterid", "nclusterid")
        for axis in "xyz"
    ]
    body = (
        "mov.u32 %r3, %ctaid.y; mov.u32 %r4, %ctaid.z; mad.lo.u32 %r3, %r4, 2, %r3;"
        "mov.u32 %r4, %ctaid.x; mad.lo.u32 %r3, %r3, 4, %r4; "
        f"mul.wide.u32 %rd4, %r3, {4 * len(names)}; add.u64 %rd5, %rd0, %rd4;"
    )
    for i, name in enumerate(names):
        body += f"mov.u32 %r5, {name}; st.global.b32 [%rd5+{4 * i}], %r5;"
    got = np.zeros((2, 2, 4, len(names)), np.uint32)  # z, y, x
    simulator.launch(text(body, "2, 1, 2"), [got], (4, 2, 2), (1,))
    z, y, x = np.indices((2, 2, 4))
    one, two = np.ones_like(x), np.full_like(x, 2)
    want = [z * 2 + x % 2, two * 2, x % 2, 0 * y, z, two, one, two, x // 2, y, 0 * z, two, two, one]
    np.testing.assert_array_equal(got, np.stack(want, -1))


def test_a_missing_barrier_is_a_race() -> None:
    with refuses(
        SharedRace,
        "shared tile+0: this block reads what block (1, 0, 0) wrote, without a barrier of their "
        "cluster between",
        "ld.shared::cluster.b32",
    ):
        launch(f"{TILE}{BARRIER}{STORE}{LOAD}{BARRIER}{KEEP}")
    with refuses(SharedRace, "this block reads what block (1, 0, 0) wrote"):
        launch(f"{TILE}{BARRIER}{STORE}bar.sync 0;\n{LOAD}{BARRIER}{KEEP}")
    with refuses(SharedRace, "this block writes what block (1, 0, 0) read", "st.shared.b32"):
        launch(f"{TILE}{STORE}{BARRIER}{LOAD}{STORE}{BARRIER}{KEEP}")
    with refuses(SharedRace, "this block writes what several blocks read", "st.shared.b32"):
        launch(f"{TILE}{STORE}{BARRIER}{LOAD}ld.shared.b32 %r9, [%r4];\n{STORE}{BARRIER}{KEEP}")


def test_the_barrier_orders_global_memory_of_its_cluster_alone() -> None:
    """Each block writes a word, and reads that of another block after the barrier."""
    body = (
        "mov.u32 %r3, %ctaid.x; xor.b32 %r4, %r3, {}; mul.wide.u32 %rd4, %r3, 4; "
        "mul.wide.u32 %rd6, %r4, 4; add.u64 %rd5, %rd0, %rd4; add.u64 %rd7, %rd0, %rd6;"
        "setp.eq.u32 %p0, %r2, 0; @%p0 st.global.b32 [%rd5], %r3;\n"
        f"{BARRIER}@%p0 ld.global.b32 %r8, [%rd7];\n{BARRIER}"
    )
    launch(body.format(1))
    with refuses(simulator.GlobalRace, "this block reads what block (2, 0, 0) wrote: blocks run"):
        launch(body.format(2))
    # two blocks of the cluster read a word that one of them writes after the barrier
    again = "ld.global.b32 %r9, [%rd0+{}];\n" + BARRIER + "{} st.global.b32 [%rd0+{}], %r3;\n"
    first = "setp.eq.u32 %p0, %r0, 0; mov.u32 %r3, 5;\n"
    launch(first + again.format(0, "@%p0", 0), grid=2)
    with refuses(simulator.GlobalRace, "this block writes what several blocks read"):
        launch(first + again.format(0, "@%p0", 0))


def test_a_block_that_may_not_have_started() -> None:
    with refuses(AbsentBlock, "block (1, 0, 0) may not have started: no barrier of the cluster"):
        launch(f"{TILE}{STORE}bar.sync 0;\n{LOAD}{BARRIER}{KEEP}")


def test_a_block_that_may_have_exited() -> None:
    with refuses(
        AbsentBlock, "which may have exited: no barrier of the cluster comes after", "ld.shared::"
    ):
        launch(f"{TILE}{STORE}{BARRIER}{LOAD}{KEEP}")
    own = TILE.replace("xor.b32 %r6, %r5, 1", "mov.u32 %r6, %r5")
    launch(f"{own}{STORE}{BARRIER}{LOAD}{KEEP}")  # its own memory exists


def test_the_barrier_waits_for_all_threads_of_the_cluster() -> None:
    rank = "mov.u32 %r5, %cluster_ctarank; setp.eq.u32 %p0, %r5, 1;\n"
    with refuses(simulator.EarlyExit, "64 threads of its cluster exited before it"):
        launch(f"{rank}@%p0 ret;\n{BARRIER}")
    launch(f"{rank}@%p0 ret;\n{BARRIER}", strict=False)
    with refuses(simulator.Deadlock, "128 of the cluster's 128 threads wait"):
        launch(f"{rank}@%p0 bra A;\n{BARRIER}bra B;\nA:\nbar.sync 1, 96;\nB:\n")
    with refuses(simulator.BarrierDivergence, "16 of the warp's 32 live threads"):
        launch(f"and.b32 %r3, %r2, 31; setp.lt.u32 %p0, %r3, 16;\n@%p0 bra A;\n{BARRIER}A:\n")


def test_instructions_between_arrival_and_wait_are_refused() -> None:
    arrive, wait, _ = BARRIER.split("\n")
    for body in (f"{arrive} mov.u32 %r3, 1; {wait}", arrive, wait, f"{arrive}\nA:\n{wait}"):
        with refuses(simulator.ParseError, "arrive must come right before barrier.cluster.wait"):
            launch(body + "\n")


def test_geometry() -> None:
    with refuses(simulator.LaunchError, "grid=(3, 1, 1) is no multiple of the cluster (2, 1, 1)"):
        launch("", grid=3)
    with refuses(simulator.LaunchError, "a cluster of (16, 1, 1) has more than 8 blocks"):
        launch("", "16, 1, 1", grid=16)
    y = np.zeros(256, np.uint32)
    for version, target in (("8.0", 80), ("7.7", 90)):
        with refuses(simulator.ParseError, "clusters need PTX 7.8 and sm_90"):
            simulator.launch(text("", version=version, target=target), [y], (4,), (64,))
    with refuses(simulator.OutOfBounds, "rank 2 of a cluster of 2 blocks", "mapa"):
        launch(TILE.replace("xor.b32 %r6, %r5, 1", "mov.u32 %r6, 2"))
    with refuses(simulator.OutOfBounds, "shared offset", "256 bytes of shared memory"):
        launch(f"{TILE}{STORE}{BARRIER}ld.shared::cluster.b32 %r8, [%r7+256];\n{BARRIER}")
    with refuses(simulator.UninitializedRead, "nobody wrote all of these 4 bytes"):
        launch(f"{TILE}{BARRIER}{LOAD}{BARRIER}")
    with refuses(simulator.OutOfBounds, "shared offset"):  # treated as an address in its own block
        launch(f"{TILE}{STORE}{BARRIER}ld.shared.b32 %r8, [%r7];\n")


# --- in the kernel language ---


@kernel
def rotated(k: Builder, *, cluster: int, blocks: int = 8) -> None:
    """y[block, i] = numbers of the next block in the cluster."""
    y = k.output("y", u32, (blocks, 64))
    k.launch((blocks,), 32, cluster=(cluster, 1, 1))
    tile = k.shared("tile", u32, (2, 32))
    for i in range(2):
        tile.at(i, k.thread_id).store(0, (k.block_id() * 2 + i) * 32 + k.thread_id)
    k.cluster_barrier()
    following = (k.cluster_rank + 1) % cluster
    values = [k.peer(tile, following).at(i, k.thread_id).load() for i in range(2)]
    k.cluster_barrier()
    for i, value in enumerate(values):
        y.at(k.block_id()).store(k.thread_id + 32 * i, value)


@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
def test_the_language(cluster: int) -> None:
    (got,) = simulator.run(rotated(cluster=cluster))
    numbers = np.arange(512).reshape(8 // cluster, cluster, 64)
    np.testing.assert_array_equal(got, np.roll(numbers, -1, axis=1).reshape(8, 64))


def test_text() -> None:
    built: Kernel = rotated(cluster=4)
    assert built.cluster == (4, 1, 1)
    for line in (".version 8.0", ".target sm_90", ".explicitcluster", ".reqnctapercluster 4, 1, 1"):
        assert line in built.text.splitlines()


def test_the_language_refuses_bad_clusters() -> None:
    with pytest.raises(KernelError, match=r"cluster=\(16, 1, 1\) must have 1 to 8 blocks"):
        rotated(cluster=16, blocks=16)
    with pytest.raises(KernelError, match=r"grid=\(8, 1, 1\) must be a multiple of cluster"):
        rotated(cluster=3)

    @kernel
    def peer_of_a_buffer(k: Builder) -> None:
        k.launch((2,), 32, cluster=(2, 1, 1))
        k.peer(k.output("y", u32, (4,)), 0)

    with pytest.raises(KernelError, match="a peer has shared memory, not global memory"):
        peer_of_a_buffer()
