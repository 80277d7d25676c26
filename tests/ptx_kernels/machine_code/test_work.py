"""Work of a launch, from its arguments and its machine code."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.format_lists import PRODUCTS

from ptx_kernels.kernels import CASES, KERNELS
from ptx_kernels.kernels.attention import PagedAttentionConfig
from ptx_kernels.kernels.gated_delta import GatedDeltaRuleConfig
from ptx_kernels.kernels.matvec import PRESETS, matvec_rule
from ptx_kernels.machine_code import work
from ptx_kernels.machine_code.ptxas import assemble
from ptx_kernels.machine_code.report import code, figures, work_of_loops
from ptx_kernels.machine_code.sass import Loop, disassemble, hot_loop, load_bits
from ptx_kernels.ptx import Builder, Kernel, f32, kernel
from ptx_kernels.tuning import choose


def loop_of(kernel: Kernel) -> Loop:
    loop = hot_loop(disassemble(assemble(kernel.text, "sm_90").cubin))
    assert loop is not None
    return loop


def attention(**changes) -> Kernel:
    sizes = dict(
        batch=2,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        num_pages=64,
        page_size=16,
        pages_per_sequence=8,
    )
    return KERNELS["paged_attention"](**(sizes | dict(scale=0.125, dtype="bf16") | changes))


LATENT = dict(num_heads=8, num_kv_heads=1, head_dim=320, value_dim=256)


@pytest.mark.slow("assembles two kernels a format", quick=["Q2_K", "Q3_K", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("format", PRODUCTS)
def test_loads_tell_the_same_as_dot_products(format):
    """Weights per iteration, counted by dp4a and by the loads of packed weights.

    For f32 activations, loads are counted.
    """
    # 87 and 96 times 256 columns: with and without a remainder, in more iterations than ptxas
    # unrolls
    for preset, columns, m in (("quarter_warp_dp4a", 256 * 87, 1), ("batched", 256 * 96, 3)):
        config = PRESETS[preset]
        kernel = KERNELS["matvec"](format=format, n=64, columns=columns, m=m, config=config)
        loop = loop_of(kernel)
        # dp4a of four weights: Q2_K's sums are shared by two rows
        each = {("Q2_K", 1): 1.5, ("Q2_K", 3): 1.5, ("Q3_K", 1): 2}.get((format, m), 1)
        by_dots = loop.count("dp4a") * 4 / m / each
        constant = sum(".CONSTANT" in i.opcode for i in loop.instructions)
        assert (
            constant * work.weights_per_load((format,), config)
            == by_dots
            == work.weights_per_trip(kernel, work.packed_weights(kernel), loop)
        )


@pytest.mark.parametrize("preset", ["tiled", "chunked"])
def test_staged_activations_change_no_load_of_weights(preset):
    """k = 9472 is one chunk of 8192 columns and a partial one.

    Each float in shared memory serves two rows.
    """
    kernel = KERNELS["matvec"](format="Q4_K", n=64, columns=37 * 256, m=1, config=PRESETS[preset])
    loop = loop_of(kernel)
    floats = sum(load_bits(i.opcode) for i in loop.instructions if i.name == "LDS") / 32
    assert work.work(kernel, loop).quant_bytes == floats * PRESETS[preset].rows_per_warp / 2


def test_work_of_a_matvec():
    """Two loads, header and quants, for each row and step.

    The activations are f32, so there is no dp4a to count.
    """
    config = PRESETS["fused_f32"]
    kernel = KERNELS["matvec"](format="Q4_K", n=64, columns=4096, m=2, config=config)
    loop = loop_of(kernel)
    found = work.work(kernel, loop)
    # header and quants
    steps = sum(".CONSTANT" in i.opcode for i in loop.instructions) / (2 * config.rows_per_warp)
    weights = 256 // config.lanes * config.rows_per_warp * steps
    assert found.quant_bytes == weights / 2
    assert found.trips == 64 * 4096 / (weights * 32)
    assert found.nbytes == 64 * 16 * 144 + 2 * 4096 * 4 + 2 * 64 * 4


def test_loops_of_joined_matrices():
    """Each matrix has a loop for its format; the first, for the largest matrix, represents all."""
    formats = ("Q4_K", "Q4_K", "Q6_K")
    kernel = KERNELS["qkv_matvec"](
        formats=formats, rows=(64, 32, 32), columns=8192, m=1, config=PRESETS["quarter_warp_dp4a"]
    )
    machine = code(kernel, "sm_90")
    loops, found = machine.stretches.peers, [*work_of_loops(kernel, machine)]
    assert [loop.count("dp4a") for loop in loops] == [loops[0].count("dp4a")] * 3
    assert loops[0] == machine.body and len(loops[2]) > len(loops[0])
    low, _, high = (each.quant_bytes for each in found)
    assert low * 6 == high * 4 and {each.trips for each in found} == {found[0].trips}


def test_loops_of_joined_matrices_on_tensor_cores():
    """Each loop takes as many instructions as its format alone, though product counts differ."""
    (case,) = (case for case in CASES if case.label == "qkv_gemm-Q4_K-Q6_K-m8")
    kernels = [
        KERNELS["qkv_gemm"](**case.arguments | {"formats": formats})
        for formats in (case.arguments["formats"], ("Q4_K",) * 3, ("Q6_K",) * 3)
    ]
    machines = [code(kernel, "sm_90") for kernel in kernels]
    both, low, high = (machine.stretches.peers for machine in machines)
    assert [loop.count("mma") for loop in both] == [
        loop.count("mma") for loop in (*low[:2], high[2])
    ]
    assert machines[0].body == both[2]  # the one with most products, which all blocks wait for
    for loop, alone in zip(both, (*low[:2], high[2]), strict=True):
        assert loop.issued() == pytest.approx(alone.issued(), rel=0.03)
    found = [each.quant_bytes for each in work_of_loops(kernels[0], machines[0])]
    assert found == [64, 64, 96]  # 16 rows of 256 weights
    assert figures(kernels[0], "sm_90").instructions_per_quant_byte == both[2].issued() / 96


def test_work_without_a_loop():
    kernel = KERNELS["quantize_q8_1"](rows=3, columns=4096)
    found = work.work(kernel, Loop(()), whole=True)
    assert found.trips == kernel.grid[0] * kernel.grid[1] * kernel.block[0] / 32
    assert found.nbytes == 3 * 4096 * (4 + 1) + 3 * 128 * 8
    assert found.quant_bytes is None


def test_a_loop_that_ptxas_unrolled_away():
    """Two iterations of the text's loop make up the kernel; each warp runs them once."""
    kernel = KERNELS["matvec"](
        format="Q6_K", n=4096, columns=4096, m=1, config=choose(matvec_rule, "Q6_K", 4096, 4096, 1)
    )
    all_of_it = disassemble(assemble(kernel.text, "sm_90").cubin)
    assert hot_loop(all_of_it) is None
    found = work.work(kernel, Loop(all_of_it), whole=True)
    assert found.trips == kernel.grid[0] * 4
    assert found.trips * found.quant_bytes * 32 == 4096 * 4096 * 6 / 8


