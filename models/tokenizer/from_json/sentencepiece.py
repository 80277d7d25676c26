"""SentencePiece-like BPE: scores in place of merges, except for Gemma's, which GGUF can keep.

SentencePiece's rule joins the neighbours that form the token of the highest score; here each
token's score is minus the place that its first merge has among all tokens'. That is the same order
if every way of splitting a token in two is a merge, and the merges of one token stand together, as
in files converted from SentencePiece. Runs of one character (Llama 2's spaces) interleave there and
share one score.
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

#: Gemma 4's marks of tool calls and channels, which readers of its answers need.
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
    unsaid: list[str],
) -> dict[str, Any]:
    """GGUF's keys of a SentencePiece-like model, and "types" where they are not `tokens`' own.

    unsaid: gets what GGUF leaves out.
    """
    prefix, replaced = _normalizer(normalizing)
    gemma = replaced and not prefix and len(splitting) == 1 and _splits_at_spaces(splitting[0])
    for step in [] if gemma else splitting:
        prefix, replaced = _metaspace(step, tokens, unsaid) or prefix, True
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
            if set(text) == {SPACE}:  # merges form it, and it stands for spaces
                types[tokens.ids[text]] = TokenType.NORMAL
            elif text in GEMMA_MARKUP:
                types[tokens.ids[text]] = TokenType.USER_DEFINED
    else:
        metadata[KEY + "scores"] = _scores(model, tokens)
    return metadata


def _splits_at_spaces(step: JSONFields) -> bool:
    """Gemma's pre-tokenizer; it finds no space, since the normalizer has replaced them all."""
    return (
        step.string("type") == "Split"
        and _is_space(step.object("pattern"))
        and step.string("behavior") == "MergedWithPrevious"
        and not step.boolean("invert", False)
    )


def _normalizer(steps: list[JSONFields]) -> tuple[bool, bool]:
    """(a space is put before a text, spaces are written as SPACE)."""
    prefix, replaced = False, False
    for step in steps:
        match step.string("type"):
            case "Prepend" if step.string("prepend") == SPACE:
                prefix = True
            case "Replace" if _is_space(step.object("pattern")) and step.string("content") == SPACE:
                replaced = True
            case kind:
                expected = f"expected are spaces written as {SPACE!r}"
                step.fail("type", f"{kind[:100]!r} of this kind is not supported; {expected}")
    return prefix, replaced


def _metaspace(step: JSONFields, tokens: Tokens, unsaid: list[str]) -> bool:
    """True if a pre-tokenizer's step, a `Metaspace`, puts a space before a text."""
    kind = step.string("type")
    if kind != "Metaspace" or step.string("replacement") != SPACE:
        expected = f"expected 'ByteLevel' or 'Metaspace' of {SPACE!r}"
        step.fail("type", f"{kind[:100]!r} is not supported, {expected}")
    spaced = (text for text in tokens.ids if SPACE in text[1:] and text not in tokens.added)
    if step.boolean("split", True) and (inner := next(spaced, None)) is not None:
        problem = f"is true, so that {inner!r} would never be formed; GGUF cannot say so"
        step.fail("split", problem)
    if prepends(step):
        how = "after special tokens and before a text's own leading space"
        unsaid.append(f"where Metaspace puts no space: {how} there will be one")
    return prepends(step)


def _check_bytes(model: JSONFields, tokens: Tokens) -> None:
    """Refuses a vocabulary without the tokens of all 256 bytes."""
    if not model.boolean("byte_fallback", False):
        model.fail("byte_fallback", "must be true for BPE that is not byte-level")
    for byte in range(256):
        if f"<0x{byte:02X}>" not in tokens.ids:
            model.fail("vocab", f"lacks '<0x{byte:02X}>', a byte token")


def _is_space(pattern: JSONFields | None) -> bool:
    return pattern is not None and pattern.values == {"String": " "}


def _scores(model: JSONFields, tokens: Tokens) -> np.ndarray:
    """float32 (vocabulary,)."""
    merges = merges_of(model, tokens.ids)
    spans: dict[str, tuple[int, int]] = {}  # token -> ranks of its first and last merge
    for rank, (left, right) in enumerate(merges):
        first, _ = spans.get(left + right, (rank, rank))
        spans[left + right] = first, rank
    _check_complete(model, tokens, merges)
    scores = np.zeros(len(tokens.texts), np.float32)
    place, last, previous = 0, -1, ""
    for text, (start, stop) in spans.items():  # in the order of their first merges
        if start > last:
            place += 1
        elif len(set(text + previous)) > 1:
            problem = f"interleaves those of {previous!r} and {text!r}, which scores cannot say"
            model.fail("merges", problem)
        scores[tokens.ids[text]] = -place
        last, previous = max(last, stop), text
    return scores


def _check_complete(model: JSONFields, tokens: Tokens, merges: Merges) -> None:
    """Refuses merges that lack a way of splitting a token into two others."""
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
        # Early converters took the score 0 of the first token for none; here 0 is the highest, too.
        if len(lacking) > 1 or tokens.ids[text] > first:
            join = f"which SentencePiece would join to {text!r}: ids would differ"
            model.fail("merges", f"lacks {left!r}, {right!r}, {join}")
