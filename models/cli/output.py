"""What the commands share: safe text, progress, and the errors that are the user's to mend."""

from __future__ import annotations

import unicodedata

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ..load import from_gguf
from ..model import Model


class UsageError(Exception):
    """What the user asked for cannot be done; the message says why."""


def printable(text: str) -> str:
    """Text without control characters, which a file or a model could steer a terminal with."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\N{REPLACEMENT CHARACTER}" for c in text)


def bytes_progress(title: str, notes: Console) -> Progress:
    """A bar that counts bytes, on a terminal only."""
    columns = (
        TextColumn(title),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal)


def load_model(path: str, notes: Console) -> Model:
    """A GGUF file's model, with a bar while it is read."""
    with bytes_progress("Loading", notes) as progress:
        task = progress.add_task("", total=None)
        return from_gguf(path, progress=lambda done, total: progress.update(task, completed=done, total=total))