def test_only_what_is_touched_counts():
    tables_and_lengths = 2 * 8 * 4 + 2 * 4
    heads = 2 * 8 * 64 * 4
    assert work.traffic(attention()) == 2 * (16 * 2 * 16 * 64 * 2) + 2 * heads + tables_and_lengths
    few = attention(num_pages=4)
    assert work.traffic(few) == 2 * (4 * 2 * 16 * 64 * 2) + 2 * heads + tables_and_lengths
    window = attention(window=32)  # of 128 tokens
    assert work.traffic(window) == 2 * (4 * 2 * 16 * 64 * 2) + 2 * heads + tables_and_lengths
    append = KERNELS["append_kv"](
        tokens=3, num_pages=64, num_kv_heads=2, page_size=16, head_dim=64, dtype="f32"
    )
    assert work.traffic(append) == 2 * (3 * 2 * 64 * 4) * 2 + 3 * 4
    lookup = KERNELS["decode"](format="Q4_K", n=1000, blocks=2, dtype="f32", lookups=5)
    assert work.traffic(lookup) == 5 * 2 * 144 + 5 * 512 * 4 + 5 * 4


@pytest.mark.parametrize(
    "changes, read",
    [
        ({}, 2 * 1),
        (dict(config=PagedAttentionConfig(warps=2, queries=2, unroll=4)), 2 * 2),
        (dict(config=PagedAttentionConfig(warps=4, unroll=2, splits=3)), 2 * 1),
        # latent rows: each team reads the values by wide loads, the rest by narrow ones
        (dict(LATENT, config=PagedAttentionConfig(4, 2, 2, teams=4)), 4),
    ],
    ids=["whole", "halves", "splits", "teams"],
)
def test_attention_reads_its_pages_by_16_byte_loads(changes, read):
    """All tokens of two sequences, times `read` for keys, values, and groups of query heads."""
    kernel = attention(**changes)
    loop = loop_of(kernel)
    wide = loop.count("load global 128")
    found = work.work(kernel, loop)
    heads, width = kernel.arguments["num_kv_heads"], kernel.arguments["value_dim"] or 64
    asked = found.trips * wide * 16 * 32
    assert asked == read * 2 * padded(kernel) * heads * width * 2


