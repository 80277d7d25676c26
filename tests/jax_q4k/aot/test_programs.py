"""Programs compiled for an H200 without a GPU: CUDA graphs, copies, and the cost of a layer."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from support.paths import GOLDEN

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.engine.stages import standard_stages
from jax_q4k.models.kv_cache.shapes import page_kinds
from jax_q4k.models.runner.engine_state import EngineState, Sizes
from jax_q4k.models.runner.engine_steps import DecodeRows, ForwardRows, PrefillPieces, SampleRows
from jax_q4k.models.runner.programs import Decode, compiler_options
from jax_q4k.ops.draw import DrawParameters, draw
from ptx_kernels.machine_code import ptxas
from tools import aot
from tools.launches import layer_launches, page_array
from tools.random_model import LLAMA_3_1_8B, random_model
from tools.thunks import Array

pytestmark = pytest.mark.skipif(aot.unavailable() is not None, reason=str(aot.unavailable()))

MODELS = ["llama-gqa", "llama3-rope", "qwen2-bias", "qwen2-odd", "qwen3-qknorm"]
PROGRAMS = ["prefill", "decode", "generate"]
CAPACITY = 100  # seven pages: no other array has as many elements as a page array


@dataclasses.dataclass(frozen=True)
class Case:
    model: str = "llama-gqa"
    batch: int = 1
    prompt_length: int = 8
    cache_dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.model}-b{self.batch}-t{self.prompt_length}-{self.cache_dtype}"

    def programs(self) -> dict[str, tuple[Any, tuple[Any, ...]]]:
        return models.abstract_programs(
            _model(self.model),
            batch=self.batch,
            prompt_length=self.prompt_length,
            capacity=CAPACITY,
            cache_dtype=jnp.dtype(self.cache_dtype),
        )


class EngineStep(NamedTuple):
    """A compiled step of an engine, and the shapes of the engine's state."""

    program: aot.Program
    state: EngineState


LLAMA = Case()
CASES = [(LLAMA, name) for name in PROGRAMS] + [
    # 96 rows: on tensor cores
    (
        Case(batch=3, prompt_length=32, cache_dtype="bfloat16"),
        "prefill",
    ),
    (Case(batch=3, cache_dtype="bfloat16"), "generate"),
    (Case(cache_dtype="int8"), "generate"),
    *((Case(name), "generate") for name in MODELS[1:]),
]


@functools.cache
def _model(name: str) -> models.Model:
    return models.from_gguf(GOLDEN / f"{name}.Q4_K_M.gguf")


@functools.cache
def compiled(case: Case, name: str) -> aot.Program:
    function, arguments = case.programs()[name]
    return aot.compile_program(function, *arguments, options=models.CUDA_COMPILER_OPTIONS)


@pytest.mark.slow("compiles programs for a GPU", quick=["llama-gqa-b1-t8-float32-decode"])
@pytest.mark.parametrize(("case", "name"), CASES, ids=str)
def test_every_kernel_of_ours_is_in_a_cuda_graph(case, name):
    program = compiled(case, name)
    assert program.ptx_launches
    assert [t for t in program.ptx_launches if not t.is_in("kCommandBuffer")] == []


@pytest.mark.parametrize(("case", "name"), CASES, ids=str)
def test_no_page_array_is_copied(case, name):
    program = compiled(case, name)
    pages = page_array(case.programs()[name][1])
    appending = "rope_append" if name == "prefill" else ("rope_append", "qkv_append_matvec")
    appends = [t for t in program.ptx_launches if t.name.startswith(appending)]
    assert len(appends) == _model(case.model).config.num_layers
    assert all(t.instruction.results[:2] == (pages, pages) for t in appends)
    assert program.rewrites(pages) == []


@functools.cache
def engine_step(name: str, kind: type[PrefillPieces | DecodeRows], rows: int) -> EngineStep:
    """Compiles a step of `rows` of an engine's eight slots, for any sampling parameters.

    A sequence has up to seven pages; there are 29, of each kind of layers.
    """
    (file,) = GOLDEN.glob(f"{name}.*gguf")
    model = models.from_gguf(file)
    kinds, counted = page_kinds(model.config), {"penalizes": True, "history": True}
    sizes = Sizes(8, kinds, (29,) * len(kinds), 7, 5, CAPACITY, **counted)
    options = {"sizes": sizes, "rows": rows, "stages": standard_stages([2]), "skips": True}
    options |= {"time": 16} if kind is PrefillPieces else {}
    program, struct = kind(model.network, **options), jax.ShapeDtypeStruct
    weights = jax.tree.map(lambda leaf: struct(leaf.shape, leaf.dtype), model.weights)
    args = model.config, sizes, jnp.float32, lambda shape, dtype, _: struct(shape, dtype)
    weights = (weights,) if program.takes_weights else ()
    arguments = *weights, EngineState.create(*args), *program.inputs(struct)
    options = models.CUDA_COMPILER_OPTIONS
    compiled = aot.compile_program(program.jitted(), *arguments, options=options)
    return EngineStep(compiled, arguments[len(weights)])


