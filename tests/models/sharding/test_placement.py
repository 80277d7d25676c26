"""Models sharded over several devices: results equal one device's, with the expected shards."""

from __future__ import annotations

import functools
import re
import shutil
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from support.helpers import nmse
from support.paths import GOLDEN

import jax_q4k as jq
from jax_q4k import models

FAMILIES = ["llama-gqa", "llama3-rope", "qwen2-bias", "qwen2-odd", "qwen3-qknorm"]
TOKENS = np.array([[1, 5, 9, 2, 7, 11, 3, 4, 8, 6]])


def mesh(devices: int, kind: AxisType = AxisType.Auto, axis: str = "tp") -> Mesh:
    return jax.make_mesh((devices,), (axis,), axis_types=(kind,), devices=jax.devices()[:devices])


def path(name: str) -> Path:
    return GOLDEN / f"{name}.Q4_K_M.gguf"


def quietly(*arguments: Any, **options: Any) -> models.Model:
    """Loads a model without the warning that names replicated tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return models.load(*arguments, **options)


def decode_step(model: models.Model, batch: int = 1) -> jax.stages.Compiled:
    """Compiles a decode step with a cache of 64 tokens."""
    cache = models.PagedCache.create(model.config, batch, 64, placement=model.placement)
    tokens = model.put(np.ones(batch, np.int32))
    with model.on_devices():
        return model.decode_step.lower(model.weights, tokens, cache).compile()


class Decoded(NamedTuple):
    """Logits and most probable token of each step after a prompt, and the step's program."""

    logits: list[jax.Array]
    tokens: list[int]
    program: str


def decoded(model: models.Model) -> Decoded:
    """Runs six steps after TOKENS."""
    with jq.implementation(activations="f32"), model.on_devices():
        cache = models.PagedCache.create(model.config, 1, 64, placement=model.placement)
        prompt = (model.put(TOKENS), model.put(np.array([TOKENS.size], np.int32)))
        prefill = jax.jit(lambda weights, *arguments: model.decoder(weights).prefill(*arguments))
        found, cache = prefill(model.weights, *prompt, cache)
        logits, tokens, step = [], [int(np.argmax(found))], decode_step(model)
        for _ in range(6):
            token = model.put(np.array(tokens[-1:], np.int32))
            found, cache = step(model.weights, token, cache)
            logits.append(np.asarray(found))
            tokens.append(int(np.argmax(found)))
    return Decoded(logits, tokens, step.as_text())


@functools.cache
def of_one_device(name: str) -> Decoded:
    return decoded(models.load(path(name)))


@pytest.mark.slow(
    "compiles a program for each number of devices",
    quick=["qwen2-bias-AxisType.Explicit-devices=2"],
)
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", FAMILIES)
def test_golden_models(name: str, kind: AxisType, devices: int) -> None:
    """Steps after a prompt equal one device's; weights and pages are not gathered."""
    model = quietly(path(name), mesh=mesh(devices, kind))
    one, several = of_one_device(name), decoded(model)
    assert nmse(several.logits, one.logits) <= 1e-10
    assert several.tokens == one.tokens
    gathered = re.findall(
        r"= \(?(\w+)\[([\d,]*)\][^=]* (?:all-gather|all-to-all)\(", several.program
    )
    assert all(dtype != "u8" for dtype, _ in gathered)
    activations = max(model.config.intermediate_size, model.config.vocab_size)
    assert all(np.prod([int(n) for n in shape.split(",")]) <= activations for _, shape in gathered)


@pytest.mark.slow("compiles two programs a model")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_generated_tokens(name: str, kind: AxisType) -> None:
    one, several = models.load(path(name)), quietly(path(name), mesh=mesh(2, kind))
    with jq.implementation(activations="f32"):
        assert nmse(several.logits(TOKENS), one.logits(TOKENS)) <= 1e-10
        first, second = (
            models.generate(model, TOKENS[0], max_new_tokens=6, ignore_end=True).tokens
            for model in (one, several)
        )
    assert first == second


