"""Deliberate bugs in the kernels' PTX, each of which the simulator must catch.

A bug is caught if the run raises the error that names it, or the result misses the tolerance.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from support.subjects import (
    Subject,
    attention_subject,
    decode_subject,
    matvec_subject,
    quantize_subject,
)

from ptx_kernels.kernels.matvec import MatvecConfig
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


def _matvec(format: str, lanes: int) -> Subject:
    columns = 256 * (35 if lanes == 8 else 11)
    return matvec_subject(format, MatvecConfig(lanes=lanes, rows_per_warp=2), columns=columns)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "q4_k-8": lambda: _matvec("Q4_K", 8),
    "q4_k-4": lambda: _matvec("Q4_K", 4),
    "q5_k-8": lambda: _matvec("Q5_K", 8),
    "q5_k-4": lambda: _matvec("Q5_K", 4),
    "q6_k": lambda: _matvec("Q6_K", 4),
    "attention": attention_subject,
    "quantize": lambda: quantize_subject("f32"),
    "decode-q5_k": lambda: decode_subject("Q5_K"),
    "decode-q5_0": lambda: decode_subject("Q5_0"),
}


@dataclass(frozen=True)
class Bug:
    """Replaces `pattern` (a regular expression; occurrence `which`, or all) with `becomes`.

    error: the simulator's error, or None if the kernel still runs and its result must be wrong.
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


#: Puts the lane (or warp) into a separate register and compares it with 3 (or 1), for any kernel.
_SOME = "  .reg .b32 %who;\n  .reg .pred %some;\n"
LANES = _SOME + "  mov.u32 %who, %laneid;\n  setp.ge.u32 %some, %who, 3;\n"
WARPS = _SOME + "  mov.u32 %who, %tid.x;\n  setp.ge.u32 %some, %who, 32;\n"

BUGS = [
    Bug("barrier-removed", "attention", r"^  bar\.sync 0;\n", "", error=SharedRace),
    Bug(
        "early-exit-before-barrier",
        "attention",
        r"^(  bar\.sync 0;)",
        WARPS + r"  @%some ret;\n\1",
        error=EarlyExit,
    ),
    Bug(
        "barrier-in-divergent-code",
        "attention",
        r"^(  bar\.sync 0;)",
        LANES + r"  @%some bra $SKIP;\n\1\n$SKIP:",
        error=BarrierDivergence,
    ),
    Bug(
        "uninitialized-shared-read",
        "attention",
        r"^.*st\.shared\.v4\.f32 .*\n",
        "",
        0,
        error=UninitializedRead,
    ),
    Bug(
        "uninitialized-marks",
        "attention",
        r"^.*st\.shared\.v2\.f32 .*\n",
        "",
        0,
        error=UninitializedRead,
    ),
    Bug(
        "empty-row-divides-by-zero",
        "attention",
        r"(div\.rn\.f32 (%f\d+), .*;\n  selp\.f32 %f\d+), %f\d+, \2",
        r"\1, \2, \2",
    ),
    Bug(
        "context-one-too-long",
        "attention",
        r"setp\.lt\.u32 (%p\d+, %r\d+, %r\d+;\n  setp)",
        r"setp.le.u32 \1",
    ),
    Bug(
        "rescale-forgotten",
        "attention",
        r"mul\.rn\.f32 (%f\d+), \1, (%f\d+);",
        r"mov.f32 \1, \1;",
        0,
    ),
    Bug("warps-not-merged", "attention", r"(ld\.shared\.v2\.f32 .*)\+16\];", r"\1];", 0),
    Bug("nibbles-lost", "q4_k-8", r"252645135|4042322160", "117901063"),
    Bug("nibble-order", "q4_k-4", r", 252645135;", ", 4042322160;", 0),
    Bug("scale-of-sub-block-5", "q4_k-4", r", 12336;", ", 48;"),
    Bug("scale-of-upper-sub-blocks-4-bit", "q4_k-8", r", 3855;", ", 1799;"),
    Bug("min-sign", "q4_k-8", r"neg\.f32 (%f\d+), (%f\d+);", r"mov.f32 \1, \2;", 0),
    Bug("min-sign-4", "q4_k-4", r"neg\.f32 (%f\d+), (%f\d+);", r"mov.f32 \1, \2;", 1),
    Bug("high-nibbles-signed", "q4_k-4", r"dp4a\.u32\.s32", "dp4a.s32.s32"),
    Bug(
        "tail-one-short",
        "q4_k-8",
        r"setp\.lt\.u32 (%p\d+), (%r\d+), 3;",
        r"setp.lt.u32 \1, \2, 2;",
        -1,
    ),
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
    Bug(
        "fifth-bits-off-by-one",
        "q5_k-4",
        r"shl\.b32 (%r\d+), (%r\d+), 3;",
        r"shl.b32 \1, \2, 2;",
        -1,
    ),
    Bug(
        "fifth-bits-of-the-other-half",
        "q5_k-4",
        r"^(  ld\.global\.nc\.v4\.u32 .*)\+16\];",
        r"\1+32];",
        0,
    ),
    Bug(
        "row-beyond-the-end",
        "q4_k-4",
        r"min\.u32 (.*), 4;",
        r"min.u32 \1, 5;",
        error=OutOfBounds,
    ),
    Bug(
        "unaligned-vector-load",
        "q4_k-8",
        r"(ld\.global\.nc\.v4\.u32 .*)\+16\];",
        r"\1+8];",
        0,
        error=Misaligned,
    ),
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
    Bug("fifth-bit-spread", "decode-q5_0", r", 33818640;", ", 33818624;", 0),
    Bug(
        "register-never-written",
        "decode-q5_0",
        r"^  cvt\.f32\.f16 .*\n",
        "",
        0,
        error=UninitializedRead,
    ),
]


@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
def test_the_kernels_themselves_pass(subject: Callable[[], Subject]) -> None:
    built = subject()
    assert built.passes()


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
