"""Small kernels of every family with operands and what they must give: perturbed and mutated by
tests and tools.

To add one, write a function that returns a Subject and give it a label in SUBJECTS. Shapes should
be small (a run takes milliseconds) but reach every branch of the text: tails, masks, several warps
and blocks.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from helpers import nmse
from oracles import (
    activation_operands,
    attention,
    dequantized,
    gated,
    half_operands,
    int8_vectors,
    loaded,
    quantized,
    random_planes,
    rms_norm_oracle,
    rotated,
    stored,
    weights,
)

from ptx_kernels import formats, simulator
from ptx_kernels.kernels.append_kv import append_kv
from ptx_kernels.kernels.argmax import ArgmaxConfig, argmax
from ptx_kernels.kernels.attention import (
    MergeConfig,
    PagedAttentionConfig,
    merge_attention,
    paged_attention,
)
from ptx_kernels.kernels.decode import decode
from ptx_kernels.kernels.gemm import GemmConfig, gemm
from ptx_kernels.kernels.matvec import PRESETS, MatvecConfig, gated_matvec, matvec, qkv_matvec
from ptx_kernels.kernels.quantize_f16 import quantize_f16
from ptx_kernels.kernels.quantize_q8_1 import quantize_q8_1
from ptx_kernels.kernels.rms_norm import RmsNormConfig, rms_norm
from ptx_kernels.kernels.rope_append import rope_append
from ptx_kernels.kernels.top_k import TopKConfig, top_k
from ptx_kernels.ptx import Kernel

_OPEN = re.compile(r"\.approx\.|\bmma\.[^;]*\.f32|\b(?:atom|red)\.[^;]*add\.f32")


@dataclass(frozen=True)
class Subject:
    """A kernel with operands, its exact results and how far it may miss them.

    Attributes:
      wants: one per result; a bf16 result as floats. None: no one answer (not compared).
      finish: makes of the results what `wants` holds, where they are partial ones.
      tolerance: largest NMSE of a result of floats; 0 asks for the very bits. Integers are compared
        exactly.
    """

    kernel: Kernel
    operands: tuple[np.ndarray, ...]
    wants: tuple[np.ndarray | None, ...]
    tolerance: float
    finish: Callable[..., tuple[np.ndarray, ...]] | None = None

    @property
    def exact(self) -> bool:
        """Whether hardware has no freedom in the results: perturbed runs then give the same
        bits.
        """
        return _OPEN.search(self.kernel.text) is None

    def run(self, text: str | None = None, **options: Any) -> tuple[np.ndarray, ...]:
        """The results of the kernel, or of another text in its place, with `simulator.run`'s
        options; SimulationError as the simulator raises it."""
        kernel = self.kernel if text is None else replace(self.kernel, text=text, lines={})
        return simulator.run(kernel, *self.operands, **options)

    def holds(self, results: tuple[np.ndarray, ...]) -> bool:
        """Whether results are right."""
        if self.finish is not None:
            finished = zip(self.finish(*results), self.wants, strict=True)
            return all(nmse(got, want) <= self.tolerance for got, want in finished)
        found = zip(results, self.wants, self.kernel.results, strict=True)
        return all(
            self._close(got, want, buffer.type.name)
            for got, want, buffer in found
            if want is not None
        )

    def _close(self, got: np.ndarray, want: np.ndarray, type: str) -> bool:
        if type in ("f32", "f16", "bf16") and self.tolerance:
            return nmse(loaded(got, type), want) <= self.tolerance
        return np.array_equal(got, want, equal_nan=got.dtype.kind == "f")

    def passes(self, text: str | None = None) -> bool:
        return self.holds(self.run(text))


def _rng(*seed: int) -> np.random.Generator:
    return np.random.default_rng([len(seed), *seed])


def quantize_subject(dtype: str) -> Subject:
    """Three rows of three groups; one is all 0, one has 1 as its largest, and one a negative
    number.
    """
    exact = _rng(2).standard_normal((3, 96), np.float32)
    exact[0, 32:64], exact[1, :32], exact[2, 70] = 0, np.linspace(-0.9, 1, 32), -9
    x = stored(exact, dtype)
    return Subject(
        quantize_q8_1(rows=3, columns=96, dtype=dtype), (x,), quantized(loaded(x, dtype)), 0
    )


def rms_norm_subject(output: str) -> Subject:
    rng = _rng(3)
    x, weight = rng.standard_normal((3, 416), np.float32) + 1, rng.standard_normal(416, np.float32)
    build = functools.partial(rms_norm, rows=3, columns=416, eps=1e-2, config=RmsNormConfig(2))
    want = rms_norm_oracle(x, weight, 1e-2)
    if output == "f32":
        return Subject(build(), (x, weight), (want,), 1e-13)
    (y,) = simulator.run(build(), x, weight)
    return Subject(build(output=output), (x, weight), quantized(y), 0)


def matvec_subject(
    format: str,
    config: MatvecConfig,
    *,
    n: int = 6,
    columns: int = 2304,
    m: int = 2,
    tolerance: float = 1e-11,
) -> Subject:
    rng = _rng(n, columns, m)
    planes = random_planes(rng, format, n, columns // formats.get(format).block_size)
    operands, x = activation_operands(
        config, rng.standard_normal((m, columns), np.float32) + np.float32(0.5)
    )
    kernel = matvec(format=format, n=n, columns=columns, m=m, config=config)
    return Subject(kernel, (*planes, *operands), (x @ weights(format, planes).T,), tolerance)


def preset_subject(config: MatvecConfig) -> Subject:
    """Columns for more than one round of the loop, or more than one chunk."""
    more = config.stage == "chunks" or config.streams("Q4_K") * config.unroll > 4
    return matvec_subject("Q4_K", config, columns=4352 if more else 2304)


def normed_operands(
    config: MatvecConfig, m: int, columns: int
) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Operands x and norm_weight of a mat-vec with `norm` and eps = 0.5, and the numbers that its
    products see.
    """
    rng = _rng(m, columns, 2)
    x, weight = (
        rng.standard_normal((m, columns), np.float32) + 1,
        rng.standard_normal(columns, np.float32),
    )
    norm = rms_norm(rows=m, columns=columns, eps=0.5, config=RmsNormConfig(config.warps))
    return (x, weight), activation_operands(config, simulator.run(norm, x, weight)[0])[1]


