"""Decoding ids one at a time, as they are generated."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


class StreamDecoder:
    """Takes token ids, gives the text that is certain; a character whose bytes are incomplete
    waits.

    All pieces and `finish()` together equal `Tokenizer.decode` of all ids with the same flags.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special: bool = True, strip_prefix: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = strip_prefix and tokenizer.adds_space

    def push(self, token_id: int) -> str:
        """The text that this token completes, perhaps empty. Raises ValueError on an id out of
        range.
        """
        raw = self._tokenizer.token_bytes(token_id, self._skip_special)
        if raw and self._strip:
            self._strip = False
            raw = raw.removeprefix(b" ")
        return self._utf8.decode(raw)

    def finish(self) -> str:
        """What is left: U+FFFD for bytes that never became a character."""
        return self._utf8.decode(b"", final=True)
