"""Decodes token ids one at a time, as they are generated."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class StreamDecoder:
    """Decodes token ids to text, and holds back characters whose bytes are incomplete.

    All pieces and `finish()` together equal `Tokenizer.decode` of all ids with the same flags.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], *, strip_space: bool = False) -> None:
        """Starts decoding a text.

        bytes_of: function from a token id to its UTF-8 bytes. strip_space: drop a space at the
        start of the text.
        """
        self._bytes_of = bytes_of
        self._strip_space = strip_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Returns the text that this token completes, possibly empty; raises like `bytes_of`."""
        raw = self._bytes_of(token_id)
        if raw and self._strip_space:
            self._strip_space = False
            raw = raw.removeprefix(b" ")
        return self._utf8.decode(raw)

    def finish(self) -> str:
        """Returns the text still held back, with U+FFFD for bytes of an incomplete character."""
        return self._utf8.decode(b"", final=True)
