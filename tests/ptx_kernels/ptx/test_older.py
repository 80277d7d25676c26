"""Operations whose instructions sm_75 lacks give the same bits by others, and ptxas takes those."""

from __future__ import annotations

import re

import numpy as np
import pytest
from support.helpers import nmse

from ptx_kernels import simulator
from ptx_kernels.machine_code.ptxas import assemble
from ptx_kernels.ptx import Builder, Kernel, KernelError, bf16, f16, f32, kernel, s8, s32, u8, u32
from ptx_kernels.ptx.oldest import COMMON, built_for
from ptx_kernels.ptx.types import TYPES

SPECIAL = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 65504.0, 65520.0, 1e-8, -3e38, 3.4e38]
#: Halfway between two bf16, and two f16: even and odd neighbours.
TIES = [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11]


def floats(count: int) -> np.ndarray:
    rng = np.random.default_rng(count)
    special = np.array([*SPECIAL, *TIES], np.float32)
    scaled = rng.standard_normal(count) * 2.0 ** rng.integers(-20, 20, count)
    return np.where(rng.random(count) < 0.5, rng.choice(special, count), scaled).astype(np.float32)


@kernel
def maximum(k: Builder) -> None:
    a, b = k.input("a", f32, (256,)), k.input("b", f32, (256,))
    out = k.output("out", f32, (256,))
    k.launch((1,), 256)
    out.store(k.thread_id, k.maximum(a.load(k.thread_id), b.load(k.thread_id), keep_nan=True))


@kernel
def pairs(k: Builder, *, dtype: str) -> None:
    a, b = k.input("a", f32, (256,)), k.input("b", f32, (256,))
    out = k.output("out", u32, (256,))
    k.launch((1,), 256)
    out.store(k.thread_id, k.pair(a.load(k.thread_id), b.load(k.thread_id), TYPES[dtype]))


@kernel
def to_bf16(k: Builder) -> None:
    a, out = k.input("a", f32, (256,)), k.output("out", bf16, (256,))
    k.launch((1,), 256)
    out.store(k.thread_id, a.load(k.thread_id).to(bf16))


@kernel
def reduced(k: Builder, *, operation: str) -> None:
    a, out = k.input("a", u32, (256,)), k.output("out", u32, (256,))
    k.launch((1,), 256)
    out.store(k.thread_id, k.redux(a.load(k.thread_id), operation))


def both(build: object, *operands: np.ndarray, **arguments: object) -> tuple[np.ndarray, ...]:
    """Returns the results of a kernel for sm_80 and for sm_75; ptxas takes the latter."""
    newer, older = (build(**arguments, oldest=oldest) for oldest in (COMMON, 75))  # type: ignore[operator]
    assert targets(newer) >= 80 > 75 >= targets(older) and newer.text != older.text
    assemble(older.text, "sm_75")
    return tuple(simulator.run(each, *operands)[0] for each in (newer, older))


def targets(built: Kernel) -> int:
    (number,) = re.findall(r"^\.target sm_(\d+)$", built.text, re.MULTILINE)
    return int(number)


def test_maximum_with_nan() -> None:
    newer, older = both(maximum, floats(256), floats(256)[::-1])
    numbers = ~np.isnan(newer)
    assert 10 < numbers.sum() < 246
    assert np.isnan(older[~numbers]).all()
    assert newer[numbers].tobytes() == older[numbers].tobytes()


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_pairs(dtype: str) -> None:
    newer, older = both(pairs, floats(256), floats(256)[::-1].copy(), dtype=dtype)
    nan = np.array([0x7FFF, 0x7E00], np.uint16)  # of f16, NumPy's conversion gives another one
    halves = newer.view(np.uint16), older.view(np.uint16)
    same = (halves[0] == halves[1]) | (np.isin(halves[0], nan) & np.isin(halves[1], nan))
    assert same.all()


def test_conversion_to_bf16() -> None:
    newer, older = both(to_bf16, floats(256))
    assert newer.tobytes() == older.tobytes()


@pytest.mark.parametrize("operation", ["add", "min", "max"])
def test_reductions_of_a_warp(operation: str) -> None:
    x = np.random.default_rng(0).integers(0, 1 << 32, 256, np.uint32)
    newer, older = both(reduced, x, operation=operation)
    assert newer.tobytes() == older.tobytes()


