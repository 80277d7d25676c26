"""Launches of a decode step by kind of layer, compiled for an H200 without a GPU.

Covers delta nets with attention, windowed with global layers, and latent attention. Contexts have
512 tokens: attention is split, and merging the parts is a launch.
"""

from __future__ import annotations

import dataclasses

import pytest
from support.paths import ROOT

from jax_q4k import models
from jax_q4k.models.config import Config
from tools import aot, layer_times
from tools.launches import layer_launches, page_array
from tools.random_model import (
    GEMMA_4_31B,
    GLM_4_7_FLASH,
    QWEN_3_6_35B_A3B,
    first_layers,
)
from tools.thunks import Array

pytestmark = pytest.mark.skipif(aot.unavailable() is not None, reason=str(aot.unavailable()))


DOCUMENT = ROOT / "docs/predictions.md"


@dataclasses.dataclass(frozen=True)
class Kind:
    """A layer among a shape's first ones, our kernels in it, and the maximum of XLA's launches."""

    name: str
    config: Config
    layer: int
    ours: tuple[str, ...]
    others: int

    def __str__(self) -> str:
        return self.name


QWEN, GEMMA = first_layers(QWEN_3_6_35B_A3B, 4), first_layers(GEMMA_4_31B, 6)
GLM = first_layers(GLM_4_7_FLASH, 2)

# A shared expert is one of the experts.
_EXPERTS = ("router", "routed_shared_gated_matvec", "mixture_shared_matvec")
_MLP = ("gated_matvec", "matvec")
# output and network, each with its norm, which adds the residual
_SANDWICHED = ("matvec", "rms_norm", *_MLP, "rms_norm")

KINDS = [
    # All projections of x are one launch.
    Kind("delta", QWEN, 0, ("qkv_matvec", "gated_delta_step", "matvec", *_EXPERTS), 0),
    Kind(
        "gated-attention",
        QWEN,
        3,
        ("qkv_matvec", "rope_append", "paged_attention", "matvec", *_EXPERTS),
        0,
    ),
    # XLA multiplies by the layer's scale.
    Kind(
        "local",
        GEMMA,
        0,
        ("qkv_matvec", "rope_append", "paged_attention", *_SANDWICHED),
        1,
    ),
    Kind(
        "global",
        GEMMA,
        5,
        ("qkv_matvec", "rope_append", "paged_attention", *_SANDWICHED),
        1,
    ),
    Kind(
        "latent",
        GLM,
        1,
        (
            *("qkv_matvec", "matvec", "rope_append", "expert_matvec"),
            *("paged_attention", "expert_matvec", "matvec", *_EXPERTS),
        ),
        0,
    ),
]


#: Maximum predicted microseconds of a layer, in the order of `layer_times.LAYERS`.
PREDICTED = [
    ("Qwen 3.6 35B-A3B", {"delta net": 33, "attention": 38}),
    ("Gemma 4 31B", {"local": 111, "global": 131}),
    ("GLM 4.7 Flash", {"latent attention": 51}),
]


def family(name: str) -> str:
    """Strips formats and rows from a kernel's name."""
    return name.partition("_q4_k")[0].partition("_q6_k")[0].partition("_q5_0")[0]


@pytest.mark.slow("compiles layers of five models for a GPU", quick=["latent"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_launches_of_a_layer(kind, record_property):
    program = layer_times.decode_step(kind.config).program
    launches = layer_launches(program, kind.layer)
    ours = [family(t.name) for t in launches if t in program.ptx_launches]
    record_property(
        "figure",
        f"{kind.config.architecture} {kind.name} layer, ahead of time for an H200: "
        f"{len(launches)} launches, {len(ours)} of them ours",
    )
    assert sorted(ours) == sorted(kind.ours)
    assert len(launches) - len(ours) <= kind.others


@pytest.mark.slow("assembles and simulates every kernel of a layer")
@pytest.mark.parametrize("model, most", PREDICTED, ids=lambda x: x if isinstance(x, str) else "")
def test_predicted_time_of_a_layer(model, most, record_property):
    config, kinds = layer_times.LAYERS[model]
    times = layer_times.times_of(model, config, kinds)
    record_property("figure", "\n" + layer_times.table(times))
    assert {time.kind for time in times} == most.keys()
    documented = DOCUMENT.read_text()
    for time in times:
        assert time.limit < time.seconds <= 1e-6 * most[time.kind]
        # the rest of the row is a prediction, which changes with ptxas's version
        exact = f"{time.launches} | {time.ours} | {time.nbytes / 1e6:.1f} | {time.limit * 1e6:.1f}"
        assert f"| {model}, {time.kind} | {exact} |" in documented


def test_bytes_of_a_layer():
    """Counts the bytes of one of Qwen 3.6's delta nets by hand."""
    matrices = 2048 * (8192 + 4096 + 2 * 32 + 4096)  # for x, and for the output
    experts = 9 * 3 * 512 * 2048  # eight selected and one shared
    floats = 4 * 8192 + 2 * 32 + 128 + 2 * 2048 + (256 + 1) * 2048
    state = 2 * 32 * 128 * 128 + 4 * 8192
    packed = (matrices + experts) * 144 // 256
    assert layer_times.layer_bytes(QWEN, 0) == packed + 4 * (floats + state)


@pytest.mark.parametrize("config", [QWEN, GEMMA, GLM], ids=lambda config: config.architecture)
def test_neither_pages_nor_states_are_copied(config):
    _, arguments, program = layer_times.decode_step(config)
    cache = next(x for x in arguments if isinstance(x, models.PagedCache))
    kept = [Array("bf16", page.shape) for pages in cache.pages for page in pages]
    kept += [Array("f32", part.shape) for state in cache.states for part in state]
    assert len(kept) >= config.num_layers
    # a ring of columns is as small as other results of a step; pages and matrices are larger
    large = {array for array in kept if array.elements > 1 << 16}
    assert page_array(arguments) in large
    assert [t for array in large for t in program.rewrites(array)] == []
