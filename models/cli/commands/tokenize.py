"""`jax-q4k tokenize`: shows the tokens of a text."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from rich.console import Console

from ..arguments import add_model
from ..output import UsageError, printable
from ..prompts import read_text


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "tokenize",
        help="show the tokens of a text",
        description="Show the tokens of a text as the model reads it, one in a line: id, and text "
        "in JSON's notation. Reads no weights.",
    )
    parser.set_defaults(command=_tokenize)
    add_model(parser)
    parser.add_argument(
        "text", nargs="?", metavar="TEXT", help="the text; default, or -: standard input"
    )
    parser.add_argument("-f", "--file", metavar="FILE", help="read the text from a file")
    parser.add_argument("--ids", action="store_true", help="write only ids, as a Python list")
    parser.add_argument("--json", action="store_true", help="write a JSON object for each token")
    parser.add_argument(
        "--no-bos",
        action="store_true",
        help="leave out the tokens that the tokenizer adds, such as BOS",
    )
    parser.add_argument(
        "--parse-special",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="parse names of control tokens, such as <|im_end|>, as those tokens, as "
        "llama-tokenize does; default: yes",
    )
    parser.add_argument(
        "--show-count", action="store_true", help="write the number of tokens at the end"
    )


def _tokenize(options: argparse.Namespace, notes: Console) -> None:
    from ...files.tokenizers import load_tokenizer  # imports JAX

    if options.text is not None and options.file is not None:
        raise UsageError("give TEXT or -f FILE, not both")
    stdin = options.file is None and options.text in (None, "-")
    text = read_text(options.file or "-") if stdin or options.file else options.text
    tokenizer = load_tokenizer(options.model)
    try:
        ids = tokenizer.encode(
            text,
            add_special=not options.no_bos,
            parse_special=options.parse_special,
            add_end=False,
        )
    except ValueError as error:
        raise UsageError(error) from error
    if options.ids:
        print(ids)
    else:
        for token in ids:
            sys.stdout.write(_line(tokenizer.token_bytes(token), token, options.json) + "\n")
    if options.show_count:
        print(f"{len(ids)} tokens")


def _line(text: bytes, token: int, as_json: bool) -> str:
    """Returns a token's line; bytes that are no UTF-8, as part of a character, are escaped."""
    shown = text.decode(errors="backslashreplace")
    if as_json:
        return json.dumps({"token": token, "text": shown, "bytes": list(text)})
    return f"{token:>6}  {json.dumps(printable(shown), ensure_ascii=False)}"
