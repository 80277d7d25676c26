"""Every kind of fault is raised, with the instruction's address."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tools.machine_code import (
    AbsentLaneFault,
    DeadlockFault,
    MisalignedFault,
    OutOfBoundsFault,
    PendingCopyFault,
    UnknownInstructionFault,
    UnwrittenFault,
)

from .small_kernels import execute, small_kernel

_STORE = "mad.wide.u32 %d6, %r0, 4, %d1; st.global.u32 [%d6], %r4;"
_PLACE = "mov.u32 %r7, memory; shl.b32 %r3, %r0, 2; add.u32 %r3, %r3, %r7;"
_COPY = "cp.async.ca.shared.global [%r3], [%d2], 4; cp.async.commit_group;"
FAULTS = {
    "unwritten": (UnwrittenFault, f"{_PLACE} ld.shared.u32 %r4, [%r3]; {_STORE}"),
    "pending": (
        PendingCopyFault,
        f"{_PLACE} {_COPY} ld.shared.u32 %r4, [%r3]; cp.async.wait_group 0; {_STORE}",
    ),
    "overwritten": (
        PendingCopyFault,
        f"{_PLACE} {_COPY} st.shared.u32 [%r3], %r0; cp.async.wait_group 0;"
        f" ld.shared.u32 %r4, [%r3]; {_STORE}",
    ),
    "copied twice": (
        PendingCopyFault,
        f"{_PLACE} {_COPY} {_COPY} cp.async.wait_group 0; ld.shared.u32 %r4, [%r3]; {_STORE}",
    ),
    "never awaited": (PendingCopyFault, f"{_PLACE} {_COPY} mov.u32 %r4, 0; {_STORE}"),
    "beyond a buffer": (OutOfBoundsFault, f"ld.global.u32 %r4, [%d2+4]; {_STORE}"),
    "before a buffer": (OutOfBoundsFault, f"ld.global.u32 %r4, [%d2+-4]; {_STORE}"),
    "stored beyond": (
        OutOfBoundsFault,
        "mov.u32 %r4, 0; mad.wide.u32 %d6, %r0, 4, %d1; st.global.u32 [%d6+4], %r4;",
    ),
    "beyond shared memory": (
        OutOfBoundsFault,
        f"{_PLACE} ld.global.u32 %r4, [%d2]; st.shared.u32 [%r3+2044], %r4; {_STORE}",
    ),
    "misaligned": (MisalignedFault, f"ld.global.u32 %r4, [%d2+2]; {_STORE}"),
    "absent lane": (
        AbsentLaneFault,
        "ld.global.u32 %r4, [%d2]; setp.lt.u32 %p0, %r0, 16; @!%p0 bra $skip;"
        " shfl.sync.bfly.b32 %r4, %r4, 16, 0x1f, 0xffffffff; add.u32 %r4, %r4, %r0;"
        f" st.global.u32 [%d1], %r4;\n$skip:\n {_STORE}",
    ),
    "deadlock": (
        DeadlockFault,
        "setp.lt.u32 %p0, %r0, 32; @%p0 bra $first; bar.sync 1; bra.uni $end;\n$first:\n"
        f" bar.sync 2;\n$end:\n mov.u32 %r4, 0; {_STORE}",
    ),
    "unknown": (
        UnknownInstructionFault,
        f"ld.global.u32 %r4, [%d2]; cvt.rn.f64.u32 %d5, %r4; cvt.rzi.u32.f64 %r4, %d5; {_STORE}",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("late", [True, False])
def test_a_fault_is_raised(name, late):
    error, body = FAULTS[name]
    threads = 64 if name == "deadlock" else 32
    kernel = small_kernel(body, threads, threads, threads=threads, least=80)
    with pytest.raises(error) as caught:
        execute(kernel, np.zeros(threads, np.uint32), "sm_90", late=late)
    if name != "never awaited":
        assert re.search(r", at 0x[0-9a-f]{4}: ", str(caught.value))
