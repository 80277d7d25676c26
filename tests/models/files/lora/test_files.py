"""Adapter files: settings that apply, and errors that name what is refused."""

import json
import os
import re

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.gguf_bytes import write_tensors

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.config import Config
from jax_q4k.models.config.tensors import expected_tensors
from jax_q4k.models.files.lora import adapters

from ...adapters import ALPHA, CONFIG, RANK, random_pairs, write_gguf, write_peft
from ...golden_files import model, path

BAD_SETTINGS = [
    ({"peft_type": "IA3"}, "peft_type: must be 'LORA', not 'IA3'"),
    ({"peft_type": None}, "peft_type: is missing"),
    ({"lora_alpha": "x"}, "lora_alpha: must be a number"),
    ({"lora_alpha": 1e400}, "JSON: is malformed|lora_alpha: must be a number"),
    ({"r": 0}, "r: must be an integer from 1"),
    ({"use_dora": True}, "use_dora: is True, which is not supported"),
    ({"bias": "all"}, "bias: is 'all', which is not supported"),
    (
        {"modules_to_save": ["lm_head"]},
        r"modules_to_save: is \['lm_head'\], which is not",
    ),
    ({"fan_in_fan_out": True}, "fan_in_fan_out: is True"),
    ({"use_rslora": 1}, "use_rslora: must be a boolean"),
    ({"alpha_pattern": {"(a+)+$": 1}}, r"alpha_pattern: holds '\(a\+\)\+\$'; only plain modul"),
    ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern.q_proj: must be a number"),
    ({"rank_pattern": {"q_proj": 0}}, "rank_pattern.q_proj: must be an integer from 1"),
    ({"rank_pattern": 3}, "rank_pattern: must be an object"),
    *(
        ({"init_lora_weights": kind}, rf"init_lora_weights: is '{kind}', which changes the base")
        for kind in ("olora", "OLoRA", "pissa", "pissa_niter_4", "corda", "loftq", "lora_ga", "x")
    ),
    ({"init_lora_weights": 1}, "init_lora_weights: is 1, which changes the base weights"),
    (
        {"target_parameters": ["experts.up"]},
        r"target_parameters: is \['experts.up'\], which is not",
    ),
    ({"trainable_token_indices": [3]}, r"trainable_token_indices: is \[3\], which is not supp"),
    ({"trainable_token_indices": {"embed_tokens": [3]}}, "trainable_token_indices: is {'embed"),
    ({"alora_invocation_tokens": [1]}, r"alora_invocation_tokens: is \[1\], which is not supp"),
    (
        {"layer_replication": [[0, 2]]},
        r"layer_replication: is \[\[0, 2\]\], which is not supported",
    ),
    ({"lora_bias": True}, "lora_bias: is True, which is not supported"),
    ({"use_qalora": True}, "use_qalora: is True, which is not supported"),
    ({"use_bdlora": {"nblocks": 2}}, "use_bdlora: is {'nblocks': 2}, which is not supported"),
    ({"arrow_config": {}}, "arrow_config: is {}, which is not supported"),
    ({"kasa_config": {"beta": 1}}, "kasa_config: is {'beta': 1}, which is not supported"),
    ({"monteclora_config": {"k": 1}}, "monteclora_config: is {'k': 1}, which is not supported"),
    ({"megatron_config": {"tp": 2}}, "megatron_config: is {'tp': 2}, which is not supported"),
    ({"lora_of_tomorrow": "x"}, "lora_of_tomorrow: is 'x', which is not known"),
    ({"lora_of_tomorrow": 0.5}, "lora_of_tomorrow: is 0.5, which is not known"),
    ({"alpha_pattern": []}, "alpha_pattern: must be an object|JSON|alpha_pattern"),
]


