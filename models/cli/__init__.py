"""The command line `jax-q4k COMMAND`, with one module per command.

Text goes to standard output, everything else to standard error. A failure prints one line and has
exit code 2, unless a command returns another.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

import jax_q4k as jq
from jax_q4k.collecting import gc_throttled

from . import interrupts
from .arguments import COMMANDS_ELSEWHERE, Parser, add_elsewhere, finish
from .output import UsageError, devices, print_error, split_cpu

if TYPE_CHECKING:
    from jax_q4k.cache.program_cache import ProgramCache

#: Names of commands; each is a module of `commands`.
COMMANDS = (
    "bench",
    "chat",
    "compile",
    "completion",
    "detokenize",
    "doctor",
    "embed",
    "generate",
    "imatrix",
    "inspect",
    "join",
    "merge",
    "perplexity",
    "quantize",
    "rerank",
    "serve",
    "split",
    "tokenize",
)

FAILURE = 2
INTERRUPTED = 128 + signal.SIGINT  # convention of shells

_ERRORS = (
    UsageError,
    jq.GGUFError,
    jq.CheckpointError,
    jq.CompiledFileError,
    jq.UnavailableError,
    OSError,
    MemoryError,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line (by default `sys.argv`); returns the exit code.

    Signals end the process at once; partial files are removed.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    notes = Console(stderr=True, highlight=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the terminal's encoding may lack characters
    try:
        if sys.stdout is None:
            raise UsageError("standard output is closed")
        with interrupts.ending_at_once(), gc_throttled():
            if options.runs_programs:
                split_cpu(getattr(options, "devices", 1))
                devices()  # fails with one line if there is no device
            with _program_cache(options, notes) as options.programs, _explaining(options):
                code = options.command(options, notes)
        sys.stdout.flush()
    except KeyboardInterrupt:  # outside the block, or while a line is typed
        # A thread of XLA may be compiling, and would crash while the interpreter shuts down.
        os._exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader is gone; the interpreter must not flush buffered output to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (*_ERRORS, RuntimeError) as error:
        if not isinstance(error, _ERRORS) and not _is_of_jax(error):
            raise
        print_error(notes, error)
        return FAILURE
    return code or 0


def _program_cache(
    options: argparse.Namespace, notes: Console
) -> contextlib.AbstractContextManager[ProgramCache | None]:
    if not options.runs_programs:
        return contextlib.nullcontext()
    from . import cache  # imports JAX

    return cache.programs(notes, wanted=options.keeps_programs)


def _explaining(options: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
    return jq.explaining_loads() if options.runs_programs else contextlib.nullcontext()


def _is_of_jax(error: Exception) -> bool:
    """Returns whether a program failed on the device, or there is no device."""
    import jax

    backend = "Unable to initialize backend" in str(error)
    return backend or isinstance(error, jax.errors.JaxRuntimeError)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the command line; an error ends the process with one line and FAILURE."""
    first = arguments[0] if arguments else ""
    if first in COMMANDS_ELSEWHERE:
        Parser(prog="jax-q4k").error(f"{first} is not a command here: {COMMANDS_ELSEWHERE[first]}")
    return finish(*parser_of(arguments).parse_known_args(arguments))


def parser_of(arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Returns the parser of all commands, or only of the one that the arguments begin with.

    Importing the modules of all commands takes as long as running a short command.
    """
    parser = Parser(prog="jax-q4k", description="Run GGUF models with packed weights.")
    parser.add_argument("--version", action="version", version=f"jax-q4k {jq.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    first = arguments[0] if arguments else ""
    for name in (first,) if first in COMMANDS else COMMANDS:
        importlib.import_module(f".commands.{name}", __name__).add_parser(commands)
    for one in commands.choices.values():
        one.set_defaults(parser=one)
        if one.get_default("takes_model"):
            add_elsewhere(one)
    parser.set_defaults(
        runs_programs=False, keeps_programs=True, takes_model=False, takes_prompt=None
    )
    return parser
