"""Measures memory and time of loading: `python -m benchmarks.loading [--model MODEL] [FILE]`.

Loads a GGUF file onto one CPU device, onto eight, and onto eight of two processes, each time in new
processes. Without `--model` the file has 1.04 billion random weights, 640 MB. For each process it
reports resident bytes before loading, including imports and compiled code, and their peak; bytes
and calls of reading; and seconds. Writes `benchmarks/results/loading.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.results import write_results

from . import random_file
from .common import RESULTS

#: (processes, devices of each)
CASES = ((1, 1), (1, 8), (2, 4))

#: Loads the file that argv names, and prints the cost. "demo" first: it compiles what loading
#: compiles once. The peak is that of this program alone; `ru_maxrss` would include its parent's.
CHILD = """
import json, sys, time, warnings
from pathlib import Path
import jax
path, address, processes, process = sys.argv[1:]
if int(processes) > 1:
    jax.distributed.initialize(address, int(processes), int(process))
from jax_q4k import models
warnings.simplefilter("ignore")  # the demo's heads do not divide
def counts(file):
    lines = (line.split() for line in Path("/proc/self", file).read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) for line in lines if line[1:] and line[1].isdigit()}
mesh = jax.make_mesh((jax.device_count(),), ("tp",)) if jax.device_count() > 1 else None
models.load("demo", mesh=mesh)
before, read, began = counts("status")["VmRSS"], counts("io"), time.perf_counter()
model = models.load(path, mesh=mesh)
seconds, after = time.perf_counter() - began, counts("io")
buffers = {s.data.unsafe_buffer_pointer(): s.data.nbytes
           for leaf in model.weights for s in leaf.addressable_shards}
print(json.dumps({
    "before": before << 10, "peak": counts("status")["VmHWM"] << 10,
    "weights": sum(buffers.values()),
    "read": after["rchar"] - read["rchar"], "calls": after["syscr"] - read["syscr"],
    "seconds": seconds,
}))
if int(processes) > 1:
    jax.distributed.shutdown()
"""


def loaded(model: Path, processes: int, devices: int) -> list[dict[str, Any]]:
    """Returns the cost of loading for each of some processes that load at the same time."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(model), address, str(processes), str(process)],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            text=True,
        )
        for process in range(processes)
    ]
    printed = [process.communicate()[0] for process in started]
    for process in started:
        if process.returncode:
            raise RuntimeError(f"loading {model} ended with code {process.returncode}")
    return [json.loads(text.splitlines()[-1]) for text in printed]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.loading",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("file", nargs="?", type=Path, default=RESULTS / "loading.json")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or Path(folder, "random.gguf")
        if options.model is None:
            random_file.write(model)
        model.read_bytes()  # into the page cache, for all cases alike
        size, rows = model.stat().st_size, []
        print(f"{model.name}: {size / 1e6:.0f} MB\n{'processes x devices':20}", end="")
        print(*(f"{name:>10}" for name in ("before", "peak", "weights", "read", "calls", "s")))
        for processes, devices in CASES:
            for found in loaded(model, processes, devices):
                rows.append({"processes": processes, "devices": devices, **found})
                megabytes = (found[name] / 1e6 for name in ("before", "peak", "weights", "read"))
                print(
                    f"{processes} x {devices:<16}",
                    *(f"{count:10.0f}" for count in megabytes),
                    end="",
                )
                print(f" {found['calls']:10} {found['seconds']:10.2f}")
    print(write_results(options.file, {"file_bytes": size, "results": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
