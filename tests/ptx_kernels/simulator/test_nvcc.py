"""nvcc's PTX of our own CUDA sources (tests/data/cuda), run in the simulator against NumPy.

Another program wrote the text, so it does not share our misunderstandings of PTX.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
from support.paths import DATA

from ptx_kernels import simulator
from ptx_kernels.ptx.instructions import bf16_to_f32
from ptx_kernels.simulator import DeviceBuffer

CUDA = DATA / "cuda"
rng = np.random.default_rng(7)
SPECIAL = np.array(
    [
        0,
        -0.0,
        1,
        -1,
        0.5,
        1.5,
        2.5,
        -2.5,
        65504,
        65519,
        65520,
        -7e4,
        6e-8,
        2.9e-8,
        3e-8,
        1e-40,
        np.inf,
        -np.inf,
        np.nan,
    ],
    np.float32,
)


def run(
    name: str, *arguments: object, grid: tuple[int, ...] = (1,), block: tuple[int, ...] = (128,)
) -> None:
    """Launches the kernel of a file.

    Arrays are buffers (written in place), ints s32 and floats f32 scalars.
    """
    given = [
        np.int32(a) if isinstance(a, int) else np.float32(a) if isinstance(a, float) else a
        for a in arguments
    ]
    simulator.launch((CUDA / f"{name}.ptx").read_text(), given, grid, block)


def out(shape: object, dtype: type = np.float32) -> DeviceBuffer:
    return DeviceBuffer("y", np.zeros(shape, dtype), "out", initialized=False)


def read_only(x: np.ndarray) -> DeviceBuffer:
    """A `const ... __restrict__` buffer, for which non-coherent loads are allowed."""
    return DeviceBuffer("x", x, "in")


def test_every_source_is_run() -> None:
    tests = Path(__file__).read_text()
    assert {path.stem for path in CUDA.glob("*.cu")} == {path.stem for path in CUDA.glob("*.ptx")}
    assert [path.stem for path in CUDA.glob("*.ptx") if f'run("{path.stem}"' not in tests] == []


def test_saxpy() -> None:
    x, y = rng.standard_normal((2, 1000), np.float32)
    want = (2.5 * x.astype(np.float64) + y).astype(np.float32)
    run("saxpy", 1000, 2.5, read_only(x), y, grid=(3,))
    np.testing.assert_array_equal(y, want)


def test_block_reduce() -> None:
    x = rng.standard_normal(300).astype(np.float32)
    sums, maxima = out(3), out(3)
    run("block_reduce", x, sums, maxima, 300, grid=(3,))
    blocks = [x[:128], x[128:256], x[256:]]
    np.testing.assert_allclose(
        sums.array, [b.astype(np.float64).sum() for b in blocks], rtol=1e-5, atol=1e-5
    )
    np.testing.assert_array_equal(maxima.array, [b.max() for b in blocks])


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_last_block(seed: int | None) -> None:
    """Runs twice with one counter, which the last block resets."""
    x = rng.standard_normal(3000).astype(np.float32)
    partial, counter = out(7), np.zeros(1, np.uint32)
    for _ in range(2):
        total = out(1)
        with contextlib.nullcontext() if seed is None else simulator.perturbation(seed):
            run("last_block", read_only(x), partial, counter, total, x.size, grid=(7,))
        np.testing.assert_allclose(total.array[0], x.astype(np.float64).sum(), rtol=1e-5, atol=1e-4)
        assert counter[0] == 0


def test_warp_reduce() -> None:
    x = rng.standard_normal(128).astype(np.float32)
    v = rng.integers(-20, 20, 128).astype(np.int32)
    sums, integers, masks = out(4), out((4, 4), np.int32), out((128, 2), np.uint32)
    run("warp_reduce", x, v, sums, integers, masks, grid=(2,), block=(64,))
    warps, unsigned = v.reshape(4, 32), v.reshape(4, 32).view(np.uint32)
    np.testing.assert_allclose(
        sums.array, x.reshape(4, 32).astype(np.float64).sum(1), rtol=1e-5, atol=1e-5
    )
    want = [
        warps.sum(1),
        warps.max(1),
        unsigned.min(1).view(np.int32),
        np.bitwise_or.reduce(warps, axis=1),
    ]
    np.testing.assert_array_equal(integers.array, np.stack(want, axis=1))
    bits = 1 << np.arange(32)
    same = ((warps[:, :, None] == warps[:, None, :]) * bits).sum(2).reshape(-1)
    ballot = ((warps > 0) * bits).sum(1, keepdims=True)
    few = 127 | (warps > 0).sum(1, keepdims=True) << 8
    np.testing.assert_array_equal(masks.array[:, 0], same)
    np.testing.assert_array_equal(
        masks.array[:, 1], np.where(np.arange(32) < 7, few, ballot).reshape(-1)
    )


def test_scan() -> None:
    x = rng.integers(-1000, 1000, 700).astype(np.int32)
    y = out(700, np.int32)
    run("scan", x, y, 700, grid=(3,), block=(256,))
    np.testing.assert_array_equal(
        y.array, np.concatenate([x[i : i + 256].cumsum() for i in (0, 256, 512)])
    )


def test_transpose() -> None:
    x = rng.standard_normal((70, 45), np.float32)
    y = out((45, 70))
    run("transpose", x, y, 70, 45, grid=(2, 3), block=(32, 8))
    np.testing.assert_array_equal(y.array, x.T)


def test_histogram() -> None:
    x = rng.integers(0, 250, 2000).astype(np.uint8)
    counts, largest = np.zeros(64, np.uint32), np.zeros(1, np.uint32)
    run("histogram", x, counts, largest, 2000, grid=(4,))
    np.testing.assert_array_equal(counts, np.bincount(x & 63, minlength=64))
    assert largest[0] == x.max()


def test_dp4a_matvec() -> None:
    w, x = (
        rng.integers(-128, 128, (10, 1040)).astype(np.int8),
        rng.integers(-128, 128, 1040).astype(np.int8),
    )
    scale, y = rng.standard_normal(10).astype(np.float32), out(10)
    run("dp4a_matvec", read_only(w), read_only(x), scale, y, 10, 1040, grid=(3,))
    np.testing.assert_array_equal(
        y.array, (w.astype(np.int64) @ x.astype(np.int64)).astype(np.float32) * scale
    )


def test_f16() -> None:
    x, y = _floats(), _floats()[::-1].copy()
    with np.errstate(over="ignore"):
        h, g = x.astype(np.float16), y.astype(np.float16)
    outs, back, pairs = (
        out((x.size, 4), np.float16),
        out((x.size, 3)),
        out((x.size, 3, 2), np.float16),
    )
    run("f16", x, y, outs, back, pairs, x.size, grid=(2,))
    down, up = _neighbours(x, h)
    np.testing.assert_array_equal(
        outs.array, np.stack([h, np.where(x < 0, up, down), down, up], axis=1)
    )
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(back.array[:, 0], h.astype(np.float32))
        want = (h + g).astype(np.float32) + (h * g).astype(np.float32)
        np.testing.assert_array_equal(back.array[:, 1], want)
        whole = _saturated(np.rint(h.astype(np.float64))) + _saturated(
            np.trunc(g.astype(np.float64))
        )
        np.testing.assert_array_equal(back.array[:, 2], whole.astype(np.float32))
        a, b = np.stack([h, g], 1).astype(np.float64), np.stack([g, h], 1).astype(np.float64)
        np.testing.assert_array_equal(pairs.array[:, 0], (a * b + a).astype(np.float16))
        np.testing.assert_array_equal(pairs.array[:, 1], (a + b).astype(np.float16))
        np.testing.assert_array_equal(pairs.array[:, 2], np.fmax(a, -b).astype(np.float16))


def _floats() -> np.ndarray:
    scaled = rng.standard_normal(180) * 2.0 ** rng.integers(-26, 17, 180)
    return np.concatenate([SPECIAL, scaled.astype(np.float32)])


def _neighbours(x: np.ndarray, nearest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The nearest f16 values below and above x, or x itself."""
    with np.errstate(all="ignore"):
        down = np.where(nearest > x, np.nextafter(nearest, np.float16(-np.inf)), nearest)
        up = np.where(nearest < x, np.nextafter(nearest, np.float16(np.inf)), nearest)
    return down, up


