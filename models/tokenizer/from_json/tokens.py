"""Reads vocabulary and merges of a tokenizer.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf.constants import TokenType

from ...support.json_fields import JSONFields
from ...support.warn import warn
from ..encoders import MAX_MERGES, SPACE
from ..vocabulary import BYTE_TOKEN

Merges = list[tuple[str, str]]

#: Types of models that are not BPE.
WORDPIECE, UNIGRAM = "WordPiece", "Unigram"

#: Tokens such as "<|im_start|>", which are never parsed in a user's text, regardless of flags.
_LOOKS_SPECIAL = re.compile(r"<[|｜].*[|｜]>")


class Tokens:
    """The vocabulary of a tokenizer.json.

    Attributes:
      texts: texts by id, padded to the vocabulary size.
      types: int32 (size,), TokenType.
      ids: text -> id of the tokens in the file.
      raw: tokens are UTF-8 with SentencePiece's spaces.
      added: text of an added token -> whether it is special.
      scores: id -> score of Unigram's tokens.
      flagged: "lstrip", "rstrip", "single_word" or "normalized" -> added tokens with this flag.
    """

    def __init__(self, root: JSONFields, model: JSONFields, size: int | None, raw: bool) -> None:
        """Reads the vocabulary.

        size: vocabulary size of the model; None means the number of tokens, whose ids have no gaps.
        """
        self.raw = raw
        self.added: dict[str, bool] = {}
        self.flagged: dict[str, list[str]] = {}
        self.scores: dict[int, Any] = {}
        self.ids = self._read_ids(root, model, size)
        self.texts = self._read_texts(model, size)
        self.types = np.full(len(self.texts), TokenType.UNUSED, np.int32)
        self.types[list(self.ids.values())] = TokenType.NORMAL
        for text, special in self.added.items():
            control = special or _LOOKS_SPECIAL.fullmatch(text)
            self.types[self.ids[text]] = TokenType.CONTROL if control else TokenType.USER_DEFINED
        if model.boolean("byte_fallback", False):
            for text, token in self.ids.items():
                if BYTE_TOKEN.fullmatch(text):
                    self.types[token] = TokenType.BYTE
        unknown = model.string("unk_token", None)
        if (number := model.integer("unk_id", None)) is not None:
            unknown = next((text for text, i in self.ids.items() if i == number), None)
            if unknown is None:
                model.fail("unk_id", f"is {number}, which is not in the vocabulary")
        if unknown is not None:
            if unknown not in self.ids:
                model.fail("unk_token", f"is {unknown[:100]!r}, which is not in the vocabulary")
            if raw:
                self.types[self.ids[unknown]] = TokenType.UNKNOWN
        if model.string("type", "BPE") == WORDPIECE:
            self._spell_as_in_gguf(model)

    def _spell_as_in_gguf(self, model: JSONFields) -> None:
        """Replaces WordPiece's spelling of `texts`, where ## begins parts of words, by GGUF's."""
        prefix = model.string("continuing_subword_prefix", "##")
        for i, text in enumerate(self.texts):
            if self.types[i] == TokenType.NORMAL:
                inner = text.startswith(prefix) and len(text) > len(prefix)
                self.texts[i] = text[len(prefix) :] if inner else SPACE + text

    @property
    def stripping(self) -> set[str]:
        """Added tokens that strip the white space after them."""
        return set(self.flagged.get("rstrip", ()))

    def _vocab(self, model: JSONFields) -> dict[str, Any]:
        """Returns text -> id of the model's vocabulary; Unigram lists texts with their scores."""
        if model.string("type", "BPE") != UNIGRAM:
            return model.mapping("vocab")
        found: dict[str, Any] = {}
        for i, entry in enumerate(model.array("vocab")):
            if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], str):
                model.fail("vocab", f"holds {entry!r:.100}, expected a text and its score")
            found.setdefault(entry[0], i)
            self.scores[i] = entry[1]
        return found

    def _read_ids(self, root: JSONFields, model: JSONFields, size: int | None) -> dict[str, int]:
        ids: dict[str, int] = {}
        for text, token in self._vocab(model).items():
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                problem = f"{text[:100]!r} has id {token!r:.100}, expected an integer from 0"
                model.fail("vocab", problem)
            ids[text] = token
        for entry in root.objects("added_tokens"):
            text, token = entry.string("content"), entry.integer("id")
            if size is not None and token >= size and text not in ids:
                warn(
                    f"{root.file}: {text[:100]!r} is left out: the id "
                    f"{token} of this added token is beyond the model's vocab_size, {size}"
                )
                continue
            if ids.setdefault(text, token) != token:
                problem = f"is {token} for {text[:100]!r}, which has id {ids[text]} already"
                entry.fail("id", problem)
            self.added[text] = entry.boolean("special", False)
            for flag in ("lstrip", "rstrip", "single_word", "normalized"):
                if entry.boolean(flag, False):
                    self.flagged.setdefault(flag, []).append(text)
        if not ids:
            model.fail("vocab", "is empty")
        return ids

    def _read_texts(self, model: JSONFields, size: int | None) -> list[str]:
        count = len(self.ids) if size is None else size
        limit = "the model's vocab_size"
        if size is None:
            limit = "the number of tokens: ids leave a gap"
        texts: dict[int, str] = {}
        for text, token in self.ids.items():
            try:
                text.encode()
            except UnicodeEncodeError:
                model.fail("vocab", f"the token of id {token} holds a lone surrogate")
            if not text:
                model.fail("vocab", f"the token of id {token} is empty")
            if not 0 <= token < count:
                problem = f"{text[:100]!r} has id {token}, expected less than {count}, {limit}"
                model.fail("vocab", problem)
            if texts.setdefault(token, text) != text:
                problem = f"{text[:100]!r} and {texts[token][:100]!r} both have id {token}"
                model.fail("vocab", problem)
        padded = [texts.get(i, f"[PAD{i}]") for i in range(count)]
        for i in range(count):
            if i not in texts and padded[i] in self.ids:
                model.fail("vocab", f"holds {padded[i]!r}, the name of a padding token")
        return padded


