"""Barriers in shared memory and the bulk copies that they count; bulk prefetches.

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

CHUNK = 16  # bytes; addresses and sizes of what goes in bulk are multiples of it
MOST_PREFETCHED = (1 << 20) - CHUNK  # bytes of one instruction: ptxas takes no more


def mbarrier_init(k: Text, barrier: Pointer, count: Operand) -> None:
    """One thread makes a barrier of 8 bytes whose phases expect `count` arrivals.

    A barrier of the block has to follow.
    """
    issue(k, "mbarrier.init.shared.b64", _object(barrier), count)


def mbarrier_arrive(k: Text, barrier: Pointer, *, expect: Operand | None = None) -> None:
    """Arrives at the current phase, after it expects so many bytes of copies besides (sm_90)."""
    if expect is None:
        issue(k, "mbarrier.arrive.shared.b64", SINK, _object(barrier))
    else:
        issue(k, "mbarrier.arrive.expect_tx.shared.b64", SINK, _object(barrier), expect)


def mbarrier_wait(k: Text, barrier: Pointer, parity: Operand) -> None:
    """Waits until the phase of this parity is complete (sm_90).

    The first phase has parity 0, the next 1, then 0 again.
    """
    done, again = register(k, pred), k.label()
    k.mark(again)
    issue(k, "mbarrier.try_wait.parity.shared.b64", done, _object(barrier), parity)
    k.write(f"@!{done.name} bra {again};")


def bulk_copy(k: Text, target: Pointer, source: Pointer, nbytes: Operand, barrier: Pointer) -> None:
    """One thread starts a copy from global to shared memory, whose bytes count at `barrier`.

    The barrier has to expect the bytes. Addresses and size are multiples of 16. Threads that wait
    for the barrier's phase may read them.
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
    """One thread asks for bytes of global memory to be brought into the L2 cache (sm_90).

    Nothing waits for them. Address and size are multiples of 16.
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
    """Orders this thread's shared-memory accesses before its later bulk copies there (sm_90)."""
    issue(k, "fence.proxy.async.shared::cta")


def _object(barrier: Pointer) -> Pointer:
    if barrier.space != "shared" or barrier.type is not u64:
        raise KernelError(
            f"an mbarrier is a u64 in shared memory, not a {barrier.type} in {barrier.space} memory"
        )
    return barrier
