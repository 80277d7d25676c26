"""Special tokens that messages spell stay text: their first characters are marked.

Templates join messages and the model's own markup to one text. Before, the first character of every
control token's text inside of messages is replaced by a character that occurs nowhere in them, a
mark; behind the template the marks are read as the characters they stand for, which begin no token.
Tokens that are user-defined are not marked: they are read in any text, and templates look for them
("</think>").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

#: Unicode's private use area in the basic plane; a text with all of it cannot be marked.
_PRIVATE = range(0xE000, 0xF900)


class Marks:
    """Marks for one conversation.

    Attributes:
      meanings: mark -> the character it stands for; empty where no message spells a token.
    """

    def __init__(self, tokens: Iterable[str], data: Any) -> None:
        """tokens: texts that must not be read in `data`, which is JSON.

        Raises ValueError where `data` holds the whole private use area.
        """
        text = "\0".join(_strings(data))  # what spells a token across strings is marked in vain
        used = set(text)
        # A vocabulary may have thousands, and most texts the first characters of none.
        self._tokens = [token for token in tokens if token[0] in used and token in text]
        firsts = dict.fromkeys(token[0] for token in self._tokens)
        free = [chr(code) for code in _PRIVATE if chr(code) not in used]
        if len(free) < len(firsts):
            raise ValueError("messages hold all characters of the private use area")
        self.meanings = dict(zip(free, firsts, strict=False))
        self._mark_of = {first: mark for mark, first in self.meanings.items()}

    def marked(self, value: Any) -> Any:
        """`value`, JSON, with marks in all of its strings."""
        if not self.meanings:
            return value
        if isinstance(value, str):
            for token in self._tokens:
                while token in value:  # again: occurrences may overlap
                    value = value.replace(token, self._mark_of[token[0]] + token[1:])
            return value
        if isinstance(value, Mapping):
            return {self.marked(key): self.marked(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.marked(entry) for entry in value]
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
