"""Configs of fused mat-vecs build for any model's shapes, fit the device, and never spill."""

from __future__ import annotations

import pytest
from support.assembled import spilled

from ptx_kernels.devices import DEVICES, target
from ptx_kernels.formats import get, names
from ptx_kernels.kernels.matvec import (
    PRESETS,
    MatvecConfig,
    fused_matvec_rule,
    gated_matvec,
    matvec,
    qkv_matvec,
)
from ptx_kernels.kernels.matvec.rows import launch
from ptx_kernels.kernels.matvec.rules import BYTES_AHEAD
from ptx_kernels.machine_code.model import predict
from ptx_kernels.machine_code.report import code, figures
from ptx_kernels.machine_code.report import launch as launch_of
from ptx_kernels.ptx import Builder, Kernel
from ptx_kernels.tuning import choose


def product(
    formats: tuple[str, ...], rows: tuple[int, ...], columns: int, m: int, norm: bool, output: str
) -> Kernel:
    """One matrix gets a residual, two with equal rows are gated, others are one launch."""
    config = choose(
        fused_matvec_rule,
        formats,
        rows[:1] if len(set(rows)) == 1 else rows,
        columns,
        m,
        norm,
        output,
    )
    common = dict(
        columns=columns,
        m=m,
        norm=norm and config.activations == "inline_q8",
        eps=1e-5,
        config=config,
    )
    if len(formats) == 1:
        return matvec(format=formats[0], n=rows[0], residual=True, output=output, **common)
    if len(set(rows)) == 1:
        return gated_matvec(formats=formats, n=rows[0], output=output, **common)
    return qkv_matvec(formats=formats, rows=rows, biases=True, **common)


@pytest.mark.slow("builds hundreds of kernels")
@pytest.mark.parametrize("m", [1, 8])
def test_models_of_all_sizes_build(m: int) -> None:
    for hidden, kv, inner in [
        (32, 32, 96),
        (256, 64, 704),
        (896, 128, 4864),
        (3584, 512, 18944),
        (16384, 1024, 53248),
    ]:
        for format in names():
            if hidden % get(format).block_size:
                continue
            product((format,) * 3, (hidden, kv, kv + 1), hidden, m, True, "f32")
            product((format,) * 2, (inner, inner), hidden, m, True, "q8_1")
            product((format,), (hidden,), hidden, m, False, "f32")


def test_small_matrices_take_all_the_blocks_they_can() -> None:
    assert choose(fused_matvec_rule, ("Q4_K",), (1,), 256, 1).rows_per_warp == 1
    assert choose(fused_matvec_rule, ("Q4_K", "Q6_K"), (512, 64), 4096, 1).rows_per_warp == 1
    assert choose(fused_matvec_rule, ("Q4_K", "Q6_K"), (4096, 1024), 4096, 1).rows_per_warp == 2


@pytest.mark.parametrize(
    "columns, m, activations", [(4096, 4, "inline_q8"), (4096, 5, "q8_1"), (18944, 1, "q8_1")]
)
def test_each_block_normalizes_while_that_is_little_work(
    columns: int, m: int, activations: str
) -> None:
    config = choose(fused_matvec_rule, ("Q4_K", "Q4_K"), (14336,), columns, m, True, "q8_1")
    assert config.activations == activations


def test_a_prologue_runs_once_a_block_and_blocks_share_rows_evenly() -> None:
    config: MatvecConfig = choose(
        fused_matvec_rule, ("Q4_K", "Q4_K"), (14336,), 4096, 1, True, "q8_1"
    )
    # 448 groups of 32 rows: four rounds on 132 multiprocessors
    assert config.block_rows == 32 and config.persistent == 224
    # 256 blocks: one wave
    assert choose(fused_matvec_rule, ("Q4_K",), (4096,), 4096, 1, True).persistent == 0


