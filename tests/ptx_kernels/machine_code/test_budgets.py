"""Static budgets on an H200 for the machine code of the kernels that dominate decoding.

A multiprocessor issues 128 lane-instructions a clock, and its share of memory bandwidth is about
18.5 bytes a clock. With more than six instructions per byte a kernel cannot reach the bandwidth;
with three it needs half of the issue slots.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from support.assembled import spilled
from support.format_lists import PRODUCTS

from ptx_kernels import formats
from ptx_kernels.devices import target
from ptx_kernels.kernels import KERNELS
from ptx_kernels.kernels.attention import (
    PagedAttentionConfig,
    merge_attention_rule,
    paged_attention_rule,
)
from ptx_kernels.kernels.attention.step_rows import TYPES
from ptx_kernels.kernels.gemm import GemmConfig
from ptx_kernels.kernels.matvec import (
    MAX_ROWS,
    PRESETS,
    MatvecConfig,
    float_matvec_rule,
    matvec_rule,
    qkv_append_rule,
)
from ptx_kernels.kernels.pages import PAGE_TYPES
from ptx_kernels.machine_code.model import FLOAT_INSTRUCTION_BUDGET, INSTRUCTION_BUDGETS
from ptx_kernels.machine_code.report import Figures, code, figures
from ptx_kernels.machine_code.sass import SassInstruction, load_bits
from ptx_kernels.ptx import Kernel
from ptx_kernels.tuning import choose

#: (n, k) of Llama-3.1-8B: attention output, gate and up, down, output head.
SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096)]

#: Maximum instructions per byte of quants for formats with blocks of 32 weights; Q8_0 has half as
#: many weights per byte.
SMALL_BLOCKS = {"Q8_0": 1.0, "Q5_0": 4.0, "Q4_0": 3.0, "Q4_1": 3.0, "Q5_1": 4.0}
SMALL_BLOCKS |= {"IQ4_NL": 6.0, "MXFP4": 6.0}  # codebook lookups

#: (n, k) of Qwen2.5-0.5B (key and value, down), and one that fills a device.
SMALL_SHAPES = [(128, 896), (896, 4864), (4096, 14336)]


def test_the_model_is_held_to_these_budgets():
    """`model.INSTRUCTION_BUDGETS` equals the budgets of the tests below."""
    rows = {("Q4_K", 1): 3.5, ("Q5_K", 1): 4.0, ("Q6_K", 1): 4.0, ("Q4_K", 4): 6.0}
    small = {(format, 1): most for format, most in SMALL_BLOCKS.items()}
    others = {("Q2_K", 1): 6.0, ("Q3_K", 1): 5.0, ("IQ4_XS", 1): 6.0}
    assert INSTRUCTION_BUDGETS == rows | small | others


def measure(format: str, n: int, k: int, m: int) -> Figures:
    kernel = KERNELS["matvec"](
        format=format, n=n, columns=k, m=m, config=choose(matvec_rule, format, n, k, m)
    )
    return figures(kernel, "sm_90", predict_time=False)


def quant_loads(found: Figures) -> float:
    """Number of 16-byte loads for the hot loop's quants if each is loaded once."""
    assert found.instructions_per_quant_byte is not None
    return sum(found.mix.values()) / found.instructions_per_quant_byte / 16


@pytest.mark.parametrize("n, k", SHAPES)
@pytest.mark.parametrize("format, instructions", [("Q4_K", 3.5), ("Q5_K", 4.0)])
def test_one_row_of_blocks_as_they_lie(format, instructions, n, k):
    found = measure(format, n, k, 1)
    assert (
        found.instructions_per_quant_byte is not None
        and found.instructions_per_quant_byte <= instructions
    )
    assert found.registers <= 80 and found.spill_bytes == 0
    assert found.narrowest_load == found.widest_load == 128
    assert found.loads_in_flight >= 4


# A byte of Q3_K's quants has a third more weights than one of four bits, of Q2_K's twice as many
@pytest.mark.parametrize("n, k", SHAPES)
@pytest.mark.parametrize(
    "format, most", [("Q6_K", 4.0), ("Q3_K", 5.0), ("IQ4_XS", 6.0), ("Q2_K", 6.0)]
)
def test_one_row_of_several_planes(format, most, n, k):
    found = measure(format, n, k, 1)
    assert (
        found.instructions_per_quant_byte is not None and found.instructions_per_quant_byte <= most
    )
    assert found.spill_bytes == 0
    assert found.mix["load global 128"] >= quant_loads(found)


