"""Loads a model's tokenizer without its weights."""

from __future__ import annotations

import os

from jax_q4k import CheckpointError, GGUFError, gguf

from .. import tokenizer
from ..tokenizer import Tokenizer
from .checkpoints.checkpoint import CheckpointSource
from .load import located
from .sources import is_checkpoint


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Loads the tokenizer of a model, as `load` takes it; reads no weights.

    A GGUF file may have only a vocabulary.

    Raises:
      jax_q4k.GGUFError, jax_q4k.CheckpointError: a file is malformed or not supported, or has no
        tokenizer. OSError: it cannot be read.
    """
    path = located(path)
    file = os.fsdecode(path)
    if is_checkpoint(path):
        with CheckpointSource(path) as source:
            if source.tokenizer is None:
                raise CheckpointError(file, "tokenizer.json", "is missing")
            return source.tokenizer
    metadata = gguf.read_header(path).metadata
    if not tokenizer.has_tokenizer(metadata):
        raise GGUFError(file, "tokenizer.ggml.model", "is missing: the file has no vocabulary")
    return tokenizer.from_metadata(metadata, file)