@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS)
def test_settings_of_peft_that_are_refused(settings, message, tmp_path):
    given = model("qwen3-qknorm")
    pairs = random_pairs(given, ("attn_q",))
    file = write_peft(tmp_path / "peft", given, pairs, CONFIG | settings)
    with pytest.raises(jq.CheckpointError, match=message) as caught:
        models.with_lora(given, file)
    assert caught.value.file == str(file / "adapter_config.json")


#: LoraConfig of PEFT 0.21 as `save_pretrained` writes it; its defaults change nothing.
DEFAULTS = """{"alora_invocation_tokens": null, "alpha_pattern": {}, "arrow_config": null,
"auto_mapping": null, "base_model_name_or_path": "a/b", "bias": "none", "corda_config": null,
"ensure_weight_tying": false, "eva_config": null, "exclude_modules": null, "fan_in_fan_out": false,
"inference_mode": true, "init_lora_weights": true, "kasa_config": null, "layer_replication": null,
"layers_pattern": null, "layers_to_transform": null, "loftq_config": {}, "lora_alpha": 6,
"lora_bias": false, "lora_dropout": 0.0, "lora_ga_config": null, "megatron_config": null,
"megatron_core": "megatron.core", "modules_to_save": null, "monteclora_config": null,
"peft_type": "LORA", "peft_version": "0.21.2", "qalora_group_size": 16, "r": 3, "rank_pattern": {},
"revision": null, "target_modules": ["q_proj"], "target_parameters": null,
"task_type": "CAUSAL_LM", "trainable_token_indices": null, "use_bdlora": null, "use_dora": false,
"use_qalora": false, "use_rslora": false, "velora_config": null}"""
CHANGES_NOTHING = {
    "init_lora_weights": "eva",
    "eva_config": {"rho": 2.0},
    "corda_config": {"use_float16_for_covariance": False},
    "lora_ga_config": {"direction": "ArB2r"},
    "velora_config": {"num_groups": 32},
    "lora_dropout": 0.1,
    "layers_to_transform": [0, 1],
    "layers_pattern": "layers",
    "exclude_modules": "lm_head",
    "ensure_weight_tying": True,
    "loftq_config": {"loftq_bits": 4},
    "lora_of_tomorrow": False,
}


@pytest.mark.parametrize(
    "settings",
    [{}, CHANGES_NOTHING]
    + [{"init_lora_weights": kind} for kind in (False, "gaussian", "orthogonal", "mica")],
)
def test_settings_of_peft_that_change_nothing(settings, tmp_path):
    given = model("qwen3-qknorm")
    pairs = random_pairs(given, ("attn_q",))
    plain = adapters.read(write_peft(tmp_path / "plain", given, pairs), given.config)
    file = write_peft(tmp_path / "peft", given, pairs, json.loads(DEFAULTS) | settings)
    for name, pair in adapters.read(file, given.config).items():
        assert pair.scale == plain[name].scale == ALPHA / RANK
        np.testing.assert_array_equal(pair.b @ pair.a, plain[name].b @ plain[name].a)


def test_an_untrained_olora_adapter_is_not_added(tmp_path):
    """PEFT subtracts its product from the base weights, so logits would stay the model's."""
    given, name = model("llama-gqa"), "blk.0.attn_output.weight"
    q, r = np.linalg.qr(np.asarray(models.named_tensors(given)[name].dequantize()))
    pairs = {name: (r[:RANK], q[:, :RANK])}
    for initial, refused in (("olora", True), (True, False)):
        config = CONFIG | {"init_lora_weights": initial}
        file = write_peft(tmp_path / str(initial), given, pairs, config)
        if refused:
            with pytest.raises(jq.CheckpointError, match="path_initial_model_for_weight_conv"):
                models.with_lora(given, file)
        else:
            models.with_lora(given, file)


