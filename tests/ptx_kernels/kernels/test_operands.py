"""Random operands for GPU checks and benchmarks of kernels."""

from __future__ import annotations

import numpy as np
import pytest

from ptx_kernels import formats
from ptx_kernels.kernels.operands import random_operands, random_planes
from ptx_kernels.ptx import Buffer, Kernel, bf16, e4m3, f16, f32, s8, s32, u8


def kernel(*buffers: Buffer) -> Kernel:
    return Kernel("k", "", buffers, (1, 1, 1), (32, 1, 1))


@pytest.mark.parametrize("format", sorted(formats.names()))
def test_packed_weights_are_finite_and_random(format):
    planes = random_planes(format, 3, 4, rng=np.random.default_rng(0))
    values = formats.get(format).decode(planes)
    assert values.shape == (3, 4 * formats.get(format).block_size)
    assert np.isfinite(values).all() and np.ptp(values) > 0


def test_planes_are_recognized():
    block = formats.get("Q6_K")
    planes = [Buffer(p.name, u8, (2, 3, p.bytes_per_block), "in") for p in block.planes]
    ids = Buffer("ids", s32, (5,), "in")
    *arrays, looked_up = random_operands(kernel(*planes, ids, Buffer("y", f32, (5, 768), "out")))
    assert [a.shape for a in arrays] == [b.shape for b in planes] and np.isfinite(
        block.decode(arrays)
    ).all()
    assert looked_up[:2].tolist() == [2, -1] and ((0 <= looked_up[2:]) & (looked_up[2:] < 2)).all()


def test_pages_are_in_range_and_apart():
    pages = Buffer("k_pages", bf16, (12, 2, 16, 32), "in")
    tables, lengths = (
        Buffer("block_tables", s32, (3, 4), "in"),
        Buffer("context_lens", s32, (3,), "in"),
    )
    k, ids, context_lens = random_operands(kernel(pages, tables, lengths))
    assert k.dtype == np.uint16
    assert sorted(ids.ravel()) == list(range(12))
    assert context_lens[0] == 64 and context_lens[1] == 0 and 1 <= context_lens[2] <= 64
    _, slots = random_operands(kernel(pages, Buffer("slot_mapping", s32, (6,), "in")))
    assert slots[0] == -1 and slots[1] == 12 * 16 and len(set(slots.tolist())) == 6
    of_window = Buffer("k_pages", bf16, (2, 2, 16, 32), "in")  # slots of a prompt's last tokens
    _, slots = random_operands(kernel(of_window, Buffer("slot_mapping", s32, (70,), "in")))
    assert slots[1] == 32 and set(slots[2:38].tolist()) == {-1}
    assert sorted(slots[38:].tolist()) == list(range(32))


def test_the_seed_decides():
    k = kernel(Buffer("x", f16, (4, 8), "in"), Buffer("values", s8, (4, 8), "in"))
    first, again, other = random_operands(k, 1), random_operands(k, 1), random_operands(k, 2)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    assert first[0].dtype == np.float16 and first[1].dtype == np.int8


def test_unknown_integers_are_refused():
    pages = Buffer("k_pages", f32, (4, 2, 16, 32), "in")
    with pytest.raises(KeyError, match="surprise"):
        random_operands(kernel(pages, Buffer("surprise", s32, (4,), "in")))


def test_matrices_with_prefixed_planes_of_several_formats():
    wanted = {"q": "Q4_K", "k": "Q8_0", "v": "Q6_K"}
    planes = [
        Buffer(f"{name}_{p.name}", u8, (2, 3, p.bytes_per_block), "in")
        for name, format in wanted.items()
        for p in formats.get(format).planes
    ]
    arrays = random_operands(kernel(*planes))
    for format in wanted.values():
        own, arrays = (
            arrays[: len(formats.get(format).planes)],
            arrays[len(formats.get(format).planes) :],
        )
        assert np.isfinite(formats.get(format).decode(own)).all()


def test_pages_of_bytes_are_finite_and_scales_positive():
    shape = (12, 2, 16, 32)
    fp8, scales = random_operands(
        kernel(Buffer("k_pages", e4m3, shape, "in"), Buffer("k_scales", f32, shape[:3], "in"))
    )
    assert (
        fp8.dtype == np.uint8
        and not np.isin(fp8, [0x7F, 0xFF]).any()
        and np.isin([0, 0x80, 0xFE], fp8).all()
    )
    assert (scales >= 0).all()
    contiguous = kernel(
        Buffer("k_pages", f32, (2, 2, 64, 32), "in"), Buffer("context_lens", s32, (2,), "in")
    )
    assert random_operands(contiguous)[1].tolist() == [64, 0]