@kernel
def copied(k: Builder, *, nbytes: int, sized: bool) -> None:
    """Copies `nbytes` per thread: all, half (of 4) or none of them, or leaves shared memory."""
    x, out = k.input("x", u8, (64 * nbytes,)), k.output("out", u8, (64 * nbytes,))
    k.launch((1,), 64)
    shared = k.shared("shared", u8, (64 * nbytes,))
    place = k.thread_id * nbytes
    for i in range(0, nbytes, 4):
        shared.at(place).cast(u32).store(i // 4, k.const(u32, 0x01020304))
    size = None
    if sized:
        some = 2 if nbytes == 4 else 0
        size = k.select(k.thread_id % 3 == 0, k.const(u32, nbytes), some)
        size = k.select(k.thread_id % 3 == 2, k.const(u32, 0), size)
    k.cp_async(shared.at(place), x.at(place), nbytes, size=size, where=k.thread_id % 5 != 0)
    k.cp_async_commit()
    k.cp_async_wait(0)
    k.barrier()
    for i in range(0, nbytes, 4):
        out.at(place).cast(u32).store(i // 4, shared.at(place).cast(u32).load(i // 4))


@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize("nbytes", [4, 8, 16])
def test_copies_to_shared_memory(nbytes: int, sized: bool) -> None:
    x = np.random.default_rng(1).integers(1, 256, 64 * nbytes, np.uint8)
    newer, older = both(copied, x, nbytes=nbytes, sized=sized)
    assert newer.tobytes() == older.tobytes()


@kernel
def product(k: Builder, *, dtype: str) -> None:
    a, b = k.input("a", u32, (4, 32)), k.input("b", u32, (2, 32))
    type = TYPES[dtype]
    number = f32 if type is f16 else s32
    c, d = k.input("c", number, (4, 32)), k.output("d", number, (4, 32))
    k.launch((1,), 32)
    fragments = [[p.at(i, k.lane_id).load() for i in range(n)] for p, n in ((a, 4), (b, 2), (c, 4))]
    b_type = f16 if type is f16 else s8
    for i, value in enumerate(k.mma(*fragments, type, b_type)):
        d.at(i, k.lane_id).store(0, value)


@pytest.mark.parametrize("dtype", ["s8", "u8", "f16"])
def test_products_of_matrices(dtype: str) -> None:
    rng = np.random.default_rng(2)
    if dtype == "f16":
        a, b = (rng.standard_normal((n, 64)).astype(np.float16).view(np.uint32) for n in (4, 2))
        c = rng.standard_normal((4, 32)).astype(np.float32)
        newer, older = both(product, a, b, c, dtype=dtype)
        assert 0 < nmse(older, newer) <= 1e-13  # rounded after 8 of 16 products
        return
    a, b = (rng.integers(0, 1 << 32, (n, 32), np.uint32) for n in (4, 2))
    c = rng.integers(-(1 << 31), 1 << 31, (4, 32)).astype(np.int32)
    newer, older = both(product, a, b, c, dtype=dtype)
    assert newer.tobytes() == older.tobytes()


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(KernelError, match=r"product is built for sm_75, and .* needs sm_80"):

        @kernel
        def bf16_product(k: Builder) -> None:
            k.name = "product"
            k.launch((1,), 32)
            word = k.lane_id
            k.mma([word] * 4, [word] * 2, [k.const(f32, 0.0)] * 4, bf16)

        bf16_product(oldest=75)
    with pytest.raises(KernelError, match="oldest=70 must be at least 75"):
        maximum(oldest=70)

    @kernel
    def large(k: Builder) -> None:
        k.launch((1,), 32)
        k.shared("large", u8, (65 << 10,), dynamic=True)

    large()
    with pytest.raises(KernelError, match="66560 bytes of shared memory, of 65536"):
        large(oldest=75)


def test_the_context_is_the_default() -> None:
    with built_for(75):
        assert maximum() == maximum(oldest=75) != maximum(oldest=COMMON)
        assert maximum().arguments == {"oldest": 75}
    with built_for(90):
        assert maximum() == maximum(oldest=COMMON)
        assert maximum().arguments == {}
    assert maximum() == maximum(oldest=COMMON)