def test_names_of_modules_in_patterns_are_those_of_the_tensors(tmp_path):
    """Names with language_model match, and a dot matches any character, as in PEFT."""
    given = model("gemma3")
    pairs = random_pairs(given, ("attn_q",))
    layers = {"model.layers": "model.language_model.layers"}
    for pattern in ("model.language_model.layers.0.self_attn.q_proj", "layers.0.self_attn.q.proj"):
        config = CONFIG | {"alpha_pattern": {pattern: 5 * ALPHA}}
        folder = write_peft(tmp_path / pattern, given, pairs, config)
        rename(folder / "adapter_model.safetensors", layers)
        read = adapters.read(folder, given.config)
        scales = {name: pair.scale for name, pair in read.items()}
        assert scales.pop("blk.0.attn_q.weight") == 5 * ALPHA / RANK
        assert scales and set(scales.values()) == {ALPHA / RANK}


def rename(file, parts, keep=False):
    """Replaces parts of tensor names; `keep` keeps the old names too."""
    tensors = load_file(file)
    for old, new in parts.items():
        renamed = {name.replace(old, new): tensor for name, tensor in tensors.items()}
        tensors = tensors | renamed if keep else renamed
    save_file(tensors, file)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_module_of_two_spellings(reverse, tmp_path):
    given = model("gemma3")
    folder = write_peft(tmp_path / "peft", given, random_pairs(given, ("attn_q",)))
    file, spellings = folder / "adapter_model.safetensors", ["language_model.model", "model"]
    spellings = spellings[::-1] if reverse else spellings
    rename(file, {"model.model.layers": f"model.{spellings[0]}.layers"})
    rename(file, {f"model.{spellings[0]}.layers.0": f"model.{spellings[1]}.layers.0"}, keep=True)
    with pytest.raises(jq.CheckpointError, match="is of the same module as '.*'") as caught:
        models.with_lora(given, folder)
    message = str(caught.value)
    for spelling in spellings:
        assert f"base_model.model.{spelling}.layers.0.self_attn.q_proj.lora_A.weight" in message


def test_a_matrix_of_two_names(tmp_path):
    """A fused GGUF tensor and one of its parts; layers 0 and 00 in the example's names."""
    given = model("phi3")
    pairs = random_pairs(given, ("attn_q", "attn_k", "attn_v"))
    b = np.concatenate([pairs[f"blk.0.attn_{x}.weight"][1] for x in "qkv"])
    a = pairs["blk.0.attn_q.weight"][0]
    file = write_gguf(tmp_path / "a.gguf", given, pairs | {"blk.0.attn_qkv.weight": (a, b)})
    message = "is of blk.0.attn_q.weight, like 'blk.0.attn_q"
    with pytest.raises(jq.GGUFError, match=message):
        models.with_lora(given, file)
    given, tensors = model("llama-gqa"), {}
    for layer in ("0", "00"):
        tensors[f"layers.{layer}.attention.query.lora_a"] = np.ones((256, 2), np.float32)
        tensors[f"layers.{layer}.attention.query.lora_b"] = np.ones((2, 256), np.float32)
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(jq.CheckpointError, match="layers.00.* is of blk.0.attn_q.weight, like"):
        models.with_lora(given, tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("a", "b", "at"),
    [(1e32, 1e32, "lora_a"), (1e20, 1e20, "lora_b"), (-3e37, 1e-30, "lora_a"), (1e-3, 3e38, "_b")],
)
def test_numbers_too_large_for_finite_logits(a, b, at, tmp_path):
    given = model("llama-gqa")
    pairs = {NAME: (A * np.float32(a), B * np.float32(b))}
    file = write_gguf(tmp_path / "a.gguf", given, pairs)
    with pytest.raises(jq.GGUFError, match=rf"{at}': is so large that logits may be NaN"):
        models.with_lora(given, file)
    with pytest.raises(jq.CheckpointError, match=rf"(?i){at}.weight': is so large"):
        models.with_lora(given, write_peft(tmp_path / "peft", given, pairs))
    finite = {NAME: (A * np.float32(2e4), B * np.float32(2e4))}
    write_gguf(file, given, finite)
    assert np.isfinite(models.with_lora(given, file).logits([[5, 6, 7]])).all()
    with pytest.raises(ValueError, match=f"scale=10000.0 makes the adapter of {NAME} so large"):
        models.with_lora(given, file, scale=1e4)
    with pytest.raises(ValueError, match=f"scale=10000.0 makes the adapter of {NAME} so large"):
        models.merge(path("llama-gqa"), tmp_path / "m.gguf", (file, 1e4))