def padded(kernel: Kernel) -> int:
    """Tokens of a sequence's rounds: 128, divided over splits and rounded up to full rounds."""
    config, latent = kernel.arguments["config"], kernel.arguments["value_dim"]
    step = (1 if latent else 4) * config.warps // config.teams * config.unroll
    share = -(-128 // config.splits)
    rest = 128 - (config.splits - 1) * share
    return step * ((config.splits - 1) * -(-share // step) + -(-rest // step))


def test_a_state_is_read_and_written():
    """Stores of results determine the iterations if the hot loop loads only from shared memory."""
    heads = dict(num_k_heads=1, num_v_heads=2, key_dim=128, value_dim=64)
    config = GatedDeltaRuleConfig(4, 8, 2, tokens=4)
    kernel = KERNELS["gated_delta_rule"](batch=3, time=10, scale=1.0, config=config, **heads)
    loop = loop_of(kernel)
    found = work.work(kernel, loop)
    state, tokens = 3 * 2 * 128 * 64 * 4, 3 * 10 * (2 * 128 + 2 * 2 * 64 + 2 * 2) * 4
    assert found.nbytes == 2 * state + tokens
    # three rounds of four tokens, 24 blocks of four warps
    assert found.trips * loop.count("store global") == 3 * 4 * (3 * 2 * 2) * 4


def test_every_case_is_understood():
    """Counts bytes of every kernel; for products also weights and formats."""
    for case in CASES:
        kernel = KERNELS[case.family](**case.arguments)
        touched = sum(b.nbytes for b in kernel.buffers if b.name not in ("k_pages", "v_pages"))
        moved = sum(b.nbytes for b in (*kernel.operands, *kernel.results))
        assert 0 < work.traffic(kernel) <= moved
        if packed := work.packed_weights(kernel):
            assert set(packed.formats) <= set(work.QUANT_BITS)
            bits = 8 * touched / packed.count
            assert min(work.QUANT_BITS[format] for format in packed.formats) < bits


def test_a_kernel_of_no_family():
    """Its bytes are known, but its iterations only if it has no loop."""

    @kernel
    def double(k: Builder, *, n: int) -> None:
        x, y = k.input("x", f32, (n,)), k.output("y", f32, (n,))
        k.launch((-(-n // 256),), 256)
        i = k.block_id() * 256 + k.thread_id
        with k.when(i < n):
            y.store(i, x.load(i) * 2.0)

    for given in (double(n=1000), replace(double(n=1000), family="", arguments={})):
        assert work.work(given, Loop(())) == work.Work(8000, None, None)
        assert work.work(given, Loop(()), whole=True) == work.Work(8000, 4 * 8, None)
        found = figures(given, "sm_90")
        assert (found.nbytes, found.instructions_per_quant_byte) == (8000, None)
        assert found.seconds is not None


@pytest.mark.parametrize("head_dim", [64, 80])
def test_a_step_of_tensor_cores_is_a_trip(head_dim):
    """An iteration covers 16 tokens of a sequence and KV head, for any width of loads."""
    config = PagedAttentionConfig(queries=4, tensor_cores=True)
    kernel = attention(config=config, head_dim=head_dim)
    assert work.work(kernel, loop_of(kernel)).trips == 2 * 2 * 8
    kernel = attention(config=config, head_dim=head_dim, window=33)
    assert work.work(kernel, loop_of(kernel)).trips == 2 * 2 * 3


def test_blocks_that_share_a_group_read_its_pages_each():
    whole, halves = (attention(config=PagedAttentionConfig(queries=queries)) for queries in (4, 2))
    found = [work.work(kernel, loop_of(kernel)) for kernel in (whole, halves)]
    assert found[0].nbytes == found[1].nbytes
    assert found[1].trips == 2 * found[0].trips
