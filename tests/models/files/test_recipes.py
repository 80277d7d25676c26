"""Types of tensors against what llama.cpp itself chose, for golden files and for synthetic shapes.

tests/data/recipes.json: `llama_model_quantize` of llama-cpp-python 0.3.36 on random weights of
these shapes; a part's types run over the layers, "4xQ6_K 2xQ4_K" being four layers of Q6_K, then
two of Q4_K.
"""

import json
from pathlib import Path

import pytest

import jax_q4k as jq
from jax_q4k.models.config import Config
from jax_q4k.models.files import recipes
from jax_q4k.models.tensors import expected_tensors

from ..golden import NAMES, path

CASES = json.loads((Path(__file__).parents[2] / "data" / "recipes.json").read_text())


def unrolled(runs):
    counted = [run.rpartition("x") for run in runs.split()]
    return [kind for count, _, kind in counted for _ in range(int(count or 1))]


@pytest.mark.parametrize("type", recipes.RECIPES)
@pytest.mark.parametrize("case", CASES)
def test_types_are_llama_cpps(case, type):
    case = CASES[case]
    config = Config(**case["config"], vocab_size=96, context_length=256, head_dim=64, norm_eps=1e-5)
    shapes = {
        name: shape
        for name, (shape, required, *_) in expected_tensors(config).items()
        if required or (name == "output.weight" and not case["tied"])
    }
    got = recipes.tensor_types(recipes.get(type), config, shapes)
    assert set(got) == set(shapes)
    assert {got[name] for name, shape in shapes.items() if len(shape) == 1} == {"F32"}
    for part, runs in case["types"][type].items():
        found = [
            kind
            for name, kind in got.items()
            if name.split(".")[-2] == part and len(shapes[name]) > 1
        ]
        assert found == unrolled(runs), part


@pytest.mark.parametrize(
    ("architecture", "layers", "kv_heads", "kind"),
    [
        ("llama", 80, 1, "Q5_K"),
        ("qwen2", 80, 4, "Q5_K"),
        ("llama", 80, 4, "Q4_K"),  # 65B: no groups
        ("qwen3", 80, 1, "Q4_K"),
        ("llama", 96, 1, "Q4_K"),
    ],
)
def test_values_of_70b_models_alone_are_better(architecture, layers, kv_heads, kind):
    """llama.cpp tells 70B models by architecture, 80 layers and, of Llama's, grouped queries."""
    config = Config(architecture, 96, 256, 256, 512, layers, 4, kv_heads, 64, 1e-5)
    name = f"blk.{layers // 8}.attn_v.weight"
    assert recipes.tensor_types(recipes.get("Q4_K_M"), config, {name: (64 * kv_heads, 256)}) == {
        name: kind
    }


@pytest.mark.parametrize("name", [*NAMES, "text-spm"])
def test_golden_files_are_q4_k_m(name):
    header = jq.gguf.read_header(path(name))
    shapes = {name: info.shape for name, info in header.tensors.items()}
    got = recipes.tensor_types(recipes.get("Q4_K_M"), Config.from_metadata(header.metadata), shapes)
    assert got == {name: info.type.name for name, info in header.tensors.items()}
    assert header.metadata["general.file_type"] == recipes.get("Q4_K_M").file_type


@pytest.mark.parametrize("name", ["Q4_K", "q4_k_m", "", None, ["Q4_K_M"]])
def test_unknown_names_list_the_known(name):
    with pytest.raises(
        ValueError, match="must be one of Q4_K_M, Q4_K_S, Q5_K_M, Q5_K_S, Q6_K, Q8_0"
    ):
        recipes.get(name)
