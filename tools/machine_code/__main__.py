"""Executes machine code of kernels and compares with the simulator, bit for bit.

python -m tools.machine_code [--targets sm_75 sm_90] [--subjects 'gemm*'] [--seed 0] [--at-once]
python -m tools.machine_code --programs [--batches 1] [--prompts 512] [--clusters 8]

By default the subjects of the tests, built for sm_75 where that is the target; with --programs the
kernels of Llama 3.1 8B at full size, of which --clusters random clusters, or blocks if there are no
clusters, or all without it. Subjects that a target lacks instructions for, and kernels whose
operands exceed --gigabytes, are left out and named. Exits with 1 if anything differs.
$JAX_Q4K_PTXAS names another ptxas; targets that it does not know are named and left out.
"""

from __future__ import annotations

import argparse
import fnmatch
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ptx_kernels.devices import DEVICES
from ptx_kernels.kernels.operands import random_operands
from ptx_kernels.machine_code.ptxas import AssemblyError, assemble, tool_version
from ptx_kernels.ptx import Kernel, KernelError
from ptx_kernels.ptx.oldest import COMMON

from ..mutation import labels, load_subject
from .confirm import disagreement, simulated
from .errors import Fault
from .launch import Program, load
from .machine import Shape

TARGETS = ("sm_75", "sm_80", "sm_90", "sm_120")

_OF_PROGRAMS = ("device", "batches", "prompts", "clusters", "gigabytes")
_AHEAD = 2  # launches whose kernels are assembled while another is executed
_PROBE = ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry probe() { ret; }\n"


@dataclass(frozen=True)
class _Launch:
    """A kernel with operands, and the numbers of the clusters that run, None for all."""

    name: str
    kernel: Kernel
    operands: tuple[np.ndarray, ...]
    clusters: list[int] | None = None

    @property
    def least(self) -> int:
        """Number of the oldest architecture that the kernel's text runs on."""
        found = re.search(r"^\.target sm_(\d+)", self.kernel.text, re.MULTILINE)
        assert found is not None
        return int(found[1])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.machine_code", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--subjects", nargs="+", default=["*"], help="patterns of labels")
    parser.add_argument("--seed", type=int, help="of a random order of warps")
    parser.add_argument("--at-once", action="store_true", help="copies arrive when they start")
    programs = parser.add_argument_group("programs", "Llama 3.1 8B at full size")
    programs.add_argument("--programs", action="store_true", help="execute its kernels instead")
    programs.add_argument("--device", choices=DEVICES, default="H200", help="that they are for")
    programs.add_argument("--batches", nargs="*", type=int, default=[1], help="of decode steps")
    programs.add_argument("--prompts", nargs="*", type=int, default=[], help="their lengths")
    programs.add_argument("--clusters", type=int, help="execute so many, drawn at random")
    programs.add_argument(
        "--gigabytes", type=float, default=1.0, help="most of a kernel's operands"
    )
    options = parser.parse_args(argv)
    changed = any(getattr(options, name) != parser.get_default(name) for name in _OF_PROGRAMS)
    if changed and not options.programs:
        parser.error(f"--{', --'.join(_OF_PROGRAMS)} need --programs")
    known = [target for target in options.targets if _known(target)]
    unknown = sorted({*options.targets} - {*known})
    print(f"ptxas {tool_version('ptxas')}", *(f"does not know {t}" for t in unknown), sep="; ")
    failures = count = 0
    start = time.perf_counter()
    # Kernels for COMMON run on newer architectures; older ones have builds of their own.
    builds = [COMMON] if options.programs else sorted({min(_number(t), COMMON) for t in known})
    for build in builds:
        targets = [t for t in known if options.programs or min(_number(t), COMMON) == build]
        launches = (_of_programs if options.programs else _of_subjects)(options, build)
        for launch, assembling in _assembled(launches, targets):
            found = _differences(launch, assembling, options)
            for target, difference in found.items():
                if difference or options.programs:
                    print(f"{launch.name} {target}: {difference or 'same bits'}", flush=True)
            count += len(found)
            failures += sum(map(bool, found.values()))
    seconds = time.perf_counter() - start
    print(f"{count - failures} of {count} launches give the simulator's bits; {seconds:.0f} s")
    return 1 if failures or not count else 0


_Assembling = dict[str, Future[Program]]


def _assembled(
    launches: Iterable[_Launch], targets: list[str]
) -> Iterator[tuple[_Launch, _Assembling]]:
    """Yields launches with their programs for each target that they run on.

    ptxas and nvdisasm, which take longer than the execution of a small kernel, run ahead.
    """
    waiting = deque[tuple[_Launch, _Assembling]]()
    with ThreadPoolExecutor(_AHEAD) as pool:
        for launch in launches:
            assembling = {}
            for target in targets:
                if _number(target) < launch.least:
                    print(f"{launch.name} {target}: left out, needs sm_{launch.least}")
                else:
                    assembling[target] = pool.submit(load, launch.kernel, target)
            waiting.append((launch, assembling))
            if len(waiting) > _AHEAD:
                yield waiting.popleft()
        yield from waiting


def _differences(
    launch: _Launch, assembling: _Assembling, options: argparse.Namespace
) -> dict[str, str]:
    """Maps each target to how its machine code differs, empty if it does not."""
    if not assembling:
        return {}
    found = {}
    wants = simulated(launch.kernel, launch.operands, launch.clusters)
    for target, program in assembling.items():
        try:
            found[target] = disagreement(
                program.result(),
                launch.operands,
                wants,
                clusters=launch.clusters,
                seed=options.seed,
                late=not options.at_once,
            )
        except Fault as fault:
            found[target] = f"{type(fault).__name__}: {fault}"
    return found


def _number(target: str) -> int:
    return int(target.removeprefix("sm_"))


def _known(target: str) -> bool:
    try:
        assemble(_PROBE, target)
    except AssemblyError:
        return False
    return True


def _of_subjects(options: argparse.Namespace, build: int) -> Iterator[_Launch]:
    for label in labels():
        if any(fnmatch.fnmatchcase(label, pattern) for pattern in options.subjects):
            try:
                subject = load_subject(label, build)
            except KernelError as error:
                print(f"{label} sm_{build}: left out, {error}")
                continue
            yield _Launch(label, subject.kernel, subject.operands)


def _of_programs(options: argparse.Namespace, build: int) -> Iterator[_Launch]:
    from ..program_kernels import Asked, chosen_kernels, label

    asked = [Asked("llama-3.1-8b", batch=batch) for batch in options.batches]
    asked += [Asked("llama-3.1-8b", prompt=prompt) for prompt in options.prompts]
    for program in asked:
        for kernel in chosen_kernels(program, DEVICES[options.device]):
            name = f"{options.device}, {program}, {label(kernel)}"
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
            yield _Launch(name, kernel, tuple(random_operands(kernel, 0)), clusters)


if __name__ == "__main__":
    sys.exit(main())
