"""Products with experts selected by ids in device memory, against float64.

Some ids of the subjects select no expert; their choice gives zeros, or adds nothing.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.assembled import spilled
from support.format_lists import PRODUCTS
from support.subjects.experts import (
    EXPERTS,
    IDS,
    expert_gated_subject,
    expert_gemm_subject,
    expert_matvec_subject,
    mixture_subject,
    route_subject,
    routed_gated_subject,
    router_subject,
)

from ptx_kernels import simulator
from ptx_kernels.kernels.gemm import GemmConfig
from ptx_kernels.kernels.matvec import (
    PRESETS,
    MatvecConfig,
    expert_matvec_rule,
    gated_matvec,
    matvec,
    matvec_rule,
    mixture_matvec,
    mixture_matvec_rule,
)
from ptx_kernels.kernels.matvec.mixture import choices_at_once
from ptx_kernels.kernels.route import Routing
from ptx_kernels.kernels.router import router, router_rule
from ptx_kernels.machine_code.report import figures
from ptx_kernels.ptx import Kernel, KernelError
from ptx_kernels.tuning import choose

INLINE = PRESETS["inline_q8"]
GROUPS = replace(INLINE, rows_per_warp=4, resident_blocks=2)  # a block has 32 rows
DP4A = PRESETS["quarter_warp_dp4a"]
FLOATS = replace(PRESETS["fused_f32"], rows_per_warp=2)
SUBJECTS = {
    "matvec": functools.partial(expert_matvec_subject, DP4A),
    "matvec-f32": functools.partial(expert_matvec_subject, PRESETS["multi_warp"], "Q5_K"),
    "matvec-persistent": functools.partial(
        expert_matvec_subject, replace(INLINE, warps=1, persistent=2)
    ),
    "gated": functools.partial(expert_gated_subject, DP4A, "swiglu_oai", n=7),
    "gated-f32": functools.partial(
        expert_gated_subject, replace(PRESETS["tiled"], rows_per_warp=2), "gelu", n=9
    ),
    "gated-q8_1": functools.partial(expert_gated_subject, GROUPS, "silu", "q8_1", n=32),
    "gated-persistent": functools.partial(
        expert_gated_subject, replace(GROUPS, persistent=2), "silu", "q8_1", n=96
    ),
    "gemm": functools.partial(expert_gemm_subject, GemmConfig(1, 2, 1, 16, 3)),
    "gemm-rows_of_a_block": functools.partial(
        expert_gemm_subject, GemmConfig(2, 1, 1, 32, 2), "Q8_0", n=64, columns=96 * 2
    ),
    "gemm-fewer_rows_than_a_tile": functools.partial(
        expert_gemm_subject, GemmConfig(1, 1, 2, 64, 2), "Q6_K", n=10, columns=256
    ),
    "routed": functools.partial(routed_gated_subject, INLINE, "softmax", n=9),
    "routed-q8_1": functools.partial(routed_gated_subject, GROUPS, "sigmoid", "q8_1", n=32),
    "routed-persistent": functools.partial(
        routed_gated_subject, replace(GROUPS, persistent=2), "softmax", "q8_1", n=96
    ),
    "routed-f32": functools.partial(
        routed_gated_subject, replace(PRESETS["tiled"], rows_per_warp=2), "sigmoid", n=9
    ),
    "shared": functools.partial(routed_gated_subject, INLINE, "softmax", n=9, shared=True),
    "shared-q8_1": functools.partial(
        routed_gated_subject, GROUPS, "sigmoid", "q8_1", n=32, shared=True, gated_by=True
    ),
    "shared-ahead": functools.partial(
        *(routed_gated_subject, replace(GROUPS, ahead=True, persistent=2), "softmax", "q8_1"),
        n=96,
        shared=True,
        gated_by=True,
    ),
    "shared-mixture": functools.partial(mixture_subject, DP4A, shared=True),
    "shared-mixture-f32": functools.partial(mixture_subject, FLOATS, "Q6_K", shared=True),
    "router-small": functools.partial(router_subject, 1, 100),
    "router-whole": functools.partial(router_subject, 8, 512, norm=False, biases=True),
    "router-rest": functools.partial(router_subject, 2, 1284, biases=True),
    "router-joined": functools.partial(router_subject, 3, 100, rows=(5, 1, 3), biases=True),
    "route": functools.partial(route_subject, "softmax", experts=64, top=6),
    "route-all": functools.partial(route_subject, "sigmoid", experts=5, top=5),
    "mixture": functools.partial(mixture_subject, DP4A),
    "mixture-f32": functools.partial(mixture_subject, FLOATS, "Q6_K"),
    "mixture-several_warps": functools.partial(
        mixture_subject, replace(DP4A, warps_per_row=2, persistent=1), columns=512
    ),
    **{
        f"mixture-{format}": functools.partial(mixture_subject, DP4A, format, columns=352)
        for format in ("MXFP4", "Q8_0", "Q5_1")
    },
    "mixture-all_streams": functools.partial(
        mixture_subject, MatvecConfig(lanes=4, unroll=1), "IQ4_NL", columns=2080
    ),
}


@pytest.mark.parametrize("label", SUBJECTS)
def test_equals_float64(label: str) -> None:
    assert SUBJECTS[label]().passes()


def test_choices_that_name_no_expert_read_nothing() -> None:
    """Ignores NaN in their weights and activations, and in matrices that no id selects."""
    subject = mixture_subject(DP4A)
    operands = [np.copy(x) for x in subject.operands]
    none = (IDS < 0) | (IDS >= EXPERTS)
    operands[1][none] = np.nan
    scale_sum = next(x for x in operands if x.ndim == 3 and x.shape[0] == IDS.size)
    scale_sum[none.ravel()] = np.nan
    for stacked in operands[2:]:
        if stacked.shape[:1] == (EXPERTS,):
            stacked[1] = 255 if stacked.dtype == np.uint8 else np.nan
    assert 1 not in IDS
    assert subject.holds(simulator.run(subject.kernel, *operands))


def test_a_part_of_the_streams_has_whole_lines() -> None:
    """Loads several choices at once, to have as few iterations as possible.

    Each choice gets streams for 256 columns, or all streams.
    """
    eight, all_lanes = DP4A, MatvecConfig(lanes=32)
    assert choices_at_once(eight, "Q4_K", 768, 8) == 4  # each of four streams has three blocks
    assert choices_at_once(eight, "Q4_K", 512, 10) == 2  # of four, a fourth would be idle
    assert choices_at_once(eight, "Q4_K", 14336, 2) == 2
    assert choices_at_once(eight, "MXFP4", 2880, 4) == 4
    assert choices_at_once(eight, "Q4_K", 768, 1) == 1
    assert choices_at_once(all_lanes, "Q4_K", 768, 8) == 1


def chosen_kernels() -> dict[str, Kernel]:
    """Kernels with the rules' Configs, and with everything that the products can be fused with."""
    found = {}
    n, k, m, experts, top = 14336, 4096, 8, 8, 2
    common: dict[str, Any] = dict(m=m, experts=experts, top=top, biases=True)
    for columns, rows in ((2048, 1), (2880, 8), (7168, 8)):
        found[f"router {columns}"] = router(
            rows=(511, 1),
            columns=columns,
            m=rows,
            norm=True,
            eps=1e-6,
            biases=True,
            config=choose(router_rule, columns),
        )
    for format in PRODUCTS:
        for exact in (False, True):
            label = f"{format}{', f32' if exact else ''}"
            output, pair = "f32" if exact else "q8_1", (format, format)
            config = choose(expert_matvec_rule, pair, n, k, m * top, True, output, exact)
            around: dict[str, Any] = dict(
                formats=pair,
                n=n,
                columns=k,
                activation="swiglu_oai",
                norm=True,
                eps=1e-6,
                output=output,
                config=config,
            )
            found[f"gated {label}"] = gated_matvec(**around, **common)
            if format in ("Q4_K", "MXFP4"):
                many = {"experts": 512, "top": 32, "routing": Routing(top=32, bias=True)}
                found[f"routed {label}"] = gated_matvec(**around, **(common | many))
                shared = {"biases": False, "shared": True, "shared_gate": True, "top": 31}
                many |= {"routing": Routing(top=31, bias=True)}
                found[f"shared {label}"] = gated_matvec(**around, **(common | many | shared))
            config = choose(mixture_matvec_rule, format, k, n, m, exact)
            sizes: dict[str, Any] = dict(format=format, n=k, columns=n, residual=True)
            found[f"mixture {label}"] = mixture_matvec(
                scales=True, config=config, **sizes, **common
            )
            if not exact:
                found[f"shared mixture {label}"] = mixture_matvec(
                    shared=True, config=config, **sizes, **(common | {"biases": False})
                )
    return found


