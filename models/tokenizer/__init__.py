"""Tokenizers of GGUF files, by their metadata, and of folders, by their tokenizer.json.

`tokenizer.ggml.model` may be "llama" (SentencePiece with scores), "gpt2" (byte-level BPE) or
"gemma4" (BPE of raw UTF-8); ids equal llama.cpp's for the same text and flags. A tokenizer.json is
read by the `tokenizers` library; `metadata_from_json` says in GGUF's keys what these can say of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from jax_q4k import gguf

from .encoders import GGUFEncoder
from .from_json import from_json, metadata_from_json
from .streaming import StreamDecoder
from .tokenizer import Tokenizer
from .vocabulary import NO_VOCABULARY, GGUFVocabulary, Vocabulary

__all__ = [
    "StreamDecoder",
    "Tokenizer",
    "Vocabulary",
    "from_gguf",
    "from_json",
    "from_metadata",
    "has_tokenizer",
    "metadata_from_json",
]


def has_tokenizer(metadata: Mapping[str, Any]) -> bool:
    """True if the metadata holds a vocabulary, which test models often do not."""
    model = metadata.get("tokenizer.ggml.model", "none")
    # `from_metadata` refuses a model that is no str.
    return not isinstance(model, str) or model not in NO_VOCABULARY


def from_metadata(metadata: Mapping[str, Any], file: str = "metadata") -> Tokenizer:
    """The tokenizer that GGUF metadata describes.

    Args:
      metadata: keys as in the file, arrays as any sequence.
      file: its name in errors.

    Raises:
      jax_q4k.GGUFError: the metadata is inconsistent, or names a tokenizer that is not supported.
    """
    vocabulary = GGUFVocabulary.from_metadata(metadata, file)
    return Tokenizer(vocabulary, GGUFEncoder(vocabulary))


def from_gguf(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a GGUF file, vocabulary-only files included. No tensor data is read.

    Raises:
      jax_q4k.GGUFError: a malformed file, and as `from_metadata` does.
    """
    return from_metadata(gguf.read_header(path).metadata, os.fsdecode(path))
