"""The cost model's predictions for launched kernels, where exact counts are known."""

from __future__ import annotations

import functools

import pytest

from ptx_kernels.devices import REFERENCE
from ptx_kernels.kernels import KERNELS
from ptx_kernels.kernels.attention import paged_attention_rule
from ptx_kernels.kernels.gemm import GemmConfig
from ptx_kernels.kernels.matvec import fused_matvec_rule
from ptx_kernels.machine_code.accesses import accesses
from ptx_kernels.machine_code.model import Prediction, predict
from ptx_kernels.machine_code.report import code, figures, launch
from ptx_kernels.ptx import Kernel
from ptx_kernels.tuning import choose
from tools import aot
from tools.program_kernels import Asked, program_kernels

pytestmark = pytest.mark.skipif(aot.unavailable() is not None, reason=str(aot.unavailable()))

SHAPE = "llama-3.1-8b"


def of_program(batch: int, family: str, n: int, columns: int) -> Kernel:
    """Returns the product of a decode step with these rows and columns of Q4_K weights.

    Several of its launches may differ in what they prefetch.
    """
    found = [
        kernel
        for kernel in program_kernels(Asked(SHAPE, batch=batch)).kernels
        if kernel.family == family
        and (kernel.arguments.get("n"), kernel.arguments["columns"]) == (n, columns)
        and "Q4_K" in (kernel.arguments.get("format"), *kernel.arguments.get("formats", ()))
    ]
    assert len({kernel.arguments["config"] for kernel in found}) == 1
    return found[0]


@functools.cache
def predicted(kernel: Kernel) -> Prediction:
    asked = launch(kernel, code(kernel, REFERENCE.arch))
    assert asked is not None
    return predict(asked, REFERENCE)


def test_activations_in_reading_order_do_not_bind_few_rows():
    """The mat-vec of attention's output with four rows has no bank conflicts, and L1 keeps up."""
    config = choose(fused_matvec_rule, ("Q4_K",), (4096,), 4096, 4, True)
    kernel = KERNELS["matvec"](
        format="Q4_K", n=4096, columns=4096, m=4, residual=True, config=config
    )
    assert config.activations == "inline_q8" and accesses(kernel).shared_excess <= 1.1
    found = predicted(kernel)
    assert found.bound != "l1" and found.bounds["l1"] < 1.5 * found.bounds["bandwidth"]


def small_tiles(n: int) -> Kernel:
    """A product of 32 rows in blocks of 16 weight rows, with four column warps each."""
    config = GemmConfig(row_warps=1, column_warps=4, tiles=1, m_tile=32, stages=3)
    return KERNELS["gemm"](format="Q4_K", n=n, columns=4096, m=32, config=config)


def test_small_tiles_read_activations_again():
    """Blocks of 16 weight rows read 33 MB of weights, and 147 MB of activations through the L2."""
    kernel = small_tiles(14336)
    blocks = kernel.grid[0] * kernel.grid[1]
    counted = accesses(kernel)
    assert blocks * counted.memory_bytes == pytest.approx(33.0e6, rel=0.01)
    assert blocks * counted.l2_bytes == pytest.approx(33.0e6 + 147e6 + 4 * 32 * 14336, rel=0.02)
    found = predicted(kernel)
    assert found.bounds["l2"] > 25e-6


@pytest.mark.slow("simulates kernels of full size")
def test_bytes_in_flight_are_different_ones():
    """Four lanes load a word each of a super-block's header: no byte counts twice.

    For gate and up, the next iteration's weights are in flight with the current ones, for four rows
    a warp. For down, it is three blocks a lane.
    """
    gated = predicted(of_program(1, "gated_matvec", 14336, 4096))
    assert gated.bytes_in_flight == pytest.approx(2 * 36.9e3, rel=0.01)
    down = predicted(of_program(1, "matvec", 4096, 14336))
    assert down.bytes_in_flight == pytest.approx(3 * 36.9e3, rel=0.01)


def test_copies_count_with_their_stages():
    """A ring of three stages holds two steps of 16 rows of four 144-byte blocks.

    One block is resident.
    """
    assert predicted(small_tiles(4096)).bytes_in_flight == 2 * 16 * 4 * 144


@pytest.mark.slow("compiles programs for a GPU")
def test_a_prologue_is_no_part_of_the_stream():
    """The norm before gate and up waits for x and quantizes, while the first weights arrive."""
    found = predicted(of_program(1, "gated_matvec", 14336, 4096))
    assert 1e-6 < found.prologue < 2e-6 and found.first == 0
    assert found.bounds["bandwidth"] > 0.95 * 66e6 / REFERENCE.bandwidth
    assert found.bound == "bandwidth"
    whole = found.prologue + found.bounds["bandwidth"] + 1.3e-6
    assert found.seconds == pytest.approx(whole, rel=1e-6)


@pytest.mark.slow("compiles programs for a GPU")
def test_attention_of_eight_queries_hides_latency_behind_its_work():
    """32 sequences of 4096 tokens: the next iteration's loads are in flight while it computes."""
    heads = 64, 8, 128
    kernel = KERNELS["paged_attention"](
        batch=32,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        num_pages=32 * 256,
        page_size=16,
        pages_per_sequence=256,
        scale=128**-0.5,
        dtype="bf16",
        config=choose(paged_attention_rule, 32, *heads, 4096, "bf16"),
    )
    seconds = figures(kernel, REFERENCE.arch).seconds
    assert seconds is not None and 125e-6 < seconds < 180e-6
