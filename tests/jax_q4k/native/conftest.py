"""Kernels of every instruction set that this processor runs; the quick tier has two of them."""

import platform

import pytest

from jax_q4k import native

CANDIDATES = (
    ("neon", "portable")
    if platform.machine() == "aarch64"
    else ("avx512", "avxvnni", "avx2", "portable")
)


QUICK = (native.kernels() if native.available() else CANDIDATES[0], "portable")
OTHERS = pytest.mark.slow("repeats all with the kernels of another instruction set")


@pytest.fixture(
    params=[name if name in QUICK else pytest.param(name, marks=OTHERS) for name in CANDIDATES]
)
def kernels(request):
    """Runs the test with these kernels."""
    if not native.available():
        pytest.skip(native.problem())
    before = native.kernels()
    try:
        native.select(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    yield request.param
    native.select(before)
