"""Texts -> ids by the `tokenizers` library, from a tokenizer.json itself."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Container, Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, NormalizedString, PreTokenizedString, Tokenizer, pre_tokenizers

from jax_q4k import CheckpointError

#: Texts that a vocabulary may have a token for, of which one shows what is put around a text.
_PROBES = ("a", "the", "0", ".", " ", "\n", "中")


def read(content: Mapping[str, Any], file: str) -> Tokenizer:
    """The library's tokenizer, which neither cuts texts nor pads them.

    Raises CheckpointError for what the library refuses.
    """
    with _errors(file, "JSON"):
        tokenizer = Tokenizer.from_str(json.dumps(content))
        # A file holds those of the last call before it was saved; transformers drops them, too.
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return tokenizer


def around(tokenizer: Tokenizer, file: str) -> tuple[list[int], list[int]]:
    """Ids that the post-processor puts before and behind a text."""
    ids: list[int] = []
    plain = _copy(tokenizer, (), set())
    with _errors(file, "post_processor"):
        for probe in _PROBES:
            whole = tokenizer.encode(probe)
            ids, own = whole.ids, plain.encode(probe).ids
            places = [i for i, added in enumerate(whole.special_tokens_mask) if not added]
            if not places:
                continue
            first, last = places[0], places[-1] + 1
            if ids[first:last] != own:
                problem = "must put tokens around one text, and change none of its own"
                raise CheckpointError(file, "post_processor", problem)
            return ids[:first], ids[last:]
    return ids, []


class LibraryEncoder:
    """Encodes as the library does, but reads the control tokens of a text only where told to."""

    def __init__(
        self, tokenizer: Tokenizer, added: Mapping[str, int], control: set[str], file: str
    ) -> None:
        """Raises CheckpointError where the library gives a token another id than the file.

        added: added tokens -> ids, by the file. control: those that only `parse_special` reads.
        file: the name in errors.
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
        """Ids of a text; arguments as `Tokenizer.encode`'s.

        Raises CheckpointError where the library fails, as with a hopeless regular expression.
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
            return tokenizer.encode(text).ids

    def content(self) -> dict[str, Any]:
        """The object of the tokenizer.json."""
        return json.loads(self._tokenizer.to_str())


def _copy(
    tokenizer: Tokenizer,
    added: Container[str],
    control: Container[str],
    marks: Mapping[str, str] | None = None,
) -> Tokenizer:
    """A tokenizer of the same model without a post-processor, whose special tokens are others.

    added: tokens that it has. control: those of them that are special. marks: as `encode` takes
    them.
    """
    copy = Tokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        copy.normalizer = tokenizer.normalizer
    steps = [] if tokenizer.pre_tokenizer is None else [tokenizer.pre_tokenizer]
    if marks:  # behind the last search for tokens, which comes behind the normalizer
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
    """A step that reads marks as the characters they stand for."""

    def __init__(self, marks: Mapping[str, str]) -> None:
        self._marks = marks

    def pre_tokenize(self, text: PreTokenizedString) -> None:
        text.normalize(self._unmark)

    def _unmark(self, text: NormalizedString) -> None:
        for mark, character in self._marks.items():
            text.replace(mark, character)


@contextlib.contextmanager
def _errors(file: str, field: str) -> Iterator[None]:
    """Turns the library's errors, panics included, into CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except BaseException as error:
        # A panic is no Exception, and has no name to import.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            problem = f"the tokenizers library fails: {str(error)[:300]}"
            raise CheckpointError(file, field, problem) from None
        raise
