"""Simulates `mma.sync`, and `ldmatrix`, which loads fragments; both take a full warp.

`mma.sync` runs on tensor cores. Layouts follow PTX ISA 9.1, 9.7.14.5 (mma) and 9.7.14.5.15
(ldmatrix). Let g = lane / 4 and t = lane % 4. Each 32-bit register of a fragment of A (or B) holds
adjacent values along k of row (or column) g, with t counting registers. Register i of A has rows g
+ 8 * (i % 2) and the low or high 8 or 16 bytes of k. Register i of B has the low or high bytes of
k. Result i is at row g + 8 * (i // 2), column 2t + i % 2.
"""

from __future__ import annotations

import numpy as np

from ...ptx.instructions import bf16_to_f32
from ..errors import WarpDivergence
from ..layout import WARP
from .binding import Call, Place
from .meaning import means


def _numbers(words: np.ndarray, type_: str) -> np.ndarray:
    """Unpacks the values in u32 (..., n) to float32 (..., n * values per word), exactly."""
    if type_ == "bf16":
        return bf16_to_f32(words.view(np.uint16))
    return words.view({"s8": np.int8, "u8": np.uint8, "f16": np.float16}[type_]).astype(np.float32)


def _fragment(registers: list[np.ndarray], type_: str, rows: int) -> np.ndarray:
    """Assembles a fragment's registers, u32 (lanes,) each, to float32 (warps, rows, k).

    The fragment is of A, or of B transposed.
    """
    count = rows // 8  # registers that share a part of k; each is (warps, 8, that part)
    parts = [_numbers(r.reshape(-1, 8, 4), type_) for r in registers]
    columns = [np.concatenate(parts[i : i + count], axis=1) for i in range(0, len(parts), count)]
    return np.concatenate(columns, axis=2)


def _multiply(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, rng: np.random.Generator | None
) -> np.ndarray:
    """Returns c + a @ b.T for each warp: a is (warps, 16, k), b (warps, 8, k).

    Integers are exact and wrap at 32 bits. For floats, the exact products are summed in float64 and
    rounded once to float32. The summation order and intermediate rounding of a tensor core are not
    documented. `rng` picks one possibility: products in random order, each partial sum rounded to
    float32 toward zero or to nearest.
    """
    if c.dtype == np.int32:
        products = np.matmul(a, b.transpose(0, 2, 1))  # below 2^24: exact in float32
        return c + products.astype(np.int32)
    if rng is None:
        return (
            np.matmul(a.astype(np.float64), b.astype(np.float64).transpose(0, 2, 1)) + c
        ).astype(np.float32)
    total, truncate = c, bool(rng.integers(2))
    for i in rng.permutation(a.shape[2]):
        exact = total + a[:, :, None, i].astype(np.float64) * b[:, None, :, i]
        total = exact.astype(np.float32)
        if truncate:
            total = np.where(
                np.abs(total) > np.abs(exact), np.nextafter(total, np.float32(0)), total
            )
    return total


def _check_whole_warps(call: Call) -> None:
    frame = call.frame
    if frame.whole_warps:
        return
    warps = frame.all_lanes // WARP
    present = np.bincount(warps, minlength=frame.layout.lanes // WARP)[warps]
    position = int(np.argmax(present < WARP))
    what = (
        f"{int(present[position])} of the warp's 32 lanes execute this; all of them must, together"
    )
    raise call.fault(WarpDivergence, position, what)


@means("mma.sync.aligned")
def mma(
    call: Call, a: list[np.ndarray], b: list[np.ndarray], c: list[np.ndarray]
) -> list[np.ndarray]:
    """Returns the fragments of c + A B of each warp."""
    _check_whole_warps(call)
    left = _fragment([np.ascontiguousarray(call.every(v)) for v in a], call.words["a"], 16)
    right = _fragment([np.ascontiguousarray(call.every(v)) for v in b], call.words["b"], 8)
    start = np.empty((call.frame.count // WARP, 16, 8), c[0].dtype)
    for i, value in enumerate(c):
        start[_quarter(i)] = call.every(value).reshape(-1, 8, 4)
    result = _multiply(left, right, start, call.batch.freedom.generator)
    return [result[_quarter(i)].reshape(-1) for i in range(4)]


@means("mma.sync.aligned.m8n8k16")
def small_mma(
    call: Call, a: list[np.ndarray], b: list[np.ndarray], c: list[np.ndarray]
) -> list[np.ndarray]:
    """Returns the fragments of c + A B of each warp, of 8 rows and 16 int8 of depth."""
    _check_whole_warps(call)
    left, right = (
        _fragment([np.ascontiguousarray(call.every(v)) for v in each], call.words[type_], 8)
        for each, type_ in ((a, "a"), (b, "b"))
    )
    start = np.empty((call.frame.count // WARP, 8, 8), c[0].dtype)
    for i, value in enumerate(c):
        start[:, :, i::2] = call.every(value).reshape(-1, 8, 4)
    result = _multiply(left, right, start, None)
    return [result[:, :, i::2].reshape(-1) for i in range(2)]


def _quarter(i: int) -> tuple[slice, slice, slice]:
    """Returns the index into (warps, 16, 8) of register i of C and of the result."""
    row = 8 * (i // 2)
    return slice(None), slice(row, row + 8), slice(i % 2, None, 2)


@means("ldmatrix.sync.aligned")
def ldmatrix(call: Call, place: Place) -> list[np.ndarray]:
    """Loads 32 bits of each 8 x 8 matrix per lane.

    Lanes 8i to 8i + 7 give the addresses of the rows (16 bytes each) of matrix i.
    """
    _check_whole_warps(call)
    count = int(call.words["count"])
    givers = np.flatnonzero(np.arange(call.frame.count) % WARP < 8 * count)
    rows = call.batch.shared.load(call.access_each(place, 16).subset(givers))
    matrices = np.broadcast_to(rows, givers.size).view(np.uint16).reshape(-1, count, 8, 8)
    if call.words["trans"]:
        matrices = matrices.transpose(0, 1, 3, 2)
    by_matrix = np.ascontiguousarray(matrices.transpose(1, 0, 2, 3))
    return list(by_matrix.view(np.uint32).reshape(count, -1))
