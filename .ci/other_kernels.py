"""Prints the names of the CPU's kernels that this processor runs, without those in use."""

from jax_q4k import native


def runs(name: str) -> bool:
    try:
        native.select(name)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    if not native.available():
        raise SystemExit(native.problem())
    in_use = native.kernels()
    print(*(name for name in native.compiled() if name != in_use and runs(name)))
