"""The account of bytes that launches prefetch."""

from __future__ import annotations

import pytest

from ptx_kernels.devices import REFERENCE
from ptx_kernels.kernels import KERNELS
from ptx_kernels.kernels.matvec import matvec_rule
from ptx_kernels.machine_code.model import predict
from ptx_kernels.machine_code.report import code, launch
from ptx_kernels.ptx import Kernel, Prefetch
from ptx_kernels.tuning import choose
from tools import event_model
from tools.prefetched import Found, Prefetched

MB = 1 << 20
BLOCK = 16 * 144  # bytes of a row of 4096 weights in Q4_K


def product(n: int, wanted: int = 0) -> Kernel:
    """A mat-vec of n rows that prefetches all rows of a matrix of `wanted` rows."""

    prefetch = (Prefetch(((16, 144),), wanted, 0, wanted),) if wanted else ()
    shape = dict(format="Q4_K", n=n, columns=4096, m=1)
    return KERNELS["matvec"](**shape, config=choose(matvec_rule, **shape), prefetch=prefetch)


def near(found: Found) -> tuple[float, float, float]:
    return pytest.approx((found.resident, found.coming, found.queued), abs=1 << 14)


def test_bytes_come_while_memory_is_free():
    account, asking, reader = Prefetched(rate=MB), product(1024, 512), product(512)
    nbytes = asking.ahead_bytes
    assert 0.9 * 512 * BLOCK < nbytes <= 512 * BLOCK
    account.end(asking)
    account.pass_time(1.0, 0.5 * MB)  # memory is busy half of the time
    assert (0.5 * MB, nbytes - 0.5 * MB, 0) == near(account.begin(reader))
    assert account.begin(reader) == Found()  # the first launch consumed them


@pytest.mark.parametrize("kept", [0.0, 0.5])
def test_part_of_the_bytes_is_lost(kept):
    account, asking = Prefetched(rate=MB, kept=kept), product(1024, 512)
    account.end(asking)
    account.pass_time(9.0)
    assert (kept * asking.ahead_bytes, 0, 0) == near(account.begin(product(512)))


def test_others_are_served_in_the_order_of_asking():
    account = Prefetched(rate=MB)
    first, second = product(1024, 512), product(1024, 768)
    account.end(first)
    account.end(second)
    account.pass_time(1.0)
    other = product(2048)
    assert account.begin(other).resident == 0
    rest = first.ahead_bytes - MB + second.ahead_bytes
    assert (0, 0, rest) == near(account.begin(other))
    assert (0, second.ahead_bytes, first.ahead_bytes - MB) == near(account.begin(product(768)))


def test_a_launch_finds_what_shortens_it():
    """Resident bytes take no memory time; bytes queued for other launches delay this one."""

    asked = launch(kernel := product(14336), code(kernel, "sm_90"))
    assert asked is not None
    parts = [Found(), Found(resident=10 * MB), Found(coming=10 * MB), Found(queued=30 * MB)]
    for seconds in (
        lambda each: predict(each, REFERENCE).seconds,
        lambda each: event_model.seconds(each, REFERENCE),
    ):
        plain, there, coming, behind = (seconds(part.by(asked)) for part in parts)
        assert there < plain and there <= coming <= plain < behind
        assert plain - there < 1.1 * 10 * MB / REFERENCE.bandwidth
