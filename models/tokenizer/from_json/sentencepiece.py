"""SentencePiece-like BPE: scores in place of merges.

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

from ...json_fields import JSONFields
from ..encoders import LONGEST_MERGED, SPACE
from ..vocabulary import BYTE_TOKEN, KEY
from .tokens import Tokens, merges_of


def sentencepiece(
    root: JSONFields,
    model: JSONFields,
    tokens: Tokens,
    normalizing: list[JSONFields],
    splitting: list[JSONFields],
) -> dict[str, Any]:
    """Model, scores, unknown token and prefix; sets the types of byte tokens and of the unknown
    one.
    """
    prefix, replaced = False, False
    for step in normalizing:
        match step.string("type"):
            case "Prepend" if step.string("prepend") == SPACE:
                prefix = True
            case "Replace" if _is_space(step.object("pattern")) and step.string("content") == SPACE:
                replaced = True
            case kind:
                step.fail(
                    "type",
                    f"{kind[:100]!r} of this kind is not supported; expected are spaces written as {SPACE!r}",
                )
    for step in splitting:
        kind = step.string("type")
        if kind != "Metaspace" or step.string("replacement") != SPACE:
            step.fail(
                "type",
                f"{kind[:100]!r} is not supported, expected 'ByteLevel' or 'Metaspace' of {SPACE!r}",
            )
        scheme = step.string(
            "prepend_scheme", "always" if step.boolean("add_prefix_space", True) else "never"
        )
        prefix, replaced = prefix or scheme != "never", True
        inner = next(
            (text for text in tokens.ids if SPACE in text[1:] and text not in tokens.added), None
        )
        if step.boolean("split", True) and inner is not None:
            step.fail(
                "split", f"is true, so that {inner!r} would never be formed; GGUF cannot say so"
            )
    if not replaced:
        root.fail(
            "normalizer",
            f"does not write spaces as {SPACE!r}: neither byte-level nor SentencePiece's BPE",
        )
    if not model.boolean("byte_fallback", False):
        model.fail("byte_fallback", "must be true for BPE that is not byte-level")
    missing = next(
        (f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in tokens.ids), None
    )
    if missing is not None:
        model.fail("vocab", f"lacks {missing!r}, a byte token")
    for text, token in tokens.ids.items():
        if BYTE_TOKEN.fullmatch(text):
            tokens.types[token] = TokenType.BYTE
    metadata: dict[str, Any] = {
        KEY + "model": "llama",
        KEY + "pre": "default",
        KEY + "add_space_prefix": prefix,
    }
    unknown = model.string("unk_token", None)
    if unknown is not None:
        if unknown not in tokens.ids:
            model.fail("unk_token", f"is {unknown[:100]!r}, which is not in the vocabulary")
        metadata[KEY + "unknown_token_id"] = tokens.ids[unknown]
        tokens.types[tokens.ids[unknown]] = TokenType.UNKNOWN
    metadata[KEY + "scores"] = _scores(model, tokens)
    return metadata


def _is_space(pattern: JSONFields | None) -> bool:
    return pattern is not None and pattern.values == {"String": " "}


def _scores(model: JSONFields, tokens: Tokens) -> np.ndarray:
    """float32 (vocabulary,)."""
    merges = merges_of(model, tokens.ids)
    listed = set(merges)
    spans: dict[str, tuple[int, int]] = {}  # token -> ranks of its first and last merge
    for rank, (left, right) in enumerate(merges):
        first, _ = spans.get(left + right, (rank, rank))
        spans[left + right] = first, rank
    lacking = {
        text: (text[:cut], text[cut:])
        for text in tokens.ids
        if text not in tokens.added and len(text) <= LONGEST_MERGED
        for cut in range(1, len(text))
        if text[:cut] in tokens.ids
        and text[cut:] in tokens.ids
        and (text[:cut], text[cut:]) not in listed
    }
    first = min((tokens.ids[text] for text in spans), default=0)
    for text, (left, right) in lacking.items():
        # Early converters took the score of the first token, 0, for none; 0 is the highest below,
        # too.
        if len(lacking) > 1 or tokens.ids[text] > first:
            problem = f"lacks {left!r}, {right!r}, which SentencePiece would join to {text!r}: ids would differ"
            model.fail("merges", problem)
    scores = np.zeros(len(tokens.texts), np.float32)
    place, last, previous = 0, -1, ""
    for text, (start, stop) in spans.items():  # in the order of their first merges
        if start > last:
            place += 1
        elif len(set(text + previous)) > 1:
            model.fail(
                "merges", f"interleaves those of {previous!r} and {text!r}, which scores cannot say"
            )
        scores[tokens.ids[text]] = -place
        last, previous = max(last, stop), text
    return scores
