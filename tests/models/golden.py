"""Golden models: loaded once per process, with llama.cpp's tokens and logits for them."""

from __future__ import annotations

import functools
import json
from typing import NamedTuple

import numpy as np
from helpers import GOLDEN, nmse

import jax_q4k as jq
from jax_q4k import models

LLAMA_AND_QWEN = ("llama-gqa", "llama3-rope", "qwen2-bias", "qwen2-odd", "qwen3-qknorm")
NAMES = (*LLAMA_AND_QWEN, "gemma", "gemma2", "gemma3")
#: Further files of the same architectures: only their logits are looked at, and their tokens.
VARIANTS = ("gemma2-27b", "gemma3-nowindow", "llama-bias", "llama-longrope", "qwen2-fused")
#: Files whose layers have experts.
WITH_EXPERTS = (
    "glm4moe",
    "gpt-oss",
    "gpt-oss-mxfp4",
    "granitemoe",
    "mixtral",
    "qwen2moe",
    "qwen3moe",
    "qwen3vlmoe",
)
#: Further architectures, each by a file or more.
FAMILIES = (
    "cohere2",
    "command-r",
    "glm4",
    "granite",
    "granite-nope",
    "mistral3",
    "olmo2",
    "olmo3",
    "phi3",
    "phi3-long",
    "phi3-short",
    "qwen2vl",
    "qwen3vl",
    "smollm3",
    "starcoder2",
    *WITH_EXPERTS,
)


class Reference(NamedTuple):
    prompt: np.ndarray  # int32 (48,)
    greedy: np.ndarray  # int32 (24,), what follows the prompt
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


def check_logits(name: str) -> None:
    """The CPU's kernels: of exact activations llama.cpp's logits, of int8 ones not much further."""
    loaded, want = model(name), reference(name)
    tokens = want.tokens[None]
    with jq.implementation("native", activations="f32"):
        logits = loaded.logits(tokens)[0]
    assert nmse(logits, want.logits) <= 1e-8
    greedy = logits[len(want.prompt) - 1 : -1].argmax(-1)
    assert greedy.tolist() == want.greedy.tolist()
    theirs = json.loads((GOLDEN / f"{name}.json").read_text())["nmse_q8act"]
    with jq.implementation("native"):
        # llama.cpp's own int8 activations
        assert nmse(loaded.logits(tokens)[0], want.logits) <= 1.2 * theirs
