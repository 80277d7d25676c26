"""The command line: `jax-q4k generate` and `jax-q4k inspect`.

Text goes to standard output, everything else to standard error. A failure is one line and exit code 2.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import sys
import unicodedata
from collections.abc import Iterable, Sequence

import jax
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

import jax_q4k as jq
from jax_q4k.implementation import IMPLEMENTATIONS

from . import chat, inspect
from .generate import Output, Piece, Timings, stream
from .load import from_gguf
from .model import Model

FAILURE = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells count


class UsageError(Exception):
    """What the user asked for cannot be done; the message says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line (`sys.argv` if no arguments are given); returns the exit code.

    Ctrl-C ends the process at once.
    """
    options = _parser().parse_args(arguments)
    notes = Console(stderr=True, highlight=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # models write what a terminal's encoding may lack
    try:
        if sys.stdout is None:
            raise UsageError("standard output is closed")
        options.command(options, notes)
        sys.stdout.flush()
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)  # XLA may be compiling in a thread, and crashes where the interpreter ends under it
    except BrokenPipeError:
        # The reader has gone; what is buffered must not be tried again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1  # as rich does, where it meets this first
    except (UsageError, jq.GGUFError, jq.UnavailableError, OSError, MemoryError, jax.errors.JaxRuntimeError) as error:
        message = " ".join(printable(str(error)).split()) or type(error).__name__
        notes.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)
        return FAILURE
    return 0


def printable(text: str) -> str:
    """Text without control characters, which a file or a model could steer a terminal with."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jax-q4k", description="Run GGUF models whose weights stay packed.")
    parser.add_argument("--version", action="version", version=f"jax-q4k {jq.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="continue a prompt", description="Continue a prompt.")
    generate.set_defaults(command=_generate)
    generate.add_argument("model", metavar="MODEL.gguf")
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("-p", "--prompt", metavar="TEXT")
    prompt.add_argument("--tokens", metavar="IDS", help="prompt as token ids: 1,15043,29892")
    generate.add_argument("--chat", action="store_true", help="put the prompt into the file's chat template")
    generate.add_argument("-n", "--max-new-tokens", type=int, default=64, metavar="N", help="default: 64")
    generate.add_argument("--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token")
    generate.add_argument("--top-k", type=int, default=0, metavar="K", help="0, the default, keeps all tokens")
    generate.add_argument("--top-p", type=float, default=1.0, metavar="P", help="default: 1, all tokens")
    generate.add_argument("--min-p", type=float, default=0.0, metavar="P", help="default: 0, all tokens")
    generate.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="default: 1, none")
    generate.add_argument("--seed", type=int, default=0, help="default: 0")
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end here; may be repeated")
    generate.add_argument("--ignore-end", action="store_true", help="go on beyond the model's end token")
    generate.add_argument("--cache-dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    generate.add_argument(
        "--implementation",
        choices=IMPLEMENTATIONS,
        help="ptx: kernels on CUDA (default there); xla: plain JAX (default elsewhere); sim: kernels, simulated",
    )

    show = commands.add_parser("inspect", help="show what a file holds", description="Show what a file holds.")
    show.set_defaults(command=_inspect)
    show.add_argument("model", metavar="MODEL.gguf")
    return parser


def _inspect(options: argparse.Namespace, notes: Console) -> None:
    header = jq.gguf.read_header(options.model)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)  # a pipe or a file has no width to fit
    inspect.show(header, console)


def _generate(options: argparse.Namespace, notes: Console) -> None:
    model = _load(options.model, notes)
    prompt = _prompt(options, model)
    with jq.implementation(options.implementation):
        try:
            pieces = stream(
                model,
                prompt,
                max_new_tokens=options.max_new_tokens,
                temperature=options.temperature,
                top_k=options.top_k,
                top_p=options.top_p,
                min_p=options.min_p,
                repetition_penalty=options.repetition_penalty,
                seed=options.seed,
                stop=options.stop,
                ignore_end=options.ignore_end,
                cache_dtype=options.cache_dtype,
            )
        except (ValueError, TypeError) as error:
            raise UsageError(error) from error
        with notes.status("Compiling") if notes.is_terminal else contextlib.nullcontext():
            first = next(pieces)
        if sys.stdout.isatty() and options.prompt is not None:
            Console(highlight=False).print(escape(printable(options.prompt)), style="dim", end="")
        output = _write(itertools.chain((first,), pieces), as_ids=model.tokenizer is None)
    notes.print(f"[dim]{_summary(output.timings)}[/]", soft_wrap=True)


def _load(path: str, notes: Console) -> Model:
    columns = (TextColumn("Loading"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as progress:
        task = progress.add_task("", total=None)
        return from_gguf(path, progress=lambda done, total: progress.update(task, completed=done, total=total))


def _prompt(options: argparse.Namespace, model: Model) -> str | list[int]:
    if options.tokens is not None:
        try:
            return [int(part) for part in options.tokens.split(",")]
        except ValueError:
            raise UsageError(f"--tokens {options.tokens!r} must be integers between commas") from None
    if model.tokenizer is None:
        raise UsageError(f"{options.model} holds no tokenizer: give the prompt as --tokens")
    if not options.chat:
        return options.prompt
    try:
        text = chat.render(model.tokenizer, [{"role": "user", "content": options.prompt}])
        return model.tokenizer.encode(text, add_special=False, parse_special=True)
    except ValueError as error:
        raise UsageError(error) from error


def _write(pieces: Iterable[Piece], *, as_ids: bool) -> Output:
    """Writes the text as it comes, or the token ids where there is no text."""
    output = None
    for piece in pieces:
        text = f"{piece.token} " if as_ids and piece.token is not None else piece.text
        sys.stdout.write(printable(text))
        sys.stdout.flush()
        output = piece.output
    sys.stdout.write("\n")
    sys.stdout.flush()
    assert output is not None  # the last piece's
    return output


def _summary(timings: Timings) -> str:
    parts = [f"{timings.new_tokens} tokens"]
    if timings.decoded_tokens:
        parts.append(f"{timings.tokens_per_second:.1f} tokens/s")
    parts.append(f"first token after {timings.first_token:.3f} s ({timings.prompt_tokens} prompt tokens)")
    if timings.compile:
        parts.append(f"compiled in {timings.compile:.1f} s")
    return ", ".join(parts)