@pytest.mark.slow("assembles a hundred kernels")
def test_chosen_kernels_never_spill() -> None:
    assert spilled({kernel.text: label for label, kernel in chosen_kernels().items()}) == {}


def test_static_budgets() -> None:
    """Instructions per byte of quants on an H200 are those of a dense row with all choices.

    Each kernel has its own rule's Config.
    """
    sizes = dict(format="Q4_K", n=2048, m=1)
    config = choose(mixture_matvec_rule, "Q4_K", 2048, 768, 1)
    kernel = mixture_matvec(columns=768, experts=128, top=8, residual=True, config=config, **sizes)
    mixture = figures(kernel, "sm_90")
    config = choose(matvec_rule, "Q4_K", 2048, 768 * 8, 1)
    dense = figures(matvec(columns=768 * 8, config=config, **sizes), "sm_90")
    assert mixture.instructions_per_quant_byte is not None
    assert mixture.instructions_per_quant_byte <= min(3.5, 1.10 * dense.instructions_per_quant_byte)
    assert mixture.spill_bytes == 0 and mixture.bytes_in_flight >= 26 << 10


@pytest.mark.slow("assembles kernels of full size")
@pytest.mark.parametrize("format", ["Q2_K", "Q3_K", "Q6_K", "MXFP4"])
def test_few_large_experts_take_the_instructions_of_a_dense_row(format: str) -> None:
    sizes: dict[str, Any] = dict(format=format, n=4096, m=1)
    config = choose(mixture_matvec_rule, format, 4096, 1536, 1)
    kernel = mixture_matvec(columns=1536, experts=16, top=2, residual=True, config=config, **sizes)
    config = choose(matvec_rule, format, 4096, 1536 * 2, 1)
    mixture, dense = (
        figures(one, "sm_90", predict_time=False)
        for one in (kernel, matvec(columns=1536 * 2, config=config, **sizes))
    )
    assert mixture.instructions_per_quant_byte is not None
    assert mixture.instructions_per_quant_byte <= 1.10 * dense.instructions_per_quant_byte