@pytest.mark.parametrize("format, instructions", SMALL_BLOCKS.items())
def test_one_row_of_small_blocks(format, instructions):
    found = measure(format, 4864, 4096, 1)
    assert (
        found.instructions_per_quant_byte is not None
        and found.instructions_per_quant_byte <= instructions
    )
    assert found.spill_bytes == 0 and found.widest_load == 128
    assert found.mix["load global 128"] >= quant_loads(found)


@pytest.mark.parametrize("n, k", SHAPES)
def test_q4_k_four_rows(n, k):
    found = measure("Q4_K", n, k, 4)
    assert (
        found.instructions_per_quant_byte is not None and found.instructions_per_quant_byte <= 6.0
    )
    assert found.spill_bytes == 0
    assert found.mix["load global 128"] >= quant_loads(found)


def attention_kernel(
    dtype: str,
    head_dim: int,
    group: int,
    batch: int = 1,
    num_kv_heads: int = 8,
    value_dim: int | None = None,
    lanes: bool = False,
    **options: Any,
) -> Kernel:
    """Tuned attention with contexts of 4096 tokens; `lanes` selects pages of 8 tokens."""
    heads = num_kv_heads * group, num_kv_heads, head_dim
    page_size = 8 if lanes else 16
    return KERNELS["paged_attention"](
        batch=batch,
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        num_pages=1024,
        page_size=16,
        pages_per_sequence=256,
        scale=head_dim**-0.5,
        dtype=dtype,
        config=choose(paged_attention_rule, batch, *heads, 4096, dtype, value_dim, page_size),
        **options,
    )


