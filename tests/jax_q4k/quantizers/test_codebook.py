"""Codebook search: entries and signs are the best for their scale, compared with all others."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jax_q4k import cpus, native, quantizers
from jax_q4k.errors import UnavailableError
from jax_q4k.native import calls
from jax_q4k.quantizers import codebook
from ptx_kernels import formats
from ptx_kernels.formats.unpack import codebooks

pytestmark = [
    pytest.mark.cpu_kernels,
    pytest.mark.skipif(not native.available(), reason=native.problem()),
]

# format -> (factor of d, sub-blocks with a scale)
SHAPES = {
    "IQ1_M": (1.0, 16),
    "IQ1_S": (1.0, 8),
    "IQ2_S": (1 / 8, 16),
    "IQ2_XS": (1 / 8, 16),
    "IQ2_XXS": (1 / 8, 8),
    "IQ3_S": (1.0, 8),
    "IQ3_XXS": (1 / 4, 8),
}
EVEN_SIGNS = ["IQ2_XS", "IQ2_XXS", "IQ3_XXS"]
BLOCKS = 3


def book(format: str) -> np.ndarray:
    return codebooks.entries("IQ1_S" if format.startswith("IQ1") else format).astype(np.float32)


def search(format: str, x: np.ndarray, w: np.ndarray, pairs: bool = True) -> tuple[np.ndarray, ...]:
    """Returns what the C++ search finds: steps (groups of eight,), entries, signs."""
    unit, subs = SHAPES[format]
    levels, digits = np.unique(book(format), return_inverse=True)
    digits = digits.reshape(book(format).shape).astype(np.uint8)
    d, scales, entries, signs = calls.codebook_search(
        x,
        w,
        digits,
        levels,
        codebook.shared_pairs(digits, len(levels)) if pairs else np.zeros((0, 2), np.uint8),
        format=format,
        unit=unit,
        subs=subs,
    )
    steps = np.asarray(d)[:, None] * unit * (2 * np.asarray(scales, np.float32) + 1)
    return np.repeat(steps.ravel(), 32 // subs), np.asarray(entries), np.asarray(signs)


def sample(seed: int = 5) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.laplace(size=(BLOCKS, 256)).astype(np.float32)
    return x, rng.uniform(0.01, 1, x.shape).astype(np.float32)


def errors_of_all(format: str, x: np.ndarray, w: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Returns the weighted errors of the best entries, for x and w (groups, 8): (groups,).

    With two shifts (IQ1), (2, groups).
    """
    grid = book(format) * steps[:, None, None]  # (groups, entries, 4 or 8)
    size = grid.shape[-1]

    def least(values: np.ndarray) -> np.ndarray:
        parts, weights = (a.reshape(len(x), 8 // size, 1, size) for a in (values, w))
        return (weights * (parts - grid[:, None]) ** 2).sum(-1).min(-1).sum(-1)

    if format.startswith("IQ1"):
        return np.stack([least(x - shift * steps[:, None]) for shift in (0.125, -0.125)])
    if format not in EVEN_SIGNS:
        return least(np.abs(x))
    odd = np.signbit(x).sum(-1) % 2 == 1
    flipped = [least(np.abs(x) * np.where(np.arange(8) == i, -1, 1)) for i in range(8)]
    return np.where(odd, np.min(flipped, axis=0), least(np.abs(x)))


@pytest.mark.parametrize("format", SHAPES)
def test_entries_and_signs_are_the_best(format):
    x, w = sample()
    steps, entries, signs = search(format, x, w)
    values = book(format)[entries].reshape(-1, 8)
    if format.startswith("IQ1"):
        values = values + np.where(signs.reshape(-1, 1) == 1, -0.125, 0.125)
    else:
        bits = np.unpackbits(signs, axis=-1, bitorder="little").reshape(-1, 8)
        assert format not in EVEN_SIGNS or (bits.sum(-1) % 2 == 0).all()
        values = np.where(bits == 1, -values, values)
    x, w = x.reshape(-1, 8), w.reshape(-1, 8)
    got = (w * (steps[:, None] * values - x) ** 2).sum(-1)
    want = errors_of_all(format, x, w, steps)
    if format == "IQ1_S":  # one shift for four groups
        got, want = got.reshape(-1, 4).sum(-1), want.reshape(2, -1, 4).sum(-1)
    if format.startswith("IQ1"):
        want = want.min(0)
    assert (got <= want * (1 + 1e-4) + 1e-6).all()
    assert (got >= want * (1 - 1e-4) - 1e-6).all()


@pytest.mark.parametrize("format", SHAPES)
def test_pairs_do_not_change_results(format):
    x, w = sample()
    for with_pairs, without in zip(search(format, x, w), search(format, x, w, False), strict=True):
        np.testing.assert_array_equal(with_pairs, without)


def test_pairs_save_most_comparisons():
    _, digits = np.unique(book("IQ1_S"), return_inverse=True)
    digits = digits.reshape(-1, 8).astype(np.uint8)
    members: dict[int, set[int]] = {}
    for first, second in digits.reshape(-1, 2, 4) @ [27, 9, 3, 1]:
        members.setdefault(int(first), set()).add(int(second))
    pairs = codebook.shared_pairs(digits, 3)
    for number, (a, b) in enumerate(pairs.tolist(), 81):
        for seconds in members.values():
            if {a, b} <= seconds:
                seconds -= {a, b}
                seconds.add(number)
    assert len(pairs) + sum(map(len, members.values())) <= len(digits) / 2


@pytest.mark.parametrize("format", SHAPES)
def test_steps_cannot_be_refined(format):
    """No other d, with the values that were found, has an error that is smaller by a thousandth."""
    x = sample()[0]
    kind = formats.get(format)
    got = kind.decode(kind.split(quantizers.quantize(x, format))).reshape(x.shape)
    w = np.sqrt(1 + x * x / (2 * (x * x).mean(-1, keepdims=True)))
    factor = (w * got * x).sum(-1, keepdims=True) / (w * got * got).sum(-1, keepdims=True)
    error, refined = ((w * (v - x) ** 2).sum(-1) for v in (got, factor * got))
    assert (error <= 1.001 * refined).all()


@pytest.mark.parametrize("format", SHAPES)
def test_other_kernel_sets_are_as_good(format):
    x = sample()[0]
    kind, before = formats.get(format), native.kernels()
    errors = []
    try:
        for name in (before, "portable"):
            native.select(name)
            got = kind.decode(kind.split(quantizers.quantize(x, format))).reshape(x.shape)
            errors.append(((got - x) ** 2).sum())
    finally:
        native.select(before)
    np.testing.assert_allclose(errors[0], errors[1], rtol=1e-3)


def test_bytes_do_not_depend_on_the_number_of_threads(monkeypatch):
    x = np.random.default_rng(7).laplace(size=(300, 256)).astype(np.float32)
    found = []
    for threads in (1, 3):
        monkeypatch.setattr(cpus, "available", lambda threads=threads: threads)
        found.append([quantizers.quantize(x, format) for format in ("IQ2_XXS", "IQ1_M")])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_without_the_library(monkeypatch):
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(native, "problem", lambda: "it was not built")
    with pytest.raises(UnavailableError, match=r"IQ3_S is quantized by C\+\+ code: it was not"):
        quantizers.quantize(np.ones((1, 256), np.float32), "IQ3_S")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"format": "Q4_K"}, "format Q4_K has no codebook"),
        ({"x": np.zeros((2, 128), np.float32)}, r"x has shape \(2, 128\); it must be \(-1, 256\)"),
        ({"w": np.ones((1, 256), np.float32)}, r"w has shape \(1, 256\); it must be \(2, 256\)"),
        ({"digits": np.zeros((256, 4), np.uint8)}, r"digits has shape \(256, 4\)"),
        ({"digits": np.zeros((2049, 8), np.uint8)}, "digits must have 1 to 2048 rows"),
        ({"levels": np.ones(8, np.float32)}, r"levels has shape \(8\); it must be \(3\)"),
        ({"pairs": np.zeros((97, 2), np.uint8)}, "pairs must have at most 96 rows"),
        ({"pairs": np.array([[80, 0], [82, 0]], np.uint8)}, "row 1 of pairs is out of range"),
        ({"subs": 16}, r"scales has shape \(2, 16\); it must be \(2, 8\)"),
    ],
)
def test_operands_that_do_not_fit(changes, message):
    arguments = {
        "x": np.zeros((2, 256), np.float32),
        "w": np.ones((2, 256), np.float32),
        "digits": np.zeros((256, 8), np.uint8),
        "levels": np.array([8, 25, 43], np.float32),
        "pairs": np.zeros((0, 2), np.uint8),
        "format": "IQ2_XXS",
        "unit": 0.125,
        "subs": 8,
    } | changes
    operands = [arguments.pop(name) for name in ("x", "w", "digits", "levels", "pairs")]
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(calls.codebook_search(*operands, **arguments))
