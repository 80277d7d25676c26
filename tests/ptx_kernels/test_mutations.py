"""Deliberate bugs in the kernels' PTX, each of which the simulator must catch.

A bug is caught when the run raises the error that names it, or the result misses the tolerance.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from helpers import nmse
from oracles import attention, quantized, random_planes, weights

from ptx_kernels import formats, simulator
from ptx_kernels.kernels.decode import decode
from ptx_kernels.kernels.matvec import MatvecConfig, matvec
from ptx_kernels.kernels.paged_attention import PagedAttentionConfig, paged_attention
from ptx_kernels.kernels.quantize_q8_1 import quantize_q8_1
from ptx_kernels.ptx import Kernel
from ptx_kernels.simulator import (
    BarrierDivergence,
    EarlyExit,
    Misaligned,
    OutOfBounds,
    SharedRace,
    ShuffleError,
    SimulationError,
    UninitializedRead,
    UnwrittenOutput,
)


@dataclass(frozen=True)
class Subject:
    """A kernel with operands and the exact first result."""

    kernel: Kernel
    operands: tuple[np.ndarray, ...]
    want: np.ndarray

    def passes(self, text: str) -> bool:
        results = simulator.run(replace(self.kernel, text=text, lines={}), *self.operands)
        finite = all(np.isfinite(r).all() for r in results if r.dtype == np.float32)
        return finite and nmse(results[0], self.want) <= 1e-9


def matvec_subject(format: str, lanes: int) -> Subject:
    rng = np.random.default_rng(0)
    n, blocks, m = 6, 35 if lanes == 8 else 11, 2
    planes = random_planes(rng, format, n, blocks)
    values, scale_sum = quantized(rng.standard_normal((m, 256 * blocks), np.float32) + 0.5)
    x = (values.reshape(m, -1, 32) * scale_sum[..., :1].astype(np.float64)).reshape(m, -1)
    kernel = matvec(format=format, n=n, columns=256 * blocks, m=m, config=MatvecConfig(lanes=lanes, rows_per_warp=2))
    return Subject(kernel, (*planes, values, scale_sum), x @ weights(format, planes).T)


def attention_subject() -> Subject:
    rng = np.random.default_rng(1)
    q = rng.standard_normal((3, 4, 64), np.float32)
    pages = [rng.standard_normal((9, 2, 16, 64), np.float32) for _ in range(2)]
    tables = rng.permutation(9).reshape(3, 3).astype(np.int32)
    lengths = np.array([37, 0, 16], np.int32)
    for p in pages:
        for sequence, length in zip(tables, lengths, strict=True):
            for i, page in enumerate(sequence):
                p[page, :, max(0, length - 16 * i) :] = np.nan
    kernel = paged_attention(
        batch=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        num_pages=9,
        page_size=16,
        pages_per_sequence=3,
        scale=0.125,
        config=PagedAttentionConfig(warps=2),
    )
    return Subject(kernel, (q, *pages, tables, lengths), attention(q, *pages, tables, lengths, 0.125))


def quantize_subject() -> Subject:
    x = np.random.default_rng(2).standard_normal((3, 96), np.float32)
    return Subject(quantize_q8_1(rows=3, columns=96), (x,), quantized(x)[0])


def decode_subject(format: str) -> Subject:
    planes = random_planes(np.random.default_rng(3), format, 3, 2)
    return Subject(decode(format=format, n=3, blocks=2), planes, formats.get(format).decode(planes))


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "q4_k-8": lambda: matvec_subject("Q4_K", 8),
    "q4_k-4": lambda: matvec_subject("Q4_K", 4),
    "q5_k-8": lambda: matvec_subject("Q5_K", 8),
    "q5_k-4": lambda: matvec_subject("Q5_K", 4),
    "q6_k": lambda: matvec_subject("Q6_K", 4),
    "attention": attention_subject,
    "quantize": quantize_subject,
    "decode-q5_k": lambda: decode_subject("Q5_K"),
    "decode-q5_0": lambda: decode_subject("Q5_0"),
}


@dataclass(frozen=True)
class Bug:
    """`pattern` (a regular expression over the text, `which` occurrence, or all) becomes `becomes`.

    `error`: what the simulator must raise; None where the kernel still runs and its result must be wrong.
    """

    name: str
    subject: str
    pattern: str
    becomes: str
    which: int | None = None
    error: type[SimulationError] | None = None

    def apply(self, text: str) -> str:
        found = list(re.finditer(self.pattern, text, re.MULTILINE))
        assert found, f"{self.pattern} is not in the text"
        for match in [found[self.which]] if self.which is not None else reversed(found):
            text = text[: match.start()] + match.expand(self.becomes) + text[match.end() :]
        return text


#: Puts the lane (or warp) into a register of its own, compared with 3 (or 1), whatever the kernel's registers are.
LANES = "  .reg .b32 %who;\n  .reg .pred %some;\n  mov.u32 %who, %laneid;\n  setp.ge.u32 %some, %who, 3;\n"
WARPS = "  .reg .b32 %who;\n  .reg .pred %some;\n  mov.u32 %who, %tid.x;\n  setp.ge.u32 %some, %who, 32;\n"

BUGS = [
    Bug("barrier-removed", "attention", r"^  bar\.sync 0;\n", "", error=SharedRace),
    Bug("early-exit-before-barrier", "attention", r"^(  bar\.sync 0;)", WARPS + r"  @%some ret;\n\1", error=EarlyExit),
    Bug(
        "barrier-in-divergent-code",
        "attention",
        r"^(  bar\.sync 0;)",
        LANES + r"  @%some bra $SKIP;\n\1\n$SKIP:",
        error=BarrierDivergence,
    ),
    Bug("uninitialized-shared-read", "attention", r"^.*st\.shared\.v4\.f32 .*\n", "", 0, error=UninitializedRead),
    Bug("uninitialized-marks", "attention", r"^.*st\.shared\.v2\.f32 .*\n", "", 0, error=UninitializedRead),
    Bug(
        "empty-row-divides-by-zero",
        "attention",
        r"(div\.rn\.f32 (%f\d+), .*;\n  selp\.f32 %f\d+), %f\d+, \2",
        r"\1, \2, \2",
    ),
    Bug("context-one-too-long", "attention", r"setp\.lt\.u32 (%p\d+, %r\d+, %r\d+;\n  shr\.u32)", r"setp.le.u32 \1"),
    Bug("rescale-forgotten", "attention", r"mul\.rn\.f32 (%f\d+), \1, (%f\d+);", r"mov.f32 \1, \1;", 0),
    Bug("warps-not-merged", "attention", r"(ld\.shared\.v2\.f32 .*)\+8\];", r"\1];", 0),
    Bug("nibbles-lost", "q4_k-8", r"252645135|4042322160", "117901063"),
    Bug("nibble-order", "q4_k-4", r", 252645135;", ", 4042322160;", 0),
    Bug("scale-of-sub-block-5", "q4_k-4", r", 12336;", ", 48;"),
    Bug("scale-of-upper-sub-blocks-4-bit", "q4_k-8", r", 3855;", ", 1799;"),
    Bug("min-sign", "q4_k-8", r"neg\.f32 (%f\d+), (%f\d+);", r"mov.f32 \1, \2;", 0),
    Bug("min-sign-4", "q4_k-4", r"neg\.f32 (%f\d+), (%f\d+);", r"mov.f32 \1, \2;", 1),
    Bug("high-nibbles-signed", "q4_k-4", r"dp4a\.u32\.s32", "dp4a.s32.s32"),
    Bug("tail-one-short", "q4_k-8", r"setp\.lt\.u32 (%p\d+), (%r\d+), 3;", r"setp.lt.u32 \1, \2, 2;", -1),
    Bug(
        "tail-one-long",
        "q4_k-8",
        r"setp\.lt\.u32 (%p\d+), (%r\d+), 3;",
        r"setp.lt.u32 \1, \2, 4;",
        -1,
        error=OutOfBounds,
    ),
    Bug(
        "loop-one-short",
        "q4_k-8",
        r"setp\.lt\.u32 (%p\d+), (%r\d+), 4;\n  @%p\d+ bra",
        r"setp.lt.u32 \1, \2, 3;\n  @\1 bra",
    ),
    Bug("fifth-bits-of-the-other-sub-block", "q5_k-8", r", 33686018;", ", 16843009;", 0),
    Bug("fifth-bits-off-by-one", "q5_k-4", r"shl\.b32 (%r\d+), (%r\d+), 3;", r"shl.b32 \1, \2, 2;", -1),
    Bug("fifth-bits-of-the-other-half", "q5_k-4", r"^(  ld\.global\.nc\.v4\.u32 .*)\+16\];", r"\1+32];", 0),
    Bug(
        "row-beyond-the-end",
        "q4_k-4",
        r"min\.u32 (.*), 4;",
        r"min.u32 \1, 5;",
        error=OutOfBounds,
    ),
    Bug("unaligned-vector-load", "q4_k-8", r"(ld\.global\.nc\.v4\.u32 .*)\+16\];", r"\1+8];", 0, error=Misaligned),
    Bug(
        "32-bit-offset",
        "q4_k-8",
        r"(mad\.wide\.u32 (%rd\d+), .*;\n)",
        r"\1  and.b64 \2, \2, 4294967295;\n",
        0,
        error=OutOfBounds,
    ),
    Bug(
        "wrapped-address",
        "attention",
        r"(mad\.wide\.u32 (%rd\d+), .*;\n)",
        r"\1  and.b64 \2, \2, 4294967295;\n",
        3,
        error=OutOfBounds,
    ),
    Bug(
        "reduction-not-complete",
        "q4_k-8",
        r"shfl\.sync\.bfly\.b32 (.*), 1, 31, -1;",
        r"shfl.sync.bfly.b32 \1, 2, 31, -1;",
    ),
    Bug("reduction-not-broadcast", "quantize", r"shfl\.sync\.bfly", "shfl.sync.down"),
    Bug("score-not-broadcast", "attention", r"shfl\.sync\.bfly", "shfl.sync.down"),
    Bug(
        "shuffle-in-divergent-code",
        "q6_k",
        r"^(  shfl\.sync.*)",
        LANES + r"  @%some bra $SKIP;\n\1\n$SKIP:",
        0,
        error=ShuffleError,
    ),
    Bug("quant-offset-of-32-lost", "q6_k", r"xor\.b32 (.*), 2863311530;", r"or.b32 \1, 0;"),
    Bug("scale-unsigned", "q6_k", r"bfe\.s32", "bfe.u32"),
    Bug("activations-of-another-row", "q6_k", r"(ld\.global\.v4\.u32 .*)\+(2\d\d\d)\];", r"\1];"),
    Bug(
        "rounds-down",
        "quantize",
        r"cvt\.rni\.s32\.f32 (%r\d+), (%f\d+);",
        r"add.rn.f32 \2, \2, 0fBE800000;\n  cvt.rni.s32.f32 \1, \2;",
    ),
    Bug("store-forgotten", "quantize", r"^.*st\.global\.u32.*\n", "", error=UnwrittenOutput),
    Bug("fifth-bit", "decode-q5_k", r", 16843009;", ", 16842753;", 0),
    Bug("fifth-bit-spread", "decode-q5_0", r", 2113665;", ", 2113664;", 0),
    Bug("register-never-written", "decode-q5_0", r"^  cvt\.f32\.f16 .*\n", "", 0, error=UninitializedRead),
]


@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
def test_the_kernels_themselves_pass(subject: Callable[[], Subject]) -> None:
    built = subject()
    assert built.passes(built.kernel.text)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_bugs_are_caught(bug: Bug) -> None:
    subject = SUBJECTS[bug.subject]()
    broken = bug.apply(subject.kernel.text)
    assert broken != subject.kernel.text
    if bug.error is not None:
        with pytest.raises(bug.error):
            subject.passes(broken)
    else:
        assert not subject.passes(broken)
