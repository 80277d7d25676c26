"""Attention of prompt chunks over pages in the simulator, against float64, and its machine code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.oracles import bf16_parts, loaded
from support.subjects import piece_subject
from support.subjects.pages import cached, page_operands

from ptx_kernels import simulator
from ptx_kernels.devices import DEVICES, REFERENCE, target
from ptx_kernels.kernels.attention import (
    CausalAttentionConfig,
    SplitKeysConfig,
    causal_attention,
    causal_attention_rule,
    piece_attention_rule,
    split_keys,
)
from ptx_kernels.kernels.operands import random_operands
from ptx_kernels.machine_code import ptxas, sass
from ptx_kernels.ptx import KernelError
from ptx_kernels.simulator.traffic import total

SMALL = CausalAttentionConfig(warps=1, tokens=16)
SHAPE = dict(batch=1, num_heads=32, num_kv_heads=8, head_dim=128, value_dim=128, scale=0.1)
PAGES = dict(key_parts=1, page_size=16)


@pytest.mark.grid
@pytest.mark.parametrize("group", [1, 2, 4, 5, 7, 8])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_groups_of_heads(group: int, dtype: str) -> None:
    config = CausalAttentionConfig(warps=2, tokens=16)
    assert piece_subject(config, dtype, group=group).passes()


def test_the_parts_of_queries_are_needed() -> None:
    """One part has the error of bf16, 4e-3; three parts have only that of float32."""
    assert not piece_subject(SMALL, parts=1).passes()
    assert piece_subject(SMALL, parts=1, tolerance=1.6e-5).passes()
    assert piece_subject(SMALL, parts=3, tolerance=1e-12).passes()


@pytest.mark.grid
@pytest.mark.grid
@pytest.mark.parametrize("head_dim", [48, 64, 80, 112, 128, 256])
@pytest.mark.parametrize("warps, tokens", [(1, 16), (4, 48), (8, 32)])
def test_sizes_of_heads(head_dim: int, warps: int, tokens: int) -> None:
    """A thread's rows are in one page of a step, in every other page, or in all of them."""
    config = CausalAttentionConfig(warps, tokens)
    assert piece_subject(config, head_dim=head_dim, group=1).passes()


@pytest.mark.slow(
    "simulates or assembles large kernels",
    quick=[
        "CausalAttentionConfig(warps=1, tokens=16, stages=2, resident_blocks=2, splits=1)-window=16"
    ],
)
@pytest.mark.parametrize("window", [1, 5, 16, 20, 40])
@pytest.mark.parametrize("config", [SMALL, CausalAttentionConfig(2, 32, 3, splits=2)], ids=str)
def test_windows(window: int, config: CausalAttentionConfig) -> None:
    assert piece_subject(config, time=21, window=window).passes()
    assert piece_subject(config, window=window, missing=True, sinks=True).passes()


@pytest.mark.grid
@pytest.mark.parametrize("page_size", [16, 32, 48])
@pytest.mark.parametrize("tokens", [16, 32, 64])
def test_sizes_of_pages(page_size: int, tokens: int) -> None:
    config = CausalAttentionConfig(2, tokens)
    assert piece_subject(config, page_size=page_size).passes()
    assert piece_subject(config, page_size=page_size, window=18).passes()