def fused_matvec_subject(config: MatvecConfig, output: str = "f32") -> Subject:
    """Normalized rows in, bias and residual added, int8 out where asked for."""
    rng, n, columns, m = _rng(9), 64 if output == "q8_1" else 13, 1280, 2
    planes = random_planes(rng, "Q4_K", n, 5)
    operands, x = normed_operands(config, m, columns)
    bias, residual = rng.standard_normal(n, np.float32), rng.standard_normal((m, n), np.float32)
    build = functools.partial(
        matvec,
        format="Q4_K",
        n=n,
        columns=columns,
        m=m,
        norm=True,
        eps=0.5,
        bias=True,
        residual=True,
        config=config,
    )
    operands = (*planes, *operands, bias, residual)
    if output == "f32":
        return Subject(build(), operands, (x @ weights("Q4_K", planes).T + bias + residual,), 1e-11)
    return Subject(
        build(output=output), operands, quantized(simulator.run(build(), *operands)[0]), 0
    )


def gated_subject(
    config: MatvecConfig, activation: str, pair: tuple[str, str] = ("Q4_K", "Q4_K")
) -> Subject:
    n, columns, m = 7, 1280, 2
    planes = [random_planes(_rng(10, i), format, n, 5) for i, format in enumerate(pair)]
    operands, x = activation_operands(
        config, _rng(10).standard_normal((m, columns), np.float32) * np.float32(0.1)
    )
    gate, up = (x @ weights(format, mine).T for format, mine in zip(pair, planes, strict=True))
    kernel = gated_matvec(
        formats=pair, n=n, columns=columns, m=m, activation=activation, config=config
    )
    return Subject(
        kernel, (*planes[0], *planes[1], *operands), (gated(activation, gate, up),), 1e-11
    )