@pytest.mark.slow("compiles programs for a GPU", quick=["llama-gqa-DecodeRows-rows=4"])
@pytest.mark.parametrize("rows", [4, 8])
@pytest.mark.parametrize(
    "kind", [PrefillPieces, DecodeRows, ForwardRows, SampleRows], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "qwen35"])
def test_a_step_of_an_engine_is_one_cuda_graph(name, kind, rows):
    """Kernels of all sampling stages are in it, and no page array is copied."""
    program, state = engine_step(name, kind, rows)
    assert any(t.is_in("kConditional") for t in program.launches) == (kind is not ForwardRows)
    assert [t for t in program.launches if not t.is_in("kCommandBuffer")] == []
    assert [loop.is_in("kCommandBuffer") for loop in program.loops] == [True] * (kind is DecodeRows)
    assert program.ptx_launches
    assert program.rewrites(page_array(state)) == []


def test_xla_sorts_no_vocabulary():
    """Compiles draws from Llama 3's vocabulary.

    On a GPU XLA sorts with CUB, which it runs outside of CUDA graphs: every step would wait for the
    host. Compiled ahead of time, a sort is in the graph.
    """
    logits = jax.ShapeDtypeStruct((2, LLAMA_3_1_8B.vocab_size), jnp.float32)
    kinds = jnp.uint32, jnp.float32, jnp.int32, jnp.float32, jnp.float32, jnp.int32
    parameters = DrawParameters(*(jax.ShapeDtypeStruct((2,), kind) for kind in kinds))
    with jq.implementation("ptx"):
        program = aot.compile_program(jax.jit(draw), logits, parameters)
    assert [t.name.partition("_")[0] for t in program.ptx_launches].count("top") == 4
    assert " sort(" not in program.hlo


@pytest.mark.slow("compiles programs for a GPU")
@pytest.mark.parametrize("rows", [4, 8])
def test_a_decoding_step_of_an_engine_copies_recurrent_states_once(rows):
    """Rows among more slots are gathered before the loop, and written to their slots after it."""
    program, state = engine_step("qwen35", DecodeRows, rows)
    for array in {Array("f32", x.shape) for x in jax.tree.leaves(state.states)}:
        writes = [t.instruction.op_name for t in program.rewrites(array)]
        assert not [name for name in writes if "/while/" in name]
        assert all(name.endswith("/scatter") for name in writes)
        assert bool(writes) == (rows < 8)


def test_explain_names_what_is_launched():
    """`explain` lists the launched kernels with the right counts.

    Only repeated quantization of the same activations differs, since XLA merges it.
    """
    function, arguments = LLAMA.programs()["generate"]
    calls = jq.explain(function, *arguments, platform="cuda").calls
    explained = Counter(kernel.name for call in calls for kernel in call.kernels * call.count)
    launched = Counter(t.name for t in compiled(LLAMA, "generate").ptx_launches)
    assert launched.keys() == explained.keys()
    assert 0 <= explained.pop("quantize_q8_1", 0) - launched.pop("quantize_q8_1", 0)
    assert explained == launched


def test_a_long_prompt_runs_on_tensor_cores():
    case, name = next(case for case in CASES if case[0].prompt_length == 32)
    gemms = [t for t in compiled(case, name).ptx_launches if "gemm_" in t.name]
    of_layer = ["qkv_gemm", "gemm", "gated_gemm", "gemm"]
    names = [t.name.partition("_q")[0] if t.name[0] != "q" else "qkv_gemm" for t in gemms]
    assert names == of_layer * _model(case.model).config.num_layers
    assert all(t.shared_bytes > 0 and t.block[0] >= 128 for t in gemms)


def test_attention_of_a_long_prompt_is_two_launches():
    q, k = (jax.ShapeDtypeStruct((1, 600, heads, 64), jnp.float32) for heads in (8, 2))
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
    program = aot.compile_program(jax.jit(jq.causal_attention), q, k, k, lengths)
    assert [t.name for t in program.launches] == ["split_keys", "causal_attention"]
    assert not program.loops


