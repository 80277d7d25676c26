"""`jax-q4k completion`: writes a script for shell completion of commands, options and files."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rich.console import Console

SHELLS = ("bash", "zsh", "tcsh")
DESCRIPTION = "Print a shell script that completes options and files."
EXAMPLES = """\
examples:
  eval "$(jax-q4k completion bash)"                                        # in ~/.bashrc
  jax-q4k completion zsh > ~/.zfunc/_jax-q4k                               # a folder of $fpath"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "completion",
        help="complete options in a shell",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=_completion)
    parser.add_argument("shell", choices=SHELLS, help="whose script")


def _completion(options: argparse.Namespace, notes: Console) -> None:
    import shtab

    from .. import parser_of

    parser = parser_of()
    for one in _parsers(parser):
        for action in one._actions:  # argparse has no public access to them
            if _takes_file(action):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    sys.stdout.write(shtab.complete(parser, shell=options.shell) + "\n")


def _parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Returns the parser and the parsers of its commands."""
    found = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += {id(one): one for one in action.choices.values()}.values()
    return found


def _takes_file(action: argparse.Action) -> bool:
    """Returns whether an argument is a file or folder."""
    names = (action.metavar,) if isinstance(action.metavar, str) else action.metavar or ()
    words = (
        "MODEL",
        "FILE",
        "SOURCE",
        "TARGET",
        "TEXT.txt",
        "PATH",
        "IN",
        "OUT",
        "FOLDER",
        "OTHER",
    )
    return any(word in str(name) for name in names for word in words)
