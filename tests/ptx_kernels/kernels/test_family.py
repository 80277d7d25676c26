"""Kernel families: each record agrees with its kernels."""

from __future__ import annotations

import pytest

from ptx_kernels.kernels import CASES, FAMILIES


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_record_is_of_its_kernel(family):
    assert FAMILIES[family.build.__name__] is family
    assert family.examples and {case.family for case in family.examples} == {family.name}


@pytest.mark.slow("simulates or assembles large kernels", quick=["quantize_q8_1"])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_named_operands_are_buffers(family):
    built = [family.build(**case.arguments) for case in family.examples]
    buffers = {buffer.name for kernel in built for buffer in kernel.buffers}
    assert family.operands.keys() <= buffers
    integers = {b.name for kernel in built for b in kernel.operands if b.type.name == "s32"}
    assert integers <= family.operands.keys()


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_kernel_touches_a_part_of_each_buffer(family):
    for case in family.examples:
        kernel = family.build(**case.arguments)
        for buffer in kernel.buffers:
            assert 0 < family.touched(buffer, kernel.arguments)
        if family.weights:
            assert 0 < family.weights(kernel.arguments).count
        if family.passes:
            assert family.passes(kernel.arguments) >= 1


def test_names_are_unique():
    assert len({case.label for case in CASES}) == len(CASES)
    rules = {id(rule): rule.name for family in FAMILIES.values() for rule in family.rules}
    assert len(set(rules.values())) == len(rules)
