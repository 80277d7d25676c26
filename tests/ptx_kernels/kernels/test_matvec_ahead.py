"""Loading weights before their iteration, or spread over lanes, changes no bit of the results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ptx_kernels.kernels import KERNELS
from ptx_kernels.kernels.matvec import PRESETS, MatvecConfig
from ptx_kernels.kernels.operands import random_operands
from ptx_kernels.machine_code.ptxas import TARGETS, assemble
from ptx_kernels.machine_code.sass import disassemble
from ptx_kernels.ptx import KernelError
from ptx_kernels.simulator import run

INLINE = replace(PRESETS["inline_q8"], warps=2, resident_blocks=2)
NORM = dict(norm=True, eps=1e-5)
HEADS = dict(
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rope_dim=32,
    num_pages=2,
    page_size=4,
    pages="bf16",
    columns=2048,
    m=2,
)


def both(family: str, configs: list[MatvecConfig], **arguments):
    """Returns the results of each Config for the same operands."""
    kernels = [KERNELS[family](**arguments, config=config) for config in configs]
    operands = random_operands(kernels[0], seed=3)
    return [[np.asarray(y) for y in run(kernel, *operands)] for kernel in kernels]


def check(family: str, config: MatvecConfig, **arguments) -> None:
    """Loads ahead of use, or sharing headers between lanes, give the bits of plain loads."""
    configs = [replace(config, ahead=True), replace(config, broadcast_header=False)]
    for ahead, plain in zip(*both(family, configs, **arguments), strict=True):
        np.testing.assert_array_equal(ahead, plain)
        assert np.any(plain)


@pytest.mark.grid
@pytest.mark.parametrize("format", ["Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q5_0", "IQ2_XS"])
@pytest.mark.parametrize(
    ("unroll", "trips", "rest"), [(1, 3, 0), (2, 3, 0), (2, 5, 256), (3, 5, 256)]
)
def test_formats(format, unroll, trips, rest):
    """Loops of one block, of two with a remainder, and with a remainder for some lanes.

    The last team of warps is partial.
    """
    lanes = 32 if format == "IQ2_XS" else 8
    columns = 256 * 32 // lanes * trips + rest
    config = replace(INLINE, lanes=lanes, unroll=unroll)
    norm = NORM if columns <= 4096 else {}
    check("matvec", config, format=format, n=7, columns=columns, m=1, **norm)


@pytest.mark.grid
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize(
    "changes",
    [
        dict(persistent=2),
        dict(persistent=3, rows_per_warp=1),
        dict(persistent=2, rows_per_warp=4, unroll=1),
        dict(warps=4, warps_per_row=2, persistent=2),
        dict(activations="q8_1"),
        dict(activations="f32", stage="whole", unroll=1),
    ],
    ids=str,
)
def test_rounds_of_rows(m, changes):
    """A warp loads its next rows before it stores the last ones; the last team has fewer rows."""
    config = replace(INLINE, **changes)
    norm = {} if config.activations == "q8_1" else NORM
    check("matvec", config, format="Q4_K", n=27, columns=2048, m=m, **norm)


def test_columns_that_are_less_than_a_trip():
    check("matvec", replace(INLINE, persistent=1), format="Q4_K", n=9, columns=512, m=1, **NORM)


@pytest.mark.parametrize("formats", [("Q4_K", "Q4_K"), ("Q4_K", "Q6_K")], ids=str)
def test_a_pair(formats):
    """The second matrix's first iteration is loaded after the first matrix, then the next rows."""
    config = replace(INLINE, warps=8, rows_per_warp=4, unroll=1, persistent=2)
    check("gated_matvec", config, formats=formats, n=96, columns=2048, m=1, output="q8_1", **NORM)


@pytest.mark.parametrize("format", ["Q4_K", "Q5_K"])
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_headers_that_lanes_share(format, lanes):
    """Each lane loads a word of its block's header and gets the others from its neighbors."""
    columns = 256 * 32 // lanes * 2
    config = replace(INLINE, lanes=lanes, unroll=1, broadcast_header=True, persistent=1)
    check("matvec", config, format=format, n=7, columns=columns, m=1, **NORM)


@pytest.mark.slow(
    "simulates or assembles large kernels",
    quick=["*'lanes': 4*-interleaved=False"],
)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("changes", [{}, dict(lanes=4, unroll=1, broadcast_header=True)], ids=str)
def test_joined_products(interleaved, changes):
    """A format without a header loads as usual."""
    config = replace(INLINE, persistent=3, **changes)
    formats = ("Q4_K", "Q4_K", "Q6_K")
    check("qkv_append_matvec", config, formats=formats, interleaved=interleaved, **HEADS, **NORM)


@pytest.mark.slow("simulates or assembles large kernels")
def test_weights_are_asked_for_before_activations_are_staged():
    """The first load of a plane precedes the first barrier in machine code."""
    kernel = KERNELS["matvec"](
        format="Q6_K",
        n=128256,
        columns=4096,
        m=1,
        residual=True,
        config=replace(INLINE, warps=16, lanes=4, unroll=1, ahead=True, resident_blocks=1),
    )
    for arch in TARGETS:
        code = disassemble(assemble(kernel.text, arch).cubin)
        barrier = next(n for n, i in enumerate(code) if i.name == "BAR")
        assert any(".128.CONSTANT" in i.opcode for i in code[:barrier]), arch


def test_chunks_are_refused():
    with pytest.raises(KernelError, match="ahead=True needs whole rows of activations"):
        config = replace(PRESETS["chunked"], ahead=True)
        KERNELS["matvec"](format="Q4_K", n=8, columns=512, m=1, config=config)
