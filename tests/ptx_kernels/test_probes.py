"""Kernels that probe a device."""

from __future__ import annotations

import numpy as np
import pytest

from ptx_kernels import simulator
from ptx_kernels.probes import cluster_ring, ring_result


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cluster, turns", [(2, 1), (4, 3), (8, 9)])
def test_the_ring_goes_round(cluster, turns, seed):
    shape = dict(blocks=16, cluster=cluster, turns=turns)
    with simulator.perturbation(seed):
        (got,) = simulator.run(cluster_ring(**shape))
    np.testing.assert_array_equal(got, ring_result(**shape))
