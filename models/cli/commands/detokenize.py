"""`jax-q4k detokenize`: writes the text of token ids."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

from rich.console import Console

from ..arguments import add_model
from ..output import UsageError
from ..prompts import read_text

_SEPARATORS = re.compile(r"[\s,\[\]]+")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "detokenize",
        help="show the text of token ids",
        description="Write the text of token ids, such as those of tokenize --ids. Reads no "
        "weights.",
    )
    parser.set_defaults(command=_detokenize)
    add_model(parser)
    parser.add_argument(
        "ids",
        nargs="?",
        metavar="IDS",
        help="token ids, 1,15043,29892 or as a list; default, or -: standard input",
    )
    parser.add_argument(
        "--skip-special", action="store_true", help="leave out control tokens, such as BOS"
    )


def _detokenize(options: argparse.Namespace, notes: Console) -> None:
    from ...files.tokenizers import load_tokenizer  # imports JAX

    given = read_text("-") if options.ids in (None, "-") else options.ids
    words = [word for word in _SEPARATORS.split(given) if word]
    try:
        ids = [int(word) for word in words]
    except ValueError:
        wrong = next(word for word in words if not re.fullmatch(r"[+-]?\d+", word, re.ASCII))
        raise UsageError(f"{wrong[:100]!r} is not a token id") from None
    try:
        text = load_tokenizer(options.model).decode(ids, skip_special=options.skip_special)
    except ValueError as error:
        raise UsageError(error) from error
    sys.stdout.write(text + "\n")
