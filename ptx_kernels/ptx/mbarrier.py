"""Emits mbarriers in shared memory, the bulk copies that signal them, and bulk prefetches.

Each function here is a method of the Builder.

Rules follow PTX ISA 9.1, 9.7.13.15 (mbarrier) and 9.7.9.25.4 (cp.async.bulk).
"""

from __future__ import annotations

from .errors import KernelError
from .issue import SINK, issue
from .pointer import Pointer
from .text import Text
from .types import pred, u64
from .values import Operand, register

CHUNK = 16  # bytes; addresses and sizes of bulk copies are multiples of it
MOST_PREFETCHED = (1 << 20) - CHUNK  # bytes; ptxas limits the size of one instruction to this


def mbarrier_init(k: Text, barrier: Pointer, count: Operand) -> None:
    """Emits the initialization of an mbarrier of 8 bytes that expects `count` arrivals per phase.

    One thread executes it. A barrier of the thread block must follow.
    """
    issue(k, "mbarrier.init.shared.b64", _object(barrier), count)


def mbarrier_arrive(k: Text, barrier: Pointer, *, expect: Operand | None = None) -> None:
    """Emits an arrival at the current phase (sm_90).

    `expect` first adds bytes of copies that the phase waits for; None adds none.
    """
    if expect is None:
        issue(k, "mbarrier.arrive.shared.b64", SINK, _object(barrier))
    else:
        issue(k, "mbarrier.arrive.expect_tx.shared.b64", SINK, _object(barrier), expect)


def mbarrier_wait(k: Text, barrier: Pointer, parity: Operand) -> None:
    """Emits a wait until the phase of this parity is complete (sm_90).

    The first phase has parity 0, the next 1, then 0 again.
    """
    done, again = register(k, pred), k.label()
    k.mark(again)
    issue(k, "mbarrier.try_wait.parity.shared.b64", done, _object(barrier), parity)
    k.write(f"@!{done.name} bra {again};")


def bulk_copy(k: Text, target: Pointer, source: Pointer, nbytes: Operand, barrier: Pointer) -> None:
    """Emits the start of a copy from global to shared memory that signals `barrier`.

    One thread executes it. The mbarrier must expect the bytes. Addresses and size are multiples of
    16. Threads that wait for the mbarrier's phase may read the bytes.
    """
    if target.space != "shared" or source.space != "global":
        raise KernelError(
            "bulk_copy goes from global to shared memory,"
            f" not from {source.space} to {target.space}"
        )
    if isinstance(nbytes, int) and (nbytes <= 0 or nbytes % CHUNK):
        raise KernelError(f"bulk_copy of {nbytes} bytes: it must be a multiple of {CHUNK}")
    opcode = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    issue(k, opcode, target, source, nbytes, _object(barrier))


def prefetch_l2(k: Text, source: Pointer, nbytes: Operand) -> None:
    """Emits a prefetch of bytes of global memory into the L2 cache (sm_90).

    One thread executes it. Nothing waits for the bytes. Address and size are multiples of 16.
    """
    if source.space != "global":
        raise KernelError(f"prefetch_l2 is of global memory, not of {source.space} memory")
    if isinstance(nbytes, int) and (not 0 < nbytes <= MOST_PREFETCHED or nbytes % CHUNK):
        raise KernelError(
            f"prefetch_l2 of {nbytes} bytes: it must be a multiple of {CHUNK}, at most"
            f" {MOST_PREFETCHED}"
        )
    issue(k, "cp.async.bulk.prefetch.L2.global", source, nbytes)


def fence_async(k: Text) -> None:
    """Emits a fence that orders shared memory accesses before this thread's later bulk copies.

    It needs sm_90.
    """
    issue(k, "fence.proxy.async.shared::cta")


def _object(barrier: Pointer) -> Pointer:
    if barrier.space != "shared" or barrier.type is not u64:
        raise KernelError(
            f"an mbarrier is a u64 in shared memory, not a {barrier.type} in {barrier.space} memory"
        )
    return barrier
