"""Encodes texts with the `tokenizers` library, directly from a tokenizer.json."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Container, Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, NormalizedString, PreTokenizedString, Tokenizer, pre_tokenizers

from jax_q4k import CheckpointError

from ..encoders import ids_of_text

#: Texts that a vocabulary may have tokens for; one of them reveals the tokens added around a text.
_PROBES = ("a", "the", "0", ".", " ", "\n", "中")


def read(content: Mapping[str, Any], file: str) -> Tokenizer:
    """Loads the library's tokenizer without truncation and padding.

    Raises CheckpointError if the library rejects the file.
    """
    with _errors(file, "JSON"):
        tokenizer = Tokenizer.from_str(json.dumps(content))
        # A file holds settings of the last call before it was saved; transformers drops them too.
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return tokenizer


def affixes(tokenizer: Tokenizer, file: str) -> tuple[list[int], list[int]]:
    """Returns the ids that the post-processor adds before and after a text."""
    ids: list[int] = []
    plain = _copy(tokenizer, (), set())
    with _errors(file, "post_processor"):
        for probe in _PROBES:
            encoding = tokenizer.encode(probe)
            ids, plain_ids = encoding.ids, plain.encode(probe).ids
            positions = [i for i, added in enumerate(encoding.special_tokens_mask) if not added]
            if not positions:
                continue
            first, last = positions[0], positions[-1] + 1
            if ids[first:last] != plain_ids:
                problem = "must only add tokens before and after one text"
                raise CheckpointError(file, "post_processor", problem)
            return ids[:first], ids[last:]
    return ids, []


def between(tokenizer: Tokenizer, file: str) -> list[int]:
    """Returns the ids that the post-processor adds between the texts of a pair."""
    with _errors(file, "post_processor"):
        for probe in _PROBES:
            encoding = tokenizer.encode(probe, probe)
            second = encoding.sequence_ids.index(1) if 1 in encoding.sequence_ids else 0
            first = second - 1
            while first >= 0 and encoding.sequence_ids[first] is None:
                first -= 1
            if 0 <= first < second:
                return encoding.ids[first + 1 : second]
    return []


class LibraryEncoder:
    """Encoder that calls the library, but parses control tokens only with `parse_special`."""

    def __init__(
        self, tokenizer: Tokenizer, added: Mapping[str, int], control: set[str], file: str
    ) -> None:
        """Raises CheckpointError if the library gives a token another id than the file.

        added: added token -> id in the file. control: added tokens parsed only with
        `parse_special`. file: name in error messages.
        """
        self._tokenizer, self._control, self._file = tokenizer, control, file
        self._added = added
        self._copies: dict[bool, Tokenizer] = {}
        for text, token in added.items():
            if (found := tokenizer.token_to_id(text)) != token:
                problem = (
                    f"has id {token} for {text[:100]!r}, which the tokenizers library reads as"
                )
                raise CheckpointError(file, "added_tokens", f"{problem} {found}")

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_copies": {}}

    def encode(self, text: str, parse_special: bool, marks: Mapping[str, str]) -> list[int]:
        """Returns the ids of a text; takes the arguments of `Tokenizer.encode`.

        Raises CheckpointError if the library fails, for example with a hopeless regular expression.
        """
        if marks and not parse_special:
            for mark, character in marks.items():
                text = text.replace(mark, character)
            marks = {}
        with _errors(self._file, "tokenizer"):
            tokenizer = None if marks else self._copies.get(parse_special)
            if tokenizer is None:
                tokenizer = _copy(self._tokenizer, self._added, self._control, marks)
                tokenizer.encode_special_tokens = not parse_special
                if not marks:
                    self._copies[parse_special] = tokenizer
            return ids_of_text(tokenizer, text)

    def content(self) -> dict[str, Any]:
        """Returns the object of the tokenizer.json."""
        return json.loads(self._tokenizer.to_str())


def _copy(
    tokenizer: Tokenizer,
    added: Container[str],
    control: Container[str],
    marks: Mapping[str, str] | None = None,
) -> Tokenizer:
    """Copies a tokenizer without its post-processor, and with other special tokens.

    added: added tokens of the copy. control: added tokens that are special. marks: as in `encode`.
    """
    copy = Tokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        copy.normalizer = tokenizer.normalizer
    steps = [] if tokenizer.pre_tokenizer is None else [tokenizer.pre_tokenizer]
    if marks:  # must run after the last search for tokens, which follows the normalizer
        steps.insert(0, pre_tokenizers.PreTokenizer.custom(_Unmarking(marks)))
    if len(steps) > 1:
        copy.pre_tokenizer = pre_tokenizers.Sequence(steps)
    elif steps:
        copy.pre_tokenizer = steps[0]
    by_id = sorted(tokenizer.get_added_tokens_decoder().items())
    tokens = [
        AddedToken(
            token.content,
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized,
            special=token.content in control,
        )
        for _, token in by_id
        if token.content in added
    ]
    copy.add_tokens(tokens)
    return copy


class _Unmarking:
    """Pre-tokenizer step that replaces marks with the original characters."""

    def __init__(self, marks: Mapping[str, str]) -> None:
        self._marks = marks

    def pre_tokenize(self, text: PreTokenizedString) -> None:
        text.normalize(self._unmark)

    def _unmark(self, text: NormalizedString) -> None:
        for mark, character in self._marks.items():
            text.replace(mark, character)


@contextlib.contextmanager
def _errors(file: str, field: str) -> Iterator[None]:
    """Turns errors of the library inside the block, panics included, into CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except BaseException as error:
        # A panic is not an Exception, and its class cannot be imported.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            problem = f"the tokenizers library fails: {str(error)[:300]}"
            raise CheckpointError(file, field, problem) from None
        raise
