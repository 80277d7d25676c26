"""Reads messages from a terminal, or from standard input of a script."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

PROMPT, CONTINUED = ">>> ", "... "
_QUOTES = '"""'


def line_reader() -> Callable[[str], str]:
    """Returns a function that shows a prompt and reads a line; it raises EOFError at the end.

    Lines lack their newline. On a terminal they can be edited, with a history in memory on the
    arrow keys. Prompts appear only on a terminal.
    """
    if sys.stdin.isatty() and sys.stdout.isatty():
        with contextlib.suppress(ImportError):  # Python may be built without it
            import readline

            readline.parse_and_bind("set enable-bracketed-paste on")
        return input

    def read(prompt: str) -> str:
        if sys.stdin.isatty():
            sys.stderr.write(prompt)
            sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    return read


def read_message(read: Callable[[str], str]) -> str:
    r'''Reads the next message, of one or more lines.

    A line that ends with a backslash continues on the next one. A line that begins with """ starts
    a message that ends at the next """. The end of the input also ends a message.

    read: result of `line_reader`. Raises EOFError if the input ends before a message.
    '''
    line = read(PROMPT)
    if line.lstrip().startswith(_QUOTES):
        text = line.lstrip().removeprefix(_QUOTES)
        with contextlib.suppress(EOFError):
            while _QUOTES not in text:
                text += "\n" + read(CONTINUED)
        return text.partition(_QUOTES)[0].strip("\n")
    with contextlib.suppress(EOFError):
        while line.endswith("\\"):
            line = line.removesuffix("\\") + "\n" + read(CONTINUED)
    return line.removesuffix("\\") if line.endswith("\\") else line
