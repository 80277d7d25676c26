"""Tensor types compared with llama.cpp's choices, for golden files and synthetic shapes.

tests/data/recipes.json: `llama_model_quantize` of llama-cpp-python 0.3.36 on random weights of
these shapes. The types of a part are listed by layer: "4xQ6_K 2xQ4_K" is four layers of Q6_K, then
two of Q4_K.

tests/data/recipes_of_few_bits.json: a dry run of the same function for recipes of IQ1 to IQ3,
ternary and older types, and experts in MXFP4, without an importance matrix; with one, only what
differs.

tests/data/recipes_of_architectures.json: matrices of files that llama-quantize made from small
random models of many architectures, in its recipes: shape and type of each, by layers.
"""

import json
from types import SimpleNamespace

import pytest
from support.paths import DATA

import jax_q4k as jq
from jax_q4k.models.config import Config
from jax_q4k.models.config.tensors import expected_tensors
from jax_q4k.models.files.quantizing import recipes

from ...golden_files import NAMES, path

CASES = json.loads((DATA / "recipes.json").read_text())
FEW_BITS = json.loads((DATA / "recipes_of_few_bits.json").read_text())
ARCHITECTURES = json.loads((DATA / "recipes_of_architectures.json").read_text())


def dimensions(**sizes):
    return SimpleNamespace(**{"architecture": "llama", "kv_heads": None} | sizes)


def unrolled(runs):
    counted = [run.rpartition("x") for run in runs.split()]
    return [kind for count, _, kind in counted for _ in range(int(count or 1))]


@pytest.mark.parametrize(
    "case, type", [(name, type) for name, case in CASES.items() for type in case["types"]]
)
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


