"""Converts a tokenizer.json to GGUF's `tokenizer.*` metadata.

Byte-level BPE becomes `tokenizer.ggml.model` = "gpt2"; GGUF must have a name for its pre-tokenizer.
SentencePiece-like BPE (byte fallback, "▁" for spaces) becomes "llama", or "gemma4", which keeps the
merges, if it splits texts like Gemma's files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...support.json_fields import JSONFields
from ...support.warn import warn
from ..special_tokens import END_TEXTS
from ..vocabulary import KEY, PHI_3_KEEPS, PHI_3_NAMES, SPECIAL_TOKENS, Vocabulary
from .byte_level import byte_level
from .sentencepiece import GEMMA_MARKUP, sentencepiece
from .special_tokens import Named, template_metadata
from .tokens import UNIGRAM, WORDPIECE, Tokens, steps
from .words import unigram, wordpiece

__all__ = ["GEMMA_MARKUP", "Described", "metadata"]


@dataclass(frozen=True)
class Described:
    """A tokenizer's tokens and vocabulary as read from its files, and the names of the files."""

    tokens: Tokens
    named: Named
    vocabulary: Vocabulary
    config_file: str
    eos_file: str


def metadata(content: Callable[[], dict[str, Any]], described: Described) -> dict[str, Any]:
    """Converts a tokenizer to GGUF metadata.

    Warns of settings that GGUF has no key for. Raises CheckpointError if GGUF cannot express the
    tokenizer.

    content: returns the object of the tokenizer.json.
    """
    tokens, file = described.tokens, described.vocabulary.file
    root = JSONFields(content(), file)
    model = root.object("model") or root.fail("model", "is missing")
    splitting = steps(root.object("pre_tokenizer"), "pretokenizers")
    normalizing = steps(root.object("normalizer"), "normalizers")
    found: dict[str, Any]
    lost: list[str] = []
    kind = model.string("type", "BPE")
    if kind in (WORDPIECE, UNIGRAM):
        convert = wordpiece if kind == WORDPIECE else unigram
        found = convert(model, tokens, normalizing, lost)
    elif any(step.string("type") == "ByteLevel" for step in splitting):
        found = byte_level(root, model, tokens, normalizing, splitting, lost)
    else:
        found = sentencepiece(root, model, tokens, normalizing, splitting, lost)
    found[KEY + "tokens"] = tokens.texts
    found[KEY + "token_type"] = found.pop("types", tokens.types)
    if set(tokens.added) - tokens.stripping == set(PHI_3_KEEPS):
        found["general.name"] = PHI_3_NAMES[0]
        lost += _flags(tokens.flagged, ("lstrip", "single_word"))
    else:
        lost += _flags(tokens.flagged, ("lstrip", "rstrip", "single_word"))
    if any(step.string("type") == "Prepend" for step in normalizing):
        lost += _flags(tokens.flagged, ("normalized",))  # the added space is part of them
    found |= _special_tokens(root, described, found[KEY + "model"], lost)
    for what in lost:
        warn(f"{file}: GGUF cannot express {what}")
    return found | template_metadata(described.vocabulary.chat_templates)


def _flags(flagged: dict[str, list[str]], flags: tuple[str, ...]) -> list[str]:
    """Returns phrases for a warning that list the added tokens with each of `flags`."""
    found = []
    for flag in flags:
        if texts := flagged.get(flag):
            shown = ", ".join(repr(text[:50]) for text in texts[:3])
            more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
            found.append(f"that added tokens have {flag}: {shown}{more}")
    return found


def _special_tokens(
    root: JSONFields, described: Described, model: str, lost: list[str]
) -> dict[str, Any]:
    """Returns GGUF metadata: ids of special tokens, and whether BOS and EOS are added to texts."""
    named, tokens, vocabulary = described.named, described.tokens, described.vocabulary
    found: dict[str, Any] = {}
    for name, token, ids in (
        ("bos", named.bos, vocabulary.before),
        ("eos", named.eos, vocabulary.after),
    ):
        if token is not None:
            found[f"{KEY}{name}_token_id"] = token
        elif model == "llama":  # readers would use ids 1 and 2
            problem = "is missing, and neither is '<s>' or '</s>' in the vocabulary"
            JSONFields({}, described.config_file).fail(f"{name}_token", problem)
        adds = ids == (token,)
        if ids and not adds:
            position = "before" if name == "bos" else "after"
            shown = ", ".join(repr(tokens.texts[i]) for i in ids)
            lost.append(f"that {shown} are added {position} texts: nothing is added")
        if name == "bos" and not adds and model == "gemma4":
            problem = "adds no BOS before texts, but Gemma's texts begin with one in GGUF"
            root.fail("post_processor", problem)
        found[f"{KEY}add_{name}_token"] = adds
    if len(vocabulary.between) > 1 and "sep_token" in named.others:
        found[KEY + "add_sep_token"] = True
    if named.unknown is not None:
        found[KEY + "unknown_token_id"] = named.unknown
    found |= {KEY + SPECIAL_TOKENS[name]: token for name, token in named.others.items()}
    others = [token for token in named.ends if tokens.texts[token] not in END_TEXTS]
    if len(others) > 2:
        problem = f"{others!r:.200} are more end tokens than GGUF can name"
        JSONFields({}, described.eos_file).fail("eos_token_id", problem)
    names = zip(others, ("eot", "eom"), strict=False)
    return found | {f"{KEY}{other}_token_id": token for token, other in names}
