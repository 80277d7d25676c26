"""Barriers in shared memory and the bulk copies that they count.

Each function here is a method of the Builder.

Rules follow PTX ISA 9.1, 9.7.13.15 (mbarrier) and 9.7.9.25.4 (cp.async.bulk).
"""

from __future__ import annotations

from .errors import KernelError
from .pointer import Pointer
from .text import Text
from .types import pred, u32, u64
from .values import Operand, operand, register

_AMPERE = ((7, 0), 80)
_HOPPER = ((8, 0), 90)


def mbarrier_init(k: Text, barrier: Pointer, count: Operand) -> None:
    """One thread makes a barrier of 8 bytes whose phases expect `count` arrivals; a barrier of the
    block follows.
    """
    k.require(_AMPERE)
    k.write(f"mbarrier.init.shared.b64 {_object(barrier)}, {operand(count, u32, 'mbarrier.init')};")


def mbarrier_arrive(k: Text, barrier: Pointer, *, expect: Operand | None = None) -> None:
    """Arrives at the current phase, after it expects so many bytes of copies besides (sm_90)."""
    k.require(
        ((7, 1), 80) if expect is None else _HOPPER
    )  # 7.1 brought `_`, which drops the phase's state
    if expect is None:
        k.write(f"mbarrier.arrive.shared.b64 _, {_object(barrier)};")
    else:
        number = operand(expect, u32, "mbarrier.arrive")
        k.write(f"mbarrier.arrive.expect_tx.shared.b64 _, {_object(barrier)}, {number};")


def mbarrier_wait(k: Text, barrier: Pointer, parity: Operand) -> None:
    """Waits until the phase of this parity (the first is 0, the next 1, then 0 again) is complete
    (sm_90).
    """
    k.require(((7, 8), 90))
    done, again = register(k, pred), k.label()
    k.mark(again)
    parity_text = operand(parity, u32, "mbarrier.try_wait")
    k.write(f"mbarrier.try_wait.parity.shared.b64 {done.name}, {_object(barrier)}, {parity_text};")
    k.write(f"@!{done.name} bra {again};")


def bulk_copy(k: Text, target: Pointer, source: Pointer, nbytes: Operand, barrier: Pointer) -> None:
    """One thread starts a copy from global to shared memory; its bytes count at `barrier`, which
    has to expect them.

    Addresses and size are multiples of 16. Threads that wait for the barrier's phase may read them.
    """
    if target.space != "shared" or source.space != "global":
        raise KernelError(
            f"bulk_copy goes from global to shared memory, not from {source.space} to {target.space}"
        )
    if isinstance(nbytes, int) and (nbytes <= 0 or nbytes % 16):
        raise KernelError(f"bulk_copy of {nbytes} bytes: it must be a multiple of 16")
    k.require(_HOPPER)
    size = operand(nbytes, u32, "cp.async.bulk")
    opcode = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    k.write(f"{opcode} {target.operand()}, {source.operand()}, {size}, {_object(barrier)};")


def fence_async(k: Text) -> None:
    """Orders what this thread did to shared memory before bulk copies into it that it starts
    afterwards (sm_90).
    """
    k.require(_HOPPER)
    k.write("fence.proxy.async.shared::cta;")


def _object(barrier: Pointer) -> str:
    if barrier.space != "shared" or barrier.type is not u64:
        raise KernelError(
            f"an mbarrier is a u64 in shared memory, not a {barrier.type} in {barrier.space} memory"
        )
    return barrier.operand()
