"""Reports the kernels' cost as visible without a GPU: `python -m benchmarks.static [FILE]`.

Assembles every kernel for every target and compiles the 8B decode loop ahead of time. Writes
registers, spills and, for the H200, the hot loops' instructions and predicted times, of kernels and
of decoder layers by kind, to `benchmarks/results/static.json`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter

import jax

from jax_q4k import models
from ptx_kernels.kernels import CASES, KERNELS, Case
from ptx_kernels.kernels.matvec import PRESETS, preset_cases
from ptx_kernels.machine_code.ptxas import TARGETS, tool_version
from ptx_kernels.machine_code.report import as_dicts, report, table
from tools import aot, layer_times
from tools.launches import layer_launches, page_array
from tools.random_model import LLAMA_3_1_8B, random_model
from tools.results import write_results

from .common import results_file


def launches_of_8b_step() -> dict[str, object]:
    """Returns the launches per token of a Llama-3.1-8B generate loop, compiled for an H200."""
    model = random_model(LLAMA_3_1_8B, abstract=True)
    function, arguments = models.abstract_programs(model, capacity=1008)["generate"]
    program = aot.compile_program(function, *arguments, options=models.CUDA_COMPILER_OPTIONS)
    return {
        "launches": sum(launch.is_in("kWhile") for launch in program.launches),
        "ours": dict(Counter(launch.name for launch in program.ptx_launches)),
        "per_layer": len(layer_launches(program, 1)),
        "outside_cuda_graphs": sum(
            not launch.is_in("kCommandBuffer") for launch in program.launches
        ),
        "copies_of_page_arrays": len(program.rewrites(page_array(arguments))),
    }


def cases() -> list[Case]:
    """Returns each family's examples, and every mat-vec preset at Llama-3.1-8B's shapes."""
    return [*CASES, *(case for preset in PRESETS for case in preset_cases(preset))]


def main(arguments: list[str]) -> int:
    file = results_file(arguments, "static", __doc__)
    if reason := aot.unavailable():
        print(reason, file=sys.stderr)
        return 3
    rows = {arch: report(cases(), KERNELS, arch) for arch in TARGETS}
    print(table(rows["sm_90"]))
    step = launches_of_8b_step()
    print(step)
    layers = layer_times.layer_times()
    print(layer_times.table(layers))
    results = {
        "ptxas": tool_version("ptxas"),
        "llama-3.1-8b generate": step,
        "layers": [dataclasses.asdict(layer) | {"limit": layer.limit} for layer in layers],
        "kernels": as_dicts(rows["sm_90"]),
        "registers": {
            arch: {f.label: f.registers for f in figures} for arch, figures in rows.items()
        },
        "spill_bytes": {
            arch: sum(f.spill_bytes for f in figures) for arch, figures in rows.items()
        },
    }
    print(write_results(file, results))
    return 0


if __name__ == "__main__":
    # nothing runs on a GPU; without its libraries, looking for one warns
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main(sys.argv[1:]))
