"""Decode with a GGUF model that is split over the devices of several processes.

    # by hand, on each of N hosts, I = 0 .. N - 1:
    python examples/multihost_decode.py MODEL.gguf "Once upon a time" \\
        --coordinator HOST:PORT --processes N --process I
    # under Slurm, Kubernetes or MPI, where JAX finds all three; one task for each GPU:
    srun --ntasks-per-node 8 python examples/multihost_decode.py MODEL.gguf "Once upon a time"

Every process runs the same program on the same prompt. It reads only its own devices' shards from
the file. Process 0 prints the text.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax

from jax_q4k import models


def main() -> None:
    options = _parser().parse_args()
    args = options.coordinator, options.processes, options.process
    if None in args and args != (None, None, None):
        sys.exit("--coordinator, --processes and --process go together")
    jax.distributed.initialize(*args)  # before any use of a device

    mesh = jax.make_mesh((jax.device_count(),), ("tp",))
    load = models.load  # imports Flax here, so that its files are not counted
    before = _bytes_read()
    model = load(options.model, mesh=mesh)
    read = _bytes_read() - before
    size = sum(leaf.nbytes for leaf in model.weights)
    print(
        f"process {jax.process_index()} of {jax.process_count()}: {jax.local_device_count()} of "
        f"{jax.device_count()} devices, read {read} bytes, holds {_held(model)} of {size}",
        flush=True,
    )

    prompt = options.prompt
    if options.ids:
        prompt = [int(word) for word in prompt.split()]
    output = models.generate(model, prompt, max_new_tokens=options.new_tokens)
    if jax.process_index() == 0:
        print("tokens:", *output.tokens)
        if output.text is not None:
            print(f"text: {options.prompt}{output.text}")
    jax.distributed.shutdown()  # waits for the other processes


def _held(model: models.Model) -> int:
    """Bytes of the weights on this process's devices; counts a replicated shard once."""
    return sum(
        nbytes
        for leaf in model.weights
        for nbytes in {str(s.index): s.data.nbytes for s in leaf.addressable_shards}.values()
    )


def _bytes_read() -> int:
    """Bytes that this process has read so far from all files, as counted by Linux."""
    return int(Path("/proc/self/io").read_text().split()[1])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL.gguf", help="a file that each process can read")
    parser.add_argument("prompt")
    parser.add_argument("--ids", action="store_true", help="the prompt is token ids")
    parser.add_argument("--new-tokens", type=int, default=24, metavar="N")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0")
    parser.add_argument("--processes", type=int, metavar="N")
    parser.add_argument("--process", type=int, metavar="I", help="0 to N - 1")
    return parser


if __name__ == "__main__":
    main()
