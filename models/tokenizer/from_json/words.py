"""Converts WordPiece and Unigram models of a tokenizer.json to GGUF metadata."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from ...support.json_fields import JSONFields
from ..vocabulary import KEY
from .tokens import Tokens

#: Score of ids without a token, as in llama.cpp's converter.
_UNUSED_SCORE = -10000.0


def wordpiece(
    model: JSONFields, tokens: Tokens, normalizing: list[JSONFields], lost: list[str]
) -> dict[str, Any]:
    """Returns metadata of a WordPiece model; appends what GGUF cannot express to `lost`."""
    found: dict[str, Any] = {KEY + "model": "bert"}
    if model.integer("max_input_chars_per_word", 100) != 100:
        lost.append("how many characters of a word are split")
    lowercase = False
    for step in normalizing:
        if step.string("type") != "BertNormalizer":
            lost.append(f"the normalizer {step.string('type')[:50]!r}")
            continue
        lowercase = step.boolean("lowercase", True)
        accents = step.boolean("strip_accents", None)
        found[KEY + "normalizer.strip_accents"] = lowercase if accents is None else accents
    return found | {KEY + "normalizer.lowercase": lowercase}


def unigram(
    model: JSONFields, tokens: Tokens, normalizing: list[JSONFields], lost: list[str]
) -> dict[str, Any]:
    """Returns metadata of a Unigram model; appends what GGUF cannot express to `lost`."""
    found: dict[str, Any] = {
        KEY + "model": "t5",
        KEY + "add_space_prefix": True,
        KEY + "remove_extra_whitespaces": True,
    }
    scores = np.full(len(tokens.texts), _UNUSED_SCORE, np.float32)
    for i, score in tokens.scores.items():
        if isinstance(score, bool) or not isinstance(score, int | float):
            model.fail("vocab", f"has the score {score!r:.100} for id {i}, expected a number")
        scores[i] = score
    found[KEY + "scores"] = scores
    for step in normalizing:
        if step.string("type") in ("Replace", "Strip"):  # of runs of spaces
            continue
        if step.string("type") != "Precompiled":
            lost.append(f"the normalizer {step.string('type')[:50]!r}")
            continue
        charsmap = base64.b64decode(step.string("precompiled_charsmap"))
        found[KEY + "precompiled_charsmap"] = np.frombuffer(charsmap, np.uint8)
    return found
