"""Rules depend on the device: they launch as many blocks as its multiprocessors take.

They report where the number comes from.
"""

from __future__ import annotations

import math

import pytest

from ptx_kernels import formats
from ptx_kernels.kernels import KERNELS
from ptx_kernels.kernels.argmax import argmax_splits_rule
from ptx_kernels.kernels.attention import paged_attention_rule
from ptx_kernels.kernels.gemm import (
    GemmConfig,
    expert_gemm_rule,
    f16_products_rule,
    fused_gemm_rule,
    gemm_rule,
)
from ptx_kernels.kernels.gemm import gemm as gemm_kernel
from ptx_kernels.kernels.gemm.tilings import Shape
from ptx_kernels.kernels.matvec import MatvecConfig, fused_matvec_rule, matvec_rule, qkv_matvec
from ptx_kernels.kernels.rms_norm import rms_norm_rule
from ptx_kernels.limits import gemm_takes
from ptx_kernels.tuning import choose, current_device, decide, on_device, tables, target

#: (name from the driver, multiprocessors from the driver or None, the actual number)
DEVICES = [
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 16, 16),
    ("NVIDIA L40", 142, 142),
    ("NVIDIA A100-SXM4-80GB", None, 108),
    ("NVIDIA H100 PCIe", None, 114),
    ("NVIDIA GeForce RTX 4090", None, 128),
    ("NVIDIA GeForce RTX 4090 D", 114, 114),
    ("NVIDIA H200", None, 132),
    ("NVIDIA B200", None, 148),
    ("NVIDIA GeForce RTX 5090", None, 170),
]


@pytest.fixture(autouse=True)
def no_tables(monkeypatch):
    monkeypatch.setattr(tables, "packaged", tuple)


@pytest.fixture(params=DEVICES, ids=lambda device: device[0])
def multiprocessors(request):
    name, reported, count = request.param
    with on_device(target(name, reported)):
        yield count


def test_the_device_is_known(multiprocessors):
    assert (current_device().multiprocessors, current_device().assumed) == (multiprocessors, False)


@pytest.mark.grid
@pytest.mark.parametrize("context", [4096, 131072])
@pytest.mark.parametrize("batch", [1, 3, 40])
def test_attention_splits_into_two_blocks_on_each(multiprocessors, context, batch):
    """The alternative is clusters of eight, with twice the warps if half as many blocks run."""
    config = choose(paged_attention_rule, batch, 32, 8, 128, context, "bf16")
    splits, blocks = config.splits, config.splits * batch * 8
    assert blocks <= max(2 * multiprocessors, batch * 8)
    more = (splits + 1) * batch * 8 > 2 * multiprocessors or context / (splits + 1) < 64
    assert more or (config.cluster and splits == 8)
    assert not config.cluster or splits <= 8
    alone = config.cluster and splits == 8 and not more and blocks <= multiprocessors
    assert (config.warps, config.resident_blocks) == ((8, 1) if alone else (4, 2))


@pytest.mark.parametrize(
    "name, clusters",
    [("NVIDIA A100-SXM4-80GB", False), ("NVIDIA GeForce RTX 4090", False), ("NVIDIA L4", False)]
    + [(name, True) for name in ("NVIDIA H200", "NVIDIA B200", "NVIDIA GeForce RTX 5090")],
)
def test_splits_are_clusters_where_the_device_has_them(name, clusters):
    """An unknown device is assumed to have none."""
    for batch in (1, 4):
        config = paged_attention_rule(target(name), batch, 32, 8, 128, 512, "bf16")
        assert (config.cluster, config.splits > 1) == (clusters, True)
    # with one KV head, few blocks would have all of a long context
    config = paged_attention_rule(target(name), 1, 8, 1, 128, 32768, "bf16")
    assert not config.cluster and config.splits > 8


