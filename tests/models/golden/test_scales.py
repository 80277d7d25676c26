"""Per-tensor scales, as in NVFP4 files: factors of the products with a weight."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support.helpers import nmse
from support.paths import GOLDEN

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.gguf import TensorPieces
from jax_q4k.models.architectures.tensor_tables import SCALES

from .. import golden_files

#: A plain model, and models with biases, fused rows, and routed and shared experts.
FILES = ("NVFP4", "llama-bias", "phi3", "glm4moe", "gpt-oss")
TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 7]])
MATRIX = re.compile(r"(output|blk\.\d+\.(attn_(q|k|v|qkv|output)|ffn_(gate|up|down)\w*))\.weight")


def source(name: str) -> Path:
    return GOLDEN / "formats" / f"{name}.gguf" if name == "NVFP4" else golden_files.path(name)


def is_matrix(name: str) -> bool:
    return MATRIX.fullmatch(name) is not None and "_inp" not in name


@functools.cache
def contents(name: str) -> tuple[dict, dict, dict]:
    """Returns metadata, tensors with added scales, and float32 tensors multiplied by the scales.

    The tensors are those of a golden file.
    """
    file, rng = jq.gguf.read(source(name)), np.random.default_rng(5)
    scales, products = {}, dict(file.tensors)
    for tensor, weight in file.tensors.items():
        if not is_matrix(tensor):
            continue
        shape = weight.shape[:1] if weight.ndim == 3 else (1,)
        of_products, of_inputs = (
            rng.uniform(0.5, 1.5, shape).astype(np.float32) for suffix in SCALES
        )
        stem = tensor.removesuffix("weight")
        scales |= {f"{stem}scale": of_products, f"{stem}input_scale": of_inputs}
        floats = weight.dequantize() if jq.is_quantized(weight) else weight.astype(jnp.float32)
        products[tensor] = floats * of_products.reshape(-1, *[1] * (weight.ndim - 1))
    return file.metadata, file.tensors | scales, products


def written(folder: Path, metadata: dict, tensors: dict) -> Path:
    file = folder / f"{len(list(folder.iterdir()))}.gguf"
    jq.gguf.write(file, metadata, {name: TensorPieces.of(name, t) for name, t in tensors.items()})
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scales")


@functools.cache
def scaled(name: str, folder: Path) -> models.Model:
    """A model with scales."""
    return models.from_gguf(written(folder, *contents(name)[:2]))


@functools.cache
def wanted(name: str, folder: Path) -> jax.Array:
    """Logits of TOKENS from the model whose weights are multiplied by the scales."""
    metadata, _, products = contents(name)
    with jq.implementation("xla", activations="f32"):
        return models.from_gguf(written(folder, metadata, products)).logits(TOKENS)


@pytest.mark.slow("compiles each model twice", quick=["NVFP4-*"])
@pytest.mark.parametrize(
    ("name", "implementation"),
    [*((name, "native") for name in FILES), ("NVFP4", "xla"), ("gpt-oss", "xla")],
)
def test_products_are_multiplied(name: str, implementation: str, folder: Path) -> None:
    with jq.implementation(implementation, activations="f32"):
        got = scaled(name, folder).logits(TOKENS)
    assert nmse(got, wanted(name, folder)) <= 1e-8


@pytest.mark.slow("compiles several programs", quick=["NVFP4"])
@pytest.mark.parametrize("name", ["NVFP4", "gpt-oss"])
def test_products_are_multiplied_where_keys_lie_in_pages(name: str, folder: Path) -> None:
    """Logits of a prompt's last token and of the next token."""
    model = scaled(name, folder)

    @jax.jit
    def run(weights: list[jax.Array], prompt: jax.Array, token: jax.Array) -> tuple:
        decoder = model.decoder(weights)
        cache = models.PagedCache.create(model.config, 1, 64)
        logits, cache = decoder.prefill(prompt, jnp.array([prompt.size]), cache)
        return logits, decoder.decode(token, cache)[0]

    with jq.implementation(activations="f32"):
        got = np.concatenate(run(model.weights, TOKENS[:, :-1], TOKENS[:, -1]))
    assert nmse(got, wanted(name, folder)[0, -2:]) <= 1e-8


