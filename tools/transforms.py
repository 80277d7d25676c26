"""Writes docs/transforms.md: the result of each operation under each transform.

    python -m tools.transforms

tests/jax_q4k/test_transforms.py runs the same tables.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "transforms.md"

HEAD = """\
# Operations under JAX transforms

Every operation works under every transform, except in cells with a number: these raise the \
[error](#errors) with that number while they are traced.

- **yes**: matches plain JAX with dequantized weights in float64.
- **-**: does not apply: there is no operand to map, no float to differentiate, or the operation \
is not linear.

[Transforms](#transforms) with the same cells share a column:
"""


def tables() -> Any:
    """Imports tests/support/transforms; the tests folder is not a package."""
    if str(ROOT / "tests") not in sys.path:
        sys.path.append(str(ROOT / "tests"))
    return importlib.import_module("support.transforms.cells")


def page() -> str:
    cells = tables()
    cases, transforms = cells.CASES.values(), cells.TRANSFORMS
    grid = [[cells.status(case, name) for name in transforms] for case in cases]
    refusals = list(dict.fromkeys(c for row in grid for c in row if not isinstance(c, bool)))
    columns: dict[tuple[Any, ...], list[str]] = {}  # cells -> the transforms that have them
    for name, column in zip(transforms, zip(*grid, strict=True), strict=True):
        columns.setdefault(column, []).append(name)

    def text(cell: Any) -> str:
        return ("-", "yes")[cell] if isinstance(cell, bool) else str(refusals.index(cell) + 1)

    rows = [
        [f"`{case.operation}` {case.variant}".strip(), *map(text, row)]
        for case, row in zip(cases, zip(*columns, strict=True), strict=True)
    ]
    return "\n".join(
        [
            HEAD,
            *(f"- **{n[0]}**: {', '.join(n)}" for n in columns.values() if len(n) > 1),
            "",
            *table(["operation", *(names[0] for names in columns.values())], rows),
            "",
            "## Errors",
            "",
            *(f"{i}. `{refusal}`" for i, refusal in enumerate(refusals, 1)),
            "",
            "Quantized weights are constants: `jax.grad` with respect to one raises JAX's "
            "`TypeError` for integers.",
            "",
            "## Transforms",
            "",
            *table(["transform", "what is done"], [[n, t.note] for n, t in transforms.items()]),
            "",
            "Gradients are those of the sum of the results' sines, with respect to all float "
            "operands except pages. `scan` and the transforms after it include gradients where "
            "`grad` says yes.",
            "",
            "## What the tests run",
            "",
            *table(
                ["implementation", "activations", "largest error (NMSE)", "transforms"],
                [
                    [f"`{run[0]}`", run[1], f"{cells.TOLERANCES[run[1]]:g}", of(names, transforms)]
                    for run, names in _joined(cells.RUNS).items()
                ],
            ),
            "",
            f"For CUDA (`ptx`) programs are lowered but not run: {of(cells.LOWERED, transforms)}. "
            "The simulator (`sim`) runs their kernels.",
            "",
            "`python -m tools.transforms` writes this page from the tables in "
            "`tests/support/transforms`, and `tests/jax_q4k/test_transforms.py` runs every cell; "
            "with `--tier full`, which takes many minutes, in every implementation and dtype.",
            "",
        ]
    )


def _joined(runs: Any) -> dict[tuple[str, str], list[str]]:
    """Joins all parts: (implementation, dtype) -> transforms that run with it."""
    found: dict[tuple[str, str], list[str]] = {}
    for (implementation, dtype, _), names in runs.items():
        found.setdefault((implementation, dtype), []).extend(names)
    return {run: names for run, names in found.items() if names}


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def of(names: Any, all_names: Any) -> str:
    return "all" if set(names) == set(all_names) else ", ".join(names)


if __name__ == "__main__":
    PAGE.write_text(page())
