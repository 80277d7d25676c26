"""Kernels under everything that hardware leaves open: every subject with several seeds.

Three seeds are used, and twenty in the full tier. With three seeds `tools.mutation` finds 299 of
300 planted bugs.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from support.subjects import SUBJECTS, subject

from ptx_kernels import simulator

SEEDS = range(3)


@functools.lru_cache(1)
def plainly(label: str) -> Any:
    return subject(label).run()


@pytest.mark.slow("simulates each subject twice", quick=["*-first"])
@pytest.mark.parametrize("seeds", ["first", "further"])
@pytest.mark.parametrize("label", SUBJECTS)
def test_results_hold(label: str, seeds: str, request: pytest.FixtureRequest) -> None:
    built, plain = subject(label), plainly(label)
    assert built.holds(plain)
    last = 20 if request.config.getoption("--tier") == "full" else len(SEEDS)
    for seed in range(1) if seeds == "first" else range(1, last):
        with simulator.perturbation(seed):
            results = built.run()
        assert built.holds(results), f"seed {seed}"
        if built.exact:
            for got, want in zip(results, plain, strict=True):
                assert got.tobytes() == want.tobytes(), (
                    f"seed {seed}: hardware has no freedom here, yet bits differ"
                )


def test_approximate_results_do_move() -> None:
    """Every seed changes the results.

    Otherwise the test above could pass without any perturbation.
    """
    built = subject("attention-f32")
    plain = built.run()[0]
    moved = []
    for seed in SEEDS:
        with simulator.perturbation(seed):
            moved.append(built.run()[0])
            again = built.run()[0]
        np.testing.assert_array_equal(moved[-1], again)
    assert not built.exact
    assert len({m.tobytes() for m in [plain, *moved]}) == len(SEEDS) + 1