@pytest.mark.parametrize("splits", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_splits_of_what_is_seen(splits: int, dtype: str) -> None:
    """Some splits have no token; a sink's logit counts once."""
    config = CausalAttentionConfig(1, 16, splits=splits)
    assert piece_subject(config, dtype, missing=True).passes()
    assert piece_subject(config, dtype, sinks=True, soft_cap=0.7).passes()


@pytest.mark.parametrize("q_size", [1e-6, 1e-3, 1e3])
def test_f16_queries_of_any_size(q_size: float) -> None:
    """The queries are scaled into f16's range before they are split."""
    assert piece_subject(SMALL, "f16", q_size=q_size).passes()


def test_padding_gets_zeros() -> None:
    subject = piece_subject(SMALL)
    (got,) = subject.run()
    assert not got[1, 5:].any() and not got[2].any() and got[0].all()


def test_pages_are_read_once_by_a_tile_of_queries() -> None:
    """Four times the queries of a tile read no more pages; a second tile reads them again."""

    def read(time: int) -> int:
        kernel = causal_attention(
            **SHAPE | dict(num_heads=4, num_kv_heads=1, head_dim=32, value_dim=32),
            **PAGES,
            time=time,
            dtype="bf16",
            num_pages=8,
            pages_per_sequence=8,
            config=CausalAttentionConfig(warps=4, tokens=32),
        )
        q, k, v, tables, _, _ = random_operands(kernel)
        lens = [np.array([n], np.int32) for n in (128, time)]
        traffic, out = simulator.Traffic(), np.zeros(q.shape, np.float32)
        simulator.launch(
            kernel.text,
            [q, k, v, tables, *lens, out],
            kernel.grid,
            kernel.block,
            dynamic_shared_bytes=kernel.dynamic_shared_bytes,
            traffic=traffic,
        )
        return 32 * total(traffic.global_).moved - 2 * q.nbytes

    pages = 128 * 2 * 32 * 2
    assert read(4) - pages < pages / 8  # tables
    assert read(16) - pages < pages / 8
    assert 1.9 * pages < read(32) < 2.2 * pages


@pytest.mark.parametrize("dtype, parts", [("f32", 2), ("f32", 3), ("int8", 2), ("fp8", 1)])
@pytest.mark.parametrize("seen", [None, 17])
def test_pages_as_sums_of_bf16(dtype: str, parts: int, seen: int | None) -> None:
    """The output is in table order, with zeros for missing pages and unseen tokens."""
    rng, shape = np.random.default_rng(0), (5, 2, 16, 48)
    pages = [cached(rng.standard_normal(shape, np.float32), dtype) for _ in range(2)]
    tables = np.array([[3, 0, 1], [4, -1, 2]], np.int32)
    lens = np.array([33, 48], np.int32)
    kernel = split_keys(
        **dict(batch=2, time=1, num_kv_heads=2, head_dim=48, value_dim=48, parts=parts),
        **dict(dtype=dtype, num_pages=5, page_size=16, pages_per_sequence=3, seen=seen),
        config=SplitKeysConfig(warps=1),
    )
    got = simulator.run(kernel, *page_operands(pages), tables, lens)
    used = (tables >= 0) & (16 * np.arange(3) < lens[:, None])
    if seen is not None:  # 33 tokens, 17 to 33 seen: two pages; 48 tokens, 32 on seen: one page
        used &= np.array([[False, True, True], [False, True, True]])
    for i, page in enumerate(pages):
        floats = page[0] * page[1][..., None] if dtype == "int8" else loaded(page[0], dtype)
        want = np.where(used[..., None, None, None], floats[tables], 0).reshape(6, 2, 16, 48)
        for part, bits in enumerate(bf16_parts(want.astype(np.float32), parts)):
            np.testing.assert_array_equal(got[i * parts + part].view(np.uint16), bits)


@pytest.mark.parametrize("key_parts", [2, 3])
@pytest.mark.parametrize("options", [{}, {"window": 18, "missing": True, "sinks": True}])
def test_pages_of_several_parts(key_parts: int, options: dict[str, Any]) -> None:
    """Parts of f32 pages are in table order; the tables still name the original pages."""
    subject = piece_subject(CausalAttentionConfig(2, 32), "f32", key_parts=key_parts, **options)
    assert subject.passes()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"dtype": "int8"}, "dtype='int8' of pages must be one of bf16, f16, key_parts=1 of"),
        ({"dtype": "f16", "key_parts": 2}, "key_parts=2 of f16 1, and value_dim=128 head_dim=128"),
        ({"value_dim": 64}, "value_dim=64 head_dim=128"),
        ({"page_size": 24}, "page_size=24 must be a multiple of 16"),
        ({"pages_per_sequence": 0}, "pages_per_sequence=0 and splits=1 at least 1"),
        ({"dtype": None, "config": CausalAttentionConfig(splits=2)}, "splits=2 must be 1 where"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], message: str) -> None:
    of_pages = dict(dtype="bf16", num_pages=8, pages_per_sequence=8)
    with pytest.raises(KernelError, match=message):
        causal_attention(**(SHAPE | PAGES | of_pages | {"time": 9} | changes))