def test_a_long_prompt_of_a_large_matrix_is_float16():
    planes = [
        jax.ShapeDtypeStruct(shape, jnp.uint8)
        for shape in ((4096, 16, 128), (4096, 16, 64), (4096, 16, 16))
    ]
    planes.append(jax.ShapeDtypeStruct((4096, 16, 2), jnp.uint8))
    x = jax.ShapeDtypeStruct((256, 4096), jnp.bfloat16)
    program = jax.jit(
        lambda x, *planes: jq.matmul(x, jq.QuantizedArray("Q6_K", (4096, 4096), planes))
    )
    quantize, product = aot.compile_program(program, x, *planes).ptx_launches
    assert (quantize.name, quantize.shared_bytes) == ("quantize_f16", 0)
    assert (product.name, product.block, product.grid) == (
        "gemm_q6_k_f16_m64",
        (256, 1, 1),
        (4, 16, 2),
    )
    assert 99 << 10 < product.shared_bytes <= 227 << 10


@pytest.mark.parametrize("name", ["decode", "generate"])
def test_a_cache_that_is_not_donated_is_copied_and_seen(name):
    function, arguments = LLAMA.programs()[name]
    # donation inside another jit has no effect
    kept = jax.jit(lambda *arguments: function(*arguments))
    program = aot.compile_program(kept, *arguments, options=models.CUDA_COMPILER_OPTIONS)
    copies = program.rewrites(page_array(arguments))
    assert len(copies) == 2 * _model(LLAMA.model).config.num_layers


@pytest.mark.parametrize("case", [case for case, name in CASES if name == "generate"], ids=str)
def test_whole_generate_loop_is_one_cuda_graph(case):
    program = compiled(case, "generate")
    (loop,) = program.loops
    assert loop.is_in("kCommandBuffer")
    assert all(t.is_in("kWhile") for t in program.ptx_launches)
    assert [t for t in program.launches if not t.is_in("kCommandBuffer")] == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_per_layer(name, record_property):
    program = compiled(LLAMA, name)
    layers = [layer_launches(program, i) for i in range(_model(LLAMA.model).config.num_layers)]
    ours = [sum(t in program.ptx_launches for t in layer) for layer in layers]
    record_property(
        "figure",
        f"{LLAMA.model} {name}, ahead of time for an H200: "
        f"kernels per layer {[len(layer) for layer in layers]}, of them ours {ours}; "
        f"{len(program.launches)} launches in all",
    )
    # Kernels of a layer: Q, K and V with rope and KV append (separate for a prompt); attention,
    # after splitting a prompt's keys and values; output projection; gate and up; down. XLA rotates
    # a prompt's keys for its attention.
    assert ours == [7 if name == "prefill" else 5] * len(layers)
    assert max(map(len, layers)) <= (8 if name == "prefill" else 5)


@pytest.mark.slow("compiles programs for a GPU")
def test_kernels_per_layer_of_an_8b_model(record_property):
    """The generate loop in Llama 3.1 8B's shape, with 32 layers and without weights."""
    model = random_model(LLAMA_3_1_8B, abstract=True)
    function, arguments = models.abstract_programs(
        model, capacity=CAPACITY, cache_dtype=jnp.bfloat16
    )["generate"]
    program = aot.compile_program(function, *arguments, options=models.CUDA_COMPILER_OPTIONS)
    layers = [layer_launches(program, i) for i in range(LLAMA_3_1_8B.num_layers)]
    record_property(
        "figure",
        "llama-3.1-8b generate, ahead of time for an H200: "
        f"{max(map(len, layers))} kernels per layer; "
        f"{sum(t.is_in('kWhile') for t in program.launches)} launches per token, "
        f"{len(program.ptx_launches)} of them ours",
    )
    assert max(map(len, layers)) <= 5
    assert [t for t in program.launches if not t.is_in("kCommandBuffer")] == []
    assert program.rewrites(page_array(arguments)) == []
    # prefetched weights are operands, and XLA copies none of them
    weights = {(leaf.dtype.name, leaf.shape) for leaf in jax.tree.leaves(arguments[0])}
    planes = {Array("u8", shape) for dtype, shape in weights if dtype == "uint8"}
    assert planes and not any(program.rewrites(plane) for plane in planes)


