"""Hugging Face checkpoints: folders of config.json, tokenizer.json and safetensors files, with
GGUF's eyes.

What is read, and how it is checked: `config` (config.json), `weights` (safetensors), `source` (all
of it as GGUF metadata and tensors), `models.tokenizer.metadata_from_json` (tokenizer.json).
"""

from __future__ import annotations

import os
from collections.abc import Callable

import jax

from .. import tokenizer
from ..load import build
from ..model import Model
from .source import CheckpointSource

__all__ = ["CheckpointSource", "from_pretrained"]


def from_pretrained(
    path: str | os.PathLike[str], *, progress: Callable[[int, int], object] | None = None
) -> Model:
    """Loads a Llama, Mistral, Qwen 2 or Qwen 3 checkpoint from a local folder; nothing is
    downloaded.

    Weights keep their type (float32, float16 or bfloat16); norms and biases become float32.

    Args:
      path: a folder as `save_pretrained` of the transformers library writes it, or one .safetensors
        file in it.
      progress: called with (bytes done, bytes in all) while tensors are read.

    Returns:
      The model; its tokenizer is None if the folder holds none.

    Raises:
      jax_q4k.CheckpointError: a file is malformed, or asks for what is not supported. OSError: it
        cannot be read.
    """
    with CheckpointSource(path) as source:
        total, done, tensors = sum(source.nbytes.values()), 0, {}
        for name in source.tensors:
            if progress is not None:
                progress(done, total)
            tensors[name] = jax.device_put(source.read(name))
            done += source.nbytes[name]
        if progress is not None:
            progress(done, total)
        words = (
            tokenizer.from_metadata(source.metadata, source.name) if source.has_tokenizer else None
        )
        return Model(build(source.config, tensors), words, source.metadata)
