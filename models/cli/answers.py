"""Writes answers of chats as they stream: their text, and their thoughts, folded or in full."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.text import Text

from .output import printable

if TYPE_CHECKING:
    from ..engine.outputs import Piece

#: Last characters of a thought that a line may show.
_LAST = 1000


class AnswerWriter:
    """Writes the text of an answer to standard output, and its thoughts to the notes.

    A thought is folded to a line, which changes on a terminal while the model thinks. Use the
    writer as a context manager, which ends the last line.
    """

    def __init__(self, notes: Console, *, shows_thoughts: bool = False) -> None:
        """Prepares an answer. shows_thoughts: write thoughts in full, before their line."""
        self._notes, self._shows_thoughts = notes, shows_thoughts
        self._thought: _Thought | None = None
        self._tokens = 0
        self._last = ""  # last character of the text

    def __enter__(self) -> AnswerWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self._end_thought()
        if kind is None and (self._last or not sys.stdout.isatty()):
            self._write("\n")

    def write(self, piece: Piece) -> None:
        """Writes what is new."""
        tokens = self._tokens
        self._tokens += piece.token is not None
        if piece.reasoning:
            self._think(piece.reasoning, tokens)
        text = piece.text if self._last else piece.text.lstrip()
        if text:
            self._end_thought()
            self._write(printable(text))
            self._last = text[-1]
        output = piece.output
        if output and output.finish_reason == "length" and output.reasoning and not output.text:
            self._end_thought()
            hint = "The thought took all tokens of -n; a larger number leaves room for an answer."
            self._notes.print(f"[dim]{hint}[/]", soft_wrap=True)

    def _think(self, text: str, tokens: int) -> None:
        """Adds text to a thought; tokens: number of the answer's tokens before this piece."""
        if self._thought is None:
            if self._last not in ("", "\n") and sys.stdout.isatty():
                self._write("\n")
            self._thought = _Thought(self._notes, tokens, in_full=self._shows_thoughts)
        self._thought.add(printable(text), self._tokens)

    def _end_thought(self) -> None:
        if self._thought is not None:
            self._thought.end()
            self._thought = None

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


class _Thought:
    """A thought on the notes: a line while it grows, or its text; a line at its end."""

    def __init__(self, notes: Console, before: int, *, in_full: bool) -> None:
        """Begins a thought. before: number of the answer's tokens before it."""
        self._notes, self._in_full = notes, in_full
        self._before = self._until = before
        self._began, self._text = time.monotonic(), ""
        self._live: Live | None = None
        if not in_full and notes.is_terminal:
            self._live = Live(get_renderable=self._line, console=notes, transient=True)
            self._live.start()

    def add(self, text: str, tokens: int) -> None:
        """Adds text; tokens: number of the answer's tokens up to its end."""
        self._until = tokens
        if self._in_full:
            self._notes.out(text, style="dim", highlight=False, end="")
        self._text = (self._text + text)[-_LAST:]

    def end(self) -> None:
        """Replaces the changing line by the last one."""
        if self._live is not None:
            self._live.stop()
        if self._in_full and not self._text.endswith("\n"):
            self._notes.print()
        said = f"Thought for {self._seconds()} ({self._tokens()})"
        self._notes.print(f"[dim]{said}[/]", soft_wrap=True)

    def _tokens(self) -> str:
        tokens = self._until - self._before
        return f"{tokens} token{'s' if tokens != 1 else ''}"

    def _seconds(self) -> str:
        seconds = time.monotonic() - self._began
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"

    def _line(self) -> Text:
        """Returns a line with the last words of the thought, as wide as the terminal at most."""
        head = f"Thinking… {self._seconds()}, {self._tokens()}  "
        room = max(0, self._notes.width - cell_len(head) - 1)
        words = " ".join(self._text.split())
        last = words[len(words) - room :] if len(words) > room else words
        while cell_len(last) > room:
            last = last[1:]
        return Text(head + last, style="dim", no_wrap=True, overflow="crop")