@pytest.mark.parametrize(
    "fused, launches", [(None, 8), (set(jq.FUSIONS) - {"paged_attention_matmul"}, 9)]
)
def test_kernels_per_layer_of_eight_long_contexts(fused, launches, record_property):
    """A step of two layers in Llama 3.1 8B's shape.

    Activations of eight rows are quantized once, and contexts are split over clusters.

    The norm makes q8_1 for Q, K and V, and for gate and up. Attention makes it for the output
    projection.
    """
    model = random_model(dataclasses.replace(LLAMA_3_1_8B, num_layers=2), abstract=True)
    with jq.implementation(fused=fused):
        programs = models.abstract_programs(model, batch=8, capacity=4096, cache_dtype=jnp.bfloat16)
        function, arguments = programs["decode"]
        program = aot.compile_program(function, *arguments, options=models.CUDA_COMPILER_OPTIONS)
    layers = [layer_launches(program, i) for i in range(2)]
    record_property(
        "figure",
        f"llama-3.1-8b, 8 contexts of 4096: {len(layers[0])} kernels per layer, fused={fused}",
    )
    assert [len(layer) for layer in layers] == [launches] * 2
    assert not any(t.name == "merge_attention" for layer in layers for t in layer)


@pytest.mark.slow("compiles programs for a GPU", quick=["batch=1-prompt=1-launches=6"])
@pytest.mark.parametrize("batch, prompt, launches", [(1, 1, 6), (32, 1, 8), (1, 64, None)])
def test_no_kernel_is_a_cluster_if_clusters_are_switched_off(batch, prompt, launches):
    """Two layers in Llama 3.1 8B's shape; another launch merges the splits of an attention."""
    model = random_model(dataclasses.replace(LLAMA_3_1_8B, num_layers=2), abstract=True)
    found = {}
    for clusters in (True, False):
        with jq.implementation(clusters=clusters):
            programs = models.abstract_programs(
                model,
                batch=batch,
                prompt_length=prompt,
                capacity=4096,
                cache_dtype=jnp.bfloat16,
            )
            function, arguments = programs["decode" if launches else "prefill"]
            found[clusters] = aot.compile_program(
                function, *arguments, options=models.CUDA_COMPILER_OPTIONS
            )
    together = {
        on: sum("reqnctapercluster" in text for text in p.ptx_texts) for on, p in found.items()
    }
    assert together[False] == 0 and (together[True] > 0 or not launches)
    if launches:
        assert [len(layer_launches(found[False], i)) for i in range(2)] == [launches] * 2


def test_programs_run_without_graphs_if_they_are_switched_off():
    """A step and a loop launch the same kernels, outside of command buffers."""
    network = dataclasses.replace(_model("llama-gqa").network, on_gpu=True)
    _, arguments = LLAMA.programs()["decode"]
    loop, loop_arguments = LLAMA.programs()["generate"]
    launched = {}
    for graphs in (True, False):
        with jq.implementation(graphs=graphs):
            step = aot.compile_program(Decode(network).jitted(), *arguments)
            options = compiler_options(on_gpu=True)
            turns = aot.compile_program(loop, *loop_arguments, options=options)
        for program in (step, turns):
            buffers = [t for t in program.thunks if t.kind == "kCommandBuffer"]
            assert bool(buffers) == graphs
        assert len(turns.loops) == 1
        launched[graphs] = [[t.name for t in p.ptx_launches] for p in (step, turns)]
    assert launched[False] == launched[True] and all(launched[True])
    with jq.implementation(graphs=False):
        assert compiler_options(on_gpu=False) is None


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_as_xla_holds_them_assemble(name):
    """ptxas assembles every kernel.

    XLA passes PTX to the driver unchecked, so a kernel that ptxas refuses would fail only on a GPU.
    """
    program = compiled(LLAMA, name)
    texts = program.ptx_texts
    assert len(texts) >= len({t.name for t in program.ptx_launches})
    for assembly in ptxas.assemble_all(texts, ["sm_90"]).values():
        assert assembly.spill_store_bytes == assembly.spill_load_bytes == 0


def test_a_step_of_f32_activations_launches_and_assembles_as_well():
    """Float32 activations need as many kernels per layer, and no decoded matrix."""
    with jq.implementation(activations="f32"):
        function, arguments = LLAMA.programs()["decode"]
        program = aot.compile_program(function, *arguments, options=models.CUDA_COMPILER_OPTIONS)
    layers = [layer_launches(program, i) for i in range(_model(LLAMA.model).config.num_layers)]
    assert [len(layer) for layer in layers] == [5] * len(layers)
    assert all(t in program.ptx_launches for layer in layers for t in layer)
    for assembly in ptxas.assemble_all(program.ptx_texts, ["sm_90"]).values():
        assert assembly.spill_store_bytes == assembly.spill_load_bytes == 0


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_can_be_exported(name):
    function, arguments = LLAMA.programs()[name]
    with pytest.raises(ValueError, match="custom call"):
        jax.export.export(function, platforms=["cuda"])(*arguments)
    exported = jax.export.export(function, platforms=["cuda"], disabled_checks=jq.EXPORT_CHECKS)(
        *arguments
    )
    assert 'kernel_type = "ptx"' in exported.mlir_module()
