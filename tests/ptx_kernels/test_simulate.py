"""`python -m ptx_kernels simulate` on random operands, for every family."""

from __future__ import annotations

import functools

import pytest
from support.subjects import SUBJECTS, subject

from ptx_kernels.kernels import KERNELS
from ptx_kernels.simulate import simulate


@functools.cache
def smallest() -> dict[str, str]:
    """Maps each family to the label of its subject with the fewest threads."""
    size = {
        label: (k := subject(label).kernel).grid[0] * k.grid[1] * k.block[0] for label in SUBJECTS
    }
    return {
        subject(label).kernel.family: label
        for label in sorted(SUBJECTS, key=size.__getitem__, reverse=True)
    }


def test_every_family_has_a_subject() -> None:
    assert smallest().keys() == KERNELS.keys()


@pytest.mark.parametrize("family", KERNELS)
def test_random_operands_give_sane_results(family: str) -> None:
    found = simulate(subject(smallest()[family]).kernel, seeds=1)
    assert found.statistics.lane_instructions > 0
    for result in found.results:
        assert result.finite >= 0.5  # a lookup outside the rows gives NaN
        assert result.deviation <= 1e-9
    assert str(found).count("under 1 seeds") == len(found.results)
