"""Converts byte-level BPE to GGUF metadata, in which a name selects the pre-tokenizer."""

from __future__ import annotations

from typing import Any

from tokenizers import pre_tokenizers

from ...support.json_fields import JSONFields
from ..pretokenizers import PRE_TOKENIZERS, by_patterns
from ..vocabulary import KEY
from .tokens import Tokens, merge_texts


def byte_level(
    root: JSONFields,
    model: JSONFields,
    tokens: Tokens,
    normalizing: list[JSONFields],
    splitting: list[JSONFields],
    lost: list[str],
) -> dict[str, Any]:
    """Returns GGUF metadata: model, pre-tokenizer and merges.

    lost: list to which this appends descriptions of settings that GGUF cannot express.
    """
    for step in normalizing:
        if step.string("type") != "NFC":
            kind = step.string("type")[:100]
            step.fail("type", f"{kind!r} before byte-level BPE has no name in GGUF")
        lost.append("NFC normalization: ids of decomposed characters will differ")
    patterns = []
    for i, step in enumerate(splitting):
        match step.string("type"):
            case "Split":
                patterns.append(_pattern(step))
            case "Digits" if step.boolean("individual_digits", False):
                patterns.append(r"\p{N}")
            case "ByteLevel" if i == len(splitting) - 1:
                if step.boolean("add_prefix_space", True):
                    step.fail("add_prefix_space", "is true, which GGUF cannot express")
                if step.boolean("use_regex", True):
                    patterns.append(PRE_TOKENIZERS["gpt-2"].patterns[0])
            case kind:
                step.fail("type", f"{kind[:100]!r} has no name in GGUF here")
    if lacking := len(set(pre_tokenizers.ByteLevel.alphabet()) - tokens.ids.keys()):
        lost.append(f"that {lacking} bytes without a token are dropped before merging")
    ignore_merges = model.boolean("ignore_merges", False)
    pre = by_patterns(tuple(patterns), ignore_merges)
    if pre is None:
        how = f"splits by {patterns!r} with ignore_merges={ignore_merges}"
        root.fail("pre_tokenizer", f"{how}, which has no name in GGUF")
    return {KEY + "model": "gpt2", KEY + "pre": pre, KEY + "merges": merge_texts(model, tokens.ids)}


def _pattern(step: JSONFields) -> str:
    """Returns the regular expression of a Split step; rejects a step that may drop text."""
    pattern = step.object("pattern")
    if pattern is None:
        step.fail("pattern", "is missing")
    # An inverted "Removed" drops only text between matches, and patterns match everything.
    accepted = (("Isolated", False), ("Removed", True))
    if (step.string("behavior"), step.boolean("invert", False)) not in accepted:
        step.fail("behavior", "has no name in GGUF, expected 'Isolated', not inverted")
    return pattern.string("Regex")