def shapes_of(case):
    """Returns the shapes of a Llama, with a vocabulary of 96 and heads of 64."""
    hidden, inner, experts = case["hidden_size"], case["intermediate_size"], case.get("experts")
    q, kv = 64 * case["num_heads"], 64 * case["num_kv_heads"]
    shapes = {"token_embd.weight": (96, hidden)}
    if not case["tied"]:
        shapes["output.weight"] = (96, hidden)
    stack, suffix = ((experts,), "_exps") if experts else ((), "")
    parts = {"attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden)}
    parts |= {"attn_output": (hidden, q), f"ffn_down{suffix}": (*stack, hidden, inner)}
    parts |= dict.fromkeys((f"ffn_gate{suffix}", f"ffn_up{suffix}"), (*stack, inner, hidden))
    for layer in range(case["num_layers"]):
        shapes |= {f"blk.{layer}.{part}.weight": shape for part, shape in parts.items()}
    return shapes


@pytest.mark.parametrize("importance", [False, True])
@pytest.mark.parametrize(
    "case, type",
    [(name, type) for name, case in FEW_BITS.items() for type in case["types"] if " " not in type],
)
def test_types_of_few_bits_are_llama_cpps(case, type, importance):
    case = FEW_BITS[case]
    shapes, want = shapes_of(case), case["types"][type]
    if importance:
        want = want | case["types"].get(f"{type} with importance", {})
    got = recipes.tensor_types(recipes.get(type), dimensions(**case), shapes, importance=importance)
    for part, runs in want.items():
        assert [got[n] for n in shapes if n.split(".")[-2] == part] == unrolled(runs), part
    assert {name.split(".")[-2] for name in shapes} == set(want)


@pytest.mark.parametrize(
    ("architecture", "layers", "kv_heads", "kind"),
    [
        ("llama", 80, 1, "Q5_K"),
        ("qwen2", 80, 4, "Q5_K"),
        ("llama", 80, 4, "Q4_K"),  # 65B: no grouped queries
        ("qwen3", 80, 1, "Q4_K"),
        ("llama", 96, 1, "Q4_K"),
    ],
)
def test_values_of_70b_models_alone_are_better(architecture, layers, kv_heads, kind):
    """llama.cpp detects 70B models by architecture, 80 layers and, for Llama, grouped queries."""
    config = Config(architecture, 96, 256, 256, 512, layers, 4, kv_heads, 64, 1e-5)
    shapes = {f"blk.{layer}.attn_v.weight": (64 * kv_heads, 256) for layer in range(layers)}
    types = recipes.tensor_types(recipes.get("Q4_K_M"), config, shapes)
    assert types[f"blk.{layers // 8}.attn_v.weight"] == kind


@pytest.mark.parametrize("name", [*NAMES, "text-spm"])
def test_golden_files_are_q4_k_m(name):
    header = jq.gguf.read_header(path(name))
    shapes = {name: info.shape for name, info in header.tensors.items()}
    got = recipes.tensor_types(recipes.get("Q4_K_M"), Config.from_metadata(header.metadata), shapes)
    assert got == {name: info.type.name for name, info in header.tensors.items()}
    assert header.metadata["general.file_type"] == recipes.file_type("Q4_K_M")


def layers_of(runs: str) -> list[int]:
    """Parses "0-2 5" to [0, 1, 2, 5]."""
    found = []
    for run in runs.split():
        first, _, last = run.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_types_of_every_architecture(name):
    """Types of experts, of fused and shared matrices, and of tensors that are never quantized."""
    case = ARCHITECTURES[name]
    shapes, want = {}, {}
    for tensor, kinds in case["tensors"].items():
        for kind, layers in kinds.items():
            shape, _, type = kind.partition(" ")
            for layer in layers_of(layers):
                want[tensor.format(layer)] = type
                shapes[tensor.format(layer)] = tuple(map(int, shape.split("x")))
    assert recipes.tensor_types(recipes.get(case["type"]), dimensions(**case), shapes) == want


@pytest.mark.parametrize("kv_heads, importance", [(2, False), (4, True)])
@pytest.mark.parametrize(
    "type, attn_v, ffn_down, attn_output",
    [
        ("Q2_K", {2: "16xQ4_K", 4: "16xQ3_K"}, "16xQ3_K", "16xQ3_K"),
        ("Q3_K_S", "16xQ3_K", "16xQ3_K", "16xQ3_K"),
        ("Q3_K_M", "2xQ5_K 14xQ4_K", "1xQ5_K 15xQ4_K", "16xQ4_K"),
        ("Q3_K_L", "16xQ5_K", "16xQ5_K", "16xQ5_K"),
        (
            "IQ4_XS",
            {2: "16xQ5_K", 4: "16xIQ4_XS"},
            {2: "2xQ5_K 14xIQ4_XS", 4: "16xIQ4_XS"},
            "16xIQ4_XS",
        ),
    ],
)
def test_mixtures_of_three_bits_and_less(type, attn_v, ffn_down, attn_output, kv_heads, importance):
    """From llama.cpp's rules: 16 layers of 8 heads, in groups of four or two."""
    model = dimensions(num_layers=16, num_heads=8, num_kv_heads=kv_heads)
    parts = {"attn_v": attn_v, "ffn_down": ffn_down, "attn_output": attn_output}
    shapes = {f"blk.{i}.{part}.weight": (256, 256) for i in range(16) for part in parts}
    shapes["output.weight"] = (96, 256)
    got = recipes.tensor_types(recipes.get(type), model, shapes, importance=importance)
    for part, runs in parts.items():
        want = unrolled(runs[kv_heads] if isinstance(runs, dict) else runs)
        assert [got[f"blk.{i}.{part}.weight"] for i in range(16)] == want, part
    assert got["output.weight"] == "Q6_K"


@pytest.mark.parametrize(
    "type, k, want",
    [
        ("Q2_K", 96, "Q4_0"),
        ("Q3_K_S", 96, "Q4_0"),
        ("IQ4_XS", 96, "IQ4_NL"),
        ("IQ4_NL", 96, "IQ4_NL"),
        ("MXFP4_MOE", 96, "Q8_0"),
        ("Q2_K", 40, "F16"),
    ],
)
def test_rows_that_are_no_multiple_of_the_block(type, k, want):
    model = dimensions(num_layers=1, num_heads=1, num_kv_heads=1)
    shapes = {"blk.0.attn_q.weight": (8, k), "output.weight": (8, 256)}
    assert recipes.tensor_types(recipes.get(type), model, shapes)["blk.0.attn_q.weight"] == want


@pytest.mark.parametrize("type, output", [("Q2_K", "Q5_K"), ("Q3_K_L", "Q3_K"), ("Q6_K", "Q6_K")])
def test_eight_experts(type, output):
    model = dimensions(num_layers=1, num_heads=8, num_kv_heads=2)
    names = ["attn_q", "attn_k", "attn_v", "attn_output"]
    shapes = {f"blk.0.{name}.weight": (256, 256) for name in names}
    shapes |= {"blk.0.ffn_down_exps.weight": (8, 256, 256), "blk.0.ffn_gate_inp.weight": (8, 256)}
    got = recipes.tensor_types(recipes.get(type), model, shapes)
    assert (got["blk.0.attn_k.weight"], got["blk.0.attn_v.weight"]) == ("Q8_0", "Q8_0")
    assert got["blk.0.attn_output.weight"] == output
    assert got["blk.0.ffn_gate_inp.weight"] == "F32"


@pytest.mark.parametrize("short", ["Q3_K", "Q4_K", "Q5_K"])
def test_short_names_are_llama_quantizes(short):
    assert recipes.get(short) is recipes.get(f"{short}_M")
    assert recipes.file_type(short) == recipes.file_type(f"{short}_M")
    assert recipes.full_name(short.lower()) == f"{short}_M"


@pytest.mark.parametrize("name", ["Q2_K_M", "q4_k_m", "", None, ["Q4_K_M"]])
def test_unknown_names_list_the_known(name):
    with pytest.raises(ValueError, match=f"must be one of {', '.join(recipes.RECIPES)}$"):
        recipes.get(name)


@pytest.mark.parametrize(
    ("kv_heads", "type", "attn_v"),
    [((2, 8), "Q2_K", "Q4_K"), ((8, 2), "Q2_K", "Q3_K"), ((0, 2), "IQ4_XS", "IQ4_XS")],
)
def test_groups_are_those_of_the_first_layer(kv_heads, type, attn_v):
    """The first layer decides for all; a convolution instead of attention means no groups."""
    model = dimensions(num_layers=2, num_heads=8, num_kv_heads=8, kv_heads=kv_heads)
    shapes = {"blk.1.attn_v.weight": (256, 256), "output.weight": (96, 256)}
    got = recipes.tensor_types(recipes.get(type), model, shapes)
    assert got["blk.1.attn_v.weight"] == attn_v