@pytest.mark.grid
@pytest.mark.parametrize("m", [4, 16, 32, 64])
@pytest.mark.parametrize(("n", "columns"), [(4096, 4096), (4096, 14336), (14336, 4096)])
def test_few_rows_are_dealt_evenly(multiprocessors, n, columns, m):
    """The busiest multiprocessor has at most twice its share of the products."""
    config: GemmConfig = choose(gemm_rule, "Q4_K", n, columns, m)
    kernel = gemm_kernel(format="Q4_K", n=n, columns=columns, m=m, config=config)
    rounds = -(-math.prod(kernel.grid) // multiprocessors)
    busiest = rounds * config.rows * config.m_tile / config.splits
    assert busiest <= 2 * n * max(m, 8) / multiprocessors
    assert config.splits == 1 or current_device().facts.clusters


@pytest.mark.parametrize("m", [8, 16, 32, 64])
@pytest.mark.parametrize("format", ["Q4_K", "Q6_K"])
def test_all_clusters_of_a_product_run_at_once(format, m):
    """Otherwise the last clusters of an H200 would double the time of the launch."""
    products = "f16" if choose(f16_products_rule, (format,), m) else "int8"
    for columns in (4096, 14336):
        shape = Shape(target("NVIDIA H200"), (format,), (4096,), columns, m)
        config = fused_gemm_rule(shape.device, (format,), (4096,), columns, m, "f32", products)
        assert config.splits == 1 or shape.single(config), config


@pytest.mark.parametrize("m", [65, 512])
def test_a_prompts_tiles_are_the_largest_that_fill_the_device(multiprocessors, m):
    config: GemmConfig = choose(gemm_rule, "Q4_K", 4096, 4096, m)
    kernel = gemm_kernel(format="Q4_K", n=4096, columns=4096, m=m, config=config)
    enough = 1.5 * multiprocessors
    assert kernel.grid[0] * kernel.grid[1] >= enough or config.rows * config.m_tile == 256
    if (config.row_warps, config.tiles) != (4, 2):  # twice the rows would give too few blocks
        assert -(-m // config.m_tile) * -(-4096 // (2 * config.rows)) < enough


@pytest.mark.parametrize(
    ("device", "halves"), [("H200", True), ("A100", False), ("B200", False), ("RTX 5090", False)]
)
def test_products_of_halves_where_their_rate_is_known_to_win(device, halves):
    with on_device(target(f"NVIDIA {device}")):
        for m, enough in ((16, False), (17, True), (512, True)):
            found = [choose(f16_products_rule, (f,), m) for f in ("Q4_K", "Q5_K", "Q6_K")]
            assert found == [halves and enough] * 3
        assert not choose(f16_products_rule, ("Q8_0",), 512)
        assert not choose(f16_products_rule, ("Q4_K", "Q8_0"), 512)


@pytest.mark.parametrize(
    ("n", "m"), [(4096, 512), (1024, 512), (1024, 2048), (6144, 512), (128256, 33), (4096, 17)]
)
def test_products_of_halves_are_dealt_evenly(n, m):
    config = choose(fused_gemm_rule, ("Q4_K",), (n,), 4096, m, "f32", "f16")
    kernel = gemm_kernel(format="Q4_K", n=n, columns=4096, m=m, config=config)
    rounds = -(-math.prod(kernel.grid) // 132)
    share = n * -(-m // config.m_tile) * config.m_tile / 132
    assert rounds * config.rows * config.m_tile / config.splits <= 1.6 * share
    assert config.products == "f16" and config.m_tile < m + 16


def test_nobody_knows_an_unknown_device():
    with on_device(target("NVIDIA Unheard Of", 132)):
        assert not choose(f16_products_rule, ("Q4_K",), 512)
        assert choose(fused_gemm_rule, ("Q4_K",), (4096,), 4096, 8).splits == 1


def test_two_rows_a_warp_where_that_fills_the_device(multiprocessors):
    enough = 2 * 4 * multiprocessors
    assert [
        choose(matvec_rule, "Q4_K", n, 4096, 1).rows_per_warp for n in (enough - 1, enough)
    ] == [1, 2]
    fused = [
        choose(fused_matvec_rule, ("Q4_K",) * 2, (n // 2, n - n // 2), 4096, 1)
        for n in (enough - 1, enough)
    ]
    assert [config.rows_per_warp for config in fused] == [1, 2]


@pytest.mark.parametrize("rows", [(4096, 1024, 1024), (28672, 14336), (5000, 5000, 40, 40)])
def test_persistent_blocks_are_one_wave(multiprocessors, rows):
    config: MatvecConfig = choose(fused_matvec_rule, ("Q4_K",) * len(rows), rows, 4096, 1, True)
    kernel = qkv_matvec(formats=("Q4_K",) * len(rows), rows=rows, columns=4096, m=1, config=config)
    assert kernel.grid[0] <= multiprocessors * config.resident_blocks


def test_a_device_of_one_multiprocessor_has_a_choice_for_everything():
    with on_device(target("tiny", 1)):
        for rows in ((1, 1, 1, 1), (4096, 1024, 1024)):
            config = choose(fused_matvec_rule, ("Q4_K",) * len(rows), rows, 4096, 1, True)
            qkv_matvec(formats=("Q4_K",) * len(rows), rows=rows, columns=4096, m=1, config=config)
        assert choose(paged_attention_rule, 1, 32, 8, 128, 131072, "bf16").splits == 1
        assert choose(argmax_splits_rule, 128256) == 1
        KERNELS["gemm"](
            format="Q4_K",
            n=4096,
            columns=4096,
            m=64,
            config=choose(gemm_rule, "Q4_K", 4096, 4096, 64),
        )


def test_a_vocabulary_is_searched_in_one_wave(multiprocessors):
    # at least 1024 values each
    assert min(multiprocessors, 126) - 1 <= choose(argmax_splits_rule, 128256) <= multiprocessors


def test_who_says_how_many():
    def why(device):
        with on_device(device):
            return decide(gemm_rule, "Q4_K", 4096, 4096, 64).why

    assert why(target("NVIDIA A100-SXM4-80GB")).startswith(
        "rule gemm for 108 multiprocessors, no table"
    )
    assert why(target("NVIDIA L40", 58)).startswith(
        "rule gemm for 58 multiprocessors, no table for NVIDIA L40"
    )
    assert why(target("NVIDIA L40")).startswith(
        "rule gemm for 132 multiprocessors of an H200, NVIDIA L40 being unknown, no table"
    )
    assert decide(rms_norm_rule, 4096).why == "rule rms_norm"  # for any device
    assert current_device() == target("H200")


def test_choices_for_one_device_leave_no_trace_on_another():
    def splits(name):
        with on_device(target(name)):
            return choose(paged_attention_rule, 1, 32, 8, 128, 131072, "bf16").splits

    a100, b200 = splits("NVIDIA A100-SXM4-80GB"), splits("NVIDIA B200")
    assert (a100, b200) == (27, 37) == (splits("NVIDIA A100-SXM4-80GB"), splits("NVIDIA B200"))


def test_multiprocessors_come_from_the_device():
    with pytest.raises(TypeError, match="unexpected keyword argument 'multiprocessors'"):
        choose(argmax_splits_rule, 4096, multiprocessors=7)
    with pytest.raises(TypeError, match="multiple values for argument 'device'"):
        choose(argmax_splits_rule, 4096, device=target("any", 7))
    assert argmax_splits_rule(target("any", 7), 128256) == 7
    with pytest.raises(ValueError, match="multiprocessors=0 must be at least 1"):
        target("NVIDIA H200", 0)
    for count in (1.5, float("nan"), True, "132"):
        with pytest.raises(TypeError, match="multiprocessors=.* must be an integer"):
            target("NVIDIA H200", count)
    for name in (None, 5, b"H200"):
        with pytest.raises(TypeError, match="device=.* must be a name as the driver reports it"):
            target(name)


@pytest.mark.parametrize("m", [65, 8192])
@pytest.mark.parametrize("format", [name for name in formats.names() if gemm_takes(name, 4096)])
def test_tiles_of_many_rows_fit_the_memory_of_turing(format, m):
    """Kernels are built for a T4, whose thread blocks have at most 64 KB of shared memory."""
    shape = {"format": format, "n": 1024, "columns": 4096, "m": m}
    with on_device(target("Tesla T4")):
        config = choose(gemm_rule, **shape)
        of_experts = choose(expert_gemm_rule, **shape, experts=8)
        built = [KERNELS["gemm"](**shape, config=each) for each in (config, of_experts)]
    assert max(kernel.dynamic_shared_bytes for kernel in built) <= 64 << 10
    assert {kernel.arguments["oldest"] for kernel in built} == {75}
