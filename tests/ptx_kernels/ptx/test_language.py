"""The kernel language: the text that it writes, and errors while a kernel is built."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest

from ptx_kernels import simulator
from ptx_kernels.kernels.decode import decode
from ptx_kernels.machine_code.ptxas import assemble
from ptx_kernels.ptx import (
    Builder,
    KernelError,
    LanePartition,
    Value,
    all_of,
    f16,
    f32,
    kernel,
    pred,
    s32,
    u8,
    u32,
    u64,
)
from ptx_kernels.ptx.types import f16x2


def build(body, *, out_type=u32):
    """A one-warp kernel whose `body(k)` returns each lane's u32."""

    @kernel
    def one(k: Builder) -> None:
        out = k.output("out", out_type, (32,))
        k.launch((1,), 32)
        out.store(k.lane_id, body(k))

    return one()


def lanes(body, **options) -> np.ndarray:
    return simulator.run(build(body, **options))[0]


LANE = np.arange(32, dtype=np.uint32)


def test_arithmetic() -> None:
    np.testing.assert_array_equal(
        lanes(lambda k: (k.lane_id * 3 + 7) % 5 + k.lane_id // 3), (LANE * 3 + 7) % 5 + LANE // 3
    )
    np.testing.assert_array_equal(
        lanes(lambda k: (k.lane_id << 2 ^ 0xF0) & ~k.lane_id | 1), (LANE << 2 ^ 0xF0) & ~LANE | 1
    )
    np.testing.assert_array_equal(
        lanes(lambda k: (5 - k.lane_id.to(f32)) / 3.0, out_type=f32),
        (5 - LANE.astype(np.float32)) / np.float32(3),
    )


def test_division_and_remainder_by_powers_of_two_are_shifts_and_masks() -> None:
    text = build(lambda k: k.lane_id // 8 + k.lane_id % 8).text
    assert "div" not in text and "rem" not in text


def test_when_and_otherwise() -> None:
    def body(k: Builder):
        x = k.var(u32, 0)
        with k.when(k.lane_id < 10) as small:
            x += 1
            with k.when(k.lane_id >= 5):
                x += 10
        with small.otherwise():
            x.set(k.lane_id)
        return x

    np.testing.assert_array_equal(lanes(body), np.where(LANE < 10, 1 + 10 * (LANE >= 5), LANE))


def test_loop_counts_differ_by_lane() -> None:
    def body(k: Builder):
        total = k.var(u32, 0)
        with k.loop(1, k.lane_id, 2) as i:
            total += i
        return total

    np.testing.assert_array_equal(lanes(body), [sum(range(1, n, 2)) for n in range(32)])


@pytest.mark.parametrize("start, stop, rounds", [(0, 3, 3), (2, 2, 0), (3, 2, 0)])
def test_loops_between_numbers(start: int, stop: int, rounds: int) -> None:
    def body(k: Builder):
        count = k.var(u32, 0)
        with k.loop(start, stop):
            count += 1
        return count

    np.testing.assert_array_equal(lanes(body), np.full(32, rounds))


def test_written_buffers_are_not_read_through_the_non_coherent_cache() -> None:
    @kernel
    def add(k: Builder) -> None:
        x = k.inout("x", u32, (32,))
        y = k.input("y", u32, (32,), constant=True)
        k.launch((1,), 32)
        x.store(k.lane_id, x.load(k.lane_id) + y.load(k.lane_id))

    np.testing.assert_array_equal(simulator.run(add(), LANE, LANE * 3)[0], LANE * 4)
    assert add().text.count("ld.global.nc.") == 1


def test_shared_memory_takes_16_byte_accesses() -> None:
    def body(k: Builder):
        k.shared("odd", u32, (1,))
        rows = k.shared("rows", u32, (32, 4))
        rows.at(k.lane_id).store(0, (k.lane_id, k.lane_id + 1, k.lane_id + 2, k.lane_id + 3))
        return rows.at(k.lane_id).load(3)

    np.testing.assert_array_equal(lanes(body), LANE + 3)


@pytest.mark.parametrize(
    "type, first, count, accesses",
    [
        (u32, 4, 8, ["v4.u32"] * 2),
        (f32, 2, 6, ["v2.f32"] * 3),
        (u32, 5, 3, ["u32"] * 3),
        (u64, 2, 4, ["v2.u64"] * 2),  # 16 bytes are the maximum
        (u8, 4, 4, ["v4.u8"]),
    ],
)
def test_a_run_moves_in_vectors_as_wide_as_divide_it(
    type, first: int, count: int, accesses: list[str]
) -> None:
    @kernel
    def move(k: Builder) -> None:
        x, y = k.input("x", type, (16,)), k.inout("y", type, (16,))
        k.launch((1,), 32)
        values = x.load_run(first, count, where=k.lane_id == 3)
        y.store_run(first, values, where=k.lane_id == 3)
        # a load that no lane executes
        y.store_run(0, x.load_run(0, 1, where=k.lane_id == 32), where=k.lane_id == 4)

    built = move()
    for name in ("ld", "st"):
        found = re.findall(rf"{name}\.global\.(\S+)", built.text)
        assert found == [*accesses, accesses[0].removeprefix("v2.").removeprefix("v4.")]
    x, y = np.arange(16, dtype=type.dtype), np.full(16, 99, type.dtype)
    want = np.array([*y[:first], *x[first : first + count], *y[first + count :]], type.dtype)
    want[0] = 0
    np.testing.assert_array_equal(simulator.run(built, x, y)[0], want)


def test_a_conjunction_leaves_out_what_always_holds() -> None:
    assert all_of() is None and all_of(None, None) is None

    def body(k: Builder):
        low, even = k.lane_id < 8, k.lane_id % 2 == 0
        assert all_of(None, low) is low
        return k.select(all_of(low, None, even), k.lane_id + 1, 0)

    np.testing.assert_array_equal(lanes(body), np.where((LANE < 8) & (LANE % 2 == 0), LANE + 1, 0))


def test_dynamic_shared_memory_may_be_larger_than_static() -> None:
    def body(k: Builder):
        small = k.shared("small", u32, (33,), dynamic=True)
        large = k.shared("large", u32, (32, 400), dynamic=True)
        small.at(k.lane_id).store(0, k.lane_id)
        large.at(k.lane_id).store(399, k.lane_id * 2)
        return small.at(k.lane_id).load() + large.at(k.lane_id, 399).load()

    np.testing.assert_array_equal(lanes(body), LANE * 3)
    assert build(body).dynamic_shared_bytes == 144 + 51200
    assemble(build(body).text, "sm_80")


def test_reductions_reach_every_lane() -> None:
    np.testing.assert_array_equal(lanes(lambda k: k.warp_sum(k.lane_id)), np.full(32, 496))
    np.testing.assert_array_equal(
        lanes(lambda k: k.warp_sum(k.lane_id, lanes=8)), LANE.reshape(4, 8).sum(1).repeat(8)
    )
    np.testing.assert_array_equal(
        lanes(lambda k: k.warp_max(k.lane_id, lanes=4, stride=8)), LANE % 8 + 24
    )


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("width", [2, 4, 32])
def test_sums_are_scattered_over_lanes(width: int, count: int) -> None:
    """Number i is the sum of lane + 1000 i, which identifies it.

    The output of a lane combines all numbers that it has.
    """
    sums = (
        LANE.reshape(-1, width).sum(1, dtype=np.uint32)[LANE // width]
        + 1000 * width * np.arange(count)[:, None]
    )

    def shown(numbers):
        return functools.reduce(lambda total, number: total * 3 + number, numbers)

    def scattered(k: Builder) -> tuple[LanePartition, list[Value]]:
        partition = LanePartition(k, count, width)
        return partition, partition.reduce_scatter([k.lane_id + 1000 * i for i in range(count)])

    def own(k: Builder):
        partition, numbers = scattered(k)
        assert len(numbers) == partition.slots
        return shown(numbers)

    def own_items(k: Builder):
        partition, _ = scattered(k)
        return shown(
            [k.minimum(partition.item(slot), count - 1) for slot in range(partition.slots)]
        )

    def everyones(k: Builder):
        partition, numbers = scattered(k)
        return shown(partition.all_gather(numbers))

    padded = 1 << (count - 1).bit_length()
    slots, alike = max(1, padded // width), max(1, width // padded)
    items = [np.minimum(LANE % width // alike * slots + slot, count - 1) for slot in range(slots)]
    np.testing.assert_array_equal(lanes(own), shown([sums[item, LANE] for item in items]))
    np.testing.assert_array_equal(lanes(own_items), shown(items))
    np.testing.assert_array_equal(lanes(everyones), shown(sums))


def test_shuffles_within_groups_of_lanes() -> None:
    np.testing.assert_array_equal(lanes(lambda k: k.shuffle(k.lane_id, 5)), np.full(32, 5))
    np.testing.assert_array_equal(
        lanes(lambda k: k.shuffle(k.lane_id, 5, lanes=8)), LANE // 8 * 8 + 5
    )


def test_named_instructions() -> None:
    x = LANE.astype(np.float32) - 16

    def floats(body) -> np.ndarray:
        return lanes(lambda k: body(k, k.lane_id.to(f32) - 16.0), out_type=f32)

    np.testing.assert_array_equal(floats(lambda k, x: k.abs(x)), np.abs(x))
    np.testing.assert_array_equal(floats(lambda k, x: k.sqrt(k.abs(x))), np.sqrt(np.abs(x)))
    np.testing.assert_array_equal(floats(lambda k, x: k.exp2(x)), np.exp2(x))
    with np.errstate(divide="ignore"):
        np.testing.assert_array_equal(floats(lambda k, x: k.reciprocal(x)), np.float32(1) / x)
    nan_or_x = floats(lambda k, x: k.maximum(k.select(k.is_nan(x / x), x / x, x), x, keep_nan=True))
    np.testing.assert_array_equal(np.isnan(nan_or_x), x == 0)
    np.testing.assert_array_equal(lanes(lambda k: k.bit_field(k.lane_id, 1, 3)), LANE >> 1 & 7)
    np.testing.assert_array_equal(
        lanes(lambda k: k.bit_field(k.lane_id.bits(s32), 0, 1).bits(u32)), -(LANE & 1)
    )
    np.testing.assert_array_equal(
        lanes(lambda k: k.permute(k.lane_id, k.lane_id << 8, 0x5140)), LANE | LANE << 24
    )


def test_operators_take_pairs_of_halves() -> None:
    def body(k: Builder):
        two, three = (k.const(u32, bits).bits(f16x2) for bits in (0x40004000, 0x42004200))
        return (k.fma(two, three, three) - two * three).bits(u32)

    np.testing.assert_array_equal(lanes(body), np.full(32, 0x42004200))
    refuse(lambda k: k.const(u32, 0).bits(f16x2) + 1, "1 cannot stand where a f16x2 is needed")


def test_text_is_deterministic_and_declares_no_more_than_it_needs() -> None:
    def body(k: Builder):
        return k.lane_id + 1

    assert build(body).text == build(body).text
    assert build(body).text.startswith(".version 7.0\n.target sm_61\n")
    decode_q8_0 = functools.partial(decode, format="Q8_0", n=2, blocks=1)
    # built once
    assert decode_q8_0(dtype="f16") is decode_q8_0(dtype="f16") is not decode_q8_0(dtype="bf16")
    newer = build(
        lambda k: k.maximum(k.const(f32, 1.0), k.const(f32, 2.0), keep_nan=True).bits(u32)
    )
    assert ".target sm_80" in newer.text


def refuse(body, message: str) -> None:
    with pytest.raises(KernelError, match=message) as caught:
        build(body)
    assert "test_language.py:" in str(caught.value)  # the line of the kernel, not of the language


def test_a_variable_is_updated_in_place() -> None:
    """Arithmetic and bit operations; each update writes the declared register."""

    def body(k: Builder):
        x = k.var(u32, 1)
        name = x.name
        x += k.lane_id
        x *= 3
        x -= 1
        x |= 8
        x &= 0x3B
        x ^= k.lane_id
        assert x.name == name
        return x

    np.testing.assert_array_equal(lanes(body), ((LANE + 1) * 3 - 1 | 8) & 0x3B ^ LANE)

    def of_a_float(k: Builder):
        x = k.var(f32, 1.0)
        x |= 1

    refuse(of_a_float, "or.f32 is not in the instruction table")


def test_a_value_is_no_python_truth() -> None:
    def body(k: Builder):
        return k.lane_id if k.lane_id == 0 else k.lane_id + 1

    refuse(body, "no truth value .* use k.when")


def test_a_value_cannot_be_updated() -> None:
    def body(k: Builder):
        x = k.lane_id + 1
        x += 1
        return x

    refuse(body, r"immutable: only a k\.var")


@pytest.mark.parametrize(
    "body, message",
    [
        (lambda k: k.lane_id + k.const(f32, 1.0), "add.u32 needs u32, got f32"),
        (lambda k: k.lane_id + k.lane_id.bits(s32), "add.u32 needs u32, got s32"),
        (lambda k: k.lane_id + 1.5, "1.5 cannot stand where a u32 is needed"),
        (lambda k: k.lane_id + 2**32, "4294967296 is outside the range of u32"),
        (lambda k: k.lane_id - True, "True cannot stand"),
        (lambda k: k.lane_id.bits(s32) + 2**31, "2147483648 is outside the range of s32"),
        (lambda k: k.lane_id.bits(s32) + (-(2**31) - 1), "-2147483649 is outside the range of s32"),
        (lambda k: k.emit("add.u32", k.lane_id.name), "add.u32 takes 2 operands, got 1"),
        (
            lambda k: k.shared("s", u32, (2, 2)).at(0, 0, 0).load(),
            r"3 indices for a buffer of shape \(2, 2\)",
        ),
        (
            lambda k: [k.shared(name, u32, (8000,)) for name in "st"],
            r"shared t of 32000 bytes: 64000 in all, and 49152 may be static",
        ),
        (lambda k: k.shared("s", u32, (2,)).advance(1), r"only a moving\(\) pointer can advance"),
        (lambda k: k.lane_id / 2, "/ divides f32"),
        (lambda k: k.const(f32, 1.0) % 2, "% takes u32, not f32"),
        (lambda k: k.lane_id.to(pred), "no conversion from u32 to pred"),
        (lambda k: k.lane_id.bits(u64), "4 and 8 bytes"),
        (lambda k: -k.lane_id, "unary - takes f32"),
        (lambda k: k.shuffle_xor(k.lane_id.to(u64), 1), "a shuffle moves 32 bits"),
        (lambda k: k.instruction("add.f64", k.lane_id), "not in the instruction table"),
        (lambda k: k.lane_id.to(f32).to(f16), "st of u32 needs u32, got f16"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_types_that_differ(body, message: str) -> None:
    refuse(body, message)


def test_a_condition_is_a_predicate() -> None:
    def body(k: Builder):
        with k.when(k.lane_id):
            return k.lane_id

    refuse(body, "a condition is a predicate, not u32")


@pytest.mark.parametrize(
    "grid, threads, message",
    [
        ((0,), 32, "is empty"),
        ((1 << 31,), 32, "larger than CUDA allows"),
        ((1, 65536), 32, "larger than CUDA allows"),
        ((1,), 33, "multiple of 32"),
        ((1,), 2048, "at most 1024"),
        ((1 << 26,), 64, "must fit in 32 bits"),
    ],
)
def test_launch_geometry(grid, threads, message: str) -> None:
    @kernel
    def one(k: Builder) -> None:
        k.launch(grid, threads)

    with pytest.raises(KernelError, match=message):
        one()


def test_a_kernel_without_geometry() -> None:
    @kernel
    def one(k: Builder) -> None:
        k.output("out", f32, (1,))

    with pytest.raises(KernelError, match=r"never called k\.launch"):
        one()


def test_addresses_are_64_bit() -> None:
    """Element 2^30 of a u32 buffer is at 4 GiB: the index is u32, the address is not."""

    @kernel
    def far(k: Builder) -> None:
        x = k.input("x", u32, (2, 1 << 30))
        out = k.output("out", u32, (32,))
        k.launch((1,), 32)
        out.store(k.lane_id, x.at(k.lane_id & 1, k.lane_id).load())

    assert "mad.wide.u32" in far().text
    assert "mad.lo.u64" in far().text  # a stride of 4 GiB does not fit a 32-bit factor


def test_a_cast_counts_rows_in_its_own_elements() -> None:
    @kernel
    def second_rows(k: Builder) -> None:
        x = k.input("x", u8, (2, 3, 8))
        out = k.output("out", u32, (32,))
        k.launch((1,), 32)
        out.store(k.lane_id, x.cast(u32).at(1, k.lane_id % 3, 1).load())

    x = np.arange(48, dtype=np.uint8).reshape(2, 3, 8)
    want = x.view(np.uint32)[1, LANE % 3, 1]
    np.testing.assert_array_equal(simulator.run(second_rows(), x)[0], want)

    @kernel
    def odd_rows(k: Builder) -> None:
        k.input("x", u8, (2, 7)).cast(u32)

    with pytest.raises(KernelError, match="rows of 7 u8 are no whole number of u32"):
        odd_rows()


def test_a_kernel_knows_what_it_was_built_from():
    @kernel
    def fill(k, *, n: int, value: float = 2.0) -> None:
        y = k.output("y", f32, (n,))
        k.launch((1,), n)
        y.store(k.thread_id, k.const(f32, value))

    built = fill(n=32)
    assert (built.family, built.arguments) == ("fill", {"n": 32, "value": 2.0})
    assert built == fill(n=32, value=2.0)  # the same text, whichever argument is omitted


def test_loads_into_variables_leave_the_others() -> None:
    @kernel
    def second_half(k: Builder) -> None:
        x, y = k.input("x", u32, (32, 4)), k.output("y", u32, (32, 4))
        k.launch((1,), 32)
        held = [k.var(u32, i) for i in range(4)]
        x.at(k.lane_id).load_into(0, held, where=k.lane_id >= 16)
        y.at(k.lane_id).store_run(0, held)

    built = second_half()
    assert "ld.global.v4.u32" in built.text
    x = np.random.default_rng(0).integers(0, 1 << 32, (32, 4), np.uint32)
    want = np.where(np.arange(32)[:, None] < 16, np.arange(4, dtype=np.uint32), x)
    np.testing.assert_array_equal(simulator.run(built, x)[0], want)


@pytest.mark.parametrize("lane", [0, 31, 32])
def test_any_lane(lane: int) -> None:
    @kernel
    def found(k: Builder) -> None:
        y = k.output("y", u32, (32,))
        k.launch((1,), 32)
        any_is = k.warp_any(k.lane_id == lane)
        y.store(k.lane_id, k.select(any_is, k.const(u32, 1), 0))

    assert (simulator.run(found())[0] == (lane < 32)).all()
