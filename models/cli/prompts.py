"""Reads the prompts of a command: texts, files, standard input, token ids."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jax_q4k import models

from .arguments import add_alias
from .output import UsageError

if TYPE_CHECKING:
    from ..runner.model import Model

#: Maximum bytes of a prompt file; a longer text exceeds any context.
MAX_FILE = 1 << 26
#: Maximum bytes of a text to score or to tokenize; a limit for endless files such as /dev/zero.
MAX_TEXT = 1 << 30


@dataclass(frozen=True)
class PromptOption:
    """Value of option -p, -f or --tokens; `kind` says which option."""

    kind: str
    value: str


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """Adds -p, -f and --tokens, for one or more prompts."""
    group = parser.add_argument_group("prompts", "one or more prompts, run as one batch")
    for names, kind, metavar, help in (
        (("-p", "--prompt"), "text", "TEXT", "text to continue"),
        (("-f", "--file"), "file", "FILE", "read the text from a file; -: standard input"),
        (("--tokens",), "tokens", "IDS", "token ids: 1,15043,29892"),
    ):
        make = _Maker(kind)
        group.add_argument(
            *names, action="append", dest="prompts", type=make, metavar=metavar, help=help
        )
    parser.set_defaults(prompts=None, takes_prompt=_Maker("text"))


class _Maker:
    """Argparse type that makes a PromptOption of a value; messages show the type's name."""

    def __init__(self, kind: str) -> None:
        self._kind, self.__name__ = kind, kind

    def __call__(self, value: str) -> PromptOption:
        return PromptOption(self._kind, value)


def texts_of(options: argparse.Namespace) -> list[str | list[int]]:
    """Returns the prompts as texts or token ids; reads files.

    Raises UsageError if there is no prompt, or a prompt cannot be read.
    """
    if not options.prompts and is_piped():
        options.prompts = [PromptOption("file", "-")]
    if not options.prompts:
        raise UsageError("no prompt: give -p TEXT, -f FILE, --tokens IDS, or pipe text")
    if [prompt.value for prompt in options.prompts if prompt.kind == "file"].count("-") > 1:
        raise UsageError("-f - can be given once: standard input is read once")
    texts = [_text(prompt) for prompt in options.prompts]
    if texts == [""] and options.prompts == [PromptOption("file", "-")]:
        raise UsageError("no prompt: standard input is empty; give -p TEXT or -f FILE")
    return texts


def is_piped() -> bool:
    """Returns whether standard input comes from a pipe or a file."""
    return sys.stdin is not None and not sys.stdin.closed and not sys.stdin.isatty()


def _text(prompt: PromptOption) -> str | list[int]:
    if prompt.kind == "text":
        try:
            prompt.value.encode()
        except UnicodeEncodeError as error:  # Python passes invalid bytes as surrogates
            problem = f"-p is not UTF-8: invalid byte after {error.start} characters"
            raise UsageError(problem) from None
        return prompt.value
    if prompt.kind == "file":
        return _file_text(prompt.value)
    try:
        return [int(part) for part in prompt.value.split(",")]
    except ValueError:
        raise UsageError(f"--tokens {prompt.value!r} must be comma-separated integers") from None


def read_up_to(count: int, path: str) -> bytes:
    """Reads at most `count` bytes of a file, or of standard input if the path is `-`."""
    if path != "-":
        with open(path, "rb") as file:  # may be a pipe
            return file.read(count)
    if sys.stdin is None:
        raise UsageError("standard input is closed")
    return sys.stdin.buffer.read(count)


def _file_text(path: str) -> str:
    """Reads a file's text without the newline at its end."""
    return read_text(path, MAX_FILE).removesuffix("\n")


def read_text(path: str, most: int | None = None) -> str:
    """Reads the text of a file, or of standard input if the path is `-`.

    most: maximum bytes; None means MAX_TEXT.
    """
    most = MAX_TEXT if most is None else most
    name, data = "standard input" if path == "-" else path, read_up_to(most + 1, path)
    if len(data) > most:
        raise UsageError(f"{name} is longer than {most >> 20} MiB")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8: {error.reason} at byte {error.start}") from None


def add_template(parser: Any) -> None:
    """Adds --system and --no-thinking, for the chat template."""
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    add_alias(parser, ("-sys", "--system-prompt"), "system", str)
    parser.add_argument(
        "--no-thinking",
        action="store_true",
        help="ask the chat template for an answer without thinking (enable_thinking=false)",
    )


def add_show_thinking(parser: Any) -> None:
    """Adds --show-thinking, for thoughts in full."""
    parser.add_argument(
        "--show-thinking",
        action="store_true",
        help="write the model's thoughts in full, to standard error; default: one line for each",
    )


def template_variables(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the variables that `add_template`'s options set."""
    return {"enable_thinking": False} if options.no_thinking else {}


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def ids_of(
    prompts: list[str | list[int]], model: Model, options: argparse.Namespace
) -> list[list[int]]:
    """Returns the token ids of prompts; applies the chat template with --chat."""
    return [_ids(prompt, model, options) for prompt in prompts]


def _ids(prompt: str | list[int], model: Model, options: argparse.Namespace) -> list[int]:
    if isinstance(prompt, list):
        if options.chat:
            raise UsageError("--chat needs the prompt as text, not as --tokens")
        return prompt
    if model.tokenizer is None:
        raise UsageError(f"{options.model} has no tokenizer: give the prompt as --tokens")
    try:
        if options.chat and options.parse_special:
            raise UsageError("--parse-special is for prompts without --chat")
        if options.chat:
            system = [] if options.system is None else [_message("system", options.system)]
            messages = [*system, _message("user", prompt)]
            return models.chat.encode(model.tokenizer, messages, **template_variables(options))
        from ..engine.arguments import check_text  # imports JAX

        check_text(model, prompt, "prompt")
        special, start = options.parse_special, model.tokenizer.bos_token_id
        ids = model.tokenizer.encode(prompt, add_end=False, parse_special=special)
        return ids[1:] if special and ids[:2] == [start, start] else ids  # the prompt has its own
    except ValueError as error:
        raise UsageError(error) from error
