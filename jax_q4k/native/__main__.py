"""Compiles the library of native CPU kernels: `python -m jax_q4k.native`."""

import argparse
import sys

from . import build, library_path


def main() -> int:
    argparse.ArgumentParser(prog="python -m jax_q4k.native", description=__doc__).parse_args()
    try:
        left_out = build.compile_library(library_path())
    except build.BuildError as error:
        print(error, file=sys.stderr)
        return 1
    print(library_path())
    if left_out:
        print(
            f"without kernels for {', '.join(left_out)}: this compiler does not know them",
            file=sys.stderr,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
