"""Assembles the kernels of programs with any ptxas, such as the older one of a driver.

JAX_Q4K_PTXAS=PATH python -m tools.assembled [--shape SHAPE] [--batches ...] [--prompts ...]

Exits with 1 if a kernel spills or ptxas rejects it.
"""

from __future__ import annotations

import argparse
import sys

import jax

from ptx_kernels.devices import REFERENCE
from ptx_kernels.machine_code.ptxas import AssemblyError, assemble, tool_version
from ptx_kernels.machine_code.report import plain_table

from . import aot
from .program_kernels import BATCHES, PROMPTS, SHAPES, Asked, program_kernels


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.assembled", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--shape", choices=list(SHAPES), default=next(iter(SHAPES)))
    parser.add_argument("--batches", nargs="*", type=int, default=BATCHES)
    parser.add_argument("--prompts", nargs="*", type=int, default=PROMPTS[:1])
    options = parser.parse_args(argv)
    if reason := aot.unavailable():
        print(reason, file=sys.stderr)
        return 3
    asked = [Asked(options.shape, batch=batch) for batch in options.batches]
    asked += [Asked(options.shape, prompt=prompt) for prompt in options.prompts]
    rows, failures = [], []
    for program in asked:
        registers, spilled, kernels = 0, 0, program_kernels(program).kernels
        for kernel in kernels:
            try:
                made = assemble(kernel.text, REFERENCE.arch)
            except AssemblyError as error:
                failures.append(f"{kernel.name}: {error}")
                continue
            registers = max(registers, made.registers)
            if lost := made.spill_store_bytes + made.spill_load_bytes:
                spilled += 1
                failures.append(f"{kernel.name} {kernel.grid}: {lost} bytes spilled")
        rows.append((str(program), str(len(kernels)), str(registers), str(spilled)))
    header = (f"ptxas {tool_version('ptxas')}", "kernels", "most registers", "spill")
    print(plain_table(header, rows), *failures, sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    # nothing runs on a GPU; without its libraries, looking for one warns
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
