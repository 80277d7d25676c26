"""The kernels of whole programs, extrapolated from a few layers."""

from __future__ import annotations

from collections import Counter

import pytest

from jax_q4k import models
from ptx_kernels.machine_code.accesses import accesses
from ptx_kernels.machine_code.work import traffic
from tools import aot
from tools.program_kernels import CACHE_DTYPE, CONTEXT, SHAPES, Asked, program_kernels
from tools.random_model import random_model

pytestmark = pytest.mark.skipif(aot.unavailable() is not None, reason=str(aot.unavailable()))


@pytest.mark.slow("compiles a whole model for a GPU")
def test_few_layers_tell_what_all_launch():
    """Counts each kernel of Llama 3.1 8B and compares with the launches of its compiled program."""
    model = random_model(SHAPES["llama-3.1-8b"], abstract=True)
    function, arguments = models.abstract_programs(
        model, batch=8, capacity=CONTEXT, cache_dtype=CACHE_DTYPE
    )["decode"]
    program = aot.compile_program(function, *arguments, options=models.CUDA_COMPILER_OPTIONS)
    whole = Counter(program.ptx_text(launch) for launch in program.ptx_launches)
    found = program_kernels(Asked("llama-3.1-8b", batch=8))
    assert {kernel.text: count for kernel, count in found.kernels.items()} == whole
    assert found.launches == len(program.launches)


@pytest.mark.slow("compiles models for a GPU")
@pytest.mark.parametrize("shape", SHAPES)
def test_every_layer_has_its_kernels(shape):
    """Each layer has one attention and one input projection; all kernels have operands to model."""
    found = program_kernels(Asked(shape))
    families = Counter()
    for kernel, count in found.kernels.items():
        families[kernel.family] += count
        assert kernel.arguments and kernel.operands
    assert families["paged_attention"] == SHAPES[shape].num_layers
    ways_in = families["qkv_matvec"] + families["qkv_append_matvec"]
    assert ways_in == SHAPES[shape].num_layers
    assert found is program_kernels(Asked(shape))


@pytest.mark.slow("compiles or simulates whole models")
def test_prompts_have_no_loops():
    """Attention over a long prompt is one launch per layer, outside of XLA's loops."""
    found = program_kernels(Asked("llama-3.1-8b", prompt=512))
    assert not any(p.kind == "kWhile" for t, _ in found.xla for p in t.parents)
    attention = [n for kernel, n in found.kernels.items() if kernel.family == "causal_attention"]
    assert sum(attention) == SHAPES["llama-3.1-8b"].num_layers


@pytest.mark.slow("compiles a model for a GPU")
def test_a_piece_reads_the_cache_once_for_many_of_its_tokens():
    """A chunk of 192 tokens after 4096 takes ten launches a layer, with the kernel for prompts."""
    asked = Asked("llama-3.1-8b", prompt=192, before=4096)
    found, layers = program_kernels(asked), SHAPES["llama-3.1-8b"].num_layers
    assert str(asked) == "llama-3.1-8b, prompt of 192 behind 4096" and asked.tokens == 192
    families = Counter()
    for kernel, count in found.kernels.items():
        families[kernel.family] += count
    assert families["causal_attention"] == families["merge_attention"] == layers
    assert not families["paged_attention"] and not families["split_keys"]
    assert found.launches <= 10 * layers + 8
    assert not any(p.kind == "kWhile" for t, _ in found.xla for p in t.parents)
    assert "gemm_fusion_dot" not in found.hlo
    (kernel,) = (k for k in found.kernels if k.family == "causal_attention")
    context, rows = 2 * 8 * 128 * 2 * (4096 + 192), 192 * 32 * 128 * 4
    assert traffic(kernel) < 1.5 * (context + 3 * rows)  # queries, and results in two parts
    tiles = kernel.grid[0] * kernel.arguments["num_kv_heads"]
    blocks = tiles * kernel.arguments["config"].splits
    of_block = accesses(kernel).l2_bytes
    assert of_block * blocks < 1.1 * (tiles * context / 8 + 3 * rows)