def qkv_subject(config: MatvecConfig) -> Subject:
    types, rows, columns, m = ("Q4_K", "Q6_K"), (16, 5), 1280, 2  # the first fills its block
    matrices = [
        random_planes(_rng(11, n), format, n, 5) for format, n in zip(types, rows, strict=True)
    ]
    operands, x = normed_operands(config, m, columns)
    biases = [_rng(12, n).standard_normal(n, np.float32) for n in rows]
    kernel = qkv_matvec(
        formats=types,
        rows=rows,
        columns=columns,
        m=m,
        norm=True,
        eps=0.5,
        biases=True,
        config=config,
    )
    wants = (
        x @ weights(f, planes).T + b for f, planes, b in zip(types, matrices, biases, strict=True)
    )
    return Subject(
        kernel,
        (*(p for planes in matrices for p in planes), *operands, *biases),
        tuple(wants),
        1e-11,
    )


def quantize_f16_subject(dtype: str) -> Subject:
    """Five super-blocks in two blocks of warps; one is all 0, one has 1 as its largest, and one a
    negative number.
    """
    x = _rng(2).standard_normal((5, 256), np.float32)
    x[0], x[1], x[2, 70] = 0, np.linspace(-0.9, 1, 256), -9
    x = np.round(x * 64) / 64  # sums are exact
    operands, _ = half_operands(x)
    return Subject(quantize_f16(rows=5, columns=256, dtype=dtype), (stored(x, dtype),), operands, 0)


