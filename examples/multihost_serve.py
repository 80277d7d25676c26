"""Serve a GGUF model that is split over the devices of several processes, with OpenAI's API.

    # by hand, on each of N hosts, I = 0 .. N - 1:
    python examples/multihost_serve.py MODEL.gguf --host 0.0.0.0 --api-key-file KEYS \\
        --coordinator HOST:PORT --processes N --process I
    # under Slurm, Kubernetes or MPI, where JAX finds all three; one task for each GPU:
    srun --ntasks-per-node 8 python examples/multihost_serve.py MODEL.gguf ...

Process 0 answers the requests. SIGTERM or Ctrl-C ends it when the running ones are answered, and
the other processes with it. If a process dies, the others end, too: process 0 with exit code 1, the
others by a signal of JAX.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

import jax
from jax.experimental import multihost_utils

from jax_q4k import models


def main() -> None:
    options = _parser().parse_args()
    args = options.coordinator, options.processes, options.process
    if None in args and args != (None, None, None):
        sys.exit("--coordinator, --processes and --process go together")
    # It would catch SIGTERM, which is handled below.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(*args, heartbeat_timeout_seconds=options.heartbeat_timeout)
    # Connecting must not take long, unlike loading, for which a process may wait longer.
    multihost_utils.sync_global_devices("start")
    if jax.process_index():  # cluster managers signal all processes: these end with process 0
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format=f"process {jax.process_index()}: %(message)s")
    logging.getLogger("jax").setLevel(logging.WARNING)
    try:
        code = _serve(options)
    except KeyboardInterrupt:  # while it loads
        code = 130
    except Exception:
        logging.exception("process %d ends", jax.process_index())
        code = 1
    if code:
        # Nothing is waited for: the others may be gone, or hang until this process is.
        sys.stderr.flush()
        os._exit(code)
    jax.distributed.shutdown()  # waits for the other processes


def _serve(options: argparse.Namespace) -> int:
    shape = options.data, jax.device_count() // options.data
    mesh = jax.make_mesh(shape, ("dp", "tp"))
    model = models.load(options.model, mesh=mesh)
    engine = models.Engine(
        model,
        max_rows=options.rows,
        pages=options.pages,
        max_context=options.context,
        constraints=True,
        process_timeout=options.heartbeat_timeout / 3,  # before JAX aborts the process
    )
    keys = () if options.api_key_file is None else Path(options.api_key_file).read_text().split()
    return models.serve(
        engine,
        host=options.host,
        port=options.port,
        drain=options.drain,
        name=options.name,
        api_keys=tuple(keys),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL.gguf", help="a file that each process can read")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0")
    parser.add_argument("--processes", type=int, metavar="N")
    parser.add_argument("--process", type=int, metavar="I", help="0 to N - 1")
    parser.add_argument(
        "--heartbeat-timeout",
        type=int,
        default=60,
        metavar="S",
        help="silence after which a process counts as dead; default: 60",
    )
    parser.add_argument(
        "--data", type=int, default=1, metavar="N", help="groups of rows; default: 1"
    )
    server = parser.add_argument_group("server, in process 0")
    server.add_argument("--host", default="127.0.0.1", help="address; default: 127.0.0.1")
    server.add_argument("--port", type=int, default=8080, help="default: 8080; 0 takes a free one")
    server.add_argument("--name", default="default", help="the model's id; default: default")
    server.add_argument("--api-key-file", metavar="FILE", help="keys that requests need")
    server.add_argument("--drain", type=float, default=30, metavar="S", help="default: 30")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--rows", type=int, default=16, metavar="N", help="run at a time; 16")
    engine.add_argument("--pages", type=int, metavar="N", help="pages of 16 tokens")
    engine.add_argument("--context", type=int, metavar="N", help="most tokens of a request")
    return parser


if __name__ == "__main__":
    main()
