"""Launches that the simulator must refuse."""

from __future__ import annotations

import re

import numpy as np
import pytest

from ptx_kernels import simulator

from .ptx_text import module

ADDRESS = "mul.wide.u32 %rd4, %r0, 4; add.u64 %rd5, %rd0, %rd4;"


def launch(
    body: str,
    *buffers: object,
    params: str = "y",
    grid: int = 2,
    block: int = 64,
    **options: object,
) -> None:
    given = buffers or (np.zeros(grid * block, np.uint32),)
    simulator.launch(module(body + "\n  ret;", params), list(given), (grid,), (block,), **options)


def refuses(error: type[simulator.SimulationError], *parts: str):
    """Expects the error, with a message that contains all parts in this order."""
    return pytest.raises(error, match="(?s)" + ".*".join(re.escape(p) for p in parts))