@pytest.mark.slow("assembles many kernels", quick=["f16-group=4"])
@pytest.mark.parametrize(
    "dtype, group", [("bf16", 4), ("bf16", 7), ("f16", 4), ("f32", 4), ("fp8", 4), ("fp8", 8)]
)
def test_paged_attention_reads_pages_in_wide_loads(dtype, group):
    """Loads K and V of several tokens at once, as wide as tuning chooses.

    Only loads of page ids are narrower.

    All loads stay in flight.
    """
    kernel = attention_kernel(dtype, 128, group, lanes=True)
    found = figures(kernel, "sm_90")
    bits = 8 * kernel.arguments["config"].load_bytes
    loads = {
        category: count for category, count in found.mix.items() if category.startswith("load")
    }
    assert set(loads) == {f"load global {bits}", "load global 32"}
    tokens = loads["load global 32"]  # one page id each
    assert loads[f"load global {bits}"] == 2 * tokens
    in_flight = (
        32
        * kernel.arguments["config"].warps
        * found.blocks_per_multiprocessor
        * tokens
        * (2 * bits // 8 + 4)
    )
    assert found.bytes_in_flight == in_flight
    assert found.spill_bytes == 0


#: Instructions of the hot loop per value of K and V and query of a lane.
@pytest.mark.slow("assembles many kernels", quick=["bf16-group=4-instructions=2.6"])
@pytest.mark.parametrize(
    "dtype, group, instructions",
    [("bf16", 4, 2.6), ("bf16", 8, 2.3), ("int8", 4, 2.3), ("int8", 8, 2.3), ("fp8", 8, 2.5)],
)
def test_instructions_of_paged_attention(dtype, group, instructions):
    kernel = attention_kernel(dtype, 128, group, batch=8, lanes=True)
    config, size = kernel.arguments["config"], {"bf16": 2}.get(dtype, 1)
    assert config.queries == group
    products = 2 * config.unroll * config.load_bytes // size * group
    found = figures(kernel, "sm_90", predict_time=False)
    assert found.loop_instructions <= instructions * products


@pytest.mark.slow("assembles many kernels")
def test_paged_attention_never_spills():
    """A block takes any group of up to eight query heads, for every page dtype.

    The test covers every architecture.
    """
    kernels = {}
    for dtype, head_dim in (("f32", 80), ("f32", 256), ("bf16", 240), ("int8", 240), ("fp8", 96)):
        for group in (1, 2, 4, 5, 8):
            kernel = attention_kernel(dtype, head_dim, group, batch=4, lanes=True)
            assert kernel.arguments["config"].queries == group
            kernels[kernel.text] = f"{dtype} head_dim={head_dim} group={group}"
    assert spilled(kernels) == {}


#: Options that use most registers besides keys and values.
SCORING = dict(window=1000, soft_cap=30.0, sinks=True)


def registers(operands: str) -> set[int]:
    return {int(number) for number in re.findall(r"\bR(\d+)", operands)}


def loaded(instruction: SassInstruction) -> set[int]:
    """Registers that an instruction loads from global memory; empty for others."""
    if not instruction.category.startswith("load global"):
        return set()
    first = min(registers(instruction.operands.split(",")[0]))
    return set(range(first, first + -(-load_bits(instruction.opcode) // 32)))


#: A step has 16 tokens: 8192 bytes of bf16, which take 1770 issue slots at an H200's bandwidth.
@pytest.mark.parametrize(
    "dtype, group, most",
    [
        ("bf16", 2, 300),
        ("bf16", 4, 300),
        ("bf16", 8, 300),
        ("bf16", 16, 380),
        ("f16", 8, 310),
        ("int8", 4, 450),
        ("int8", 8, 450),
        ("int8", 16, 540),
        ("fp8", 8, 620),
    ],
)
def test_a_step_of_attention_by_tensor_cores(dtype, group, most):
    """Limits instructions; loads are in flight for at least a quarter of a round, without moves."""
    kernel = attention_kernel(dtype, 128, group)
    assert kernel.arguments["config"].tensor_cores
    found = code(kernel, "sm_90").body
    assert found.issued() <= most
    products = 32 if group <= 8 else 64  # scores and values: 8 and 16 products of 16 x 8 x 16
    assert found.count("mma") == products
    size = PAGE_TYPES[dtype].size
    assert found.count("load global 128") == 2 * 16 * 128 * size // (32 * 16)
    both = found.instructions * 2
    pages = set[int]()
    for i, instruction in enumerate(found.instructions):
        if "LDG.E.128" not in instruction.opcode:
            continue
        filled = loaded(instruction)
        pages |= filled
        after = enumerate(both[i + 1 :])
        distance = next(n for n, later in after if registers(later.operands) & filled)
        assert distance >= len(found) / 4, instruction
    moves = [
        i
        for i in found.instructions
        if i.opcode.startswith(("MOV", "IMAD.MOV"))
        and registers(i.operands.split(",", 1)[1]) & pages
    ]
    assert moves == []


@pytest.mark.slow("assembles many kernels")
def test_attention_by_tensor_cores_never_spills():
    """Groups of any size, on every architecture."""
    kernels = {}
    for dtype in TYPES:
        for group in (3, 4, 8, 9, 16):
            for options in ({}, SCORING) if group in (8, 16) else ({},):
                kernel = attention_kernel(dtype, 128, group, batch=4, **options)
                assert kernel.arguments["config"].tensor_cores
                assert kernel.arguments["config"].queries == group
                kernels[kernel.text] = f"{dtype} group={group} {options}"
        for head_dim in (32, 64, 80, 112):
            for group in (8, 16):
                kernel = attention_kernel(dtype, head_dim, group, batch=4, **SCORING)
                kernels[kernel.text] = f"{dtype} head_dim={head_dim} group={group}"
    assert spilled(kernels) == {}


@pytest.mark.slow("assembles many kernels")
def test_attention_of_wide_heads_never_spills():
    """A block takes groups of up to 16 query heads of 512 dimensions, on every architecture."""
    kernels = {}
    for dtype in PAGE_TYPES:
        for head_dim, group in ((512, 1), (512, 2), (512, 4), (512, 8), (512, 16), (272, 8)):
            for options in ({}, SCORING) if group in (4, 8) else ({},):
                kernel = attention_kernel(dtype, head_dim, group, num_kv_heads=2, **options)
                config = kernel.arguments["config"]
                assert config.queries * config.teams == group
                kernels[kernel.text] = f"{dtype} head_dim={head_dim} group={group} {options}"
    assert spilled(kernels) == {}


@pytest.mark.slow("assembles many kernels")
def test_attention_of_latent_pages_never_spills():
    """A block takes up to 32 query heads, so 128 heads need four blocks, on every architecture.

    Clusters divide 20 heads over float32 pages.
    """
    kernels = {}
    for dtype in PAGE_TYPES:
        for group in (1, 2, 5, 16, 20, 32, 128):
            for options in ({}, SCORING) if group == 16 else ({},):
                latent = dict(num_kv_heads=1, value_dim=512)
                kernel = attention_kernel(dtype, 576, group, **latent, **options)
                divided = (dtype, group) == ("f32", 20)
                assert kernel.grid[0] == (10 if divided else -(-group // 32))
                kernels[kernel.text] = f"{dtype} group={group} {options}"
        for head_dim, value_dim in ((576, 576), (288, 256), (64, 32), (544, 96)):
            kernel = attention_kernel(dtype, head_dim, 16, num_kv_heads=1, value_dim=value_dim)
            kernels[kernel.text] = f"{dtype} {head_dim}/{value_dim}"
    assert spilled(kernels) == {}


@pytest.mark.parametrize("n, k", SHAPES)
def test_q4_k_float_activations(n, k):
    config = PRESETS["fused_f32"]
    kernel = KERNELS["matvec"](format="Q4_K", n=n, columns=k, m=1, config=config)
    found = figures(kernel, "sm_90", predict_time=False)
    assert found.instructions_per_quant_byte is not None
    assert found.instructions_per_quant_byte <= FLOAT_INSTRUCTION_BUDGET <= 8.0
    assert found.narrowest_load == found.widest_load == 128
    assert found.spill_bytes == 0


def test_presets_never_spill():
    """Presets with Q4_K; those with int8 activations with the other formats, too.

    Presets for several rows are built with the maximum number of rows and with few.
    """
    kernels = {}
    for name, config in PRESETS.items():
        for format in PRODUCTS if config.activations == "q8_1" else ("Q4_K",):
            for m in (1, 8) if name in ("batched", "fused_f32") else (1,):
                kernel = KERNELS["matvec"](format=format, n=4096, columns=4096, m=m, config=config)
                kernels[kernel.text] = f"{name} {format} m={m}"
    assert spilled(kernels) == {}


@pytest.mark.slow("assembles many kernels")
def test_tuned_kernels_never_spill():
    """Every number of activation rows, on every architecture."""
    kernels = {}
    for format in PRODUCTS:
        small = formats.get(format).block_size == 32  # where rows are no multiples of 256
        for n, k in (
            SMALL_SHAPES
            if small
            else ((4096, 4096), (4096, 14336), (512, 256), (512, 1024), (1024, 768))
        ):
            for m in range(1, MAX_ROWS + 1):
                config = choose(matvec_rule, format, n, k, m)
                kernel = KERNELS["matvec"](format=format, n=n, columns=k, m=m, config=config)
                kernels[kernel.text] = f"{format} {n}x{k} m={m}"
    assert spilled(kernels) == {}


@pytest.mark.slow("assembles dozens of kernels", quick=["Q4_K-Q4_K-Q6_K"])
@pytest.mark.parametrize(
    "kinds", [("Q4_K", "Q4_K", "Q6_K"), ("Q5_K",) * 3, ("Q8_0",) * 3], ids="-".join
)
def test_projections_that_append_never_spill(kinds):
    """Tuned kernels for one to eight tokens, with heads of several sizes."""
    kernels = {}
    for heads, kv_heads, head_dim, columns in ((32, 8, 128, 4096), (8, 2, 64, 2048)):
        sizes = dict(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
        rows = heads * head_dim, kv_heads * head_dim, kv_heads * head_dim
        for m in (1, 2, 4, 8):
            config = choose(qkv_append_rule, True, kinds, rows, columns, m)
            norm = {"norm": True, "eps": 1e-5} if config.activations != "q8_1" else {}
            for pages, interleaved in (("bf16", True), ("fp8", False)):
                kernel = KERNELS["qkv_append_matvec"](
                    **dict(formats=kinds, columns=columns, m=m, config=config, **norm),
                    **dict(rope_dim=head_dim, interleaved=interleaved, pages=pages),
                    **dict(num_pages=64, page_size=16, **sizes),
                )
                kernels[kernel.text] = f"{sizes} m={m} {pages}"
    assert spilled(kernels) == {}


@pytest.mark.parametrize(
    "batch, kv_heads, capacity",
    [(1, 8, 256), (1, 8, 32768), (4, 8, 4096), (3, 2, 1000), (33, 8, 4096)],
)
def test_attention_splits_a_context_into_one_wave(batch, kv_heads, capacity):
    config = choose(paged_attention_rule, batch, 4 * kv_heads, kv_heads, 128, capacity, "bf16")
    blocks = batch * kv_heads
    assert config.splits * blocks <= max(blocks, 264) and capacity / config.splits >= 64
    more = (config.splits + 1) * blocks > 264 or capacity / (config.splits + 1) < 64
    # eight is the largest cluster; 32 clusters of eight would not all run at once
    assert more or (config.cluster and config.splits == (8 if blocks < 32 else 7))
    assert choose(paged_attention_rule, batch, 4 * kv_heads, kv_heads, 128, 255, "bf16").splits == 1


def _attention_seconds(config: PagedAttentionConfig, batch: int, tokens: int, dtype: str) -> float:
    """Attention with 8 KV heads of four query heads each, including the merge if there is one."""
    shape, pages = dict(batch=batch, num_heads=32, head_dim=128), batch * tokens // 16
    attention = KERNELS["paged_attention"](
        **shape,
        num_kv_heads=8,
        num_pages=pages,
        page_size=16,
        pages_per_sequence=tokens // 16,
        scale=1.0,
        dtype=dtype,
        config=config,
    )
    kernels = [attention]
    if not config.cluster:
        merge = choose(merge_attention_rule, 128, config.splits)
        kernels.append(KERNELS["merge_attention"](**shape, splits=config.splits, config=merge))
    times = [figures(kernel, "sm_90").seconds for kernel in kernels]
    return sum(time for time in times if time is not None)


@pytest.mark.slow(
    "simulates attention of long contexts",
    quick=["batch=1-tokens=512-bf16", "batch=1-tokens=1024-int8"],
)
@pytest.mark.parametrize(
    "batch, tokens, dtype",
    [(1, n, "bf16") for n in (512, 4096, 32768)]
    + [(2, 1024, "bf16"), (4, 512, "bf16"), (1, 4096, "f32"), (1, 1024, "int8")],
)
def test_a_cluster_is_no_slower_than_a_launch_that_merges(batch, tokens, dtype):
    """For any context length with 16-bit pages, as predicted for an H200."""
    shape = batch, 32, 8, 128, tokens, dtype
    config = choose(paged_attention_rule, *shape)
    apart = paged_attention_rule(target("any", 132), *shape)
    assert config.cluster and not apart.cluster and apart.splits >= config.splits
    times = [_attention_seconds(each, batch, tokens, dtype) for each in (config, apart)]
    assert times[0] < times[1]


@pytest.mark.slow("simulates attention of long contexts", quick=["*value_dim=None*"])
@pytest.mark.parametrize(
    "num_heads, num_kv_heads, head_dim, value_dim, least",
    [(32, 4, 512, None, 32), (20, 1, 576, 512, 16)],
)
def test_blocks_of_few_tokens_at_a_time_take_shorter_parts(
    num_heads, num_kv_heads, head_dim, value_dim, least
):
    """Gemma 4's global layers and GLM 4.7 Flash, with contexts that leave blocks idle.

    Times are predicted for an H200 without clusters, and include the cost of merging more parts.
    """

    def seconds(splits: int) -> float:
        shape = dict(batch=1, num_heads=num_heads)
        attention = KERNELS["paged_attention"](
            **shape,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            num_pages=32,
            page_size=16,
            pages_per_sequence=32,
            scale=1.0,
            dtype="bf16",
            config=replace(config, splits=splits),
        )
        merge = KERNELS["merge_attention"](
            **shape,
            head_dim=value_dim or head_dim,
            splits=splits,
            config=choose(merge_attention_rule, value_dim or head_dim, splits),
        )
        times = [figures(kernel, "sm_90").seconds for kernel in (attention, merge)]
        return sum(time for time in times if time is not None)

    shape = 1, num_heads, num_kv_heads, head_dim, 512, "bf16", value_dim
    config = paged_attention_rule(target("any", 132), *shape)
    assert config.splits == 512 // least
    assert seconds(config.splits) < 0.75 * seconds(512 // 64)


@pytest.mark.slow("assembles and simulates large kernels")
@pytest.mark.parametrize(
    "num_heads, num_kv_heads, head_dim, value_dim, tokens, queries",
    [
        (20, 1, 576, 512, 512, 2),
        (16, 2, 256, None, 2048, 2),
        (32, 4, 512, None, 1024, 4),
    ],
)
def test_few_contexts_divide_their_query_heads(
    num_heads, num_kv_heads, head_dim, value_dim, tokens, queries
):
    """GLM 4.7 Flash, Qwen 3.6 35B-A3B, and Gemma 4's global layers, as predicted for an H200.

    The other Config is that of a device of unknown name, which has no clusters. A context of 32768
    tokens is split instead.
    """
    shape: dict[str, Any] = dict(batch=1, num_heads=num_heads, head_dim=head_dim)
    heads = 1, num_heads, num_kv_heads, head_dim

    def seconds(config: PagedAttentionConfig) -> float:
        kernels = [
            KERNELS["paged_attention"](
                **shape,
                num_kv_heads=num_kv_heads,
                value_dim=value_dim,
                num_pages=tokens // 16,
                page_size=16,
                pages_per_sequence=tokens // 16,
                scale=1.0,
                dtype="bf16",
                config=config,
            )
        ]
        if not config.cluster:
            merge = choose(merge_attention_rule, value_dim or head_dim, config.splits)
            merged = shape | {"head_dim": value_dim or head_dim, "splits": config.splits}
            kernels.append(KERNELS["merge_attention"](**merged, config=merge))
        found = [figures(kernel, "sm_90") for kernel in kernels]
        assert [each.spill_bytes for each in found] == [0] * len(found)
        return sum(each.seconds for each in found if each.seconds is not None)

    config = choose(paged_attention_rule, *heads, tokens, "bf16", value_dim)
    assert config.cluster and config.teams == 1 and config.queries == queries
    whole = paged_attention_rule(target("any", 132), *heads, tokens, "bf16", value_dim)
    assert seconds(config) < 0.9 * seconds(whole)
    long = choose(paged_attention_rule, *heads, 32768, "bf16", value_dim)
    assert not long.cluster and long.queries * long.teams > queries


def test_slim_kernels_live_in_the_registers_of_64_resident_warps():
    config = MatvecConfig(lanes=32, unroll=1, warps=32, resident_blocks=2)
    kernel = KERNELS["matvec"](format="Q4_K", n=4096, columns=4096, m=1, config=config)
    found = figures(kernel, "sm_90")
    assert (found.registers, found.spill_bytes, found.blocks_per_multiprocessor) == (32, 0, 2)


def test_without_room_for_a_block_there_are_figures_but_no_prediction():
    """The kernel needs 199 KB of shared memory; a multiprocessor of sm_80 has 163 KB."""
    config = GemmConfig(row_warps=8, column_warps=1, tiles=2, m_tile=64, stages=2, products="f16")
    kernel = KERNELS["gemm"](format="Q6_K", n=4096, columns=14336, m=512, config=config)
    found = figures(kernel, "sm_80")
    assert (found.blocks_per_multiprocessor, found.occupancy, found.seconds) == (0, 0, None)
    assert found.registers > 0 and found.instructions_per_quant_byte is not None


def float_kernels() -> dict[str, Kernel]:
    """Tuned mat-vecs with float activations: plain, after a norm, gated, and for q, k, v."""
    found = {}
    for format in PRODUCTS:
        for n, columns in ((64, 1280), (4096, 4096)):
            for m in (1, 2, 3, 4, 8):
                shape = {"columns": columns, "m": m}
                label = f"{format} {n}x{columns} m={m}"
                for dtype in ("f32", "bf16") if format == "Q4_K" else ("f32",):
                    config = choose(float_matvec_rule, (format,), (n,), columns, m)
                    found[f"{label} {dtype}"] = KERNELS["matvec"](
                        format=format, n=n, dtype=dtype, config=config, **shape
                    )
                if m in (1, 8) and n == 4096 and format in ("Q4_K", "Q5_K", "Q6_K"):
                    norm = {"norm": True, "eps": 1e-5} if m == 1 else {}
                    pair, rows = (format, format), (n, 1024)
                    config = choose(float_matvec_rule, pair, (n,), columns, m, bool(norm))
                    found[f"gated {label}"] = KERNELS["gated_matvec"](
                        formats=pair, n=n, config=config, **shape, **norm
                    )
                    config = choose(float_matvec_rule, pair, rows, columns, m, bool(norm))
                    found[f"qkv {label}"] = KERNELS["qkv_matvec"](
                        formats=pair, rows=rows, config=config, **shape, **norm
                    )
    return found


@pytest.mark.slow("assembles many kernels")
def test_float_mat_vecs_never_spill():
    """Every format with up to eight rows of activations, on every architecture."""
    assert spilled({kernel.text: label for label, kernel in float_kernels().items()}) == {}
