"""Decoding ids one at a time, as they are generated."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class StreamDecoder:
    """Token ids -> the text that is certain; a character whose bytes are incomplete waits.

    All pieces and `finish()` together equal `Tokenizer.decode` of all ids with the same flags.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], *, strip_space: bool = False) -> None:
        """bytes_of: a token's UTF-8. strip_space: drop a space at the beginning of the text."""
        self._bytes_of = bytes_of
        self._strip_space = strip_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes, perhaps empty. Raises as `bytes_of` does."""
        raw = self._bytes_of(token_id)
        if raw and self._strip_space:
            self._strip_space = False
            raw = raw.removeprefix(b" ")
        return self._utf8.decode(raw)

    def finish(self) -> str:
        """The rest: U+FFFD for bytes that never became a character."""
        return self._utf8.decode(b"", final=True)
