"""Options that several commands share."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.markup import escape

import jax_q4k as jq

from ..sampling import Constraint, Sampling
from ..sampling.file_defaults import USUAL, default_sampling
from .arguments import add_alias
from .output import UsageError, printable, warnings_in_a_line
from .prompts import MAX_FILE, read_text

if TYPE_CHECKING:
    from ..runner.model import Model

#: Help of options whose default differs from the field's.
HELP = {
    "temperature": "randomness: 0 always takes the most likely token; default: the model file's, "
    "else 0.7",
    "min_p": "drop tokens less likely than this fraction of the most likely one; default: the "
    "model file's, else 0.05, or 0 if the file sets others",
    "top_k": "keep the N most likely tokens, 0 all; default: the model file's, else 0",
    "top_p": "keep the most likely tokens up to this total probability, 1 all; default: the model "
    "file's, else 1",
    "repetition_penalty": "divide the logits of earlier tokens, 1 disables it; default: the model "
    "file's, else 1",
    "seed": "seed of the random numbers; default: random, and printed",
}

#: Other tools' names of fields of Sampling.
ALIASES = {
    "max_new_tokens": ("--max-tokens", "--n-predict", "--predict"),
    "temperature": ("--temp",),
    "repetition_penalty": ("--repeat-penalty",),
}


#: Fields of Sampling whose options may be repeated.
_SEVERAL = ("stop", "stop_token_ids", "logit_bias", "dry_sequence_breakers", "spelled_tokens")


def add_running(parser: argparse._ActionsContainer, *, names_adapters: bool = False) -> None:
    """Adds options that control how generation runs.

    names_adapters: whether --lora also takes adapters that requests name.
    """
    if names_adapters:
        _add_named_lora(parser)
    else:
        add_lora(parser)
    add_cache_dtype(parser)
    add_draft(parser)
    add_devices(parser)
    add_implementation(parser)
    add_no_cache(parser)


def add_sampling(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """Adds an option for every field of Sampling; `defaults` override the fields' own.

    Missing options are None; `sampling_of` fills them in.
    """
    groups = {name: parser.add_argument_group(name) for name in ("sampling", "penalties")}
    for field in dataclasses.fields(Sampling):
        if "help" not in field.metadata:  # Python functions
            continue
        is_penalty = "penal" in field.name or field.name.startswith("dry_")
        group = groups["penalties" if is_penalty else "sampling"]
        short, metavar = field.metadata.get("short"), field.metadata.get("metavar")
        names = [*([short] if short else ()), f"--{field.name.replace('_', '-')}"]
        options: dict[str, Any] = {"help": field.metadata["help"]}
        if field.type == "bool":
            options |= {"action": "store_const", "const": True}
        elif field.name in _SEVERAL:
            names = [name.removesuffix("s") if name != "--logit-bias" else name for name in names]
            options |= {"action": "append", "dest": field.name, "metavar": metavar}
            kinds: dict[str, Any] = {"logit_bias": _bias, "stop_token_ids": int}
            options |= {"type": kinds.get(field.name, str)}
        else:
            kind = int if str(field.type).startswith("int") else float
            options |= {"type": kind, "metavar": metavar}
        if field.name in defaults:
            default = defaults[field.name]
            options |= {"default": default, "help": f"{options['help']}; default: {default}"}
        elif field.name in HELP:
            options |= {"help": HELP[field.name]}
        group.add_argument(*names, **options)
        if field.name in ALIASES:
            add_alias(group, ALIASES[field.name], field.name, options["type"])
    _add_constraint(parser)


def _add_constraint(parser: argparse.ArgumentParser) -> None:
    """Adds options of the field `constraint`."""
    group = parser.add_argument_group("form of the text").add_mutually_exclusive_group()
    for name, metavar, make, help in (
        ("--json-schema", "SCHEMA|FILE", Constraint.json_schema, "JSON that a schema describes"),
        ("--grammar", "GRAMMAR|FILE", Constraint.grammar, "text of a grammar, in GBNF or Lark"),
        ("--regex", "PATTERN", Constraint.regex, "text that a regular expression matches"),
    ):
        read = _form_of(make, reads_files=metavar.endswith("FILE"))
        group.add_argument(name, dest="constraint", metavar=metavar, type=read, help=help)


def _form_of(
    make: Callable[[str], Constraint], *, reads_files: bool
) -> Callable[[str], Constraint]:
    """Returns a parser of an option's text, which may be the name of a file."""

    def parse(text: str) -> Constraint:
        try:
            is_file = reads_files and len(text) < 4096 and os.path.isfile(text)
            return make(read_text(text, MAX_FILE) if is_file else text)
        except (OSError, ValueError, UsageError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _bias(text: str) -> tuple[int, float]:
    """Parses `ID=X` of --logit-bias."""
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a token id, =, and a number") from None


def sampling_of(options: argparse.Namespace, model: Model, notes: Console) -> Sampling:
    """Returns sampling parameters: the options, else the model file's defaults, else `USUAL`.

    Without a seed option, the seed is random. Raises UsageError for a value out of range, and for a
    constraint that cannot be compiled.
    """
    try:
        with warnings_in_a_line(notes):
            of_file = default_sampling(model.metadata)
    except ValueError as error:
        problem = escape(printable(f"The file's default sampling parameters are ignored: {error}"))
        notes.print(f"[dim]{problem}[/]", soft_wrap=True)
        of_file = {}
    usual = of_file or USUAL
    by_chance = {"seed": secrets.randbits(32)}
    try:
        sampling = Sampling(**by_chance | usual | sampling_fields(options))
        if sampling.constraint is not None and model.grammars is not None:
            model.grammars.matcher(sampling.constraint)
        return sampling
    except (ValueError, TypeError, ImportError) as error:
        raise UsageError(error) from error


def sampling_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of Sampling that the options of `add_sampling` set."""
    fields = [field for field in dataclasses.fields(Sampling) if hasattr(options, field.name)]
    values = {field.name: getattr(options, field.name) for field in fields}
    return {name: value for name, value in values.items() if value is not None}


def add_cache_dtype(parser: argparse._ActionsContainer) -> None:
    """Adds --cache-dtype, the dtype of the KV cache."""
    parser.add_argument(
        "--cache-dtype",
        choices=[str(d) for d in jq.PAGE_DTYPES],
        default="float32",
        help="type of cached keys and values; default: float32",
    )


def add_draft(parser: argparse._ActionsContainer) -> None:
    """Adds --draft, for speculative decoding."""
    parser.add_argument(
        "--draft",
        metavar="lookup|nextn|MODEL",
        help="source of draft tokens, several of which are verified in one pass. lookup: what "
        "followed the last tokens before; nextn: the multi-token-prediction layer of the model's "
        "file; or a smaller model with the same vocabulary",
    )


def add_context_shift(parser: argparse._ActionsContainer) -> None:
    """Adds --context-shift and --keep, for a full context."""
    parser.add_argument(
        "--context-shift",
        action="store_true",
        help="when the context is full, drop the older half and continue",
    )
    parser.add_argument(
        "--keep",
        type=int,
        default=1,
        metavar="N",
        help="first tokens of the prompt that --context-shift keeps; default: 1",
    )


def add_lora(parser: argparse._ActionsContainer) -> None:
    """Adds --lora, for LoRA adapters."""
    parser.add_argument(
        "--lora",
        action="append",
        type=_adapter,
        metavar="FILE[=SCALE]",
        help="apply a LoRA adapter: a GGUF file, or a PEFT folder; may be repeated",
    )


class NamedAdapter(NamedTuple):
    """An adapter that requests may name."""

    name: str
    path: str
    scale: float


def _add_named_lora(parser: argparse._ActionsContainer) -> None:
    """Adds --lora of a server."""
    parser.add_argument(
        "--lora",
        action="append",
        type=_perhaps_named_adapter,
        metavar="[NAME=]FILE[=SCALE]",
        help="LoRA adapter, a GGUF file or a PEFT folder. With NAME, requests whose model is NAME "
        "use it; without, all do. May be repeated",
    )


def _perhaps_named_adapter(text: str) -> tuple[str, float] | NamedAdapter:
    """Parses `[NAME=]FILE[=SCALE]`; a name of a file that exists may have "=", too."""
    path, scale = _adapter(text)
    name, equals, rest = path.partition("=")
    if not equals or not name or not rest or os.path.exists(path):
        return path, scale
    return NamedAdapter(name, rest, scale)


def _adapter(text: str) -> tuple[str, float]:
    """Parses `FILE[=SCALE]` of --lora."""
    path, _, scale = text.rpartition("=")
    try:
        return (path, float(scale)) if path else (text, 1.0)
    except ValueError:  # "=" is part of the file name
        return text, 1.0


def add_no_cache(parser: argparse._ActionsContainer) -> None:
    """Adds --no-cache, which disables the on-disk cache of compiled programs."""
    parser.add_argument(
        "--no-cache",
        action="store_false",
        dest="keeps_programs",
        help="do not use the on-disk cache of compiled programs",
    )


def add_devices(parser: argparse._ActionsContainer) -> None:
    """Adds --devices, the number of devices to shard the model over."""
    parser.add_argument(
        "--devices",
        type=int,
        default=1,
        metavar="N",
        help="split the model over N GPUs, or over N parts of a CPU; default: 1",
    )


def add_activations(parser: argparse._ActionsContainer) -> None:
    """Adds --activations, the precision of activations in matrix products."""
    parser.add_argument(
        "--activations",
        choices=("q8_1", "f32"),
        help="round activations of matmuls to int8 (q8_1, the default), or not (f32)",
    )


#: Switches of `jq.implementation` that are on by default, and help of options that turn them off.
_SWITCHES = {
    "clusters": "CUDA kernels without thread block clusters",
    "prefetch": "CUDA kernels without prefetches of later weights",
    "graphs": "kernels of a GPU are launched one by one, not as CUDA graphs",
}


def add_implementation(parser: argparse._ActionsContainer) -> None:
    """Adds --implementation, and options for a GPU or driver that fails with a kind of kernel."""
    parser.add_argument(
        "--implementation",
        choices=jq.IMPLEMENTATIONS,
        help="ptx: CUDA kernels, the default on GPUs; native: CPU kernels, the default on CPUs if "
        "`jax-q4k doctor` finds them; xla: plain JAX; sim: the CUDA kernels in a simulator",
    )
    for name, help in _SWITCHES.items():
        parser.add_argument(f"--no-{name}", dest=name, action="store_false", help=help)
    parser.add_argument(
        "--decoded-products",
        action=argparse.BooleanOptionalAction,
        help="decode weights to float16 for XLA's products of long prompts on a GPU, or never; "
        "default: where it is faster",
    )


def implementation_of(options: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
    """Returns the `jq.implementation` that the options of a command select."""
    return jq.implementation(
        options.implementation,
        activations=getattr(options, "activations", None),
        decoded_products=options.decoded_products,
        **{name: getattr(options, name) for name in _SWITCHES},
    )


def implementation_arguments(options: argparse.Namespace) -> list[str]:
    """Returns the arguments with which another process selects the same implementation."""
    given = [f"--no-{name}" for name in _SWITCHES if not getattr(options, name)]
    if options.decoded_products is not None:
        given.append("--decoded-products" if options.decoded_products else "--no-decoded-products")
    if options.implementation is not None:
        given += ["--implementation", options.implementation]
    return given