def test_malformed_descriptions(tmp_path):
    given = model("qwen3-qknorm")
    folder = write_peft(tmp_path / "peft", given, random_pairs(given, ("attn_q",)))
    described = folder / "adapter_config.json"
    for text in ("", "[]", "{", "[" * 100_000, '{"r": 1, "r": 2}', '{"r": NaN}', "1" * 10_000):
        described.write_text(text)
        with pytest.raises(jq.CheckpointError):
            models.with_lora(given, folder)
    described.unlink()
    with pytest.raises(jq.CheckpointError, match="adapter_config.json: is missing next to it"):
        models.with_lora(given, folder)
    os.mkfifo(described)
    with pytest.raises(jq.CheckpointError, match="must be a regular file"):
        models.with_lora(given, folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(jq.CheckpointError, match="adapter_model.safetensors: is missing in the"):
        models.with_lora(given, folder)
    with pytest.raises(FileNotFoundError):
        models.with_lora(given, tmp_path / "nothing.gguf")
    with pytest.raises(FileNotFoundError, match="nothing"):
        models.with_lora(given, tmp_path / "nothing.safetensors")


A, B = np.ones((RANK, 256), np.float32), np.ones((256, RANK), np.float32)
ONE = np.array(1, np.float32)
Q = "base_model.model.model.layers.0.self_attn.q_proj"
BAD_TENSORS = {
    "nothing": ({}, "tensors: are missing"),
    "other": ({"weight": A}, "tensor 'weight': is not part of a LoRA adapter"),
    "alone": ({f"{Q}.lora_A.weight": A}, "is present without its lora_b"),
    "rank": ({f"{Q}.lora_A.weight": A, f"{Q}.lora_B.weight": B[:, :2]}, r"\(256, 2\), expected"),
    "columns": ({f"{Q}.lora_A.weight": A[:, 1:], f"{Q}.lora_B.weight": B}, r"\(3, 255\), expected"),
    "rows": ({f"{Q}.lora_A.weight": A, f"{Q}.lora_B.weight": B[1:]}, r"\(255, 3\), expected"),
    "axes": ({f"{Q}.lora_A.weight": A[0], f"{Q}.lora_B.weight": B}, r"has shape \(256,\), exp"),
    "no-rank": ({f"{Q}.lora_A.weight": A[:0], f"{Q}.lora_B.weight": B[:, :0]}, r"\(0, 256\), exp"),
    "scalar-a": (
        {f"{Q}.lora_A.weight": ONE, f"{Q}.lora_B.weight": B},
        r"shape \(\), exp",
    ),
    "scalar-b": (
        {f"{Q}.lora_A.weight": A, f"{Q}.lora_B.weight": ONE},
        r"shape \(\), exp",
    ),
    "other-rank": (
        {f"{Q}.lora_A.weight": A[:2], f"{Q}.lora_B.weight": B[:, :2]},
        "has rank 2; r and rank_pattern in adapter_config.json are 3",
    ),
    "type": (
        {f"{Q}.lora_A.weight": A.astype(np.float64), f"{Q}.lora_B.weight": B},
        "has dtype F64; supported:",
    ),
    "nan": ({f"{Q}.lora_A.weight": A * np.nan, f"{Q}.lora_B.weight": B}, "element 0 is NaN"),
    "layer": (
        {f"{Q[:-19]}9.self_attn.q_proj.lora_{x}.weight": A for x in "AB"},
        "matches no module of a llama model",
    ),
    "norm": (
        {f"base_model.model.model.norm.lora_{x}.weight": A for x in "AB"},
        "is of output_norm.weight, which is not one of this model's attention",
    ),
    "embedding": (
        {f"base_model.model.model.embed_tokens.lora_embedding_{x}": A for x in "AB"},
        "is not part of a LoRA adapter for matrices",
    ),
    "vocabulary": (
        {f"base_model.model.model.embed_tokens.lora_{x}.weight": A for x in "AB"},
        "is of token_embd.weight, which is not one of this model's attention",
    ),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_tensors_of_peft_that_are_refused(case, tmp_path):
    tensors, message = BAD_TENSORS[case]
    given = model("llama-gqa")
    folder = write_peft(tmp_path / "peft", given, {})
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(jq.CheckpointError, match=message):
        models.with_lora(given, folder)


NAME = "blk.0.attn_q.weight"
BAD_FILES = {
    "type": ({}, {"general__type": "model"}, "general.type: is 'model', expected 'adapter'"),
    "untyped": ({}, {"general__type": None}, "general.type: is missing"),
    "control": ({}, {"adapter__type": "x"}, "adapter.type: is 'x', expected 'lora'"),
    "activated": (
        {NAME: (A, B)},
        {"adapter__alora__invocation_tokens": [1, 2]},
        "adapter.alora.invocation_tokens: is present: activated LoRA is not supported",
    ),
    "unknown-key": (
        {NAME: (A, B)},
        {"adapter__lora__of_tomorrow": True, "adapter__lora__task_name": "chat"},
        "adapter.lora.of_tomorrow: is not a known key, and may change the adapter",
    ),
    "nan": (
        {},
        {"adapter__lora__alpha": np.float32("nan")},
        "adapter.lora.alpha: must be a number",
    ),
    "architecture": (
        {},
        {"general__architecture": "qwen2"},
        "general.architecture: is 'qwen2', expected 'llama'",
    ),
    "empty": ({}, {}, "tensors: are missing"),
    "rank": ({NAME: (A, B[:, :2])}, {}, r"has shape \(256, 2\), expected \(256, 3\)"),
    "transposed": ({NAME: (A.T, B)}, {}, r"has shape \(256, 3\), expected \(rank, 256\)"),
    "norm": ({"output_norm.weight": (A, B)}, {}, "is of output_norm.weight, which is not one"),
    "embedding": ({"token_embd.weight": (A, B)}, {}, "is of token_embd.weight, which is not one"),
    "unknown": ({"blk.0.attn_x.weight": (A, B)}, {}, "is of blk.0.attn_x.weight, which is not one"),
    "layer": ({"blk.7.attn_q.weight": (A, B)}, {}, "is of blk.7.attn_q.weight, which is not one"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_gguf_files_that_are_refused(case, tmp_path):
    pairs, metadata, message = BAD_FILES[case]
    given = model("llama-gqa")
    file = write_gguf(tmp_path / "a.gguf", given, pairs, **metadata)
    with pytest.raises(jq.GGUFError, match=message):
        models.with_lora(given, file)


@pytest.mark.parametrize("end", ["a", "b"])
def test_gguf_tensors_without_axes_are_refused(end, tmp_path):
    """gguf-py writes them; this package's writer refuses to."""
    given, tensors = model("llama-gqa"), {f"{NAME}.lora_a": A, f"{NAME}.lora_b": B}
    tensors[f"{NAME}.lora_{end}"] = ONE
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    write_tensors(writer, tensors)
    with pytest.raises(jq.GGUFError, match=rf"lora_{end}': has shape \(\), expected"):
        models.with_lora(given, tmp_path / "a.gguf")


@pytest.mark.parametrize("shape", [(), (1, 1, 256)])
def test_importance_of_other_axes_is_refused(shape, tmp_path):
    tensors = {f"{NAME}.in_sum2": np.ones(shape, np.float32), f"{NAME}.counts": A[0, :1]}
    writer = gguf.GGUFWriter(tmp_path / "i.gguf", "")
    writer.add_type("imatrix")
    write_tensors(writer, tensors)
    message = rf"in_sum2': has shape {re.escape(str(shape))}, expected \(k,\) or \(experts, k\)"
    with pytest.raises(jq.GGUFError, match=message):
        models.read_imatrix(tmp_path / "i.gguf")


def test_sizes_beside_a_zero_that_no_array_has(tmp_path):
    given = model("llama-gqa")
    folder = write_peft(tmp_path / "peft", given, {})
    described = {"dtype": "F32", "shape": [0, 1 << 62], "data_offsets": [0, 0]}
    header = json.dumps({f"{Q}.lora_A.weight": described, f"{Q}.lora_B.weight": described})
    data = len(header).to_bytes(8, "little") + header.encode()
    (folder / "adapter_model.safetensors").write_bytes(data)
    with pytest.raises(jq.CheckpointError, match=r"has shape \(0, 4611686018427387904\), beyond"):
        models.with_lora(given, folder)


def test_experts_and_tied_outputs_are_refused(tmp_path):
    mixtral = model("mixtral")
    pair = np.ones((RANK, 4), np.float32), np.ones((4, RANK), np.float32)
    name = "blk.0.ffn_down_exps.weight"
    with pytest.raises(jq.GGUFError, match="is of experts .*, which is not supported"):
        models.with_lora(mixtral, write_gguf(tmp_path / "a.gguf", mixtral, {name: pair}))
    config, tied = model("gemma3").config, model("gemma3")
    pair = np.ones((1, config.hidden_size), np.float32), np.ones((config.vocab_size, 1), np.float32)
    with pytest.raises(jq.GGUFError, match="has no such matrix: its output is tied"):
        models.with_lora(tied, write_gguf(tmp_path / "b.gguf", tied, {"output.weight": pair}))


@pytest.mark.parametrize(
    ("name", "module", "parts"),
    [
        ("qwen3next", "linear_attn.in_proj_qkvz", ("attn_qkv", "attn_gate")),
        ("qwen35", "linear_attn.in_proj_z", ("attn_gate",)),
    ],
)
def test_rows_that_files_have_in_another_order_are_refused(name, module, parts, tmp_path):
    config = Config.from_metadata(jq.gguf.read_header(path(name)).metadata)
    expected = expected_tensors(config)
    shapes = [expected[f"blk.0.{part}.weight"].shape for part in parts]
    full = f"base_model.model.model.layers.0.{module}"
    pair = np.ones((RANK, shapes[0][1])), np.ones((sum(rows for rows, _ in shapes), RANK))
    tensors = {f"{full}.lora_{x}.weight": m.astype("f4") for x, m in zip("AB", pair, strict=True)}
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    message = (
        f"{module}.* matches no module of a {name} model, or an adapter of it is not supported"
    )
    with pytest.raises(jq.CheckpointError, match=message):
        adapters.read(tmp_path, config)


def test_a_damaged_file(tmp_path):
    """Each change gives a typed error or an adapter."""
    from support.gguf_bytes import damage

    given, rng = model("llama-gqa"), np.random.default_rng(0)
    file = write_gguf(tmp_path / "a.gguf", given, random_pairs(given, ("attn_q",)))
    peft = write_peft(tmp_path / "peft", given, random_pairs(given, ("attn_q",)))
    weights = peft / "adapter_model.safetensors"
    outcomes = set()
    for sound, size in ((file, 500), (weights, 600), (peft / "adapter_config.json", 80)):
        data = sound.read_bytes()
        for _ in range(100):
            sound.write_bytes(damage(data, size, rng))
            try:
                adapters.read(file if sound == file else peft, given.config)
                outcomes.add("read")
            except (jq.GGUFError, jq.CheckpointError):
                outcomes.add("refused")
        sound.write_bytes(data)
    assert outcomes == {"read", "refused"}