def test_int8_activations(folder: Path) -> None:
    assert nmse(scaled("NVFP4", folder).logits(TOKENS), wanted("NVFP4", folder)) <= 1e-3


def test_each_scale_counts_but_those_of_inputs(folder: Path) -> None:
    graph, state = nnx.split(scaled("gpt-oss", folder).decoder())
    run, counted = jax.jit(lambda state: nnx.merge(graph, state)(TOKENS)), []
    logits = run(state)
    for path, variable in nnx.to_flat_state(state):
        if path[-1] in SCALES:
            value = variable.get_value()
            moved = []
            for expert in range(len(value)):
                variable.set_value(value.at[expert].set(1.0))
                moved.append(nmse(run(state), logits) > 1e-8)
            variable.set_value(value)
            routed = len(value) == 1 or sum(moved) > len(value) // 2  # few tokens reach few experts
            assert any(moved) and routed if path[-1] == "scale" else not any(moved), path
            counted.append(path[-1])
    assert counted.count("scale") == counted.count("input_scale") == 1 + 7 * 2


@pytest.mark.parametrize("name", FILES)
def test_saving_keeps_every_byte(name: str, folder: Path, tmp_path: Path) -> None:
    _, tensors, _ = contents(name)
    models.save_gguf(scaled(name, folder), tmp_path / "saved.gguf")
    saved = jq.gguf.read(tmp_path / "saved.gguf").tensors
    assert saved.keys() == tensors.keys()
    for key, tensor in tensors.items():
        if jq.is_quantized(tensor):
            assert saved[key].to_gguf_bytes() == tensor.to_gguf_bytes()
        else:
            assert saved[key].dtype == tensor.dtype and np.array_equal(saved[key], tensor)


def test_quantizing_keeps_scales(folder: Path, tmp_path: Path) -> None:
    metadata, tensors, _ = contents("phi3")
    quantized = models.quantize(scaled("phi3", folder), "Q8_0")
    file = written(folder, metadata, tensors)
    models.quantize_file(file, tmp_path / "file.gguf", "Q8_0")
    models.save_gguf(quantized, tmp_path / "model.gguf")
    for name in ("file", "model"):
        saved = jq.gguf.read(tmp_path / f"{name}.gguf").tensors
        assert saved.keys() == tensors.keys()
        assert all(np.array_equal(saved[s], tensors[s]) for s in tensors if s.endswith(SCALES))
        assert saved["blk.0.attn_qkv.weight"].format == "Q8_0"
    with jq.implementation(activations="f32"):
        assert nmse(quantized.logits(TOKENS), wanted("phi3", folder)) <= 1e-3


def test_parts_whose_scales_differ_are_written_apart_or_not_at_all(
    folder: Path, tmp_path: Path
) -> None:
    model = models.from_gguf(written(folder, *contents("phi3")[:2]))
    decoder = model.decoder()
    decoder.layers[0].attention.key.scale[...] *= 2
    model = models.Model(decoder, None, model.metadata)
    models.save_gguf(model, tmp_path / "apart.gguf")
    names = jq.gguf.read_header(tmp_path / "apart.gguf").tensors
    assert {"blk.0.attn_k.scale", "blk.0.attn_k.weight", "blk.1.attn_qkv.scale"} <= names.keys()
    assert "blk.0.attn_qkv.weight" not in names and "blk.0.attn_qkv.scale" not in names
    again = models.from_gguf(tmp_path / "apart.gguf")
    np.testing.assert_array_equal(again.logits(TOKENS), model.logits(TOKENS))
    decoder.layers[0].mlp.gate.scale[...] *= 2
    with pytest.raises(jq.GGUFError, match=r"'blk.0.ffn_up.weight': .* have different scales"):
        models.save_gguf(models.Model(decoder, None, model.metadata), tmp_path / "no.gguf")


