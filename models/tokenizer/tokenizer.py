"""Text <-> token ids."""

from __future__ import annotations

import functools
import operator
import string
from collections.abc import Container, Iterable, Mapping
from typing import Any

from gguf.constants import TokenType
from tokenizers import pre_tokenizers

from . import encoders
from .encoders import SPACE
from .streaming import StreamDecoder
from .vocabulary import Vocabulary

#: Answers of `tokens_with` that are kept.
_MOST_HOLDING = 8


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's character -> byte: printable Latin-1 is itself, other bytes are U+0100 and on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in plain]
    alphabet = {chr(byte): byte for byte in plain} | {
        chr(0x100 + i): byte for i, byte in enumerate(shifted)
    }
    assert alphabet.keys() == set(pre_tokenizers.ByteLevel.alphabet())
    return alphabet


class Tokenizer:
    """A GGUF file's tokenizer. Ids equal llama.cpp's for the same text and flags.

    Build one with `from_gguf` or `from_metadata`.

    Attributes:
      vocabulary: the file's, checked.
      vocab_size: tokens.
      bos_token_id, eos_token_id: int, or None where the file names none.
      eos_token_ids: every id that ends generation, ends of turns included.
      chat_template: str, or None where the file holds none.
      chat_templates: name -> template; the file's own is "default".
      special_tokens: a chat template's name of a special token, such as "eos_token" -> its text;
        BOS and EOS are "" where the file has none.
      control_tokens: texts that only `parse_special` reads, the longest first.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        encoders.check(vocabulary)
        self._holding: dict[tuple[str, ...], tuple[int, ...]] = {}
        self._byte_of = _byte_alphabet()
        self._types: list[int] = vocabulary.types.tolist()
        # A SentencePiece text starts with a space; each part after a special token does, too.
        self._prefix = " " if vocabulary.model == "llama" and vocabulary.add_space_prefix else ""
        bos, eos = vocabulary.bos_token_id, vocabulary.eos_token_id
        self._before = [bos] if vocabulary.add_bos and bos is not None else []
        self._after = [eos] if vocabulary.add_eos and eos is not None else []

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: an encoder is a function of the process that built it."""
        return {name: value for name, value in vars(self).items() if name != "_encode"}

    @functools.cached_property
    def _encode(self) -> encoders.Encoder:
        """The encoder, built for the first text: a large vocabulary takes tenths of a second."""
        return encoders.build(self.vocabulary)

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary.tokens)

    @property
    def bos_token_id(self) -> int | None:
        return self.vocabulary.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        """The file's own EOS; to end generation use `eos_token_ids`."""
        return self.vocabulary.eos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.vocabulary.eos_token_ids

    @property
    def chat_template(self) -> str | None:
        return self.vocabulary.chat_templates.get("default")

    @property
    def chat_templates(self) -> Mapping[str, str]:
        return self.vocabulary.chat_templates

    @property
    def special_tokens(self) -> dict[str, str]:
        named = {name: self.token(i) for name, i in self.vocabulary.special_ids.items()}
        return {"bos_token": "", "eos_token": "", **named}

    @functools.cached_property
    def control_tokens(self) -> tuple[str, ...]:
        return tuple(text for text, _, control in self._special if control)

    @property
    def adds_space(self) -> bool:
        """True if texts are encoded with a space in front (SentencePiece)."""
        return bool(self._prefix)

    def token(self, token_id: int) -> str:
        """A token's text as the vocabulary spells it."""
        return self.vocabulary.tokens[self._check(token_id)]

    def encode(
        self,
        text: str,
        add_special: bool = True,
        parse_special: bool = False,
        *,
        add_end: bool = True,
        marks: Mapping[str, str] | None = None,
    ) -> list[int]:
        """Token ids of a text.

        Args:
          add_special: add BOS and EOS as the file asks.
          parse_special: read control tokens' text, such as "<|im_end|>", as those tokens; leave it
            off for text from users. User-defined tokens are always read.
          add_end: with `add_special`, add the EOS, too, where the file asks for one, as texts to
            embed have it; False: not, as for a prompt that generation continues.
          marks: characters of `text` -> those they stand for, which begin no special token.

        Raises:
          TypeError: `text` is no str. ValueError: it holds lone surrogates.
        """
        if not isinstance(text, str):
            raise TypeError(f"text is of type {type(text).__name__}, expected str")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text holds a lone surrogate at position {error.start}") from None
        ids: list[int] = []
        prefix, meanings = self._prefix, str.maketrans(dict(marks or {}))
        for part in self._split(text, parse_special):
            if isinstance(part, int):
                ids.append(part)
                prefix = self._prefix
            else:
                ids += self._encode(prefix + part.translate(meanings) if marks else prefix + part)
                prefix = ""
        if not add_special:
            return ids
        return [*self._before, *ids, *(self._after if add_end else ())]

    def decode(
        self, ids: Iterable[int], skip_special: bool = True, strip_prefix: bool = True
    ) -> str:
        """Text of token ids, the inverse of `encode`; bytes that are not UTF-8 become U+FFFD.

        Args:
          skip_special: leave out control and unknown tokens.
          strip_prefix: drop the space that a SentencePiece tokenizer puts before a text; pass False
            for ids that continue a text.

        Raises:
          TypeError: ids are no integers. ValueError: an id outside of the vocabulary.
        """
        if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
            raise TypeError(f"ids is of type {type(ids).__name__}; it must be a list of token ids")
        stream = self.stream(skip_special, strip_prefix)
        return "".join(map(stream.push, ids)) + stream.finish()

    def stream(self, skip_special: bool = True, strip_prefix: bool = True) -> StreamDecoder:
        """A decoder that takes ids one at a time; its pieces together equal `decode`'s text."""
        bytes_of = functools.partial(self.token_bytes, skip_special=skip_special)
        return StreamDecoder(bytes_of, strip_space=strip_prefix and self.adds_space)

    def token_bytes(self, token_id: int, skip_special: bool = False) -> bytes:
        """A token's UTF-8 bytes, perhaps a part of a character; unused tokens have none."""
        token_id = self._check(token_id)
        text, kind = self.vocabulary.tokens[token_id], self._types[token_id]
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            return b"" if skip_special else text.encode()
        if kind == TokenType.USER_DEFINED:
            return text.encode()
        if kind == TokenType.BYTE:
            return bytes.fromhex(text[3:5])  # "<0x0A>"
        if kind != TokenType.NORMAL:
            return b""
        if self.vocabulary.raw:
            return text.replace(SPACE, " ").encode()
        try:
            return bytes(map(self._byte_of.__getitem__, text))
        except KeyError:  # not spelled in the byte alphabet: an added token of type normal
            return text.encode()

    def cut_at_controls(self, text: str) -> list[str | int]:
        """A text cut at what spells control tokens: texts (never empty) and ids."""
        return _cut(text, [entry for entry in self._special if entry[2]])

    def tokens_with(self, texts: tuple[str, ...]) -> tuple[int, ...]:
        """Ids of the tokens that hold one of some texts, control tokens as they are spelled."""
        if texts not in self._holding:
            wanted = [text.encode() for text in texts]
            every = map(self.token_bytes, range(self.vocab_size))
            found = (i for i, own in enumerate(every) if any(text in own for text in wanted))
            self._holding[texts] = tuple(found)
            while len(self._holding) > _MOST_HOLDING:
                del self._holding[next(iter(self._holding))]
        return self._holding[texts]

    def _check(self, token_id: int) -> int:
        try:
            token_id = operator.index(token_id)
        except TypeError:
            kind = type(token_id).__name__
            raise TypeError(f"a token id is of type {kind}; it must be an integer") from None
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(
                f"token id {token_id} is outside of the vocabulary, 0 to {self.vocab_size - 1}"
            )
        return token_id

    @functools.cached_property
    def _special(self) -> list[tuple[str, int, bool]]:
        """(text, id, True if only parse_special reads it), longest text first."""
        kinds: dict[int, bool] = {
            TokenType.CONTROL: True,
            TokenType.UNKNOWN: True,
            TokenType.USER_DEFINED: False,
        }
        special = [
            (token, i, kinds[kind])
            for i, (token, kind) in enumerate(zip(self.vocabulary.tokens, self._types, strict=True))
            if kind in kinds
        ]
        return sorted(special, key=lambda entry: (-len(entry[0].encode()), entry[1]))

    def _split(self, text: str, parse_special: bool) -> list[str | int]:
        """Text cut at special tokens: text parts (never empty) and ids."""
        special = [entry for entry in self._special if parse_special or not entry[2]]
        return _cut(text, special, self.vocabulary.stripping_ids)


def _cut(
    text: str, special: Iterable[tuple[str, int, bool]], stripping: Container[int] = ()
) -> list[str | int]:
    """Text cut at tokens: text parts (never empty) and ids.

    As in llama.cpp the first token of `special` is cut out first, wherever it stands. The white
    space behind those of `stripping` goes.
    """
    parts: list[str | int] = [text] if text else []
    for token, token_id, _ in special:
        if token not in text:
            continue
        cut: list[str | int] = []
        for part in parts:
            if isinstance(part, int) or token not in part:
                cut.append(part)
                continue
            for i, piece in enumerate(part.split(token)):
                if i and token_id in stripping:
                    piece = piece.lstrip(string.whitespace)
                cut += ([token_id] if i else []) + ([piece] if piece else [])
        parts = cut
    return parts