def _saturated(x: np.ndarray) -> np.ndarray:
    """Clamps x to s32 like float-to-integer conversions.

    The caller then rounds the sum of two results to f32.
    """
    return np.clip(
        np.nan_to_num(x, nan=0.0, posinf=2.0**31 - 1, neginf=-(2.0**31)), -(2.0**31), 2.0**31 - 1
    ).astype(np.float32)


def test_bf16() -> None:
    x, y = _floats(), _floats()[::-1].copy()
    outs, back, pairs = out((x.size, 2), np.uint16), out(x.size), out((x.size, 4, 2), np.uint16)
    run("bf16", x, y, outs, back, pairs, x.size, grid=(2,))
    cut = np.where(np.isnan(x), np.uint16(0x7FFF), (x.view(np.uint32) >> 16).astype(np.uint16))
    np.testing.assert_array_equal(outs.array, np.stack([_rounded(x), cut], axis=1))
    np.testing.assert_array_equal(back.array, bf16_to_f32(outs.array[:, 0]))
    a = bf16_to_f32(np.stack([_rounded(x), _rounded(y)], axis=1)).astype(np.float64)
    with np.errstate(all="ignore"):
        wants = [a * a[:, ::-1] + a, a, a + a[:, ::-1], -a * a[:, ::-1]]
    for i, want in enumerate(wants):
        got = bf16_to_f32(pairs.array[:, i])
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        np.testing.assert_allclose(got, want.astype(np.float32), rtol=2.0**-8, atol=4.7e-41)
    np.testing.assert_array_equal(bf16_to_f32(pairs.array[:, 1]), a.astype(np.float32))