def test_a_prologue_that_chooses_keeps_the_budget() -> None:
    """Routing keeps the instructions of the loop over weights, in Qwen3-30B-A3B's shape."""
    config = choose(expert_matvec_rule, ("Q4_K", "Q4_K"), 768, 2048, 8, True, "q8_1")
    sizes = dict(formats=("Q4_K", "Q4_K"), n=768, columns=2048, m=1, experts=128, top=8)
    around = dict(norm=True, eps=1e-6, output="q8_1", config=config)
    given, routed = (
        figures(gated_matvec(**sizes, **around, **routing), "sm_90", predict_time=False)
        for routing in ({}, {"routing": Routing(top=8)})
    )
    assert given.instructions_per_quant_byte is not None
    assert routed.instructions_per_quant_byte <= 1.05 * given.instructions_per_quant_byte
    assert routed.spill_bytes == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(top=0), "experts=4 and top=0 must both be at least 1"),
        (dict(shared=True, biases=True), "a shared expert has no bias or scale"),
        (dict(shared=True, scales=True), "a shared expert has no bias or scale"),
        (dict(config=INLINE), "activations are q8_1 or f32, .* not inline_q8"),
        (dict(config=PRESETS["chunked"]), "not f32, stage='chunks'"),
        (dict(config=MatvecConfig(lanes=32, broadcast_header=True)), "not q8_1, .*True"),
    ],
)
def test_mixtures_refuse(arguments: dict, message: str) -> None:
    sizes = dict(format="Q4_K", n=4, columns=256, m=1, experts=4, top=2, config=DP4A)
    with pytest.raises(KernelError, match=message):
        mixture_matvec(**(sizes | arguments))


def test_a_routing_and_a_router_refuse() -> None:
    sizes = dict(formats=("Q4_K",) * 2, n=4, columns=256, m=1, experts=4, top=2, config=INLINE)
    with pytest.raises(KernelError, match="top=2 must be the routing's, 3"):
        gated_matvec(**sizes, routing=Routing(top=3))
    with pytest.raises(KernelError, match="top=2 of experts=1"):
        gated_matvec(**(sizes | dict(experts=1)), routing=Routing(top=2))
    with pytest.raises(KernelError, match="gating='relu' must be softmax or sigmoid"):
        gated_matvec(**sizes, routing=Routing(top=2, gating="relu"))
    with pytest.raises(KernelError, match="1 to 512 in total, m=9 at most 8, .*=6 a multiple"):
        router(rows=(512, 1), columns=6, m=9)
    with pytest.raises(KernelError, match="shared=True and gated=True need a routing"):
        gated_matvec(**sizes, shared=True)
    with pytest.raises(
        KernelError, match="top=2, shared=False, gated=True: .* a shared one is gat"
    ):
        gated_matvec(**sizes, routing=Routing(top=2), shared_gate=True)
    with pytest.raises(KernelError, match="top=32, shared=True, .* at most 32 experts"):
        gated_matvec(**(sizes | dict(experts=40, top=32, shared=True)), routing=Routing(top=32))
    with pytest.raises(KernelError, match="a shared expert has no bias or scale"):
        gated_matvec(**sizes, routing=Routing(top=2), shared=True, biases=True)


def test_layers_and_experts_are_not_both_stacks() -> None:
    sizes = dict(format="Q4_K", n=4, columns=256, m=1, experts=4, top=2, config=DP4A)
    with pytest.raises(KernelError, match="layers=2, experts=4"):
        matvec(**sizes, layers=2)
    with pytest.raises(KernelError, match="experts=4 and top=0"):
        matvec(**(sizes | dict(top=0)))
