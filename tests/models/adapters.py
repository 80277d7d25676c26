"""Random LoRA adapters and the files that hold them."""

import json

import numpy as np
from safetensors.numpy import save_file

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.config.tensors import expected_tensors
from jax_q4k.models.files.checkpoints import tensor_locations
from jax_q4k.models.files.lora import adapters

from .checkpoints import halves

RANK, ALPHA = 3, 6.0
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "use_dora": False}


def random_pairs(given, short=None, seed=0):
    """Maps GGUF names to (a (rank, k), b (n, rank)) of all matrices, or of those in `short`."""
    rng, tensors = np.random.default_rng(seed), models.named_tensors(given)
    names = [n for n in adapters.named_linears(given.config) if n in tensors]
    if short is not None:
        names = [n for n in names if n.split(".")[-2] in short]
    shapes = {name: tensors[name].shape for name in names}
    return {
        name: (
            rng.normal(size=(RANK, k)).astype(np.float32) / k**0.5,
            rng.normal(size=(n, RANK)).astype(np.float32) / 2,
        )
        for name, (n, k) in shapes.items()
    }


def write_gguf(file, given, pairs, dtype=np.float32, **metadata):
    said = {
        "general.type": "adapter",
        "general.architecture": given.config.architecture,
        "adapter.type": "lora",
        "adapter.lora.alpha": np.float32(ALPHA),
    } | {key.replace("__", "."): value for key, value in metadata.items()}
    tensors = {}
    for name, (a, b) in pairs.items():
        tensors |= {f"{name}.lora_a": a.astype(dtype), f"{name}.lora_b": b.astype(dtype)}
    jq.gguf.write(file, {k: v for k, v in said.items() if v is not None}, tensors)
    return file


def write_peft(folder, given, pairs, config=CONFIG):
    """Writes a PEFT folder with the checkpoint's module names and row order.

    Parts of a fused module must share a.
    """
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors, kind = {}, given.config.kind
    places = tensor_locations.locations(given.config, kind.checkpoints[0])
    expected = expected_tensors(given.config)
    for name, (a, b) in pairs.items():
        place, entry = places[name], expected[name].entry
        module = f"base_model.model.{place.names[0].removesuffix('.weight')}"
        if entry.rotated and given.config.interleaved_rope:
            b = halves(b, getattr(given.config, entry.rotated))
        tensors[f"{module}.lora_A.weight"] = a
        whole = tensors.setdefault(
            f"{module}.lora_B.weight", np.zeros((place.shape[0], RANK), np.float32)
        )
        whole[place.rows] = b
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
