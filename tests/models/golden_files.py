"""Golden models, loaded once per process, with llama.cpp's tokens and logits."""

from __future__ import annotations

import contextlib
import functools
import json
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from support.helpers import nmse
from support.paths import GOLDEN

import jax_q4k as jq
from jax_q4k import models

LLAMA_AND_QWEN = ("llama-gqa", "llama3-rope", "qwen2-bias", "qwen2-odd", "qwen3-qknorm")
NAMES = (*LLAMA_AND_QWEN, "gemma", "gemma2", "gemma3")
#: Further files of the same architectures; tests use only their logits and tokens.
VARIANTS = ("gemma2-27b", "gemma3-nowindow", "llama-bias", "llama-longrope", "qwen2-fused")
#: Files with recurrent layers.
RECURRENT = ("lfm2", "lfm2moe", "qwen35", "qwen35-mtp", "qwen35moe", "qwen3next")
#: Files whose layers have experts.
WITH_EXPERTS = (
    "deepseek2",
    "deepseek2-lite",
    "deepseek2-noyarn",
    "gemma4-moe",
    "glm4moe",
    "gpt-oss",
    "gpt-oss-mxfp4",
    "granitemoe",
    "lfm2moe",
    "mixtral",
    "qwen2moe",
    "qwen35moe",
    "qwen3moe",
    "qwen3next",
    "qwen3vlmoe",
)
#: Files in which int8 activations, ours or llama.cpp's, change the experts of some tokens. The
#: result then depends more on the experts than on the products, so tests fix the experts.
ROUTED = ("deepseek2", "deepseek2-lite", "deepseek2-noyarn", "gemma4-moe", "qwen3next")

#: Further architectures, each with at least one file.
FAMILIES = (
    "cohere2",
    "command-r",
    "gemma4",
    "gemma4-e",
    "glm4",
    "granite",
    "granite-nope",
    "lfm2",
    "mistral3",
    "olmo2",
    "olmo3",
    "phi3",
    "phi3-long",
    "phi3-short",
    "qwen2vl",
    "qwen35",
    "qwen35-mtp",
    "qwen3vl",
    "smollm3",
    "starcoder2",
    *WITH_EXPERTS,
)

#: A file for each feature of a decoder. The quick tier runs these on all implementations; the CPU
#: kernels run every file.
FEATURES = {
    "rope on pairs of neighbors": "llama-gqa",
    "rope scaled as Llama 3 has it": "llama3-rope",
    "rope of long and short factors": "phi3-long",
    "rope by yarn, attention sinks": "gpt-oss-mxfp4",
    "rope of three positions": "qwen2vl",
    "layers without rope": "smollm3",
    "norms of queries and keys": "qwen3-qknorm",
    "norms before and after, soft caps": "gemma2",
    "norms after alone": "olmo2",
    "LayerNorm, attention beside the MLP, windows": "cohere2",
    "biases, an MLP without gate": "starcoder2",
    "embeddings of each layer, shared KV": "gemma4-e",
    "latent attention, experts in groups": "deepseek2",
    "experts": "granitemoe",
    "gated delta nets": "qwen35",
    "short convolutions, experts": "lfm2moe",
}
FEATURED = tuple(FEATURES.values())


class Reference(NamedTuple):
    prompt: np.ndarray  # int32 (48,)
    greedy: np.ndarray  # int32 (24,), the continuation of the prompt
    logits: np.ndarray  # float32 (72, vocab), after each token of both

    @property
    def tokens(self) -> np.ndarray:
        return np.concatenate([self.prompt, self.greedy])


def path(name: str):
    (file,) = GOLDEN.glob(f"{name}.*.gguf")
    return file


@functools.cache
def model(name: str) -> models.Model:
    return models.from_gguf(path(name))


@functools.cache
def reference(name: str) -> Reference:
    with np.load(GOLDEN / f"{name}.npz") as data:
        return Reference(data["prompt"], data["greedy_f32"], data["logits_f32"])


@contextlib.contextmanager
def routes_given(name: str):
    """Context in which tokens get the experts of llama.cpp's float32 run, with their weights."""
    with np.load(GOLDEN / f"{name}.npz") as data:
        routes = iter(data["routes_f32"].astype(np.int32))

    def given(x, logits, gate, up, down, top, *, gating, selection_bias, **options):
        normalize, scale = options.pop("normalize"), options.pop("scale")
        for name in ("groups", "groups_used", "group_best"):  # only used for choosing
            del options[name]
        rows = next(routes)
        time = logits.shape[-2]
        ids = jnp.array(np.pad(rows, ((0, time - len(rows)), (0, 0)))).reshape(
            *logits.shape[:-1], top
        )
        scores = jax.nn.softmax(logits) if gating == "softmax" else jax.nn.sigmoid(logits)
        weights = jnp.take_along_axis(scores, ids, axis=-1)
        if normalize:
            weights = weights / weights.sum(-1, keepdims=True)
        shared, logit = options.pop("shared"), options.pop("shared_logits")
        if shared is not None:
            around = {k: options[k] for k in ("activation", "norm_weight", "eps") if k in options}
            y = jq.mlp(x, *shared, **around)
            y = y if logit is None else jax.nn.sigmoid(logit) * y
            options["residual"] = options["residual"] + y
        return jq.expert_mlp(x, gate, up, down, ids, weights * scale, **options)

    with mock.patch.object(jq, "routed_mlp", given):
        yield


def check_logits(name: str) -> None:
    """Checks the CPU kernels: float activations match llama.cpp's logits, int8 ones almost."""
    loaded, want = model(name), reference(name)
    tokens = want.tokens[None]
    with jq.implementation("native", activations="f32"):
        logits = loaded.logits(tokens)[0]
    assert nmse(logits, want.logits) <= 1e-8
    greedy = logits[len(want.prompt) - 1 : -1].argmax(-1)
    assert greedy.tolist() == want.greedy.tolist()
    # error of llama.cpp's own int8 activations
    theirs = json.loads((GOLDEN / f"{name}.json").read_text())["nmse_q8act"]
    if name not in ROUTED:
        with jq.implementation("native"):
            assert nmse(loaded.logits(tokens)[0], want.logits) <= 1.2 * theirs
    elif name != "deepseek2-lite":  # see test_families
        with jq.implementation("native"), routes_given(name):
            fresh = models.from_gguf(path(name))  # with programs of these routes only
            assert nmse(fresh.logits(tokens)[0], want.logits) <= 1.2 * theirs
