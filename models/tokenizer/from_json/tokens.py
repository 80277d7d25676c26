"""The vocabulary and the merges of a tokenizer.json."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
from gguf.constants import TokenType

from ...json_fields import JSONFields
from ..encoders import MAX_MERGES

Merges = list[tuple[str, str]]

_LOOKS_SPECIAL = re.compile(
    r"<[|｜].*[|｜]>"
)  # <|im_start|>: never to be read in a user's text, whatever its flag


class Tokens:
    """Texts and types by id, padded to `size`; `ids` and `added` are of the file's own tokens."""

    def __init__(self, root: JSONFields, model: JSONFields, size: int | None) -> None:
        self.ids: dict[str, int] = {}
        self.added: dict[str, bool] = {}  # text -> whether it is special
        for text, token in model.mapping("vocab").items():
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                model.fail(
                    "vocab", f"{text[:100]!r} has id {token!r:.100}, expected an integer from 0"
                )
            self.ids[text] = token
        for entry in root.objects("added_tokens"):
            text, token = entry.string("content"), entry.integer("id")
            if self.ids.setdefault(text, token) != token:
                entry.fail(
                    "id", f"is {token} for {text[:100]!r}, which has id {self.ids[text]} already"
                )
            self.added[text] = entry.boolean("special", False)
        count = len(self.ids) if size is None else size
        if not self.ids:
            model.fail("vocab", "is empty")
        texts: dict[int, str] = {}
        for text, token in self.ids.items():
            try:
                text.encode()
            except UnicodeEncodeError:
                model.fail("vocab", f"the token of id {token} holds a lone surrogate")
            if not text:
                model.fail("vocab", f"the token of id {token} is empty")
            if not 0 <= token < count:
                why = (
                    "the number of tokens: ids leave a gap"
                    if size is None
                    else "the model's vocab_size"
                )
                model.fail(
                    "vocab", f"{text[:100]!r} has id {token}, expected less than {count}, {why}"
                )
            if texts.setdefault(token, text) != text:
                model.fail(
                    "vocab", f"{text[:100]!r} and {texts[token][:100]!r} both have id {token}"
                )
        self.texts = [texts.get(i, f"[PAD{i}]") for i in range(count)]
        for i in range(count):
            if i not in texts and self.texts[i] in self.ids:
                model.fail("vocab", f"holds {self.texts[i]!r}, the name of padding")
        self.types = np.full(count, TokenType.UNUSED, np.int32)
        self.types[list(self.ids.values())] = TokenType.NORMAL
        for text, special in self.added.items():
            control = special or _LOOKS_SPECIAL.fullmatch(text)
            self.types[self.ids[text]] = TokenType.CONTROL if control else TokenType.USER_DEFINED


def steps(step: JSONFields | None, key: str) -> list[JSONFields]:
    """The steps of a normalizer, pre-tokenizer or post-processor, whose sequences hold theirs under
    `key`.
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
    """By rank; written as "a b" or, in newer files, as ["a", "b"]."""
    values = model.array("merges")
    if len(values) > MAX_MERGES:
        model.fail("merges", f"has {len(values)} entries, expected at most {MAX_MERGES}")
    merges: Merges = []
    for rank, value in enumerate(values):
        pair = value.split(" ") if isinstance(value, str) else value
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or not all(isinstance(part, str) and part in ids and " " not in part for part in pair)
            or "".join(pair) not in ids
        ):
            model.fail(
                f"merges[{rank}]",
                f"is {value!r:.200}, expected two tokens without spaces that form a third",
            )
        merges.append((pair[0], pair[1]))
    return merges