def gemm_subject(
    format: str, config: GemmConfig, *, n: int = 21, columns: int = 768, m: int = 19
) -> Subject:
    rng = _rng(n, columns, m, 1)
    planes = random_planes(rng, format, n, columns // formats.get(format).block_size)
    x = rng.standard_normal((m, columns), np.float32) + np.float32(0.5)
    kernel = gemm(format=format, n=n, columns=columns, m=m, config=config)
    if config.products == "f16":
        operands, exact = half_operands(x)
        tolerance = 1e-7 if format == "Q6_K" else 1e-10  # how tensor cores round in between is open
    else:
        operands, tolerance = quantized(x), 1e-12
        exact = dequantized(*operands)
    return Subject(kernel, (*planes, *operands), (exact @ weights(format, planes).T,), tolerance)


def decode_subject(format: str, dtype: str = "f32") -> Subject:
    planes = random_planes(_rng(4), format, 3, 2)
    want = formats.get(format).decode(planes)
    exact = stored(want, dtype)
    return Subject(decode(format=format, n=3, blocks=2, dtype=dtype), planes, (exact,), 0)


def embedding_subject() -> Subject:
    planes, ids = random_planes(_rng(5), "Q4_K", 5, 2), np.array([4, 0, -1, 5], np.int32)
    want = np.concatenate(
        [formats.get("Q4_K").decode(planes)[ids[:2]], np.full((2, 512), np.nan, np.float32)]
    )
    return Subject(decode(format="Q4_K", n=5, blocks=2, lookups=4), (*planes, ids), (want,), 0)


def append_subject(dtype: str) -> Subject:
    """Seven tokens, the second and third of which have no slot: a negative one, and the first
    behind the pages. Many values lie halfway between two of a narrower type."""
    rng = _rng(6)
    pages = [cached(rng.standard_normal((3, 2, 4, 32), np.float32), dtype) for _ in range(2)]
    shape = (7, 2, 32)
    new = [
        (rng.integers(-4096, 4097, shape) * 2.0 ** rng.integers(-20, -4, shape)).astype(np.float32)
        for _ in "kv"
    ]
    slots = np.array([7, -1, 12, 2, 0, 11, 5], np.int32)
    wants = [tuple(part.copy() for part in page) for page in pages]
    for want, values in zip(wants, new, strict=True):
        for token in (0, 3, 4, 5, 6):
            for part, held in zip(want, cached(values[token], dtype), strict=True):
                part[slots[token] // 4, :, slots[token] % 4] = held
    kernel = append_kv(tokens=7, num_pages=3, num_kv_heads=2, page_size=4, head_dim=32, dtype=dtype)
    return Subject(kernel, (*_interleaved(pages), *new, slots), _interleaved(wants), 0)


def cached(x: np.ndarray, dtype: str) -> tuple[np.ndarray, ...]:
    """Float vectors as pages hold them: (rows,), or (rows, scales) for int8."""
    return int8_vectors(x) if dtype == "int8" else (stored(x, dtype),)


def _interleaved(pages: list[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    """(k rows, v rows, k scales, v scales): the order of a kernel's operands."""
    return tuple(part for parts in zip(*pages, strict=True) for part in parts)


def rope_subject(interleaved: bool, qk_norm: bool, dtype: str = "f32") -> Subject:
    """Four tokens of 96 dimensions, 40 of them rotated; the second and the third have no slot."""
    rng = _rng(9)
    exact = [rng.standard_normal((3, 2, 4, 96), np.float32) for _ in range(2)]
    q, k, v = (rng.standard_normal((4, heads, 96), np.float32) for heads in (4, 2, 2))
    slots = np.array([5, -1, 12, 11], np.int32)
    radians = rng.uniform(0, 1000, (4, 20))
    angles = [np.cos(radians).astype(np.float32), np.sin(radians).astype(np.float32)]
    norms = list(rng.uniform(0.5, 2, (2, 96)).astype(np.float32)) if qk_norm else []
    turned = (
        [rms_norm_oracle(x, w, 1e-2) for x, w in zip((q, k), norms, strict=True)]
        if qk_norm
        else [q, k]
    )
    q_want, k_want = (rotated(x, *angles, interleaved) for x in turned)
    pages = [cached(page, dtype) for page in exact]
    wants = [tuple(part.copy() for part in page) for page in pages]
    for want, values in zip(wants, (k_want, v), strict=True):
        for token in (0, 3):
            for part, held in zip(
                want, cached(values[token].astype(np.float32), dtype), strict=True
            ):
                part[slots[token] // 4, :, slots[token] % 4] = held
    kernel = rope_append(
        tokens=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=96,
        rope_dim=40,
        num_pages=3,
        page_size=4,
        dtype=dtype,
        interleaved=interleaved,
        qk_norm=qk_norm,
        eps=1e-2,
    )
    operands = (*_interleaved(pages), q, k, v, slots, *angles, *norms)
    if dtype == "int8":  # a value near the middle of two steps may round to either
        return Subject(
            kernel, operands, (*_dequantized(*_interleaved(wants)), q_want), 1e-6, _dequantized
        )
    return Subject(kernel, operands, (*_interleaved(wants), q_want), 1e-12)


def _dequantized(
    k: np.ndarray, v: np.ndarray, k_scales: np.ndarray, v_scales: np.ndarray, *others: np.ndarray
) -> tuple[np.ndarray, ...]:
    """int8 pages as floats."""
    return (
        k * k_scales[..., None].astype(np.float64),
        v * v_scales[..., None].astype(np.float64),
        *others,
    )


_TWO_WARPS = PagedAttentionConfig(warps=2, queries=2)


def read_q8_1(values: np.ndarray, scale_sum: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What q8_1 groups stand for, and by how much their sums of values are wrong: 0."""
    scale, total = scale_sum[..., 0], scale_sum[..., 1]
    sums = np.rint(np.divide(total, scale, out=total.copy(), where=scale != 0))
    return dequantized(values, scale_sum), sums - values.reshape(*scale.shape, 32).sum(
        -1, dtype=np.int32
    )


def attention_subject(
    head_dim: int = 64,
    dtype: str = "f32",
    config: PagedAttentionConfig = _TWO_WARPS,
    *,
    contiguous: bool = False,
    sinks: bool = False,
    output: str = "f32",
    q_size: float = 1.0,
    tolerance: float = 1e-11,
    **options: Any,
) -> Subject:
    """Two KV heads of three query heads each; contexts of 37, 0, 1 and 48 tokens, the last of which
    fills its pages.

    What no context holds is NaN, tables name pages beyond the last there, and so do two entries
    within contexts.
    """
    rng = _rng(1, head_dim)
    lengths = np.array([37, 0, 1, 48], np.int32)
    page_size, width = (48, 1) if contiguous else (16, 3)
    num_pages = 4 * width
    q = rng.standard_normal((4, 6, head_dim), np.float32) * np.float32(q_size)
    tables = rng.permutation(num_pages).reshape(4, width).astype(np.int32)
    used = np.zeros((num_pages, page_size), bool)
    if contiguous:
        tables = np.arange(4, dtype=np.int32)[:, None]
    else:
        tables[0, 1] = tables[3, 2] = num_pages
    for table, length in zip(tables, lengths, strict=True):
        for t in range(length)[-options.get("window", length + 1) :]:
            if table[t // page_size] < num_pages:
                used[table[t // page_size], t % page_size] = True
        if not contiguous:
            table[-(-length // page_size) :] = num_pages
    exact = [rng.standard_normal((num_pages, 2, page_size, head_dim), np.float32) for _ in range(2)]
    pages = [cached(x, dtype) for x in exact]
    unused = np.broadcast_to(~used[:, None], (num_pages, 2, page_size))
    for page in pages:
        page[-1][unused] = {"bf16": 0x7FC0, "fp8": 0x7F}.get(dtype, np.nan)
    held = [
        rows * scale[0][..., None] if (scale := rest) else loaded(rows, dtype)
        for rows, *rest in pages
    ]
    logits = rng.standard_normal(6).astype(np.float32) if sinks else None
    build = functools.partial(
        paged_attention,
        batch=4,
        num_heads=6,
        num_kv_heads=2,
        head_dim=head_dim,
        num_pages=num_pages,
        page_size=page_size,
        pages_per_sequence=width,
        scale=head_dim**-0.5,
        dtype=dtype,
        contiguous=contiguous,
        sinks=sinks,
        config=config,
        **options,
    )
    given = (q, *_interleaved(pages), None if contiguous else tables, lengths, logits)
    operands = tuple(x for x in given if x is not None)
    want = attention(q, held[0], held[1], tables, lengths, head_dim**-0.5, sinks=logits, **options)
    if config.splits > 1:
        return Subject(build(), operands, (want,), tolerance, merged)
    if output == "q8_1":
        (y,) = simulator.run(build(), *operands)
        wants = read_q8_1(*quantized(y.reshape(4, -1)))
        return Subject(build(output=output), operands, wants, tolerance, read_q8_1)
    return Subject(build(), operands, (want,), tolerance)


def merged(parts: np.ndarray, marks: np.ndarray) -> tuple[np.ndarray]:
    """What splits of attention make together, float64: (batch, heads, head_dim)."""
    highest, total = marks[..., 0].astype(np.float64), marks[..., 1]
    factors = np.exp2(highest - highest.max(-1, keepdims=True))
    together, weight = (factors[..., None] * parts).sum(2), (factors * total).sum(-1)[..., None]
    return (np.divide(together, weight, out=np.zeros_like(together), where=weight > 0),)


def merge_subject(config: MergeConfig) -> Subject:
    """Eleven splits, of which the third and the last are empty; of one head all; of one the scores
    lie far apart.
    """
    rng = _rng(10)
    parts, marks = (
        rng.standard_normal((2, 3, 11, 48), np.float32),
        rng.uniform(1, 9, (2, 3, 11, 2)).astype(np.float32),
    )
    marks[0, 1, :, 0] = [-300, 200, 0, 300, 299, -150, 0, 301, -299, 300, 0]
    for empty in (np.s_[:, :, [2, 10]], np.s_[1, 1]):
        parts[empty], marks[empty] = 0, [-3e38, 0]
    kernel = merge_attention(batch=2, num_heads=3, head_dim=48, splits=11, config=config)
    return Subject(kernel, (parts, marks), merged(parts, marks), 1e-12)


def _searched(columns: int, places: tuple[int, ...] = ()) -> np.ndarray:
    """Rows to search, (5 + len(places), columns).

    Neighbouring floats as the two largest, the smaller first; few values, so many ties; the same
    below 0; NaN; zeros of both signs. Then rows whose largest value stands in each of `places`.
    """
    rng = _rng(7)
    shape = (1 + len(places), columns)
    ordinary = rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 30, shape)
    few = rng.choice([-1.5, -0.0, 0.0, 2.0, -np.inf, np.inf], columns)
    zeros = np.where(rng.random(columns) < 0.3, 0.0, -0.0)
    first = ordinary[0]
    x = np.stack([first, few, -np.abs(first) - 2.0**-20, first, zeros, *ordinary[1:]]).astype(
        np.float32
    )
    x[0, -2:] = np.array([0x53800000, 0x53800001], np.uint32).view(np.float32)
    x[2, 5:9] = np.array([0xB0000001, 0xB0000000, 0xB0000001, 0xB0000000], np.uint32).view(
        np.float32
    )
    x[3, [columns // 2, columns - 2]] = np.nan
    x[np.arange(5, len(x)), list(places)] = 2.0**41
    return x


def _ordered(x: np.ndarray, count: int) -> np.ndarray:
    """Places of the `count` largest of each row, (rows, count): NaN first, then by value, then by
    place.
    """
    key = np.where(np.isnan(x), -np.inf, -np.clip(x.astype(np.float64), -1e99, 1e99))
    return np.argsort(key, axis=1, kind="stable")[:, :count].astype(np.int32)


def argmax_subject() -> Subject:
    x = _searched(300, (0, 63, 64, 93, 128, 149, 150, 213, 214, 278, 299))
    want = np.concatenate([_ordered(x[:, :150], 1), 150 + _ordered(x[:, 150:], 1)], axis=1).astype(
        np.int32
    )
    kernel = argmax(rows=16, columns=300, splits=2, config=ArgmaxConfig(warps=2, unroll=1))
    return Subject(kernel, (x,), (np.take_along_axis(x, want, 1), want), 0)


def argmax_of_candidates_subject() -> Subject:
    x = _searched(80, (0, 5, 18, 31, 32, 41, 59, 63, 64, 73, 79))
    indices = _rng(9).permutation(x.size).reshape(x.shape).astype(np.int32)
    place = np.concatenate([_ordered(x[:, :40], 1), 40 + _ordered(x[:, 40:], 1)], axis=1).astype(
        np.int32
    )
    kernel = argmax(
        rows=16, columns=80, splits=2, from_candidates=True, config=ArgmaxConfig(warps=1, unroll=1)
    )
    wants = np.take_along_axis(x, place, 1), np.take_along_axis(indices, place, 1)
    return Subject(kernel, (x, indices), wants, 0)


def top_k_subject() -> Subject:
    """Two parts of 71 and 70 values, of each of which the 71 largest are wanted: all, in order, and
    one more.
    """
    x = _searched(141)
    places = [_ordered(x[:, :71], 71), 71 + _ordered(x[:, 71:], 70), np.full((5, 1), 141, np.int32)]
    want = np.concatenate(places, axis=1).astype(np.int32)
    padded = np.concatenate([x, np.full((5, 1), -np.inf, np.float32)], axis=1)
    kernel = top_k(rows=5, columns=141, count=71, splits=2, config=TopKConfig(warps=1))
    return Subject(kernel, (x,), (np.take_along_axis(padded, want, 1), want), 0)


def top_k_of_candidates_subject() -> Subject:
    x, indices = _searched(40), _rng(10).permutation(200).reshape(5, 40).astype(np.int32)
    places = _ordered(x, 9)
    kernel = top_k(rows=5, columns=40, count=9, from_candidates=True, config=TopKConfig(warps=2))
    wants = np.take_along_axis(x, places, 1), np.take_along_axis(indices, places, 1)
    return Subject(kernel, (x, indices), wants, 0)


_HEAD_DIMS = {"f32": 64, "f16": 128, "bf16": 96, "int8": 48, "fp8": 32}

SUBJECTS: dict[str, Callable[[], Subject]] = {
    **{f"quantize-{t}": functools.partial(quantize_subject, t) for t in ("f32", "f16", "bf16")},
    **{
        f"quantize_f16-{t}": functools.partial(quantize_f16_subject, t)
        for t in ("f32", "f16", "bf16")
    },
    **{f"rms_norm-{o}": functools.partial(rms_norm_subject, o) for o in ("f32", "q8_1")},
    **{
        f"matvec-{name}": functools.partial(preset_subject, config)
        for name, config in PRESETS.items()
    },
    **{
        f"matvec-{f}-{lanes}": functools.partial(
            matvec_subject, f, MatvecConfig(lanes=lanes, rows_per_warp=2)
        )
        for f, lanes in (("Q4_K", 4), ("Q5_K", 8), ("Q6_K", 4), ("Q6_K", 32))
    },
    "matvec-persistent": functools.partial(
        matvec_subject, "Q4_K", replace(PRESETS["dp4a"], persistent=2, warps=2), n=11, columns=256
    ),
    "fused-f32": functools.partial(
        fused_matvec_subject, replace(PRESETS["tiled"], warps=2, persistent=2)
    ),
    "fused-q8_1": functools.partial(
        fused_matvec_subject, replace(PRESETS["inline_q8"], warps=16), "q8_1"
    ),
    "chunked-rest": functools.partial(
        matvec_subject, "Q4_K", replace(PRESETS["chunked"], warps=2, rows_per_warp=2), n=3, m=8
    ),
    "gated-silu": functools.partial(
        gated_subject, replace(PRESETS["multi_warp_dp4a"], persistent=2), "silu"
    ),
    "gated-gelu": functools.partial(gated_subject, PRESETS["batched"], "gelu", ("Q5_K", "Q6_K")),
    "qkv": functools.partial(qkv_subject, PRESETS["inline_q8"]),
    "gemm-Q4_K": functools.partial(gemm_subject, "Q4_K", GemmConfig(1, 2, 1, 16, 3)),
    "gemm-Q5_K": functools.partial(gemm_subject, "Q5_K", GemmConfig(2, 1, 1, 16, 2), n=33),
    "gemm-Q5_1": functools.partial(
        gemm_subject, "Q5_1", GemmConfig(1, 1, 1, 16, 2), n=15, columns=704, m=15
    ),
    "gemm-Q6_K": functools.partial(gemm_subject, "Q6_K", GemmConfig(1, 4, 1, 16, 2), n=17),
    "gemm-f16-Q4_K": functools.partial(gemm_subject, "Q4_K", GemmConfig(1, 1, 2, 16, 3, "f16")),
    "gemm-f16-Q5_K": functools.partial(
        gemm_subject, "Q5_K", GemmConfig(2, 1, 1, 16, 2, "f16"), n=33
    ),
    "gemm-f16-Q6_K": functools.partial(
        gemm_subject, "Q6_K", GemmConfig(1, 1, 1, 32, 2, "f16"), n=15
    ),
    **{f"decode-{f}": functools.partial(decode_subject, f) for f in formats.names()},
    "decode-bf16": functools.partial(decode_subject, "Q6_K", "bf16"),
    "embedding": embedding_subject,
    **{f"append-{t}": functools.partial(append_subject, t) for t in ("f32", "bf16", "int8", "fp8")},
    "rope_append-interleaved": functools.partial(rope_subject, True, False),
    "rope_append-norm": functools.partial(rope_subject, False, True),
    "rope_append-int8": functools.partial(rope_subject, True, True, "int8"),
    **{f"attention-{t}": functools.partial(attention_subject, d, t) for t, d in _HEAD_DIMS.items()},
    "attention-one_warp": functools.partial(
        attention_subject, 128, "f16", PagedAttentionConfig(warps=1, unroll=1)
    ),
    "attention-contiguous": functools.partial(
        attention_subject, contiguous=True, window=20, sinks=True
    ),
    "attention-soft_cap": functools.partial(attention_subject, 32, soft_cap=1.5, window=9),
    "attention-splits": functools.partial(
        attention_subject, config=PagedAttentionConfig(warps=1, splits=3, unroll=1), sinks=True
    ),
    "attention-steep": functools.partial(attention_subject, q_size=40.0),
    "attention-q8_1": functools.partial(attention_subject, output="q8_1", tolerance=1e-7),
    "merge": functools.partial(merge_subject, MergeConfig(warps=2, unroll=2)),
    "argmax": argmax_subject,
    "argmax-candidates": argmax_of_candidates_subject,
    "top_k": top_k_subject,
    "top_k-candidates": top_k_of_candidates_subject,
}


@functools.cache
def subject(label: str) -> Subject:
    return SUBJECTS[label]()
