"""Argument parser: one-line errors, hints for options of other tools, words without an option."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from ..support.assets import DEMO, HUB_EXAMPLE

MODEL = (
    "a GGUF file (the first part of a split one), a folder with one, a checkpoint folder, "
    f"a name on the Hugging Face hub such as {HUB_EXAMPLE}, or demo, the small model that comes "
    "with this package"
)

#: Commands of other tools -> what to use here.
COMMANDS_ELSEWHERE = {
    "run": "`jax-q4k chat MODEL` talks to a model, `jax-q4k generate MODEL -p TEXT` continues a "
    "text",
    "server": "`jax-q4k serve MODEL` serves a model over HTTP",
    "pull": "a hub model is downloaded when a command first uses it: "
    "`jax-q4k generate ORG/NAME:Q4_K_M -p TEXT`",
    "list": "downloaded models are listed by `hf cache ls`",
    "ls": "downloaded models are listed by `hf cache ls`",
    "show": "`jax-q4k inspect MODEL` shows a file",
    "convert": "`jax-q4k quantize FOLDER OUT.gguf --type BF16` converts a checkpoint",
    "benchmark": "`jax-q4k bench MODEL` measures speed",
}

#: Options of other tools -> what happens here instead.
OPTIONS_ELSEWHERE = {
    ("-t", "--threads"): "all cores are used; `taskset -c 0-3 jax-q4k ...` limits them",
    ("-c", "--ctx-size", "--context"): "the context grows as needed, up to the model's; "
    "--context-shift continues beyond it",
    ("-ngl", "--gpu-layers", "--n-gpu-layers"): "if JAX finds a GPU, it runs all layers",
    ("--think", "--hidethinking", "--reasoning-format"): "`jax-q4k chat` folds "
    "thoughts; --show-thinking shows them, --no-thinking asks for answers without",
    ("--jinja", "-cnv"): "`jax-q4k chat` and `generate --chat` use the model's chat template",
}


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors are one line, without the usage in front."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\nTry `{self.prog} --help`.\n")


class _Elsewhere(argparse.Action):
    """Argparse action of another tool's option: fails with a hint to our own option."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:  # type: ignore[override]
        parser.error(f"{'/'.join(self.option_strings)} is not an option here: {self.metavar}")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds MODEL, and the other ways to name one: --demo, -m FILE and -hf NAME."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL)
    parser.add_argument("--demo", action="store_true", help="the same as the model demo")
    for names in (("-m", "--model"), ("-hf", "--hf-repo")):
        parser.add_argument(*names, dest="named", metavar="MODEL", help=argparse.SUPPRESS)
    parser.set_defaults(takes_model=True)


def add_elsewhere(parser: argparse.ArgumentParser) -> None:
    """Adds hints for the options of other tools that the parser does not have itself."""
    known = parser._option_string_actions  # argparse names no public way to them
    for names, hint in OPTIONS_ELSEWHERE.items():
        if new := [name for name in names if name not in known]:
            parser.add_argument(
                *new, action=_Elsewhere, nargs="?", metavar=hint, help=argparse.SUPPRESS
            )


def add_alias(
    parser: argparse._ActionsContainer, names: Sequence[str], dest: str, kind: Any
) -> None:
    """Adds other tools' names for an option, without a line in the help."""
    parser.add_argument(
        *names, dest=dest, type=kind, default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )


def finish(options: argparse.Namespace, rest: list[str]) -> argparse.Namespace:
    """Assigns words without an option to the model, other arguments and the prompt, in this order.

    Returns the options. argparse alone assigns the model's word to the next argument if an option
    follows it. Ends the process with an error if there is no model, or a word or option is left
    over.
    """
    parser = options.parser
    strange = [word for word in rest if word.startswith("-") and word != "-"]
    if strange:
        parser.error(f"unknown option {strange[0]}")
    words = rest
    if options.takes_model:
        further = [a for a in parser._get_positional_actions() if a.dest != "model"]
        given = [getattr(options, action.dest) for action in further]
        words = [*filter(None, [options.model]), *(w for w in given if w is not None), *rest]
        if options.demo:
            options.model = DEMO
        elif options.named is not None:
            options.model = options.named
        elif words:
            options.model = words.pop(0)
        else:
            parser.error(f"no model given; MODEL is {MODEL}")
        for action in further:
            if not words and action.required:
                parser.error(f"the following arguments are required: {action.metavar}")
            setattr(options, action.dest, words.pop(0) if words else None)
    if options.takes_prompt and len(words) == 1 and not options.prompts:
        options.prompts = [options.takes_prompt(words.pop())]
    if words:
        hint = "; put the prompt in quotes" if options.takes_prompt else ""
        parser.error(f"unexpected argument {words[0]!r}{hint}")
    return options
