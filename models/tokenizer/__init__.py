"""Builds tokenizers from GGUF metadata, or from the tokenizer.json of checkpoint folders.

`tokenizer.ggml.model` may be "llama" (SentencePiece with scores), "gpt2" (byte-level BPE),
"gemma4" (BPE of raw UTF-8), "bert" (WordPiece) or "t5" (SentencePiece's Unigram); ids equal
llama.cpp's for the same text and flags, except that WordPiece keeps all vowels of Hangul and
Devanagari and takes words of over 100 characters as unknown, as the models' own tokenizers do. A
tokenizer.json is read by the `tokenizers` library; `metadata_from_json` converts it to GGUF
metadata where possible.
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
    """Returns whether the metadata has a vocabulary; test models often have none."""
    model = metadata.get("tokenizer.ggml.model", "none")
    # `from_metadata` rejects a model that is not a str.
    return not isinstance(model, str) or model not in NO_VOCABULARY


def from_metadata(metadata: Mapping[str, Any], file: str = "metadata") -> Tokenizer:
    """Builds the tokenizer that GGUF metadata describes.

    Args:
      metadata: keys as in the file, arrays as any sequence.
      file: name of the file in error messages.

    Raises:
      jax_q4k.GGUFError: the metadata is inconsistent, or the tokenizer is not supported.
    """
    vocabulary = GGUFVocabulary.from_metadata(metadata, file)
    return Tokenizer(vocabulary, GGUFEncoder(vocabulary))


def from_gguf(path: str | os.PathLike[str]) -> Tokenizer:
    """Loads the tokenizer of a GGUF file, which may have only a vocabulary; reads no tensor data.

    Raises:
      jax_q4k.GGUFError: the file is malformed, or as in `from_metadata`.
    """
    return from_metadata(gguf.read_header(path).metadata, os.fsdecode(path))
