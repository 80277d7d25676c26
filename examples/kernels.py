"""Lower a model's decode step for CUDA, on any machine, and list its PTX kernels.

python examples/kernels.py MODEL.gguf
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from jax_q4k import models
from jax_q4k.custom_call import TARGET


def custom_calls(module: Any) -> Iterator[Any]:
    """Yields the attributes of each PTX custom call in a lowered module, in program order."""
    functions = {
        op.name.value: op for op in module.body.operations if op.operation.name == "func.func"
    }

    def walk(operation: Any) -> Iterator[Any]:
        for region in operation.regions:
            for block in region:
                for op in block.operations:
                    name, attributes = op.operation.name, op.operation.attributes
                    if name == "func.call":
                        yield from walk(functions[attributes["callee"].value])
                    elif (
                        name == "stablehlo.custom_call"
                        and attributes["call_target_name"].value == TARGET
                    ):
                        yield attributes["mhlo.backend_config"]
                    yield from walk(op)

    return walk(functions["main"])


def main(path: str) -> None:
    model = models.load(path)
    step, arguments = models.abstract_programs(model)["decode"]
    lowered = step.trace(*arguments).lower(lowering_platforms=("cuda",))
    launches: Counter[tuple[str, tuple[int, ...], tuple[int, ...], str]] = Counter()
    for call in custom_calls(lowered.compiler_ir("stablehlo")):
        grid, block = (
            [call[f"{kind}_{axis}"].value for axis in "xyz"] for kind in ("grid", "block")
        )
        launches[call["name"].value, tuple(grid), tuple(block), call["kernel_data"].value] += 1

    table = Table(title=f"PTX kernels of one decode step: {launches.total()} launches")
    for heading in ("kernel", "launches", "grid", "block", "lines of PTX"):
        table.add_column(heading, justify="left" if heading == "kernel" else "right")
    for (name, grid, block, ptx), count in launches.items():
        table.add_row(name, str(count), _axes(grid), _axes(block), str(len(ptx.splitlines())))
    table.caption = (
        "Rows that look alike prefetch different weights. Equal launches are merged when XLA"
        " compiles."
    )
    Console().print(table)


def _axes(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes)).removesuffix(" x 1").removesuffix(" x 1")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL.gguf", help="or a checkpoint folder, or demo")
    main(parser.parse_args().model)
