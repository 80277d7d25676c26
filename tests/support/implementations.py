"""Implementations that tests run operations with on a CPU.

Tests of the CPU kernels are skipped if their library is missing.
"""

from __future__ import annotations

import pytest

from jax_q4k import native

needs_native = pytest.mark.skipif(
    not native.available(), reason=native.problem() or "the library is there"
)
NATIVE = pytest.param("native", marks=[needs_native, pytest.mark.cpu_kernels])
IMPLEMENTATIONS = ("xla", NATIVE, "sim")
