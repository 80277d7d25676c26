"""Executes machine code of kernels and compares with the simulator, bit for bit.

python -m tools.machine_code [--targets sm_80 sm_90] [--subjects 'gemm*'] [--seed 0] [--at-once]
python -m tools.machine_code --programs [--batches 1] [--prompts 512] [--clusters 8]

By default the subjects of the tests; with --programs the kernels of Llama 3.1 8B at full size, of
which --clusters random clusters, or blocks if there are no clusters, or all without it. Kernels
whose operands exceed --gigabytes are left out, and named. Exits with 1 if anything differs.
$JAX_Q4K_PTXAS names another ptxas; targets that it does not know are named and left out.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import time
from collections.abc import Iterator

import numpy as np

from ptx_kernels.kernels.operands import random_operands
from ptx_kernels.machine_code.ptxas import AssemblyError, assemble, tool_version
from ptx_kernels.ptx import Kernel

from ..mutation import labels, load_subject
from .confirm import disagreement
from .errors import Fault
from .machine import Shape

_PROBE = ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry probe() { ret; }\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.machine_code", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--targets", nargs="+", default=["sm_80", "sm_90", "sm_120"])
    parser.add_argument("--subjects", nargs="+", default=["*"], help="patterns of labels")
    parser.add_argument("--seed", type=int, help="of a random order of warps")
    parser.add_argument("--at-once", action="store_true", help="copies arrive when they start")
    parser.add_argument("--programs", action="store_true")
    parser.add_argument("--batches", nargs="*", type=int, default=[1])
    parser.add_argument("--prompts", nargs="*", type=int, default=[])
    parser.add_argument("--clusters", type=int)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    options = parser.parse_args(argv)
    targets = [target for target in options.targets if _known(target)]
    left_out = sorted({*options.targets} - {*targets})
    print(f"ptxas {tool_version('ptxas')}", *(f"does not know {t}" for t in left_out), sep="; ")
    failures = count = 0
    start = time.perf_counter()
    launches = _of_programs(options) if options.programs else _of_subjects(options)
    for name, kernel, operands, clusters in launches:
        for target in targets:
            if kernel.cluster != (1, 1, 1) and target in ("sm_80", "sm_86", "sm_89"):
                continue
            count += 1
            found = _difference(kernel, operands, target, clusters, options)
            if found or options.programs:
                print(f"{name} {target}: {found or 'same bits'}", flush=True)
            failures += bool(found)
    seconds = time.perf_counter() - start
    print(f"{count - failures} of {count} launches give the simulator's bits; {seconds:.0f} s")
    return 1 if failures or not count else 0


def _difference(
    kernel: Kernel,
    operands: tuple[np.ndarray, ...],
    target: str,
    clusters: list[int] | None,
    options: argparse.Namespace,
) -> str:
    try:
        return disagreement(
            kernel,
            operands,
            target,
            clusters=clusters,
            seed=options.seed,
            late=not options.at_once,
        )
    except Fault as fault:
        return f"{type(fault).__name__}: {fault}"


def _known(target: str) -> bool:
    try:
        assemble(_PROBE, target)
    except AssemblyError:
        return False
    return True


_Launch = tuple[str, Kernel, tuple[np.ndarray, ...], list[int] | None]


def _of_subjects(options: argparse.Namespace) -> Iterator[_Launch]:
    for label in labels():
        if any(fnmatch.fnmatchcase(label, pattern) for pattern in options.subjects):
            subject = load_subject(label)
            yield label, subject.kernel, subject.operands, None


def _of_programs(options: argparse.Namespace) -> Iterator[_Launch]:
    from ..program_kernels import Asked, label, program_kernels

    asked = [Asked("llama-3.1-8b", batch=batch) for batch in options.batches]
    asked += [Asked("llama-3.1-8b", prompt=prompt) for prompt in options.prompts]
    for program in asked:
        for kernel in program_kernels(program).kernels:
            name = f"{program}, {label(kernel)}"
            size = sum(buffer.nbytes for buffer in kernel.buffers)
            if size > options.gigabytes * 1e9:
                print(f"{name}: left out, {size / 1e9:.1f} GB")
                continue
            clusters = None
            if options.clusters:
                total = len(Shape.of(kernel).clusters())
                rng = np.random.default_rng(options.seed)
                drawn = rng.choice(total, min(total, options.clusters), replace=False)
                clusters = sorted(drawn.tolist())
            yield name, kernel, tuple(random_operands(kernel, 0)), clusters


if __name__ == "__main__":
    sys.exit(main())