def _rounded(x: np.ndarray) -> np.ndarray:
    """Rounds to bf16 bits by comparing two candidates, unlike the table's arithmetic."""
    bits = x.view(np.uint32)
    below = (bits >> 16).astype(np.uint16)
    rest = bits & 0xFFFF
    up = (rest > 0x8000) | ((rest == 0x8000) & (below & 1 == 1))
    return np.where(np.isnan(x), np.uint16(0x7FFF), below + up.astype(np.uint16))


def test_index64() -> None:
    n, stride, divisor = 70, 3 * 2**33 + 5, 10**10 + 19
    x = rng.integers(-(2**63), 2**63 - 1, n, np.int64)
    x[:4] = 0, -1, 1, -(2**63)
    y, f = out((n, 8), np.uint64), out((n, 2))
    run("index64", x, y, f, np.int64(stride), np.uint64(divisor), n)
    for i, v in enumerate(map(int, x)):
        u = v % 2**64
        quotient = abs(v) // divisor * (-1 if v < 0 else 1)
        bits = f"{u:064b}"
        leading = len(bits) - len(bits.lstrip("0"))
        first = 64 - bits.rfind("1") if u else 0
        wants = [
            i * stride,
            u // divisor,
            u % divisor,
            quotient,
            v >> (i & 63),
            u * 0x9E3779B97F4A7C15 >> 64,
            u.bit_count() | leading << 8 | first << 16,
            int(bits[::-1], 2),
        ]
        assert [int(got) for got in y.array[i]] == [want % 2**64 for want in wants], f"x[{i}] = {v}"
    np.testing.assert_array_equal(
        f.array, np.stack([x.astype(np.float32), x.view(np.uint64).astype(np.float32)], 1)
    )


def test_loop_break() -> None:
    x = np.concatenate([np.arange(1, 200), [27, 97, 871, 1 << 20, 0x55555555, 0xFFFFFFFF]]).astype(
        np.uint32
    )
    steps, peaks = out(x.size, np.int32), out(x.size, np.uint32)
    run("loop_break", x, steps, peaks, x.size, 150, grid=(2,))
    for i, start in enumerate(map(int, x)):
        value = peak = start
        count = 0
        while value != 1 and count != 150:
            if value % 2 and value > 0x55555554:
                count = -count - 1
                break
            value = 3 * value + 1 if value % 2 else value // 2
            peak = max(peak, value)
            count += 1
        assert (steps.array[i], peaks.array[i]) == (count, peak), start


