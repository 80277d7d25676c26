"""Thread blocks that a device runs at once, in clusters or alone."""

from __future__ import annotations

import dataclasses

import pytest

from ptx_kernels.devices import DEVICES, target, tensor_busy
from ptx_kernels.kernels.attention import paged_attention_rule
from ptx_kernels.kernels.gemm import fused_gemm_rule


@pytest.mark.parametrize(
    "cluster, resident, places",
    [(1, 1, 132), (1, 2, 264), (2, 1, 132), (4, 1, 124), (8, 1, 120), (8, 2, 248), (7, 1, 112)],
)
def test_clusters_leave_multiprocessors_idle(cluster, resident, places):
    """GPCs of an H200: three of 18 multiprocessors, four of 16, one of 14."""
    assert sum(DEVICES["H200"].groups) == 132
    assert DEVICES["H200"].places(cluster, resident) == places


@pytest.mark.parametrize(
    "blocks, cluster, resident, busiest",
    [
        (132, 1, 1, 1),
        (133, 1, 1, 2),
        (120, 8, 1, 1),
        (128, 8, 1, 2),  # the sixteenth cluster of eight runs after the others
        (128, 8, 2, 2),  # or beside one of them
        (384, 8, 4, 4),
        (248, 8, 2, 2),
        (256, 8, 2, 3),
        (0, 1, 1, 0),
    ],
)
def test_blocks_of_the_busiest_multiprocessor(blocks, cluster, resident, busiest):
    assert DEVICES["H200"].busiest(blocks, cluster, resident) == busiest


def test_unknown_groups_have_sixteen_multiprocessors():
    device = dataclasses.replace(DEVICES["B200"], multiprocessors=40)
    assert device.places(8) == 40 and device.places(6) == 12 + 12 + 6


def test_a_part_of_a_device_may_have_no_place_for_clusters():
    """The rules then choose Configs without them."""
    few = target("NVIDIA H200", multiprocessors=4)
    assert few.busiest(16, 8) >= 16 > few.busiest(16)
    config = paged_attention_rule(target("NVIDIA H200", 1), 1, 32, 8, 128, 4096, "bf16")
    assert not config.cluster
    assert fused_gemm_rule(few, ("Q4_K",), (4096,), 4096, 8, "f32", "int8").splits <= 4


def test_more_warps_keep_a_multiprocessor_busier():
    assert [round(tensor_busy(warps), 2) for warps in (4, 8, 16)] == [0.36, 0.53, 0.7]