@pytest.mark.slow("compiles programs for several devices")
@pytest.mark.parametrize(
    ("axes", "kind"),
    [
        ({"data": 2, "model": 4}, AxisType.Auto),
        ({"dp": 2, "tp": 2}, AxisType.Explicit),
        ({"data": 4}, AxisType.Auto),
    ],
)
def test_batches_over_a_data_axis(axes: dict[str, int], kind: AxisType) -> None:
    """Tokens equal one device's; a device holds its rows and their pages, and moves no weights."""
    count = int(np.prod([*axes.values()]))
    on = jax.make_mesh(
        tuple(axes.values()), tuple(axes), (kind,) * len(axes), devices=jax.devices()[:count]
    )
    one, several = models.load(path("llama-gqa")), quietly(path("llama-gqa"), mesh=on)
    groups = axes.get("data") or axes["dp"]
    tokens = np.random.default_rng(0).integers(1, one.config.vocab_size, (4, 10))
    prompts = [row[:length] for row, length in zip(tokens, (8, 3, 10), strict=False)]
    with jq.implementation(activations="f32"):
        logits = several.logits(tokens)
        assert nmse(logits, one.logits(tokens)) <= 1e-10
        assert logits.addressable_shards[0].data.shape[0] == 4 // groups
        assert nmse(several.logits(tokens[:3]), one.logits(tokens[:3])) <= 1e-10
        first, second = (  # three rows: padding fills the last device's share
            [out.tokens for out in models.generate(m, prompts, max_new_tokens=6, ignore_end=True)]
            for m in (one, several)
        )
    assert first == second
    cache = models.PagedCache.create(several.config, 4, 64, placement=several.placement)
    for pages in cache.pages[0]:
        assert pages.addressable_shards[0].data.nbytes == pages.nbytes // count
    moved = re.findall(
        r"= \(?(\w+)\[([\d,]*)\][^=]* all-[\w-]+\(", decode_step(several, 4).as_text()
    )
    assert all(dtype == "f32" for dtype, _ in moved) and bool(moved) == (count > groups)
    sizes = [np.prod([int(n) for n in shape.split(",")]) for _, shape in moved]
    assert max(sizes, default=0) <= 4 // groups * one.config.intermediate_size


def test_a_batch_that_devices_cannot_split() -> None:
    on = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    model = quietly(path("llama-gqa"), mesh=on)
    with pytest.raises(
        ValueError, match="batch=3 must be a multiple of 2, the devices along.*data"
    ):
        models.PagedCache.create(model.config, 3, 64, placement=model.placement)


@pytest.mark.slow("compiles a step for two devices")
def test_two_sums_a_layer() -> None:
    """Splits rows, then columns, of attention and of feed-forward, if all dimensions divide."""
    config = models.Config("llama", 512, 512, 1024, 512, 3, 8, 4, 64, 1e-5)
    text = decode_step(random_model(config, mesh(2))).as_text()
    assert "all-gather" not in text and "all-to-all" not in text
    assert len(re.findall(r" all-reduce(?:-start)?\(", text)) == 2 * config.num_layers + 1


#: Models with states, convolutions, heads that differ between layers, and latent vectors.
OTHERS = ["qwen35", "lfm2moe", "gemma4-e", "deepseek2-noyarn"]
PROMPTS = [TOKENS[0], TOKENS[0, 3:9]]
TWO = np.concatenate([TOKENS, TOKENS[:, ::-1]])


def of_prompts(model: models.Model, **options: Any) -> list[list[int]]:
    """Generates tokens after PROMPTS."""
    options = {"max_new_tokens": 6, "ignore_end": True} | options
    return [out.tokens for out in models.generate(model, PROMPTS, **options)]


@functools.cache
def logits_and_tokens(file: Path) -> tuple[np.ndarray, list[list[int]]]:
    """Logits of TWO on one device, and tokens after PROMPTS."""
    one = models.load(file)
    with jq.implementation(activations="f32"):
        return np.asarray(one.logits(TWO)), of_prompts(one)


