"""Escapes special tokens in messages, so that they are encoded as text.

Templates join messages and the model's own markup into one text. Before that, the first character
of the name of every control token in messages is replaced by a mark, a character that does not
occur in them. When the rendered text is encoded, marks are read as the original characters, which
then begin no token. User-defined tokens are not escaped, because they are parsed in any text and
templates search for them ("</think>").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

#: Unicode's private use area in the basic plane; a text with all of its characters has no mark.
_PRIVATE = range(0xE000, 0xF900)


class SpecialTokenEscaper:
    """Escape characters (marks) for one conversation.

    Attributes:
      meanings: mark -> original character; empty if no message contains a token's name.
    """

    def __init__(self, tokens: Iterable[str], data: Any) -> None:
        """Chooses the marks.

        tokens: names of tokens that must not be parsed in `data`, which is JSON.

        Raises ValueError if `data` contains the whole private use area.
        """
        text = "\0".join(_strings(data))  # a token across two strings gets an unused mark
        used = set(text)
        # A vocabulary may have thousands of tokens, and most texts none of their first characters.
        self._tokens = [token for token in tokens if token[0] in used and token in text]
        firsts = dict.fromkeys(token[0] for token in self._tokens)
        free = [chr(code) for code in _PRIVATE if chr(code) not in used]
        if len(free) < len(firsts):
            raise ValueError("messages hold all characters of the private use area")
        self.meanings = dict(zip(free, firsts, strict=False))
        self._mark_of = {first: mark for mark, first in self.meanings.items()}

    def escaped(self, value: Any) -> Any:
        """Returns the JSON `value` with token names escaped in all of its strings."""
        if not self.meanings:
            return value
        if isinstance(value, str):
            for token in self._tokens:
                while token in value:  # repeats, because occurrences may overlap
                    value = value.replace(token, self._mark_of[token[0]] + token[1:])
            return value
        if isinstance(value, Mapping):
            return {self.escaped(key): self.escaped(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.escaped(entry) for entry in value]
        return value


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _strings(key)
            yield from _strings(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _strings(entry)