@pytest.mark.slow("compiles for two devices", quick=["NVFP4-AxisType.Auto"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", ["NVFP4", "gpt-oss"])
@pytest.mark.filterwarnings("ignore:replicated on each")
def test_weights_are_split_and_scales_are_whole(name: str, kind: AxisType, folder: Path) -> None:
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(kind,), devices=jax.devices()[:2])
    file = written(folder, *contents(name)[:2])
    split = models.load(file, mesh=mesh)
    assert {n for n, at in split.placement.tensors.items() if at.is_fully_replicated} >= {
        n for n in split.placement.tensors if n.endswith(SCALES)
    }
    assert not split.placement.tensors["blk.0.attn_q.weight"].is_fully_replicated
    with jq.implementation(activations="f32"):
        assert nmse(split.logits(TOKENS), wanted(name, folder)) <= 1e-8
        generated = models.generate(split, TOKENS[0].tolist(), max_new_tokens=2)
    assert generated.tokens[0] == wanted(name, folder)[0, -1].argmax()


def test_rules_are_those_of_weights(folder: Path) -> None:
    mesh = jax.make_mesh((2,), ("tp",), devices=jax.devices()[:2])
    rules = {"attn_q": P("tp"), "attn_output": P(None, "tp"), "ffn_down": P(None, "tp")}
    file = written(folder, *contents("NVFP4")[:2])
    at = models.load(file, mesh=mesh, rules=rules).placement.tensors
    for name in rules:
        assert at[f"blk.0.{name}.weight"].spec == rules[name]
        assert at[f"blk.0.{name}.scale"].is_fully_replicated


BAD = [
    ("NVFP4", "blk.0.attn_q.scale", np.ones(2, np.float32), r"has shape \(2,\), expected \(1,\)"),
    ("NVFP4", "blk.0.attn_q.scale", np.ones(256, np.float32), "has shape"),
    ("NVFP4", "blk.0.ffn_up.input_scale", np.ones((1, 2), np.float32), "has shape"),
    ("NVFP4", "blk.0.ffn_down.scale", np.float32([np.nan]), "element 0 is NaN"),
    ("NVFP4", "blk.0.ffn_down.input_scale", np.float32([np.inf]), "element 0 is NaN or inf"),
    ("NVFP4", "blk.7.attn_q.scale", np.ones(1, np.float32), "is not part of a llama model"),
    ("NVFP4", "blk.0.attn_qkv.scale", np.ones(1, np.float32), "is not part of a llama model"),
    ("NVFP4", "token_embd.scale", np.ones(1, np.float32), "is not part of a llama model"),
    ("NVFP4", "blk.0.attn_norm.scale", np.ones(1, np.float32), "is not part of a llama model"),
    ("gemma2", "output.scale", np.ones(1, np.float32), "is present without 'output.weight'"),
    ("glm4moe", "blk.0.ffn_up_exps.scale", np.ones(8, np.float32), "is not part of a glm4moe"),
    ("phi3", "blk.0.attn_qkv.scale", np.ones(3, np.float32), r"has shape \(3,\), expected \(1,\)"),
    ("phi3", "blk.0.ffn_up.scale", np.ones((1, 2, 1), np.float32), "has shape"),
    ("phi3", "blk.0.attn_q.scale", np.ones(1, np.float32), "is present in addition to"),
    ("qwen3moe", "blk.0.ffn_up_exps.scale", np.ones(1, np.float32), "has shape"),
    ("qwen3moe", "blk.0.ffn_gate_inp.scale", np.ones(16, np.float32), "is not part of a qwen3moe"),
]


@pytest.mark.parametrize(("name", "tensor", "value", "problem"), BAD)
def test_bad_scales_are_refused(
    name: str, tensor: str, value: np.ndarray, problem: str, folder: Path
) -> None:
    metadata, tensors, _ = contents(name)
    file = written(folder, metadata, tensors | {tensor: value})
    with pytest.raises(jq.GGUFError, match=f"tensor '.*': .*{problem}"):
        models.from_gguf(file)