def test_the_rule_fills_the_device() -> None:
    """Splits contexts if there are too few query tiles; each split has at least four steps."""
    device = target(REFERENCE.name)
    found = {}
    for time in (4, 16, 64, 256, 512, 2048):
        config = causal_attention_rule(device, 8, 4 * time, 128, 128, 2, 1, "bf16", 4096)
        blocks = 8 * -(-4 * time // (16 * config.warps)) * config.splits
        found[time] = config.splits
        assert config.splits == 1 or config.splits <= 4096 // (4 * config.tokens)
        assert blocks * config.warps >= 128 and (config.splits == 1 or blocks <= 264)
    assert found == {4: 16, 16: 16, 64: 8, 256: 2, 512: 1, 2048: 1}


@pytest.mark.grid
@pytest.mark.parametrize("device", [*DEVICES, "NVIDIA of tomorrow"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_the_rule_s_blocks_have_room(device: str, dtype: str) -> None:
    chosen = target(device)
    room = chosen.facts.block_shared_bytes if chosen.facts else 99 << 10
    for head_dim, time in ((64, 16), (128, 256), (256, 5), (256, 512)):
        dims = head_dim, head_dim
        config = causal_attention_rule(chosen, 8, 4 * time, *dims, 2, 1, dtype, 4096)
        sizes = SHAPE | dict(zip(("head_dim", "value_dim"), dims, strict=True)) | {"time": time}
        of_pages = dict(dtype=dtype, num_pages=256, pages_per_sequence=256, config=config)
        kernel = causal_attention(**sizes, **PAGES, **of_pages)
        assert kernel.dynamic_shared_bytes == config.shared_bytes(*dims, 2, 1, dtype) <= room


@pytest.mark.parametrize(
    "batch, time, dtype, capacity, wanted",
    [
        (1, 256, "bf16", 4096, True),
        (1, 4, "bf16", 4096, True),  # predicted: 15.7 us with lanes, 12.7 with tensor cores
        (1, 2, "f16", 4096, False),  # 9.8 and 12.7
        (1, 8, "bf16", 1024, False),  # 9.1 and 12.3
        (8, 4, "f16", 1024, True),  # 27.9 and 16.4
        (64, 1, "bf16", 4096, False),  # a decode step, which reads every page once
        (1, 256, "f32", 4096, True),
        (1, 256, "int8", 4096, True),
        (1, 4, "fp8", 4096, False),
        (32, 16, "int8", 32768, False),  # its parts would take 8.6 GB
    ],
)
def test_which_pieces_take_tensor_cores(
    batch: int, time: int, dtype: str, capacity: int, wanted: bool
) -> None:
    assert (
        piece_attention_rule(target(), batch, time, 8, 128, capacity, dtype, None, capacity)
        is wanted
    )


@pytest.mark.parametrize("changes", [{"head_dim": 272}, {"value_dim": 128}])
def test_heads_and_latent_pages_that_do_not(changes: dict[str, int]) -> None:
    shape = dict(batch=1, time=256, num_kv_heads=8, head_dim=128, capacity=4096, dtype="bf16")
    assert not piece_attention_rule(target(), **(shape | changes))


@pytest.mark.slow(
    "assembles a large kernel for each case", quick=["f16-parts=1-sm_90", "bf16-parts=2-sm_120"]
)
@pytest.mark.grid
@pytest.mark.parametrize("arch", ptxas.TARGETS)
@pytest.mark.parametrize("dtype, parts", [("bf16", 1), ("f16", 1), ("bf16", 2)])
def test_instructions_per_mma(dtype: str, parts: int, arch: str) -> None:
    """Counts the loop over tokens that all rows see, with its copies."""
    config = causal_attention_rule(target(), 8, 1024, 128, 128, 2, parts, dtype, 4096)
    of_pages = dict(dtype=dtype, num_pages=256, pages_per_sequence=256, config=config)
    named = dict(key_parts=parts, named_pages=256 if parts > 1 else None)
    kernel = causal_attention(**SHAPE | PAGES | named, **of_pages, time=256)
    code = sass.disassemble(ptxas.assemble(kernel.text, arch).cubin)
    loops = [
        (loop.issued(), sum(i.name == "HMMA" for i in loop.instructions))
        for loop in sass.innermost_loops(code)
    ]
    assert min(issued / mma for issued, mma in loops if mma) <= 3.4