@pytest.mark.slow("compiles two programs a model and mesh")
@pytest.mark.parametrize(
    ("axes", "kind"),
    [
        ({"tp": 2}, AxisType.Auto),
        ({"dp": 2}, AxisType.Auto),
        ({"dp": 2, "tp": 2}, AxisType.Explicit),
    ],
)
@pytest.mark.parametrize("name", OTHERS)
def test_layers_of_other_kinds(name: str, axes: dict[str, int], kind: AxisType) -> None:
    """Logits, tokens, and tokens with drafts equal one device's; rows of states are sharded."""
    count = int(np.prod([*axes.values()]))
    on = jax.make_mesh(
        tuple(axes.values()), tuple(axes), (kind,) * len(axes), devices=jax.devices()[:count]
    )
    (file,) = GOLDEN.glob(f"{name}.*.gguf")
    several, (logits, want) = quietly(file, mesh=on), logits_and_tokens(file)
    with jq.implementation(activations="f32"):
        assert nmse(several.logits(TWO), logits) <= 1e-10
        assert of_prompts(several) == want
        if count == 4:  # test_drafts covers a single axis
            assert of_prompts(several, draft="lookup") == want
    groups, heads = axes.get("dp", 1), axes.get("tp", 1)
    cache = models.PagedCache.create(several.config, 2, 64, placement=several.placement)
    for state in jax.tree.leaves(cache.states):
        assert state.addressable_shards[0].data.shape[0] == 2 // groups
    for layer, (keys, *_) in ((i, pages) for i, pages in enumerate(cache.pages) if pages):
        held = keys.addressable_shards[0].data.shape[1]
        kv_heads = several.config.kv_heads_of(layer)
        assert held == (1 if several.config.latent else max(kv_heads // heads, 1))


def test_heads_of_each_layer_decide_what_is_split() -> None:
    """Layers with two KV heads are sharded over two devices, those with one head are replicated."""
    (file,) = GOLDEN.glob("gemma4-e.*.gguf")
    with pytest.warns(UserWarning, match="attn_k, attn_v, inp_gate, per_layer_model_proj, proj$"):
        model = models.load(file, mesh=mesh(2))
    tensors = models.named_tensors(model)
    assert tensors["blk.0.attn_k.weight"].sharding.spec == P("tp")
    assert tensors["blk.3.attn_k.weight"].sharding.is_fully_replicated
    assert tensors["per_layer_token_embd.weight"].sharding.spec == P("tp")


@pytest.mark.slow("compiles programs for two devices")
@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2}])
def test_drafts(axes: dict[str, int]) -> None:
    """Samples with a penalty, while rows or the vocabulary are sharded in the arrays' types."""
    on = jax.make_mesh((2,), tuple(axes), (AxisType.Explicit,), devices=jax.devices()[:2])
    one, several = models.load(path("llama-gqa")), quietly(path("llama-gqa"), mesh=on)
    options: dict[str, Any] = {"temperature": 0.5, "repetition_penalty": 1.3, "seed": 2}
    with jq.implementation(activations="f32"):
        assert of_prompts(several, draft="lookup", **options) == of_prompts(one, **options)


def random_model(config: models.Config, on: Mesh) -> models.Model:
    """A model of Q4_K zeros with the config's shapes."""
    from jax_q4k.models.config.tensors import expected_tensors
    from jax_q4k.models.network.build import build
    from jax_q4k.models.sharding.plan import plan_sharding

    tensors = {}
    for name, expected in expected_tensors(config).items():
        if expected.required:
            zeros = np.zeros(expected.shape, np.float32)
            tensors[name] = jq.quantize(zeros, "Q4_K") if zeros.ndim == 2 else jax.device_put(zeros)

    class Info:
        def __init__(self, tensor: Any) -> None:
            self.shape, self.type = tensor.shape, self
            self.name = getattr(tensor, "format", "F32")

    infos = {name: Info(tensor) for name, tensor in tensors.items()}
    placement = plan_sharding(config, infos, on)
    placed = {name: jax.device_put(t, placement.tensors[name]) for name, t in tensors.items()}
    return models.Model(build(config, placed), None, None, placement)


@pytest.mark.slow("compiles several programs", quick=["fields2-AxisType.Auto"])
@pytest.mark.grid
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.8, "top_k": 5},
        {"temperature": 0.8, "top_p": 0.9, "min_p": 0.05},
        {"repetition_penalty": 1.3},
    ],
)
def test_sampling(fields: dict[str, Any], kind: AxisType) -> None:
    one, several = models.load(path("llama-gqa")), quietly(path("llama-gqa"), mesh=mesh(2, kind))
    with jq.implementation(activations="f32"):
        first, second = (
            models.generate(model, TOKENS[0], max_new_tokens=5, seed=3, **fields).tokens
            for model in (one, several)
        )
    assert first == second


