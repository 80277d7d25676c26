"""Messages that a user types, or that a script sends on standard input."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

PROMPT, CONTINUED = ">>> ", "... "
_QUOTES = '"""'


def line_reader() -> Callable[[str], str]:
    """A function: prompt -> the next line, without its end; raises EOFError where there is none.

    On a terminal lines can be edited, and those typed before come back with the arrow keys; prompts
    appear there only. They are kept in memory, not in a file.
    """
    if sys.stdin.isatty() and sys.stdout.isatty():
        with contextlib.suppress(ImportError):  # of Pythons built without it
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
    r'''The next message, of one line or several.

    A line that ends with a backslash goes on with the next one. A line that begins with """ begins
    a message that ends at the next """. The end of the input ends a message, too.

    read: as `line_reader` gives. Raises EOFError as it does, before anything of a message.
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
