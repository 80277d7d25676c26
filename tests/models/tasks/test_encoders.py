"""Encoders: `models.embed` of BERT's family, against NumPy and transformers."""

import dataclasses
import functools
import json
import re
import shutil

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from safetensors.numpy import load_file, save_file
from support import encoder_folders, encoders
from support.helpers import nmse
from support.paths import DATA, ROOT

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models import cli
from jax_q4k.models.architectures import ARCHITECTURES
from jax_q4k.models.engine.encoding import batches
from jax_q4k.models.engine.reranking import pairs_of
from jax_q4k.models.network.layers import bidirectional
from jax_q4k.models.tasks import bench

from ..golden_files import model as decoder

FOLDERS = sorted(path.name for path in (DATA / "encoders").iterdir() if path.is_dir())
RERANKERS = [name for name in FOLDERS if name.endswith("reranker")]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Returns a function from a kind to its model and tensors."""
    folder = tmp_path_factory.mktemp("encoders")

    @functools.cache
    def written(kind, labels=0):
        path = folder / f"{kind}-{labels}.gguf"
        held = encoders.write(path, kind, labels=labels)
        return models.load(path), held

    return written


@functools.cache
def folder(name):
    path = DATA / "encoders" / name
    return models.load(path), json.loads((path / "expected.json").read_text())


def ids_of(count, seed=0, vocab=60):
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()


@pytest.mark.parametrize("kind", encoders.KINDS)
def test_vectors_of_each_token(made, kind):
    """Rows of one batch, the longer one beyond the windows."""
    given, held = made(kind)
    rows = [ids_of(29), ids_of(3, 1)]
    for ids, got in zip(rows, models.embed(given, rows, pooling="none"), strict=True):
        assert nmse(got, encoders.reference(kind, held, ids)) <= 1e-11


@pytest.mark.slow("compiles a program for a long text", quick=["modern-bert"])
@pytest.mark.parametrize("kind", ["bert", "jina-bert-v2", "modern-bert"])
def test_long_texts_in_blocks(made, kind, monkeypatch):
    monkeypatch.setattr(bidirectional, "BLOCK", 16)
    given, held = made(kind)
    ids = ids_of(61, 2)  # a block is left over
    got = models.embed(given, [ids], pooling="none")[0]
    assert nmse(got, encoders.reference(kind, held, ids)) <= 1e-11


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_poolings(made, pooling):
    given, held = made("bert")
    rows = [ids_of(29), ids_of(3, 1)]
    got = models.embed(given, rows, pooling=pooling)
    for ids, vector in zip(rows, got, strict=True):
        vectors = encoders.reference("bert", held, ids)
        want = {"mean": vectors.mean(0), "cls": vectors[0], "last": vectors[-1]}[pooling]
        assert nmse(vector, want) <= 1e-11


def test_dense_layers_follow_the_pooling(made):
    given, held = made("gemma-embedding")
    ids = ids_of(29)
    mean = encoders.reference("gemma-embedding", held, ids).mean(0)
    want = held["dense_3.weight"].astype(float) @ (held["dense_2.weight"].astype(float) @ mean)
    assert nmse(models.embed(given, ids), want) <= 1e-11
    unit = models.embed(given, ids, normalize=True)
    assert nmse(unit, want / np.linalg.norm(want)) <= 1e-11


@pytest.mark.parametrize("name", [name for name in FOLDERS if name not in RERANKERS])
def test_folders_of_transformers(name):
    given, expected = folder(name)
    assert [given.tokenizer.encode(text) for text in expected["texts"]] == expected["ids"]
    got = models.embed(given, expected["texts"], pooling="none")
    for vectors, want in zip(got, expected["vectors"], strict=True):
        assert nmse(vectors, np.array(want)) <= 1e-11


@pytest.mark.parametrize("kind", encoder_folders.LAYER)
def test_folders_of_publishers(kind, tmp_path):
    """Their config.json and names of tensors; a GGUF file made of the folder has equal vectors."""
    held = encoder_folders.write(tmp_path, kind)
    given, rows = models.load(tmp_path), [ids_of(29), ids_of(3, 1)]
    found = models.embed(given, rows, pooling="none")
    for ids, got in zip(rows, found, strict=True):
        assert nmse(got, encoders.reference(given.config.architecture, held, ids)) <= 1e-11
    models.save_gguf(given, tmp_path / "a.gguf")
    again = models.load(tmp_path / "a.gguf")
    assert again.config.context_length == encoders.CONTEXT
    for got, want in zip(models.embed(again, rows, pooling="none"), found, strict=True):
        np.testing.assert_array_equal(got, want)


def test_the_publishers_folder_of_jina_embeddings_v3(tmp_path):
    """Names of the publisher, with an adapter that a text without a task does not use."""
    source, (given, _) = DATA / "encoders/jina-bert-v3", folder("jina-bert-v3")
    config = json.loads((source / "config.json").read_text())
    del config["rope_parameters"]  # the default of transformers' class
    shutil.copytree(source, tmp_path / "a")
    (tmp_path / "a/config.json").write_text(json.dumps(config))
    config |= {"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta"}
    config |= {"lora_adaptations": ["separation"], "lora_alpha": 1, "lora_rank": 4}
    config |= {"position_embedding_type": "rotary", "rotary_emb_base": 20000.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    held = {}
    for name, value in load_file(source / "model.safetensors").items():
        module, suffix = name.rsplit(".", 1)
        if suffix == "weight" and value.ndim == 2:
            held[f"roberta.{module}.parametrizations.weight.original"] = value
            n, k = value.shape
            adapter = f"roberta.{module}.parametrizations.weight.0.lora"
            a, b = ((1, n, 4), (1, 4, k)) if "embeddings" in module else ((1, 4, k), (1, n, 4))
            held[f"{adapter}_A"], held[f"{adapter}_B"] = np.ones(a, "f4"), np.ones(b, "f4")
        else:
            held[f"roberta.{name}"] = value
    save_file(held, tmp_path / "model.safetensors")
    rows = [ids_of(29, vocab=40), ids_of(3, 1, vocab=40)]
    for model in (models.load(tmp_path), models.load(tmp_path / "a")):
        np.testing.assert_array_equal(models.embed(model, rows), models.embed(given, rows))
    del config["rotary_emb_base"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(jq.CheckpointError, match="rotary_emb_base: is missing"):
        models.load(tmp_path)


def test_the_bias_of_the_sum_of_experts(tmp_path):
    """Files hold it unless it is 0, because llama.cpp refuses files with it."""
    encoder_folders.write(tmp_path, "nomic-bert-moe")
    name = "blk.1.ffn_exps.bias"
    with pytest.warns(UserWarning, match=f"llama.cpp has no tensor {name}"):
        models.quantize_file(tmp_path, tmp_path / "a.gguf", "F32")
    assert name in jq.gguf.read(tmp_path / "a.gguf").tensors
    held = load_file(tmp_path / "model.safetensors")
    held["encoder.layers.1.mlp.experts.bias"] *= 0
    save_file(held, tmp_path / "model.safetensors")
    models.quantize_file(tmp_path, tmp_path / "a.gguf", "F32")
    assert name not in jq.gguf.read(tmp_path / "a.gguf").tensors


def test_further_norms_of_which_one_is_missing(tmp_path):
    """A folder of jina-embeddings-v2-base-code has all three in every layer."""
    encoder_folders.write(tmp_path, "jina-bert-v2-code")
    held = load_file(tmp_path / "model.safetensors")
    del held["encoder.layer.1.attention.self.layer_norm_k.bias"]
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(jq.CheckpointError, match=r"layers.1.*layer_norm_k.bias': is missing"):
        models.load(tmp_path)


@pytest.mark.parametrize(
    "kind, changes, problem",
    [
        ("nomic-bert", {"qkv_proj_bias": True}, "qkv_proj_bias: is True, which is not supported"),
        ("nomic-bert", {"rotary_emb_fraction": 0.5}, "rotary_emb_fraction: is 0.5"),
        ("nomic-bert", {"rotary_emb_fraction": None}, "rotary_emb_fraction: is missing"),
        ("nomic-bert", {"hidden_size": 32}, "n_embd: is 64, but hidden_size is 32"),
        ("nomic-bert", {"moe_every_n_layers": 2}, "num_experts: is missing"),
        (
            "nomic-bert-moe",
            {"moe_every_n_layers": 1},
            "moe_every_n_layers: must be an integer",
        ),
        ("nomic-bert-moe", {"moe_normalize_expert_weights": True}, "moe_normalize_expert_weights"),
        ("nomic-bert-moe", {"num_shared_experts": 1}, "num_shared_experts: is 1"),
        ("nomic-bert-moe", {"num_experts": 4}, "router.layer.weight': has shape (5, 64)"),
        ("nomic-bert", {"activation_function": "gelu"}, "activation_function: is 'gelu'"),
        ("jina-bert-v2", {"feed_forward_type": "reglu"}, "feed_forward_type: is 'reglu'"),
        ("jina-bert-v2", {"position_embedding_type": "absolute"}, "position_embedding_type: is"),
    ],
)
def test_settings_of_publishers_that_are_refused(kind, changes, problem, tmp_path):
    encoder_folders.write(tmp_path, kind, **changes)
    with pytest.raises(jq.CheckpointError, match=re.escape(problem)):
        models.load(tmp_path)


def test_dense_layers_of_a_folder(tmp_path):
    """EmbeddingGemma's folders have them in folders of their own."""
    shutil.copytree(DATA / "encoders" / "gemma-embedding", tmp_path, dirs_exist_ok=True)
    names, rng = ("Transformer", "Pooling", "Dense", "Dense", "Normalize"), np.random.default_rng(0)
    modules = [
        {"path": f"{i}_{name}" if i else "", "type": f"sentence_transformers.models.{name}"}
        for i, name in enumerate(names)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text('{"pooling_mode_mean_tokens": true}')
    weights = []
    for name, n, k in (("2_Dense", 80, 32), ("3_Dense", 32, 80)):
        (tmp_path / name).mkdir()
        about = {"in_features": k, "out_features": n, "bias": False}
        about["activation_function"] = "torch.nn.modules.linear.Identity"
        (tmp_path / name / "config.json").write_text(json.dumps(about))
        weights.append(rng.standard_normal((n, k)).astype(np.float32))
        save_file({"linear.weight": weights[-1]}, tmp_path / name / "model.safetensors")
    given, (_, expected) = models.load(tmp_path), folder("gemma-embedding")
    mean = np.array(expected["vectors"][0]).mean(0)
    want = weights[1].astype(float) @ (weights[0].astype(float) @ mean)
    got = models.embed(given, expected["texts"][0])
    assert nmse(got, want / np.linalg.norm(want)) <= 1e-11
    models.save_gguf(given, tmp_path / "a.gguf")
    assert models.load(tmp_path / "a.gguf").config.dense_size == 80
    about["bias"] = True
    (tmp_path / "3_Dense/config.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match="3_Dense/config.json: bias=true is not supported"):
        models.embed(models.load(tmp_path), [5])


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_become_gguf_files(name, tmp_path):
    given, expected = folder(name)
    models.save_gguf(given, tmp_path / "a.gguf")
    again = models.load(tmp_path / "a.gguf")
    eps = given.config.norm_eps  # float64 in config.json, float32 in GGUF files
    assert dataclasses.replace(again.config, norm_eps=eps) == given.config
    for text in map(str.strip, expected["texts"]):  # a last space is lost, as in llama.cpp
        assert again.tokenizer.encode(text) == given.tokenizer.encode(text)
    if "pairs" in expected:
        pairs = pairs_of(again, expected["query"], expected["documents"], 640)
        assert [pair.ids.tolist() for pair in pairs] == expected["pairs"]
    tensors = models.named_tensors(given)
    for tensor, value in models.named_tensors(again).items():
        np.testing.assert_array_equal(value, tensors[tensor], err_msg=tensor)


@pytest.mark.parametrize("kind, name", [("bert", "0.ffn_up"), ("nomic-bert-moe", "1.ffn_up_exps")])
def test_quantized_weights(kind, name, made, tmp_path):
    """The matrices stay packed, and the vectors are near those of the floats."""
    given, held = made(kind)
    models.save_gguf(models.quantize(given, "Q8_0"), tmp_path / "a.gguf")
    packed = models.load(tmp_path / "a.gguf")
    assert jq.is_quantized(models.named_tensors(packed)[f"blk.{name}.weight"])
    ids = ids_of(29)
    got = models.embed(packed, ids, pooling="none")
    assert nmse(got, encoders.reference(kind, held, ids)) <= 1e-3


def test_batches_are_bounded(made):
    """Each text is in one batch, with texts of about its length."""
    given, _ = made("bert")
    lengths = [600, 3, 500, 4, *[120] * 70]
    found = list(batches(given, lengths))
    assert sorted(i for batch in found for i in batch) == list(range(len(lengths)))
    for batch in found:
        longest = max(lengths[i] for i in batch)
        assert len(batch) == 1 or given.padded_length(longest) * len(batch) <= 4096
    progress = []
    models.embed(given, [[5]] * 3, progress=lambda *at: progress.append(at))
    assert progress == [(3, 3)]


def test_encoders_generate_nothing(made):
    given, _ = made("bert")
    for call in (
        lambda: models.generate(given, [1, 2]),
        lambda: next(models.stream(given, [1, 2])),
        lambda: given.logits([[1, 2]]),
        lambda: models.score(given, "the sea was calm"),
        lambda: models.kl_divergence(given, given, "the sea was calm"),
        lambda: models.compile_step(given, "step.bin"),
        lambda: models.abstract_programs(given),
        lambda: bench.check(given, bench.Test("pp", 8)),
    ):
        with pytest.raises(ValueError, match="is an encoder, bert: it makes embeddings"):
            call()
    with pytest.raises(ValueError, match="model is an encoder, bert; EncoderEngine runs it"):
        models.Engine(given)


@pytest.mark.parametrize("command", ["generate", "chat", "bench", "perplexity", "compile"])
def test_commands_of_text_refuse_encoders(command, tmp_path, capsys):
    file = tmp_path / "a.gguf"
    encoders.write(file, "bert")
    more = {
        "generate": ["-p", "a"],
        "bench": ["-p", "8", "-n", "0", "-r", "1"],
        "perplexity": [str(ROOT / "README.md")],
        "compile": ["-o", str(tmp_path / "step")],
    }
    assert cli.main([command, str(file), *more.get(command, [])]) == 2
    assert "error: the model is an encoder, bert" in capsys.readouterr().err.replace("\n", " ")


def test_texts_beyond_the_context(made):
    given, _ = made("bert")
    with pytest.raises(ValueError, match="text has 641 tokens; the context length is 640"):
        models.embed(given, [5] * 641)
    assert models.embed(given, [5] * 640).shape == (encoders.HIDDEN,)


@pytest.mark.parametrize("heads, want", [(4, [1 / 4, 1 / 16, 1 / 64, 1 / 256]), (6, None)])
def test_slopes(heads, want):
    """Six heads have the slopes of four, then the first and third of eight."""
    if want is None:
        want = [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]
    np.testing.assert_allclose(bidirectional.alibi_slopes(heads, 8.0), want, rtol=1e-6)


def test_engine(made):
    """Requests of several threads, in batches of about one length."""
    given, _ = made("bert")
    rows = [ids_of(n, n) for n in (3, 29, 5, 29)]
    want = models.embed(given, rows)
    with models.EncoderEngine(given, max_rows=2) as engine:
        assert nmse(engine.embed(rows), want) <= 1e-11
        assert nmse(engine.embed(rows[1]), want[1]) <= 1e-11
        stats = engine.stats()
        assert stats.prompt_tokens == 3 + 29 + 5 + 29 + 29
        with pytest.raises(ValueError, match="text has 641 tokens"):
            engine.embed([5] * 641)
    assert not engine.is_open
    with pytest.raises(models.EngineClosedError, match="the engine is closed"):
        engine.embed(rows)
    with pytest.raises(ValueError, match="model is a decoder, llama; Engine runs it"):
        models.EncoderEngine(decoder("llama-gqa"))


def test_an_engine_that_fails_says_so(made, monkeypatch):
    given, _ = made("bert")
    engine = models.EncoderEngine(given)
    monkeypatch.setattr(engine._runs, "vectors", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.embed([5])
    engine._thread.join()
    assert isinstance(engine.failure, ZeroDivisionError)
    with pytest.raises(models.EngineClosedError, match="the engine has failed: division by zero"):
        engine.embed([5])


def test_the_page_of_models_names_every_encoder():
    head, found = "| encoders | `general.architecture` |", []
    lines = (ROOT / "docs/models.md").read_text().splitlines()
    for line in lines[lines.index(head) + 2 :]:
        if not line:
            break
        found.append(line.strip("| ").rpartition(" | ")[2].strip("`"))
    assert found == list(encoders.KINDS)
    assert {name for name, kind in ARCHITECTURES.items() if kind.bidirectional} == {*found}


@pytest.mark.slow("compiles two programs a mesh", quick=["modern-bert-dp"])
@pytest.mark.parametrize("axis", ["dp", "tp"])
@pytest.mark.parametrize("kind", ["modern-bert", "gemma-embedding", "nomic-bert-moe"])
@pytest.mark.filterwarnings("ignore:.*replicated")
def test_meshes(kind, axis, tmp_path):
    held = encoders.write(tmp_path / "a.gguf", kind)
    mesh = jax.make_mesh((2,), (axis,), axis_types=(AxisType.Explicit,))
    rows = [ids_of(29), ids_of(3, 1)]
    found = models.embed(models.load(tmp_path / "a.gguf", mesh=mesh), rows, pooling="none")
    for ids, got in zip(rows, found, strict=True):
        assert nmse(got, encoders.reference(kind, held, ids)) <= 1e-11
