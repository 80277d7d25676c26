"""Reads and writes sizes that only encoders and rerankers have in GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_q4k.gguf import Fields

from ..architectures.base import Architecture

TOKEN_TYPES = "tokenizer.ggml.token_type_count"
LABELS = "classifier.output_labels"
#: Sizes of the dense layers after pooling: the first's input, its output, and those of the second.
_DENSE = ("dense_2_feat_in", "dense_2_feat_out", "dense_3_feat_in", "dense_3_feat_out")
_MAX_SIZE, _MAX_TYPES = 1 << 24, 1 << 16


def read(
    get: Fields, kind: Architecture, metadata: Mapping[str, Any], hidden_size: int
) -> dict[str, Any]:
    """Returns the fields of `Config` for encoders; raises GGUFError that names the invalid key.

    get: metadata of the architecture. metadata: all of it.
    """
    fields: dict[str, Any] = {}
    if LABELS in get:
        fields["labels"] = len(get.strings(LABELS))
        if not fields["labels"]:
            get.fail(LABELS, "is empty")
    held = {tensor.gguf for tensor in (*kind.input, *kind.output)}
    if "token_types" in held:
        every = Fields(metadata, get.file)
        fields["token_types"] = every.integer(TOKEN_TYPES, 0, least=0, most=_MAX_TYPES)
    if "dense_2" in held and any(key in get for key in _DENSE):
        sizes = [get.integer(key, least=1, most=_MAX_SIZE) for key in _DENSE]
        expected = hidden_size, sizes[1], sizes[1], hidden_size
        for key, size, want in zip(_DENSE, sizes, expected, strict=True):
            if size != want:
                get.fail(key, f"is {size}, expected {want}")
        fields["dense_size"] = sizes[1]
    return fields


def write(config: Any) -> dict[str, Any]:
    """Returns metadata of these fields, the inverse of `read`, with complete keys."""
    prefix, values = f"{config.architecture}.", dict[str, Any]()
    if config.kind.bidirectional:
        values[f"{prefix}attention.causal"] = False
    if config.token_types:
        values[TOKEN_TYPES] = config.token_types
    if config.labels != 1:
        values[prefix + LABELS] = [f"LABEL_{i}" for i in range(config.labels)]
    if (inner := config.dense_size) and (size := config.hidden_size):
        sizes = size, inner, inner, size
        values |= {prefix + key: value for key, value in zip(_DENSE, sizes, strict=True)}
    return values
