"""A model sharded over eight H200s, compiled without a GPU; counts its all-reduces."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.config.tensors import expected_tensors
from jax_q4k.models.kv_cache.shapes import PAGE_SIZE
from jax_q4k.models.network import build as model_build
from jax_q4k.models.runner.engine_state import EngineState, Sizes
from jax_q4k.models.runner.engine_steps import DecodeRows, PrefillPieces
from jax_q4k.models.sampling.stages import SamplingStages
from jax_q4k.models.sharding.placement import Placement
from jax_q4k.models.sharding.plan import plan_sharding
from tools import aot
from tools.random_model import LLAMA_3_1_8B

pytestmark = pytest.mark.skipif(aot.unavailable() is not None, reason=str(aot.unavailable()))

CONFIG = dataclasses.replace(LLAMA_3_1_8B, num_layers=2)
DEVICES = 8


@dataclasses.dataclass
class Info:
    """A tensor of a GGUF file as `place` sees it; it is also its own type."""

    shape: tuple[int, ...]
    name: str

    @property
    def type(self) -> Info:
        return self


def stored(name: str, shape: tuple[int, ...]) -> Any:
    """Shapes of a tensor in the type that Q4_K_M gives it."""
    if len(shape) == 1:
        return jax.ShapeDtypeStruct(shape, jnp.float32)
    format = "Q6_K" if "ffn_down" in name or "attn_v" in name or name.startswith("out") else "Q4_K"
    block = jq.formats.get(format)
    n, k = shape
    planes = [
        jax.ShapeDtypeStruct((n, k // block.block_size, plane.bytes_per_block), jnp.uint8)
        for plane in block.planes
    ]
    return jq.QuantizedArray(format, shape, planes)


def placed(array: Any, sharding: NamedSharding) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), array)


def abstract_model(mesh: Mesh) -> tuple[models.Model, list[Any], Placement]:
    """Returns a model of shapes, its weights with shardings, and the placement."""
    tensors = {
        name: stored(name, expected.shape)
        for name, expected in expected_tensors(CONFIG).items()
        if expected.required or name == "output.weight"
    }
    infos = {name: Info(t.shape, getattr(t, "format", "F32")) for name, t in tensors.items()}
    where = plan_sharding(CONFIG, infos, mesh)
    tensors = {name: placed(tensor, where.tensors[name]) for name, tensor in tensors.items()}
    with mock.patch.object(model_build, "float_array", lambda tensor: tensor):
        model = models.Model(model_build.build(CONFIG, tensors))
    weights = [
        w if isinstance(w, jax.ShapeDtypeStruct) else placed(w, where.replicated)
        for w in model.weights
    ]
    return model, weights, where


def engine_program(name: str, model: models.Model, groups: int) -> tuple[Any, tuple[Any, ...]]:
    """Returns an engine's program for one sequence in each group, and its abstract arguments."""
    placement = model.placement
    assert placement is not None
    whole, tokens = placement.replicated, 4096
    pages = tokens // PAGE_SIZE
    sizes = Sizes(groups, (None,), (pages,), pages, 0, tokens, groups=groups)
    options: dict[str, Any] = {"sizes": sizes, "rows": groups, "stages": SamplingStages()}
    program: PrefillPieces | DecodeRows = DecodeRows(model.network, **options)
    if name == "prefill":
        program = PrefillPieces(model.network, time=128, fresh=True, **options)

    def struct(shape: tuple[int, ...], dtype: Any, over: NamedSharding | None = None) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=over or whole)

    dtype = jnp.dtype(jnp.bfloat16)
    state = EngineState.create(CONFIG, sizes, dtype, struct, placement)
    return program.jitted(), (state, *program.inputs(struct))


def decode_step(model: models.Model, mesh: Mesh, groups: int) -> tuple[Any, tuple[Any, ...]]:
    """Returns the decode step of one sequence in each group, and its abstract arguments."""
    assert model.placement is not None
    whole = model.placement.replicated
    cache = jax.eval_shape(
        lambda: models.PagedCache.create(CONFIG, groups, 4096, dtype=jnp.bfloat16)
    )
    tables = cache.block_tables
    if groups > 1:
        tables = jax.ShapeDtypeStruct((groups, 1, *tables.shape[1:]), tables.dtype)
    cache = dataclasses.replace(cache, block_tables=tables)
    parts = NamedSharding(mesh, P("dp", "tp"))
    cache = jax.tree.map(lambda a: placed(a, parts if a.ndim == 4 else whole), cache)
    ids = placed(jax.ShapeDtypeStruct((groups,), jnp.int32), whole)
    return model.decode_step, (ids, cache)


@pytest.mark.slow("compiles for several GPUs", quick=["decode-AxisType.Auto-groups=1"])
@pytest.mark.parametrize(
    ("kind", "groups"), [(AxisType.Auto, 1), (AxisType.Explicit, 1), (AxisType.Explicit, 2)]
)
@pytest.mark.parametrize("program", ["decode", "prefill", "generate"])
def test_two_sums_a_layer(kind: AxisType, groups: int, program: str) -> None:
    """One more all-reduce sums the embedding rows; weights and pages are not gathered."""
    gpus = np.array(aot.gpus("h200", DEVICES)).reshape(groups, -1)
    mesh = Mesh(gpus, ("dp", "tp"), axis_types=(kind, kind))
    model, weights, where = abstract_model(mesh)
    model.network = dataclasses.replace(model.network, placement=where)
    if program == "decode":
        function, arguments = decode_step(model, mesh, groups)
    else:
        function, arguments = engine_program(program, model, groups)
    samples = program != "decode"
    with model.on_devices():
        lowered = function.trace(weights, *arguments).lower(lowering_platforms=("cuda",))
        text = lowered.compile(compiler_options=models.CUDA_COMPILER_OPTIONS).as_text()
    calls = re.findall(
        r" = (.*) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
        r"(?:-start)?\(",
        text,
    )
    counts = Counter(name for _, name in calls)
    # sampling's argmax gathers a candidate from each device
    allowed = 2 * CONFIG.num_layers + 1 + (2 if samples else 0)
    assert counts.pop("all-reduce") <= allowed
    gathered = [re.sub(r"{[^}]*}", "", types) for types, name in calls if name == "all-gather"]
    one_number = rf"[(), ]*(?:s32\[(?:1|{groups})\][(), ]*)+"  # of each group, such as its token
    numbers = sum(re.fullmatch(one_number, types) is not None for types in gathered)
    assert counts.total() == (numbers if samples else 0)
    assert text.count("__gpu$xla.gpu.ptx") > 6
