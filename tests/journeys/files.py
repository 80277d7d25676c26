"""Models of journeys: golden files, the demo, and variants of a golden file."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from support.paths import GOLDEN

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.network import build

ORIGINAL = "llama-gqa"
#: Context length of "short" in tokens.
SHORT = 100


@functools.cache
def path(name: str) -> Path:
    """Returns the file of a golden model, the demo, a model in MADE, or an adapter."""
    if name == "demo":
        return models.demo_path()
    if name in ADAPTERS:
        return ADAPTERS[name](_folder() / f"{name}.gguf")
    if name in MADE:
        return _made(_folder() / f"{name}.gguf", MADE[name])
    (file,) = GOLDEN.glob(f"{name}.*.gguf")
    return file


@functools.cache
def _folder() -> Path:
    holder = tempfile.TemporaryDirectory(prefix="jax-q4k-journeys-")
    _folder.holder = holder  # type: ignore[attr-defined]  # removed with it
    return Path(holder.name)


def _made(file: Path, change: Callable[[Any, Any], tuple[Any, Any]]) -> Path:
    """Writes the original model with changed tensors or config."""
    original = models.load(path(ORIGINAL))
    config, tensors = change(original.config, dict(models.named_tensors(original)))
    metadata = {**original.metadata, **config.to_metadata()}
    models.save_gguf(models.Model(build.build(config, tensors), None, metadata), file)
    return file


def _with(**fields: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
    return lambda config, tensors: (dataclasses.replace(config, **fields), tensors)


def _other_weights(config: Any, tensors: Any) -> tuple[Any, Any]:
    norm = np.roll(tensors["output_norm.weight"], 3)
    return config, tensors | {"output_norm.weight": jnp.asarray(norm)}


#: Name -> function from the original's (config, tensors) to those of the variant.
MADE = {
    "short": _with(context_length=SHORT),
    "other theta": lambda c, t: (dataclasses.replace(c, rope_theta=2 * c.rope_theta), t),
    "other epsilon": _with(norm_eps=1e-2),
    "other weights": _other_weights,
}


def _adapter(rank: int, seed: int, layer: int = 0) -> Callable[[Path], Path]:
    def write(file: Path) -> Path:
        rng, tensors = (
            np.random.default_rng(seed),
            models.named_tensors(models.load(path(ORIGINAL))),
        )
        name = f"blk.{layer}.attn_output.weight"
        n, k = tensors[name].shape
        pairs = {
            f"{name}.lora_a": rng.normal(size=(rank, k)).astype(np.float32) / k**0.5,
            f"{name}.lora_b": rng.normal(size=(n, rank)).astype(np.float32),
        }
        said = {
            "general.type": "adapter",
            "general.architecture": "llama",
            "adapter.type": "lora",
            "adapter.lora.alpha": np.float32(2 * rank),
        }
        jq.gguf.write(file, said, pairs)
        return file

    return write


#: Adapters of the original model, with other values or on another layer.
ADAPTERS = {
    "adapter": _adapter(3, 0),
    "adapter, other values": _adapter(3, 1),
    "adapter, other layer": _adapter(3, 0, layer=1),
}
