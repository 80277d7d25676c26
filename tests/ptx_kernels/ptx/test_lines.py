"""Maps lines of PTX to the lines of Python that wrote them."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest

import ptx_kernels
from ptx_kernels import simulator
from ptx_kernels.kernels import KERNELS
from ptx_kernels.ptx import Builder, f32, kernel, u32


@kernel
def copy(k: Builder, *, n: int) -> None:
    """y = x for one warp; the store is out of bounds if n < 32."""
    x = k.input("x", f32, (32,))
    y = k.output("y", f32, (n,))
    k.launch((1,), 32)
    value = x.load(k.lane_id)
    with k.when(k.lane_id < 32):
        y.store(k.lane_id, value)  # the line at fault


def test_an_error_names_the_line_that_wrote_the_instruction() -> None:
    source, start = inspect.getsourcelines(inspect.unwrap(copy))
    line = start + next(i for i, text in enumerate(source) if "at fault" in text)
    with pytest.raises(simulator.OutOfBounds) as caught:
        simulator.run(copy(n=7), np.zeros(32, np.float32))
    assert caught.value.source == f"test_lines.py:{line}"
    assert str(caught.value).endswith(f"thread (7, 0, 0)\n  written by test_lines.py:{line}")


def test_every_instruction_has_a_line() -> None:
    built = KERNELS["quantize_q8_1"](rows=3, columns=96, dtype="bf16")
    text = dict(enumerate(built.text.split("\n"), 1))
    first = next(n for n, line in text.items() if "mov.u32" in line)
    # followed by ret, the brace and the final newline
    assert list(built.lines) == list(range(first, len(text) - 2))
    files = {tuple(file for file, _ in path) for path in built.lines.values()}
    own = "kernels/quantize_q8_1.py"
    assert files == {(own,), (own, own), ("kernels/vectors.py", own)}
    for file, number in (place for path in built.lines.values() for place in path):
        assert 0 < number <= len((Path(ptx_kernels.__file__).parent / file).read_text().split("\n"))


def test_lines_are_no_part_of_what_a_kernel_is() -> None:
    def build(k: Builder, *, n: int) -> None:
        k.output("y", u32, (n,)).store(k.thread_id, k.thread_id)
        k.launch((1,), n)

    def elsewhere(k: Builder, *, n: int) -> None:
        k.name = "build"
        k.output("y", u32, (n,)).store(k.thread_id, k.thread_id)
        k.launch((1,), n)

    one, other = kernel(build)(n=32), kernel(elsewhere)(n=32)
    assert one.lines != other.lines
    assert one == other and hash(one) == hash(other) and repr(one) == repr(other)


def test_text_that_does_not_parse_is_located_too() -> None:
    @kernel
    def wrong(k: Builder) -> None:
        k.launch((1,), 32)
        k.write("add.u32 %r0, %r1, 1;")

    with pytest.raises(simulator.ParseError, match="written by test_lines.py:"):
        simulator.run(wrong())
