"""Output shared by commands: safe text, progress bars, usage errors; also loads models."""

from __future__ import annotations

import argparse
import contextlib
import os
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

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

from jax_q4k import models

from ..support.assets import DEMO
from .clock import Clock, since_start

if TYPE_CHECKING:
    import jax

    from ..engine.outputs import Timings
    from ..runner.model import Model


class UsageError(Exception):
    """The command line asks for something impossible; the message gives the reason."""


def printable(text: str) -> str:
    """Replaces control characters, with which a file or a model could control the terminal."""
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\N{REPLACEMENT CHARACTER}"
        for c in text
    )


def print_error(notes: Console, error: Exception) -> None:
    """Prints an error as one line."""
    message = " ".join(printable(_said(error)).split()) or type(error).__name__
    notes.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)


def _said(error: Exception) -> str:
    """Returns an error's message, without the errno that Python puts before a system message."""
    if isinstance(error, OSError) and error.filename is not None and error.filename2 is None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error)


def table_console() -> Console:
    """Returns a console on standard output for tables; without width limit for pipes and files."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=10_000)


@contextlib.contextmanager
def progress(
    title: str, notes: Console, *count: ProgressColumn
) -> Iterator[Callable[[int, int], object]]:
    """Shows a progress bar on a terminal; yields a function of (done, total) that updates it.

    count: columns that show the two numbers.
    """
    columns = (TextColumn(title), BarColumn(), *count, TimeRemainingColumn())
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def bytes_progress(
    title: str, notes: Console
) -> contextlib.AbstractContextManager[Callable[[int, int], object]]:
    """Like `progress`, with columns that show the numbers as bytes."""
    return progress(title, notes, DownloadColumn(binary_units=True), TransferSpeedColumn())


def reading_status(notes: Console) -> contextlib.AbstractContextManager[Any]:
    """Returns a context manager that shows, on a terminal, that a prompt is being processed."""
    if not notes.is_terminal:
        return contextlib.nullcontext()
    return notes.status("Compiling, reading the prompt")


def timings_line(timings: Timings, clock: Clock | None = None, seed: int | None = None) -> str:
    """Formats the speed of an answer and, with a clock, the seconds of each phase."""
    parts = [f"{timings.new_tokens} tokens"]
    if timings.decoded_tokens:
        parts.append(f"{timings.tokens_per_second:.1f} tokens/s")
    if timings.drafted_tokens:
        parts.append(f"{timings.accepted_tokens} of {timings.drafted_tokens} draft tokens accepted")
    if seed is not None:
        parts.append(f"seed {seed}")
    cached = f", {timings.reused_tokens} cached" if timings.reused_tokens else ""
    prompt = f"prompt {timings.first_token:.3f} ({timings.prompt_tokens} tokens{cached})"
    steps = [f"compiling {timings.compile:.2f}"] if timings.compile or clock else []
    steps += [prompt, f"decoding {timings.decode:.3f}"]
    if clock is None:
        return f"{', '.join(parts)}; seconds: {', '.join(steps)}"
    steps = [f"imports {clock.imports:.2f}", f"loading {clock.load:.2f}", *steps]
    return f"{', '.join(parts)}; {since_start():.2f} s in total: {', '.join(steps)}"


def devices(*platform: str) -> list[jax.Device]:
    """Returns `jax.devices`; raises RuntimeError if no platform of $JAX_PLATFORMS is available."""
    import jax

    try:
        return jax.devices(*platform)
    except AssertionError as error:  # raised by JAX for a known but missing platform
        named = os.environ.get("JAX_PLATFORMS", "")
        problem = f"Unable to initialize backend {named!r}, which $JAX_PLATFORMS names"
        raise RuntimeError(f"{problem}: this machine has no such device") from error


@contextlib.contextmanager
def warnings_in_a_line(notes: Console) -> Iterator[None]:
    """Prints warnings issued inside the block at its end, without their Python locations.

    Also prints them if the block raises, since a warning may explain the error.
    """
    with warnings.catch_warnings(record=True) as caught:
        try:
            yield
        finally:
            for warning in caught:
                notes.print(f"[dim]{escape(printable(str(warning.message)))}[/]", soft_wrap=True)


def split_cpu(count: int) -> None:
    """Splits a CPU into `count` JAX devices, unless JAX has started or XLA_FLAGS has a count."""
    import jax

    if count > 1 and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # JAX is already initialized
            jax.config.update("jax_num_cpu_devices", count)


def load_model(path: str, notes: Console, count: int = 1, lora: Any = None) -> Model:
    """Calls `models.load` with a progress bar, `count` devices and LoRA adapters.

    Raises UsageError if there are fewer devices.
    """
    import numpy as np
    from jax.sharding import AxisType, Mesh

    from ..files.load import located

    found = devices()
    if not 1 <= count <= len(found):
        raise UsageError(f"--devices {count} must be 1 to {len(found)}, the number of devices")
    path = os.fspath(located(path))  # a download shows its own progress bars
    mesh = None
    if count > 1:
        mesh = Mesh(np.array(found[:count]), ("tp",), axis_types=(AxisType.Explicit,))
    with warnings_in_a_line(notes), bytes_progress("Loading", notes) as report:
        return models.load(path, progress=report, mesh=mesh, lora=lora)


def loaded_draft(options: argparse.Namespace, notes: Console) -> Any:
    """Returns the `draft` argument of `generate` for option --draft; loads a draft model."""
    named = options.draft
    if named == "nextn":
        if options.model == DEMO or not os.path.isfile(options.model):
            raise UsageError("--draft nextn needs a GGUF file with a multi-token-prediction layer")
        return models.load_nextn(options.model)
    return named if named in (None, "lookup") else load_model(named, notes, options.devices)
