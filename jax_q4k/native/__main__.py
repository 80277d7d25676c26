"""Compiles the library of native CPU kernels: `python -m jax_q4k.native`."""

import argparse
import os
import sys
import time

from . import build, library_path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_q4k.native", description=__doc__)
    parser.add_argument("--if-stale", action="store_true", help="do nothing if it is up to date")
    options = parser.parse_args()
    if options.if_stale and "CXX" not in os.environ and build.is_current(library_path()):
        return 0
    started = time.perf_counter()

    def progress(name: str, done: int, total: int) -> None:
        seconds = time.perf_counter() - started
        print(f"[{done}/{total}] {name}.o ({seconds:.0f} s)", file=sys.stderr, flush=True)

    print("Compiling the CPU kernels ...", file=sys.stderr, flush=True)
    try:
        left_out = build.compile_library(library_path(), progress=progress)
    except build.BuildError as error:
        print(error, file=sys.stderr)
        return 1
    print(library_path())
    if left_out:
        print(
            f"without kernels for {', '.join(left_out)}: this compiler does not support them",
            file=sys.stderr,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
