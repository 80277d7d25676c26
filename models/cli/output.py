"""What the commands share: safe text, progress, and the errors that are the user's to mend."""

from __future__ import annotations

import contextlib
import unicodedata
import warnings
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from ..files.gguf import from_gguf
from ..model import Model


class UsageError(Exception):
    """What the user asked for cannot be done; the message says why."""


def printable(text: str) -> str:
    """Text without control characters, which a file or a model could steer a terminal with."""
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\N{REPLACEMENT CHARACTER}"
        for c in text
    )


def table_console() -> Console:
    """Standard output for tables; a pipe or a file has no width to fit."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


@contextlib.contextmanager
def progress(
    title: str, notes: Console, *count: ProgressColumn
) -> Iterator[Callable[[int, int], object]]:
    """A bar, on a terminal only, and what is called with (done, in all); `count`: columns that show
    these.
    """
    columns = (TextColumn(title), BarColumn(), *count, TimeRemainingColumn())
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def bytes_progress(
    title: str, notes: Console
) -> contextlib.AbstractContextManager[Callable[[int, int], object]]:
    """`progress` of bytes."""
    return progress(title, notes, DownloadColumn(binary_units=True), TransferSpeedColumn())


def load_model(path: str, notes: Console) -> Model:
    """A GGUF file's model, with a bar while it is read."""
    with warnings.catch_warnings(record=True) as caught, bytes_progress("Loading", notes) as report:
        model = from_gguf(path, progress=report)
    for warning in caught:
        notes.print(f"[dim]{escape(printable(str(warning.message)))}[/]", soft_wrap=True)
    return model
