"""Encodes text to token ids, and decodes ids to text."""

from __future__ import annotations

import dataclasses
import functools
import operator
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NoReturn, Protocol

from gguf.constants import TokenType
from tokenizers import pre_tokenizers

from .encoders import SPACE, cut
from .streaming import StreamDecoder
from .vocabulary import Vocabulary

#: Number of cached results of `tokens_with`.
_MOST_HOLDING = 8
_HOLDING = threading.Lock()


def _byte_alphabet() -> dict[str, int]:
    """Returns GPT-2's byte alphabet: character -> byte.

    Printable Latin-1 characters stand for themselves, characters from U+0100 on for other bytes.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in plain]
    alphabet = {chr(byte): byte for byte in plain} | {
        chr(0x100 + i): byte for i, byte in enumerate(shifted)
    }
    assert alphabet.keys() == set(pre_tokenizers.ByteLevel.alphabet())
    return alphabet


class Encoder(Protocol):
    """Protocol of encoders from text to ids."""

    def encode(self, text: str, parse_special: bool, marks: Mapping[str, str]) -> list[int]:
        """Returns the ids of a text without BOS and EOS; arguments as in `Tokenizer.encode`."""


class Tokenizer:
    """Tokenizer of a GGUF file or of a checkpoint folder.

    Ids of a GGUF file equal llama.cpp's for the same text and flags. Ids of a folder equal those of
    the `tokenizers` library for its tokenizer.json. Build one with `from_gguf`, `from_metadata` or
    `from_json`.

    Attributes:
      vocabulary: checked vocabulary of the file.
      vocab_size: number of tokens.
      bos_token_id, eos_token_id: int, or None if the file has none.
      eos_token_ids: all ids that end generation, ends of turns included.
      chat_template: str, or None if the file has none.
      chat_templates: name -> template; the file's own is "default".
      special_tokens: name of a special token in chat templates, such as "eos_token" -> its text;
        BOS and EOS are "" if the file has none.
      control_tokens: texts that are tokens only with `parse_special`, the longest first.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        encoder: Encoder,
        metadata: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        """Combines a vocabulary and its encoder to a tokenizer.

        metadata: implements `gguf_metadata`; None means that the tokenizer came from GGUF metadata.
        """
        self.vocabulary = vocabulary
        self._encoder = encoder
        self._metadata = metadata
        self._holding: dict[tuple[str, ...], tuple[int, ...]] = {}
        self._byte_of = _byte_alphabet()
        self._types: list[int] = vocabulary.types.tolist()

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Raises TypeError, with the method that may be meant."""
        raise TypeError("a Tokenizer is not a function: tokenizer.encode(text) returns the ids")

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
        return tuple(text for text, _, control in self.vocabulary.special if control)

    @property
    def adds_space(self) -> bool:
        """Whether a space is added before texts (SentencePiece)."""
        return self.vocabulary.adds_space

    def with_chat_template(self, template: str) -> Tokenizer:
        """Returns this tokenizer with a chat template (Jinja) in place of the file's ones."""
        vocabulary = dataclasses.replace(self.vocabulary, chat_templates={"default": template})
        return Tokenizer(vocabulary, self._encoder, self._metadata)

    def gguf_metadata(self) -> dict[str, Any]:
        """Returns GGUF metadata of this tokenizer; empty if it came from GGUF metadata.

        Warns of settings that GGUF has no key for and most files omit.

        Raises:
          jax_q4k.CheckpointError: GGUF cannot express the tokenizer.
        """
        return {} if self._metadata is None else self._metadata()

    def token(self, token_id: int) -> str:
        """Returns a token's text as spelled in the vocabulary."""
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
        """Returns the token ids of a text.

        Args:
          add_special: add BOS and EOS, or other tokens that the file asks for.
          parse_special: parse the text of control tokens, such as "<|im_end|>", as those tokens;
            leave it off for text from users. User-defined tokens are always parsed.
          add_end: with `add_special`, also add EOS if the file asks for it, as for embeddings. Pass
            False for a prompt that generation continues.
          marks: character of `text` -> character that it replaces, which begins no special token.

        Raises:
          TypeError: `text` is not a str. ValueError: it contains lone surrogates.
          jax_q4k.CheckpointError, a ValueError: a folder's tokenizer.json fails on it.
        """
        if not isinstance(text, str):
            raise TypeError(f"text is of type {type(text).__name__}, expected str")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text holds a lone surrogate at position {error.start}") from None
        ids = self._encoder.encode(text, parse_special, marks or {})
        if not add_special:
            return ids
        return [*self.vocabulary.before, *ids, *(self.vocabulary.after if add_end else ())]

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Returns the ids of two texts, such as query and document, and where the second begins.

        Special tokens are added before, between and after the texts as the file asks.

        Raises TypeError and ValueError as `encode` does.
        """
        ids, other = (self.encode(text, add_special=False) for text in (first, second))
        ids = [*self.vocabulary.before, *ids, *self.vocabulary.between]
        return [*ids, *other, *self.vocabulary.after], len(ids)

    def decode(
        self, ids: Iterable[int], skip_special: bool = True, strip_prefix: bool = True
    ) -> str:
        """Returns the text of token ids, the inverse of `encode`; invalid UTF-8 becomes U+FFFD.

        Args:
          skip_special: omit control and unknown tokens.
          strip_prefix: drop the space that a SentencePiece tokenizer adds before a text; pass False
            for ids that continue a text.

        Raises:
          TypeError: ids are not integers. ValueError: an id outside the vocabulary.
        """
        if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
            raise TypeError(f"ids is of type {type(ids).__name__}; it must be a list of token ids")
        stream = self.stream(skip_special, strip_prefix)
        return "".join(map(stream.push, ids)) + stream.finish()

    def stream(
        self,
        skip_special: bool = True,
        strip_prefix: bool = True,
        *,
        spelled: Collection[int] = (),
    ) -> StreamDecoder:
        """Returns a decoder for ids one at a time; its pieces together equal `decode`'s text.

        spelled: control tokens that `skip_special` does not omit.
        """

        def bytes_of(token: int) -> bytes:
            return self.token_bytes(token, skip_special and token not in spelled)

        return StreamDecoder(bytes_of, strip_space=strip_prefix and self.adds_space)

    def token_bytes(self, token_id: int, skip_special: bool = False) -> bytes:
        """Returns a token's UTF-8 bytes, possibly part of a character; empty for unused tokens."""
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
        except KeyError:  # an added token of type normal, not in the byte alphabet
            return text.encode()

    def control_ids(self, names: Iterable[str]) -> frozenset[int]:
        """Returns the ids of the control tokens with these names; ignores other names."""
        ids = {text: token for text, token, is_control in self.vocabulary.special if is_control}
        return frozenset(ids[name] for name in names if name in ids)

    def cut_at_controls(self, text: str) -> list[str | int]:
        """Splits a text at the names of control tokens; returns non-empty texts and ids."""
        return cut(text, [entry for entry in self.vocabulary.special if entry[2]])

    @functools.cached_property
    def longest_token(self) -> int:
        """Maximum bytes of a token's text: a text of more than n times as many needs over n."""
        return max(len(self.token_bytes(token)) for token in range(self.vocab_size))

    def exceeds(self, text: str, count: int) -> bool:
        """Returns whether a text has more than `count` tokens, estimated without encoding it.

        True means far more: the text is so long that `count` of the longest tokens hold no quarter
        of it. (Normalization shortens texts, but less.) False if an unknown token may stand for any
        number of characters.
        """
        if len(text) <= count or not self._has_every_byte:
            return False
        return len(text.encode(errors="replace")) > 4 * count * self.longest_token

    @functools.cached_property
    def _has_every_byte(self) -> bool:
        """Whether each byte has a token, so that each byte of a text is in one."""
        ids = self.vocabulary.ids
        if self.vocabulary.raw:
            return all(f"<0x{byte:02X}>" in ids for byte in range(256))
        return self._byte_of.keys() <= ids.keys()

    def tokens_with(self, texts: tuple[str, ...]) -> tuple[int, ...]:
        """Returns the ids of tokens that contain one of `texts`.

        The text of a control token is its name.
        """
        if (known := self._holding.get(texts)) is None:
            wanted = [text.encode() for text in texts]
            every = map(self.token_bytes, range(self.vocab_size))
            found = (i for i, token in enumerate(every) if any(text in token for text in wanted))
            known = tuple(found)
            with _HOLDING:
                self._holding[texts] = known
                while len(self._holding) > _MOST_HOLDING:
                    del self._holding[next(iter(self._holding))]
        return known

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
