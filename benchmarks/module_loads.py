"""Times how the CUDA driver loads a model's kernels, with and without its machine code cache.

XLA passes the PTX of every kernel launch to the driver as a separate module. The driver compiles
it, or finds it in a cache folder ($CUDA_CACHE_PATH, by default ~/.nv/ComputeCache). It reads the
folder when a process first uses it, so each case is a process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ptx_kernels.driver import Device
from ptx_kernels.simulated_cuda import SimulatedDevice

ROOT = Path(__file__).resolve().parents[1]
_TIMEOUT = 60.0  # seconds per process
_CONTEXT = 512  # tokens that a decode step reads


@dataclass(frozen=True)
class Loads:
    """Seconds that the driver takes to load the kernels of a decode step, each once.

    Attributes:
      texts: number of distinct kernels.
      launches: launches of the step, which XLA loads one by one.
      cold: with an empty cache, which is filled.
      warm: in a later process with the same cache.
      without: without a cache.
    """

    texts: int
    launches: int
    cold: float
    warm: float
    without: float

    def of_program(self, seconds: float) -> float:
        """Returns the seconds of all launches, if each takes a kernel's mean time."""
        return seconds / self.texts * self.launches


def decode_texts(device: str) -> tuple[list[str], int]:
    """Returns the distinct kernels of a decode step of Llama 3.1 8B as PTX, and its launches."""
    import jax.numpy as jnp

    import jax_q4k as jq
    from jax_q4k import models
    from tools.random_model import LLAMA_3_1_8B, random_model

    model = random_model(LLAMA_3_1_8B, abstract=True)
    programs = models.abstract_programs(model, capacity=_CONTEXT, cache_dtype=jnp.bfloat16)
    function, arguments = programs["decode"]
    calls = jq.explain(function, *arguments, platform="cuda", device=device).calls
    texts = dict.fromkeys(kernel.text for call in calls for kernel in call.kernels)
    return list(texts), sum(call.count * len(call.kernels) for call in calls)


def measure_loads(device: str, *, simulated: bool) -> Loads:
    """Loads the kernels in separate processes; `device` as the driver calls it.

    `simulated`: by the simulated driver, which compiles nothing. Raises RuntimeError for a process
    that fails, TimeoutExpired for one that takes longer than a minute.
    """
    with tempfile.TemporaryDirectory() as folder:
        file, cache = Path(folder) / "texts.json", {"CUDA_CACHE_PATH": f"{folder}/cache"}
        # the kernels depend only on shapes, so JAX needs no GPU
        made = _process(["texts", str(file), device], {"JAX_PLATFORMS": "cpu"})
        command = ["load", str(file), *(["--simulated"] if simulated else [])]
        cases = {
            "cold": cache | {"CUDA_CACHE_DISABLE": "0"},
            "warm": cache | {"CUDA_CACHE_DISABLE": "0"},
            "without": {"CUDA_CACHE_DISABLE": "1"},
        }
        seconds = {name: sum(_process(command, changes)) for name, changes in cases.items()}
    return Loads(**made, **seconds)


def _process(arguments: list[str], changes: dict[str, str]) -> Any:
    """Returns the output of `python -m benchmarks.module_loads`, in a changed environment."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.module_loads", *arguments],
        cwd=ROOT,
        env=os.environ | changes,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"module_loads {arguments[0]} failed: {reason}")
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.module_loads", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    texts = commands.add_parser("texts", help="write the kernels of a decode step, as PTX")
    texts.add_argument("file", type=Path, help="JSON to write")
    texts.add_argument("device", help="whose tuning counts, as the driver calls it")
    load = commands.add_parser("load", help="load them, and print the seconds of each")
    load.add_argument("file", type=Path, help="JSON to read")
    load.add_argument("--simulated", action="store_true", help="by the simulated driver")
    both = commands.add_parser("measure", help="all of it, on this machine's GPU")
    both.add_argument("device", help="as the driver calls it, such as NVIDIA H200")
    options = parser.parse_args(argv)
    if options.command == "measure":
        print(json.dumps(asdict(measure_loads(options.device, simulated=False))))
    elif options.command == "texts":
        found, launches = decode_texts(options.device)
        options.file.write_text(json.dumps(found))
        print(json.dumps({"texts": len(found), "launches": launches}))
    else:
        with SimulatedDevice() if options.simulated else Device() as gpu:
            print(
                json.dumps([gpu.time_load(text) for text in json.loads(options.file.read_text())])
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
