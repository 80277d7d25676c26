"""Text <-> token ids."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from gguf.constants import TokenType
from tokenizers import pre_tokenizers

from .encoders import SPACE, cut
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


class Encoder(Protocol):
    """Texts -> ids."""

    def encode(self, text: str, parse_special: bool, marks: Mapping[str, str]) -> list[int]:
        """Ids of a text, without those at its ends; arguments as `Tokenizer.encode`'s."""


class Tokenizer:
    """The tokenizer of a GGUF file or of a folder.

    Ids of a GGUF file equal llama.cpp's for the same text and flags, those of a folder the
    `tokenizers` library's for its tokenizer.json. Build one with `from_gguf`, `from_metadata` or
    `from_json`.

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

    def __init__(
        self,
        vocabulary: Vocabulary,
        encoder: Encoder,
        metadata: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        """metadata: makes GGUF's keys, as `gguf_metadata`; None: those of the file are at hand."""
        self.vocabulary = vocabulary
        self._encoder = encoder
        self._metadata = metadata
        self._holding: dict[tuple[str, ...], tuple[int, ...]] = {}
        self._byte_of = _byte_alphabet()
        self._types: list[int] = vocabulary.types.tolist()

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
        """True if texts are encoded with a space in front (SentencePiece)."""
        return self.vocabulary.adds_space

    def gguf_metadata(self) -> dict[str, Any]:
        """GGUF's keys that say this tokenizer; none of one that comes from such keys.

        Warns of what GGUF cannot say and most files leave out.

        Raises:
          jax_q4k.CheckpointError: GGUF cannot say it.
        """
        return {} if self._metadata is None else self._metadata()

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
          add_special: add BOS and EOS, or what else the file asks for at a text's ends.
          parse_special: read control tokens' text, such as "<|im_end|>", as those tokens; leave it
            off for text from users. User-defined tokens are always read.
          add_end: with `add_special`, add the EOS, too, where the file asks for one, as texts to
            embed have it; False: not, as for a prompt that generation continues.
          marks: characters of `text` -> those they stand for, which begin no special token.

        Raises:
          TypeError: `text` is no str. ValueError: it holds lone surrogates.
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
        return cut(text, [entry for entry in self.vocabulary.special if entry[2]])

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