@pytest.mark.parametrize(
    "rows", [(14336, 3584, 3584), (8192, 1024, 1024), (5120, 2048, 2048), (12800, 16, 16)]
)
def test_matrices_of_one_launch_share_the_rounds_evenly(rows: tuple[int, ...]) -> None:
    """No matrix keeps a block busy for longer than if all rows belonged to one matrix.

    All blocks are resident.
    """
    config: MatvecConfig = choose(fused_matvec_rule, ("Q4_K",) * 3, rows, 4096, 1, True)
    groups = [-(-n // config.block_rows) for n in rows]
    blocks = launch(Builder("joined"), config, *rows)
    assert 0 < config.persistent < sum(groups) and sum(blocks) <= 132 * config.resident_blocks
    rounds = [-(-each // count) for each, count in zip(groups, blocks, strict=True)]
    assert max(rounds) == -(-sum(groups) // config.persistent)


@pytest.mark.parametrize("format", ["Q4_K", "Q6_K"])
def test_weights_of_long_rows_are_under_way_where_no_table_decides(format: str) -> None:
    """A multiprocessor has at least 48 KB in flight; a load's first use is half a loop later."""
    device = DEVICES["H100"]
    config = fused_matvec_rule(target(device.name), (format,), (4096,), 14336, 1)
    kernel = matvec(format=format, n=4096, columns=14336, m=1, residual=True, config=config)
    machine = code(kernel, device.arch)
    asked = launch_of(kernel, machine)
    assert asked is not None and predict(asked, device).bytes_in_flight >= BYTES_AHEAD
    for loop in machine.stretches.peers:
        distance = loop.load_to_use(
            lambda i: i.category.startswith("load global") and ".CONSTANT" in i.opcode
        )
        assert distance is not None and distance >= 0.5


def test_none_spills() -> None:
    kernels = {}
    for m in (1, 4, 8):
        for formats, rows, columns in [
            (("Q4_K", "Q4_K", "Q6_K"), (4096, 1024, 1024), 4096),
            (("Q4_K", "Q6_K", "Q6_K"), (8192, 512, 512), 2048),  # one loop trip, several rounds
            (("Q5_K", "Q5_K"), (14336, 14336), 4096),
            (("Q4_K", "Q4_K"), (14336, 14336), 4096),
            (("Q4_K",), (4096,), 4096),
        ]:
            for norm in (True, False) if len(rows) > 1 else (False,):
                output = "q8_1" if len(rows) == 2 else "f32"
                kernels[product(formats, rows, columns, m, norm, output).text] = (
                    f"{formats} {rows} m={m} norm={norm}"
                )
    assert spilled(kernels) == {}


@pytest.mark.parametrize(
    "formats, rows, output, budget",
    [
        (("Q4_K",), (4096,), "f32", 3.5),
        (("Q4_K", "Q4_K"), (14336, 14336), "q8_1", 3.5),
        (("Q4_K", "Q4_K", "Q6_K"), (4096, 1024, 1024), "f32", 3.8),
    ],
)
@pytest.mark.parametrize("norm", [False, True])
def test_fusing_costs_no_instructions_in_the_loop(
    formats, rows, output: str, budget: float, norm: bool
) -> None:
    """Budgets of the plain mat-vec hold, per byte of quants.

    They also hold with the activations in shared memory.
    """
    kernel = product(formats, rows, 4096, 1, norm, output)
    found = figures(kernel, "sm_90", predict_time=False)
    assert (
        found.instructions_per_quant_byte is not None
        and found.instructions_per_quant_byte <= budget
    )
    assert found.spill_bytes == 0 and found.widest_load == 128 and found.loads_in_flight >= 4


@pytest.mark.parametrize("preset", ["tiled", "chunked"])
@pytest.mark.parametrize("columns", [4096, 14336])
def test_f32_activations_in_shared_memory(preset: str, columns: int) -> None:
    kernel = matvec(format="Q4_K", n=4096, columns=columns, m=1, config=PRESETS[preset])
    found = figures(kernel, "sm_90", predict_time=False)
    assert found.instructions_per_quant_byte is not None and found.instructions_per_quant_byte <= 8
    assert found.spill_bytes == 0 and found.widest_load == 128
