"""Converts SentencePiece-like BPE to GGUF: merges become scores, except for Gemma.

SentencePiece joins the neighbors that form the token with the highest score. The score of a token
is minus the rank of its first merge among all tokens. The order is the same if every split of a
token into two is a merge, and the merges of one token are adjacent, as in files converted from
SentencePiece. Merges of runs of one character (Llama 2's spaces) interleave there, and these tokens
share one score. GGUF can keep Gemma's merges.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf.constants import TokenType

from ...support.json_fields import JSONFields
from ..encoders import LONGEST_MERGED, SPACE
from ..vocabulary import KEY
from .decoder import prepends
from .tokens import Merges, Tokens, merge_texts, merges_of

#: Gemma 4's markup of tool calls and channels, which clients need to parse answers.
GEMMA_MARKUP = (
    *("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"),
    *("<|tool_response>", "<tool_response|>", '<|"|>'),
)


def sentencepiece(
    root: JSONFields,
    model: JSONFields,
    tokens: Tokens,
    normalizing: list[JSONFields],
    splitting: list[JSONFields],
    lost: list[str],
) -> dict[str, Any]:
    """Returns GGUF metadata of a SentencePiece-like model; "types" overrides `tokens.types`.

    lost: list to which this appends descriptions of settings that GGUF cannot express.
    """
    prefix, replaced = _normalizer(normalizing)
    gemma = replaced and not prefix and len(splitting) == 1 and _splits_at_spaces(splitting[0])
    for step in [] if gemma else splitting:
        prefix, replaced = _metaspace(step, tokens, lost) or prefix, True
    if not replaced:
        problem = f"does not write spaces as {SPACE!r}: neither byte-level nor SentencePiece's BPE"
        root.fail("normalizer", problem)
    _check_bytes(model, tokens)
    metadata: dict[str, Any] = {
        KEY + "model": "gemma4" if gemma else "llama",
        KEY + "pre": "gemma4" if gemma else "default",
        KEY + "add_space_prefix": prefix,
    }
    if gemma:
        metadata[KEY + "merges"] = merge_texts(model, tokens.ids)
        types = metadata["types"] = tokens.types.copy()
        for text in tokens.added:
            if set(text) == {SPACE}:  # formed by merges, and represents spaces
                types[tokens.ids[text]] = TokenType.NORMAL
            elif text in GEMMA_MARKUP:
                types[tokens.ids[text]] = TokenType.USER_DEFINED
    else:
        metadata[KEY + "scores"] = _scores(model, tokens)
    return metadata


def _splits_at_spaces(step: JSONFields) -> bool:
    """Returns whether a step is Gemma's pre-tokenizer.

    It never splits, because the normalizer has replaced all spaces.
    """
    return (
        step.string("type") == "Split"
        and _is_space(step.object("pattern"))
        and step.string("behavior") == "MergedWithPrevious"
        and not step.boolean("invert", False)
    )


def _normalizer(steps: list[JSONFields]) -> tuple[bool, bool]:
    """Returns whether a space is added before texts, and whether spaces are replaced by SPACE."""
    prefix, replaced = False, False
    for step in steps:
        match step.string("type"):
            case "Prepend" if step.string("prepend") == SPACE:
                prefix = True
            case "Replace" if _is_space(step.object("pattern")) and step.string("content") == SPACE:
                replaced = True
            case kind:
                expected = f"expected spaces written as {SPACE!r}"
                step.fail("type", f"{kind[:100]!r} of this kind is not supported; {expected}")
    return prefix, replaced


def _metaspace(step: JSONFields, tokens: Tokens, lost: list[str]) -> bool:
    """Returns whether a `Metaspace` pre-tokenizer adds a space before a text.

    Rejects other steps.
    """
    kind = step.string("type")
    if kind != "Metaspace" or step.string("replacement") != SPACE:
        expected = f"expected 'ByteLevel' or 'Metaspace' of {SPACE!r}"
        step.fail("type", f"{kind[:100]!r} is not supported, {expected}")
    spaced = (text for text in tokens.ids if SPACE in text[1:] and text not in tokens.added)
    if step.boolean("split", True) and (inner := next(spaced, None)) is not None:
        problem = f"is true, so that {inner!r} is never formed, which GGUF cannot express"
        step.fail("split", problem)
    if prepends(step):
        how = "after special tokens and before a text's own leading space"
        lost.append(f"where Metaspace adds no space: {how} there will be one")
    return prepends(step)


def _check_bytes(model: JSONFields, tokens: Tokens) -> None:
    """Raises CheckpointError for a vocabulary without tokens for all 256 bytes."""
    if not model.boolean("byte_fallback", False):
        model.fail("byte_fallback", "must be true for BPE that is not byte-level")
    for byte in range(256):
        if f"<0x{byte:02X}>" not in tokens.ids:
            model.fail("vocab", f"lacks '<0x{byte:02X}>', a byte token")


def _is_space(pattern: JSONFields | None) -> bool:
    return pattern is not None and pattern.values == {"String": " "}


def _scores(model: JSONFields, tokens: Tokens) -> np.ndarray:
    """Returns scores float32 (vocabulary,) that reproduce the order of the merges."""
    merges = merges_of(model, tokens.ids)
    spans: dict[str, tuple[int, int]] = {}  # token -> ranks of its first and last merge
    for rank, (left, right) in enumerate(merges):
        first, _ = spans.get(left + right, (rank, rank))
        spans[left + right] = first, rank
    _check_complete(model, tokens, merges)
    scores = np.zeros(len(tokens.texts), np.float32)
    order, last, previous = 0, -1, ""
    for text, (start, stop) in spans.items():  # ordered by first merge
        if start > last:
            order += 1
        elif len(set(text + previous)) > 1:
            problem = f"interleaves those of {previous!r} and {text!r}, which scores cannot express"
            model.fail("merges", problem)
        scores[tokens.ids[text]] = -order
        last, previous = max(last, stop), text
    return scores


def _check_complete(model: JSONFields, tokens: Tokens, merges: Merges) -> None:
    """Raises CheckpointError if the merges lack a split of a token into two tokens."""
    listed = set(merges)
    lacking = {
        text: (text[:cut], text[cut:])
        for text in tokens.ids
        if text not in tokens.added and len(text) <= LONGEST_MERGED
        for cut in range(1, len(text))
        if text[:cut] in tokens.ids
        and text[cut:] in tokens.ids
        and (text[:cut], text[cut:]) not in listed
    }
    first = min((tokens.ids[left + right] for left, right in merges), default=0)
    for text, (left, right) in lacking.items():
        # Early converters lost merges of the first token, because they took its score 0 for a
        # missing one. Here 0 is the highest score too, so the order stays.
        if len(lacking) > 1 or tokens.ids[text] > first:
            join = f"which SentencePiece would merge to {text!r}: ids would differ"
            model.fail("merges", f"lacks {left!r}, {right!r}, {join}")