def _signed(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def _operate(code: int, p: int, q: int) -> int:
    u, v, s = p % 2**32, q % 2**32, q & 31
    bits_u, bits_v = f"{u:032b}", f"{v:032b}"
    if code == 7:
        both = (u | v << 32).to_bytes(8, "little")
        return int.from_bytes(bytes(both[i] for i in (5, 1, 4, 2)), "little")
    quotient = 0 if q == 0 else abs(p) // abs(q) * (1 if (p < 0) == (q < 0) else -1)
    table = {
        0: p + q,
        1: p - q,
        2: p * q,
        3: p * q >> 32,
        4: (v << 32 | u) << 11 >> 32,
        5: (32 - u.bit_length()) * 64 + v.bit_count(),
        6: int(bits_u[::-1], 2) ^ (32 - bits_v.rfind("1") if v else 0),
        8: abs(p - q) + 7,
        9: -1 if q == 0 else quotient,
        10: -1 if q == 0 else p - quotient * q,
        11: (u & v) | (~u & 0x0F0F0F0F) | (u ^ v ^ 0x33333333),
        12: abs(p) - min(p, q) + max(p, q),
        13: p << s,
        14: p >> s,
        15: u >> 5 & 0x7FF,
    }
    return table.get(code, -12345)


def test_switch() -> None:
    n = 600
    codes = rng.integers(-1, 18, n).astype(np.int32)
    a, b = (rng.integers(-(2**31), 2**31, n).astype(np.int32) for _ in range(2))
    b[::7], b[::11], a[::13] = 0, rng.integers(-9, 9, b[::11].size), 1
    y = out(n, np.int32)
    run("switch", codes, a, b, y, n, grid=(5,))
    want = [_signed(_operate(*map(int, row))) for row in zip(codes, a, b, strict=True)]
    np.testing.assert_array_equal(y.array, want)


def test_jump_table() -> None:
    codes, y = rng.integers(0, 5, 64).astype(np.uint32), out(64, np.uint32)
    run("jump_table", codes, y, grid=(2,), block=(32,))
    i = np.arange(64)
    np.testing.assert_array_equal(
        y.array, np.select([codes == 0, codes == 1, codes == 2], [7, i * 8, 99 - i], i * i)
    )
    codes[5] = 5
    with pytest.raises(simulator.Trap, match=r"(?s)beyond its table.*brx.idx.*thread \(5, 0, 0\)"):
        run("jump_table", codes, y, grid=(2,), block=(32,))


def test_device_call() -> None:
    x, y = rng.uniform(-1, 1, (40, 13)).astype(np.float32), out(40)
    run("device_call", x, y, 40, 13, block=(64,))
    mean, square = x.astype(np.float64).mean(1), (x.astype(np.float64) ** 2).sum(1)
    for row in range(40):
        total = sum(mean[row] ** i / (i + 1) for i in range(row % 5 + 1))
        if row % 2:
            total += sum(square[row] ** i / (i + 1) for i in range(3))
        np.testing.assert_allclose(
            y.array[row], mean[row] * square[row] + total, rtol=1e-5, atol=1e-6
        )


def test_mma_tile() -> None:
    a, b = (
        rng.standard_normal((16, 16)).astype(np.float16),
        rng.standard_normal((8, 16)).astype(np.float16),
    )
    c, d = rng.standard_normal((16, 8)).astype(np.float32), out((16, 8))
    a8, b8 = (
        rng.integers(-128, 128, (16, 32)).astype(np.int8),
        rng.integers(-128, 128, (8, 32)).astype(np.int8),
    )
    d8 = out((16, 8), np.int32)
    run("mma_tile", a, b, c, d, a8, b8, d8, block=(32,))
    np.testing.assert_allclose(
        d.array, a.astype(np.float64) @ b.T.astype(np.float64) + c, rtol=1e-5, atol=1e-5
    )
    np.testing.assert_array_equal(d8.array, a8.astype(np.int32) @ b8.T.astype(np.int32))


def test_ldmatrix() -> None:
    x = rng.integers(0, 2**16, (16, 16)).astype(np.uint16)
    straight, transposed = out((32, 4, 2), np.uint16), out((32, 4, 2), np.uint16)
    run("ldmatrix", x, straight, transposed, block=(32,))
    row, column = np.arange(32) // 4, np.arange(32) % 4 * 2
    for tile, (r, c) in enumerate([(0, 0), (8, 0), (0, 8), (8, 8)]):
        for half in range(2):
            np.testing.assert_array_equal(
                straight.array[:, tile, half], x[r + row, c + column + half]
            )
            np.testing.assert_array_equal(
                transposed.array[:, tile, half], x[r + column + half, c + row]
            )


def test_math() -> None:
    from math import erf

    values = np.concatenate(
        [rng.uniform(-8, 8, 150), [0, -0.0, 0.5, 1.5, -2.5, 3e9, -3e9, 88, -100, 1e-30]]
    )
    x = values.astype(np.float32)
    y, integers = out((x.size, 8)), out((x.size, 4), np.int32)
    run("math", x, y, integers, x.size, grid=(2,))
    v = x.astype(np.float64)
    with np.errstate(all="ignore"):
        wants = [np.exp(v), np.log(np.abs(v)), np.tanh(v), np.sqrt(np.abs(v)), 1 / (1 + np.exp(-v))]
        wants += [np.clip(v, -2.5, 2.5) / 3, np.rint(v) + np.floor(v) + np.ceil(v) + np.trunc(v)]
    for i, want in enumerate(wants):
        np.testing.assert_allclose(
            y.array[:, i], want.astype(np.float32), rtol=3e-6, err_msg=f"column {i}", atol=2e-38
        )
    np.testing.assert_allclose(y.array[:, 7], [erf(t) for t in v], rtol=1e-6, atol=1e-38)

    def clamp(t: np.ndarray, low: float, high: float) -> np.ndarray:
        return np.clip(t, low, high).astype(np.int64)

    np.testing.assert_array_equal(integers.array[:, 0], clamp(np.rint(v), -(2.0**31), 2.0**31 - 1))
    np.testing.assert_array_equal(integers.array[:, 1], clamp(np.floor(v), -(2.0**31), 2.0**31 - 1))
    np.testing.assert_array_equal(
        integers.array[:, 2].view(np.uint32), clamp(np.trunc(v), 0, 2.0**32 - 1)
    )
    inside = np.abs(v) < 100  # beyond s8, C++ leaves the conversion undefined
    bytes_ = np.trunc(v)[inside].astype(np.int64)
    np.testing.assert_array_equal(integers.array[inside, 3], bytes_ + bytes_ % 2**16)


@pytest.mark.parametrize("which", [0, 1])
def test_generic(which: int) -> None:
    x, y = rng.standard_normal(64).astype(np.float32), out(64)
    run("generic", x, y, which, block=(64,))
    table = np.array([1, -2, 3.5, 0.25, 8, -0.5, 0, 100], np.float32)
    p = x if which == 0 else 2 * x
    for t in range(64):
        last = np.zeros(5, np.float32)
        for i in range(5):
            last[(i + t) % 5] = p[(t + i) & 63] + table[(i + t) & 7]
        want = (
            p[(t & 31) + 2]
            + table[(t & 3) + 2]
            + last[t % 5]
            + last[t * 3 % 5] * (10.0 * (1 + (t & 3)))
        )
        np.testing.assert_allclose(y.array[t], want, rtol=1e-5, atol=1e-5)


# --- refused calls ---

CALLER = """.version 7.0
.target sm_80
.address_size 64
.func (.param .b32 r) twice(.param .b32 x) {{
  .reg .b32 %r<4>;
  ld.param.u32 %r0, [x];
  {inner}
  add.u32 %r1, %r0, %r0;
  st.param.b32 [r+0], %r1;
  ret;
}}
.visible .entry k(.param .u64 y) {{
  .reg .b32 %r<4>; .reg .b64 %rd<2>;
  ld.param.u64 %rd0, [y];
  mov.u32 %r0, 21;
  {{
    .param .b32 a; .param .b32 b;
    {outer}
  }}
  st.global.u32 [%rd0], %r1;
  ret;
}}
"""
GOOD = "st.param.b32 [a+0], %r0; call (b), twice, (a); ld.param.u32 %r1, [b+0];"


@pytest.mark.parametrize(
    ("inner", "outer", "message"),
    [
        ("", GOOD.replace("twice", "thrice"), "calls thrice, which has no body"),
        (
            "",
            GOOD.replace("(b), twice, (a)", "twice, (a)"),
            "takes 1 parameters and gives 1, got 1 and 0",
        ),
        ("", GOOD.replace("[a+0]", "[b+0]"), r"nothing stores \[x\+0\] before"),
        ("", GOOD.replace("b32 [a+0], %r0", "b64 [a+0], %rd0"), r"\[x\+0\] holds 8 bytes, not 4"),
        (
            "{.param .b32 a; .param .b32 b; " + GOOD + "}",
            GOOD,
            "recursion is not supported: k -> twice -> twice",
        ),
    ],
)
def test_calls_that_are_refused(inner: str, outer: str, message: str) -> None:
    with pytest.raises(simulator.ParseError, match=message):
        simulator.launch(
            CALLER.format(inner=inner, outer=outer), [np.zeros(1, np.uint32)], (1,), (1,)
        )


def test_scalars_that_do_not_fit() -> None:
    x, y = np.zeros((2, 8), np.float32)
    for n, a, message in [
        (np.int64(8), np.float32(1), "is a .u32 of 4 bytes, got a int64"),
        (np.int32(8), np.int32(1), "is a .f32 of 4 bytes, got a int32"),
        (x, np.float32(1), "is a .u32, so it takes a NumPy scalar"),
    ]:
        with pytest.raises(simulator.LaunchError, match=message):
            run("saxpy", n, a, x, y)
