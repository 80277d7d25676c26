"""`python -m ptx_kernels report | emit | simulate`: inspects and runs kernels without a GPU."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import sys
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import __version__
from .kernels import CASES, KERNELS
from .kernels.matvec import PRESETS, preset_cases
from .machine_code.markdown import MarkdownError, rewrite
from .machine_code.ptxas import TARGETS, AssemblyError, ToolNotFoundError, tool_version
from .machine_code.report import as_dicts, report, table
from .ptx import Kernel
from .simulate import simulate
from .simulator import SimulationError


def _parse_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} must be true or false")
    return text.lower() == "true"


def _parse_count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} must be a number, 0 or more")
    return int(text)


def _parser_of(annotation: Any) -> Callable[[str], Any]:
    """Returns a function that parses an option's text to an annotated type.

    `T | None` takes a T, and a dataclass `field=value,field=value`.
    """
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
    if typing.get_origin(annotation) is typing.Literal:
        annotation = type(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is tuple:
        item = typing.get_args(annotation)[0]
        return lambda text: tuple(map(item, text.split(",")))
    if dataclasses.is_dataclass(annotation):
        made: Any = annotation  # narrowed, it could be an instance
        hints = typing.get_type_hints(annotation)

        def fields(text: str) -> Any:
            given = (item.partition("=") for item in text.split(","))
            try:
                return made(**{name: _parser_of(hints[name])(end) for name, _, end in given})
            except (KeyError, TypeError) as error:
                known = ", ".join(hints)
                raise argparse.ArgumentTypeError(f"{text!r}: fields are {known}") from error

        return fields
    return _parse_bool if annotation is bool else annotation


def _options(builder: Callable[..., Kernel]) -> dict[str, tuple[Any, Any, str | None]]:
    """Returns a kernel's options: {name: (annotation, default, argument it is a field of)}.

    The argument is None if the option is no field. `Parameter.empty` means no default. A dataclass
    argument (a Config) is replaced by its fields, with the defaults of the argument's own default.
    """
    options: dict[str, tuple[Any, Any, str | None]] = {}
    for parameter in inspect.signature(builder).parameters.values():
        annotation = parameter.annotation
        if not dataclasses.is_dataclass(annotation):
            options[parameter.name] = (annotation, parameter.default, None)
            continue
        field_hints = typing.get_type_hints(annotation)
        for field in dataclasses.fields(annotation):
            default = (
                inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
            )
            if dataclasses.is_dataclass(parameter.default):
                default = getattr(parameter.default, field.name)
            if field.name in options:
                raise TypeError(
                    f"{builder.__name__}: field {field.name} of {parameter.name} is also an"
                    " argument"
                )
            options[field.name] = (field_hints[field.name], default, parameter.name)
    return options


def build(family: str, values: dict[str, Any]) -> Kernel:
    """Builds a kernel from flat option values, gathering the fields of its Config."""
    builder = KERNELS[family]
    parameters = inspect.signature(builder).parameters
    arguments: dict[str, Any] = {}
    configs: dict[str, dict[str, Any]] = {}
    for name, (_, _, owner) in _options(builder).items():
        if owner is None:
            arguments[name] = values[name]
        else:
            configs.setdefault(owner, {})[name] = values[name]
    arguments |= {o: parameters[o].annotation(**fields) for o, fields in configs.items()}
    return builder(**arguments)


def _summary(builder: Callable[..., Kernel]) -> str:
    return (inspect.getdoc(inspect.unwrap(builder)) or "").split("\n", 1)[0].replace("%", "%%")


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ptx_kernels", description=__doc__)
    parser.add_argument("--version", action="version", version=f"ptx_kernels {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    of_report = commands.add_parser(
        "report", help="registers, spills, occupancy, hot loop of every kernel"
    )
    of_report.add_argument("--arch", choices=TARGETS, default="sm_90")
    of_report.add_argument("--family", choices=sorted(KERNELS), help="only this family's kernels")
    of_report.add_argument(
        "--preset",
        choices=[*PRESETS, "all"],
        help="a strategy of the mat-vec at Llama-3.1-8B's shapes, or all of them",
    )
    of_report.add_argument(
        "--markdown",
        metavar="FILE",
        type=Path,
        help="fill in docs/kernel-tables.md, or its table of PRESET or FAMILY",
    )
    of_report.add_argument(
        "--json", action="store_true", help="every figure, with the instruction mix"
    )

    of_emit = commands.add_parser("emit", help="write a kernel's PTX text")
    for of_family in _add_families(of_emit):
        of_family.add_argument(
            "-o", dest="_output", metavar="FILE", type=Path, help="default: print it"
        )
    of_simulate = commands.add_parser(
        "simulate", help="run a kernel on random operands, every access checked"
    )
    for of_family in _add_families(of_simulate):
        of_family.add_argument(
            "--seeds",
            dest="_seeds",
            metavar="COUNT",
            type=_parse_count,
            default=0,
            help="further runs that draw what hardware leaves open",
        )
    return parser


def _add_families(command: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Adds a sub-command per kernel family with the kernel's own options."""
    added = []
    families = command.add_subparsers(dest="family", required=True, metavar="NAME")
    for family, builder in sorted(KERNELS.items()):
        summary = _summary(builder)
        of_family = families.add_parser(family, help=summary, description=summary)
        added.append(of_family)
        for name, (annotation, default, _) in _options(builder).items():
            required = default is inspect.Parameter.empty
            parse = _parser_of(annotation)
            literal = typing.get_origin(annotation) is typing.Literal
            of_family.add_argument(
                f"--{name.replace('_', '-')}",
                dest=name,
                type=parse,
                required=required,
                default=None if required else default,
                metavar=None if literal else getattr(annotation, "__name__", "").strip("_"),
                choices=typing.get_args(annotation) if literal else None,
                help=None if required else f"default: {default}",
            )
    return added


def main(argv: Sequence[str] | None = None) -> int:
    parser = _arguments()
    options = parser.parse_args(argv)
    if options.command in ("emit", "simulate"):
        try:
            kernel = build(options.family, vars(options))
        except (ValueError, TypeError) as error:
            parser.exit(2, f"{options.family}: {error}\n")
        if options.command == "simulate":
            try:
                print(simulate(kernel, options._seeds))
            except (SimulationError, MemoryError) as error:
                parser.exit(1, f"{type(error).__name__}: {error}\n")
            return 0
        if options._output is None:
            sys.stdout.write(kernel.text)
        else:
            try:
                options._output.write_text(kernel.text)
            except OSError as error:
                parser.exit(1, f"{error}\n")
        return 0
    if options.preset and options.family not in (None, "matvec"):
        parser.error(
            f"--preset {options.preset} goes with --family matvec, not {options.family}:"
            " presets are its own"
        )
    wanted = PRESETS if options.preset == "all" else [options.preset] if options.preset else []
    of_presets = [case for preset in wanted for case in preset_cases(preset)]
    cases = [case for case in of_presets or CASES if options.family in (None, case.family)]
    try:
        if options.markdown:
            preset = f"preset {options.preset}" if options.preset not in (None, "all") else None
            rewrite(options.markdown, only=f"family {options.family}" if options.family else preset)
            return 0
        rows = report(cases, KERNELS, options.arch)
    except (ToolNotFoundError, AssemblyError, OSError, MarkdownError) as error:
        parser.exit(1, f"{error}\n")
    if options.json:
        print(json.dumps({"ptxas": tool_version("ptxas"), "kernels": as_dicts(rows)}, indent=1))
    else:
        print(f"ptxas {tool_version('ptxas')}, {table(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
