"""Writes the tables of docs/kernel-tables.md.

The command is `python -m ptx_kernels report --markdown docs/kernel-tables.md`. The text between
the tables is written by hand. A table stands between the marks `<!-- table: NAME -->`
and `<!-- end -->`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import formats
from ..devices import target
from ..kernels import CASES, KERNELS, Case
from ..kernels.matvec import PRESETS, SHAPES, matvec_rule, preset_cases
from ..tuning import choose
from .model import FLOAT_INSTRUCTION_BUDGET, INSTRUCTION_BUDGETS
from .ptxas import TARGETS, assemble_all, tool_version
from .report import Figures, figures, load_range, report

ARCH = "sm_90"

_HEADER = (
    *(
        "kernel",
        "registers",
        "spills",
        "shared",
        "occupancy",
        "instr/qB",
        "load",
        "int",
        "dot",
        "float",
        "control",
    ),
    *("load bits", "KB in flight", "bound", "us", "GB/s"),
)


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _cells(f: Figures) -> tuple[str, ...]:
    return (
        f.label,
        str(f.registers),
        str(f.spill_bytes),
        str(f.shared_bytes),
        f"{f.occupancy:.0%}",
        _number(f.instructions_per_quant_byte, 2),
        *(
            _number(f.classes.get(name), 1)
            for name in ("load", "integer", "dot", "float", "control")
        ),
        load_range(f),
        f"{f.bytes_in_flight / 1024:.0f}" if f.widest_load else "-",
        f.bound or "-",
        _number(f.seconds and f.seconds * 1e6, 1),
        _number(f.seconds and f.nbytes / f.seconds / 1e9),
    )


def _lines(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    ruled = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in ruled)


@dataclass(frozen=True)
class Table:
    """A generated table of docs/kernel-tables.md.

    Attributes:
      labels: the first cell of each row, known without assembling.
      make: function that returns the table's full text.
    """

    labels: tuple[str, ...]
    make: Callable[[], str]


def _of_cases(cases: Sequence[Case]) -> Table:
    return Table(
        tuple(case.label for case in cases),
        lambda: _lines(_HEADER, map(_cells, report(cases, KERNELS, ARCH))),
    )


def _of_targets() -> Table:
    """Returns the table of registers per preset and target, spilled bytes after a plus sign."""
    n, columns = SHAPES[0]
    cases = [preset_cases(preset)[0] for preset in PRESETS]

    def make() -> str:
        texts = [KERNELS[case.family](**case.arguments).text for case in cases]
        made = assemble_all(texts, TARGETS)

        def cell(text: str, arch: str) -> str:
            spilled = made[text, arch].spill_store_bytes
            return f"{made[text, arch].registers}{f' + {spilled} B' if spilled else ''}"

        rows = (
            (preset, *(cell(text, arch) for arch in TARGETS))
            for preset, text in zip(PRESETS, texts, strict=True)
        )
        return _lines((f"preset, {n}x{columns}", *TARGETS), rows)

    return Table(tuple(PRESETS), make)


def _of_formats() -> Table:
    """Returns the table of the Config that the mat-vec rule chooses for each format."""
    n, columns = SHAPES[0]
    cases = [
        Case(
            f"{format} m={m}",
            "matvec",
            dict(
                format=format,
                n=n,
                columns=columns,
                m=m,
                config=matvec_rule(target(), format, n, columns, m),
            ),
        )
        for format in formats.names()
        for m in (1, 4, 8)
        if m == 1 or formats.get(format).int8_tile  # one row for each of the other formats
    ]
    return _of_cases(cases)


def _of_budgets() -> Table:
    """Returns the table of instruction budgets and the worst values for Llama-3.1-8B's shapes.

    The values are those of Configs that `tuning` chooses.
    """

    def matvecs(format: str, m: int, preset: str | None = None) -> list[Figures]:
        def config(n: int, columns: int) -> object:
            return PRESETS[preset] if preset else choose(matvec_rule, format, n, columns, m)

        built = (
            KERNELS["matvec"](format=format, n=n, columns=columns, m=m, config=config(n, columns))
            for n, columns in SHAPES
        )
        return [figures(kernel, ARCH) for kernel in built]

    budgets: dict[str, tuple[float, str, Callable[[], list[Figures]]]] = {
        f"{format}, q8_1, m = {m}": (
            INSTRUCTION_BUDGETS[format, m],
            more,
            functools.partial(matvecs, format, m),
        )
        for format, m, more in (
            ("Q4_K", 1, "; 16-byte loads, >= 4 in flight; <= 80 registers"),
            ("Q6_K", 1, ""),
            ("Q4_K", 4, ""),
        )
    }
    budgets["Q4_K, f32, m = 1"] = (
        FLOAT_INSTRUCTION_BUDGET,
        "",
        lambda: matvecs("Q4_K", 1, "fused_f32"),
    )

    def make() -> str:
        rows = []
        for name, (budget, more, measure) in budgets.items():
            found = measure()
            instructions = max(f.instructions_per_quant_byte or 0 for f in found)
            loads = min(f.loads_in_flight for f in found)
            most = max(f.registers for f in found)
            spilled = max(f.spill_bytes for f in found)
            rows.append(
                (
                    name,
                    f"<= {budget}{more}",
                    f"{instructions:.2f}",
                    str(loads),
                    str(most),
                    str(spilled),
                )
            )
        return _lines(
            ("kernel", "budget", "instr/qB", "16-byte loads in flight", "registers", "spills"), rows
        )

    return Table(tuple(budgets), make)


def tables() -> dict[str, Table]:
    """Returns all tables by name."""
    found = {f"preset {preset}": _of_cases(preset_cases(preset)) for preset in PRESETS}
    for family in KERNELS:
        if family not in ("matvec", "decode"):
            found[f"family {family}"] = _of_cases([case for case in CASES if case.family == family])
    decode = [
        c
        for c in CASES
        if c.family == "decode" and c.arguments["dtype"] == "bf16" and not c.arguments["lookups"]
    ]
    found["family decode"] = _of_cases(decode)
    return found | {"targets": _of_targets(), "formats": _of_formats(), "budgets": _of_budgets()}


_MARKED = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


class MarkdownError(ValueError):
    """A file whose tables cannot be filled in."""


def rewrite(path: Path, *, only: str | None = None) -> None:
    """Fills in every table of a Markdown file in place, or only the table named `only`.

    Raises:
      MarkdownError: the file names an unknown table, or has no table to fill in. OSError: no such
        file.
    """
    known = tables()

    def filled(match: re.Match[str]) -> str:
        start, name, end = match.groups()
        if name not in known:
            raise MarkdownError(f"{path}: table {name!r} must be one of {', '.join(known)}")
        return f"{start}\n{known[name].make()}\n\n{end}" if only in (None, name) else match.group()

    text = path.read_text()
    if not any(only in (None, match.group(2)) for match in _MARKED.finditer(text)):
        raise MarkdownError(f"{path}: no marks of a table{'' if only is None else f' {only!r}'}")
    text = _MARKED.sub(filled, text)
    path.write_text(re.sub(r"ptxas \d[\d.]*\d", f"ptxas {tool_version('ptxas')}", text))


def labels(text: str) -> dict[str, tuple[str, ...]]:
    """Returns the first cells of each table in a file's text, by table name."""
    found = {}
    for match in _MARKED.finditer(text):
        rows = re.findall(r"^\| ([^|]*?) \|", match.group(0), re.MULTILINE)
        found[match.group(2)] = tuple(rows[2:])
    return found
