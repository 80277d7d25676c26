"""Arguments of kernel functions must have the declared types."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from ptx_kernels.kernels.gemm import GemmConfig, gemm
from ptx_kernels.kernels.matvec import MatvecConfig, gated_matvec, matvec, qkv_matvec
from ptx_kernels.ptx import Builder, Group, KernelError, f32, kernel


@dataclass(frozen=True)
class Config:
    warps: int = 2
    padding: int = 0


@kernel
def fill(
    k: Builder,
    *,
    n: int,
    value: float,
    window: int | None = None,
    up: bool = False,
    config: Config = Config(),
):
    y = k.output("y", f32, (n,))
    k.launch((1,), 32 * config.warps)
    y.store(0, k.const(f32, value))


GOOD = dict(n=3, value=1.5)


def test_numbers_of_numpy_are_numbers():
    assert fill(n=np.int64(3), value=np.float32(1.5), config=Config(np.int32(2))) == fill(**GOOD)
    assert fill(n=3, value=2).text == fill(n=3, value=2.0).text


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(n=0), "n=0 must be an integer, at least 1"),
        (dict(n=-(10**30)), "must be an integer, at least 1"),
        (dict(n=2.0), "n=2.0 must be an integer"),
        (dict(n="3"), "n='3' must be an integer"),
        (dict(n=True), "n=True must be an integer"),
        (dict(n=None), "n=None must be an integer"),
        (dict(value=math.nan), "value=nan must be a number, finite in f32"),
        (dict(value=1e39), r"value=1e\+39 must be a number, finite in f32"),
        (dict(value="1"), "value='1' must be a number"),
        (dict(window=0), "window=0 must be an integer, at least 1"),
        (dict(up=1), "up=1 must be of type bool"),
        (dict(config=None), "config=None must be of type Config"),
        (dict(config=Config(warps=0)), r"config.warps=0 must be an integer, at least 1"),
        (dict(config=Config(padding=-1)), r"config.padding=-1 must be an integer, at least 0"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    with pytest.raises(KernelError, match=message):
        fill(**(GOOD | change))


def test_an_unknown_argument_is_left_to_python():
    with pytest.raises(TypeError, match="unexpected keyword argument 'm'"):
        fill(**GOOD, m=1)


@dataclass(frozen=True, kw_only=True)
class Shape(Group):
    rows: int
    columns: int = 4

    def __post_init__(self):
        if self.rows % self.columns:
            raise KernelError(f"rows={self.rows} must be a multiple of columns={self.columns}")


def fill_rows(k: Builder, *, shape: Shape, value: float):
    y = k.output("y", f32, (shape.rows, shape.columns))
    k.launch((1,), 32)
    y.store(0, k.const(f32, value))


def test_the_fields_of_a_group_are_arguments():
    build = kernel(fill_rows)
    assert list(inspect.signature(build).parameters) == ["rows", "columns", "value"]
    built = build(rows=np.int64(8), value=1.5)
    assert built.arguments == dict(rows=8, columns=4, value=1.5)
    assert built.buffers[0].shape == (8, 4)
    assert build(rows=8, columns=4, value=1.5) is built


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(columns=0), KernelError, "columns=0 must be an integer, at least 1"),
        (dict(columns=3), KernelError, "rows=8 must be a multiple of columns=3"),
        (dict(shape=Shape(rows=8)), TypeError, "unexpected keyword argument 'shape'"),
        (dict(rows=None), KernelError, "rows=None must be an integer"),
    ],
)
def test_bad_fields_of_a_group_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        kernel(fill_rows)(**dict(rows=8, value=1.5) | change)


def test_groups_have_no_fields_of_the_same_name():
    def twice(k: Builder, *, shape: Shape, rows: int): ...

    with pytest.raises(ValueError, match="duplicate parameter name: 'rows'"):
        kernel(twice)


SHAPE = dict(format="Q4_K", n=64, columns=256, m=16)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: gemm(**SHAPE, config=GemmConfig(tiles=10**6)), "tiles=1000000 must be 1 to 8"),
        (
            lambda: gemm(**SHAPE, config=GemmConfig(m_tile=16 * 10**5)),
            "bytes of shared memory, of 232448 that",
        ),
        (
            lambda: matvec(**SHAPE | {"m": 1}, config=replace(MatvecConfig(), resident_blocks=2.5)),
            "resident_blocks=2.5",
        ),
        (
            lambda: gated_matvec(formats=("Q4_K",), n=64, columns=256, m=1, config=MatvecConfig()),
            "of gate and up",
        ),
        (
            lambda: qkv_matvec(formats="QK", rows=(1, 2), columns=256, m=1, config=MatvecConfig()),
            "must be a tuple",
        ),
    ],
    ids=["tiles", "m_tile", "resident_blocks", "gated", "qkv"],
)
def test_kernels_refuse(build, message):
    with pytest.raises(KernelError, match=message):
        build()


def test_an_immediate_that_f32_does_not_hold():
    @kernel
    def scale(k: Builder) -> None:
        y = k.output("y", f32, (32,))
        k.launch((1,), 32)
        y.store(k.lane_id, k.const(f32, 1e39))

    with pytest.raises(KernelError, match=r"1e\+39 cannot stand where an f32 is needed"):
        scale()