@pytest.mark.slow("compiles four programs for two devices")
def test_score_stream_and_batches() -> None:
    file = GOLDEN / "text-spm.Q4_K_M.gguf"
    one, several = models.load(file), quietly(file, mesh=mesh(2, AxisType.Explicit))
    text = "Till the dirges of his Hope that melancholy burden bore"
    with jq.implementation(activations="f32"):
        assert models.score(several, text).nats == pytest.approx(models.score(one, text).nats, 1e-6)
        prompts = [TOKENS[0, :4], TOKENS[0]]
        batches = [models.generate(m, prompts, max_new_tokens=5) for m in (one, several)]
        pieces = [p.token for p in models.stream(several, TOKENS[0], max_new_tokens=5)]
    assert [o.tokens for o in batches[0]] == [o.tokens for o in batches[1]]
    assert [token for token in pieces if token is not None] == batches[0][1].tokens


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2-bias", "qwen2-odd"])
def test_parts_are_those_of_the_file(name: str) -> None:
    one, several = models.load(path(name)), quietly(path(name), mesh=mesh(4))
    whole, split = models.named_tensors(one), models.named_tensors(several)
    assert whole.keys() == split.keys()
    for tensor in whole:
        for a, b in zip(
            jax.tree.leaves(whole[tensor]), jax.tree.leaves(split[tensor]), strict=True
        ):
            np.testing.assert_array_equal(a, b)
    held = sum(w.addressable_shards[0].data.nbytes for w in several.weights)
    assert held < 0.6 * sum(w.nbytes for w in one.weights)


def test_rules_place_tensors() -> None:
    rules = {"attn_q": P("x"), "token_embd": P("x"), "ffn_down": P("x", None)}
    model = models.load(path("qwen2-bias"), mesh=mesh(2, axis="x"), rules=rules)
    tensors = models.named_tensors(model)
    assert tensors["blk.1.attn_q.weight"].sharding.spec == P("x")
    assert tensors["blk.1.attn_q.bias"].sharding.spec == P("x")
    assert tensors["blk.0.attn_k.weight"].sharding.is_fully_replicated
    with jq.implementation(activations="f32"):
        want = models.load(path("qwen2-bias")).logits(TOKENS)
        assert nmse(model.logits(TOKENS), want) <= 1e-10


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ({"attn_qq": P("tp")}, ValueError, r"rules\['attn_qq'\]: the model has no such tensor"),
        ({"attn_q": P("dp")}, ValueError, "no axis 'dp' for 'blk.0.attn_q.weight'; it has 'tp'"),
        ({"attn_q": "tp"}, TypeError, "is a str; it must be a PartitionSpec"),
        (
            {"ffn_down": P(None, "tp")},
            ValueError,
            r"'blk.0.ffn_down.weight': axis 1 of 768 cannot be split into 2: its 3 blocks of 256",
        ),
        ({"attn_norm": P(None, "tp")}, ValueError, "2 axes; tensor 'blk.0.attn_norm.weight' has 1"),
    ],
)
def test_wrong_rules(rules: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        models.load(path("llama-gqa"), mesh=mesh(2), rules=rules)


def test_wrong_meshes() -> None:
    several = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    with pytest.raises(
        ValueError, match="mesh has axes 'a', 'b'; tensors are split over one named"
    ):
        models.load(path("llama-gqa"), mesh=several)
    with pytest.raises(TypeError, match="mesh is a int; it must be a jax.sharding.Mesh"):
        models.load(path("llama-gqa"), mesh=4)  # type: ignore[arg-type]


def test_replicated_tensors_are_reported() -> None:
    with pytest.warns(UserWarning, match="replicated on each of 4 devices.*: attn_k, attn_v"):
        models.load(path("llama-gqa"), mesh=mesh(4))


def test_groups_of_devices_hold_the_same_head() -> None:
    """Two KV heads over four devices: each device has the pages of one head."""
    model = quietly(path("llama-gqa"), mesh=mesh(4))
    cache = models.PagedCache.create(model.config, 1, 64, placement=model.placement)
    keys = cache.pages[0][0]
    assert keys.shape[1] == 4 and keys.addressable_shards[0].data.shape[1] == 1


def test_damage_in_a_part_is_found(tmp_path: Path) -> None:
    """The message names the block, wherever its shard begins."""
    file = tmp_path / "damaged.gguf"
    shutil.copy(path("llama-gqa"), file)
    with jq.gguf.TensorFile(file) as source:
        header = source.header
    info = header.tensors["blk.0.ffn_gate.weight"]
    with file.open("r+b") as out:
        out.seek(header.data_start + info.offset + 144 * 500)
        out.write(b"\x00\x7c")
    with pytest.raises(jq.GGUFError, match="ffn_gate.weight.*block 500 is NaN or infinite"):
        quietly(file, mesh=mesh(2))