def steps(step: JSONFields | None, key: str) -> list[JSONFields]:
    """Returns the steps of a normalizer, pre-tokenizer or post-processor.

    key: key of the steps in a Sequence.
    """
    if step is None:
        return []
    if step.string("type") != "Sequence":
        return [step]
    inner_steps = step.objects(key)
    for inner in inner_steps:
        if inner.string("type") == "Sequence":
            inner.fail("type", "a sequence in a sequence is not supported")
    return inner_steps


def merges_of(model: JSONFields, ids: Mapping[str, int]) -> Merges:
    """Reads merges by rank; files write a merge as "a b" or, newer ones, as ["a", "b"]."""
    values = model.array("merges")
    if len(values) > MAX_MERGES:
        model.fail("merges", f"has {len(values)} entries, expected at most {MAX_MERGES}")
    merges: Merges = []
    for rank, value in enumerate(values):
        pair = value.split(" ") if isinstance(value, str) else value
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or not all(isinstance(part, str) and part in ids for part in pair)
            or "".join(pair) not in ids
        ):
            problem = f"is {value!r:.200}, expected two tokens that form a third"
            model.fail(f"merges[{rank}]", problem)
        merges.append((pair[0], pair[1]))
    return merges


def merge_texts(model: JSONFields, ids: Mapping[str, int]) -> list[str]:
    """Returns merges in GGUF's format, "a b"; raises CheckpointError for tokens with spaces."""
    merges = merges_of(model, ids)
    for rank, pair in enumerate(merges):
        if any(" " in part for part in pair):
            problem = f"is {list(pair)!r:.200}, whose spaces GGUF cannot express"
            model.fail(f"merges[{rank}]", problem)
    return [f"{left} {right}" for left, right in merges]
