"""Instructions that the lanes of a warp execute together.

The tests check which lanes may execute them, and that exited lanes do not count.
"""

from __future__ import annotations

import numpy as np
import pytest

from ptx_kernels.simulator import ShuffleError, TypeMismatch

from .ptx_text import per_thread

#: %r2 is the lane, %r3 the membermask, %r4 the result, if any; %p1 is lane < 8
TOGETHER = {
    "shfl": "shfl.sync.bfly.b32 %r4, %r2, 1, 31, %r3;",
    "vote.any": "vote.sync.any.pred %p2, %p1, %r3; selp.b32 %r4, 1, 0, %p2;",
    "vote.all": "vote.sync.all.pred %p2, %p1, %r3; selp.b32 %r4, 1, 0, %p2;",
    "vote.uni": "vote.sync.uni.pred %p2, %p1, %r3; selp.b32 %r4, 1, 0, %p2;",
    "vote.ballot": "vote.sync.ballot.b32 %r4, %p1, %r3;",
    "match.any.b32": "match.any.sync.b32 %r4, %r5, %r3;",
    "match.any.b64": "match.any.sync.b64 %r4, %rd3, %r3;",
    "match.all.b32": "match.all.sync.b32 %r4|%p2, %r5, %r3;",
    "match.all.b64": "match.all.sync.b64 %r4, %rd3, %r3;",
    **{
        f"redux.{o}.{t}": f"redux.sync.{o}.{t} %r4, %r2, %r3;"
        for o in ("add", "min", "max")
        for t in ("u32", "s32")
    },
    **{f"redux.{o}": f"redux.sync.{o}.b32 %r4, %r2, %r3;" for o in ("and", "or", "xor")},
    "bar.warp": "bar.warp.sync %r3;",
}
START = (
    "setp.lt.u32 %p1, %r2, 8; mov.b32 %r4, 77; and.b32 %r5, %r2, 1; cvt.u64.u32 %rd3, %r5; "
    "mov.b32 %r3, {};\n"
)
each = pytest.mark.parametrize("opcode", TOGETHER)


def run(opcode: str, body: str, mask: int = 0xFFFFFFFF) -> np.ndarray:
    """Runs `body` with the instruction inserted, in one warp; returns each lane's %r4."""
    return per_thread(
        START.format(f"{mask:#x}") + body.replace("@", TOGETHER[opcode]).replace("?", "@"), "%r4"
    )


@each
def test_lanes_that_are_elsewhere_must_not_be_named(opcode: str) -> None:
    """Half of the warp branches around it, or has a false guard."""
    with pytest.raises(
        ShuffleError,
        match="names lanes 0xffffff00, which are elsewhere.*\n.*sync.*\n.*thread .0, 0, 0",
    ):
        run(opcode, "?!%p1 bra END; @ END:")
    with pytest.raises(ShuffleError, match="names lanes 0xffffff00, which are elsewhere"):
        per_thread(START.format(-1) + f"@%p1 {TOGETHER[opcode]}", "%r4")
    run(opcode, "?!%p1 bra END; @ END:", mask=0xFF)


@each
def test_who_executes_it_must_be_named(opcode: str) -> None:
    with pytest.raises(
        ShuffleError, match="lane 8 executes this but membermask 0xff does not name it.*\n.*sync"
    ):
        run(opcode, "@", mask=0xFF)


@each
def test_members_must_agree(opcode: str) -> None:
    """Two halves with their own masks are valid.

    A half that names all lanes, while the other names itself, is an error.
    """
    run(opcode, "selp.b32 %r3, 0xff, 0xffffff00, %p1; @")
    with pytest.raises(
        ShuffleError, match="membermask 0xffffffff names lane 8, whose membermask is 0xffffff00"
    ):
        run(opcode, "selp.b32 %r3, 0xffffffff, 0xffffff00, %p1; @")


#: results of 8 lanes after the others have exited
ODD = np.arange(8) % 2
ALONE = {
    "shfl": np.arange(8) ^ 1,
    "match.any.b32": np.where(ODD, 0xAA, 0x55),
    "match.any.b64": np.where(ODD, 0xAA, 0x55),
    "vote.any": 1,
    "vote.all": 1,
    "vote.uni": 1,
    "vote.ballot": 0xFF,
    "match.all.b32": 0,
    "match.all.b64": 0,
    **{
        f"redux.{o}.{t}": v
        for o, v in (("add", 28), ("min", 0), ("max", 7))
        for t in ("u32", "s32")
    },
    "redux.and": 0,
    "redux.or": 7,
    "redux.xor": 0,
    "bar.warp": 77,
}


@each
def test_exited_lanes_do_not_count(opcode: str) -> None:
    """A full membermask still names them."""
    store = "mul.wide.u32 %rd4, %r0, 4; add.u64 %rd5, %rd0, %rd4; st.global.u32 [%rd5], %r4;"
    got = run(opcode, f"{store} ?!%p1 ret; @")
    np.testing.assert_array_equal(got[:8], np.broadcast_to(ALONE[opcode], 8))
    assert (got[8:] == 77).all()


@pytest.mark.parametrize("instruction", ["{} %f1, %r2, -1;", "{} %r4, %f1, -1;"])
def test_bits_are_reduced_in_integer_registers(instruction: str) -> None:
    """ptxas rejects such operands too, although the opcode says .b32."""
    with pytest.raises(TypeMismatch, match="in a .b32 register, but %f1 is .f32"):
        per_thread(f"mov.f32 %f1, 1.0; {instruction.format('redux.sync.or.b32')}", "%r2")


def test_a_shuffle_reads_no_lane_that_exited() -> None:
    with pytest.raises(ShuffleError, match="lane 0 reads lane 9, which has exited"):
        per_thread(START.format(-1) + "@!%p1 ret; shfl.sync.idx.b32 %r4, %r2, 9, 31, -1;", "%r4")


def test_the_active_mask_holds_who_is_here() -> None:
    """It excludes lanes in other branches, and lanes that have exited."""
    np.testing.assert_array_equal(
        per_thread(START.format(-1) + "activemask.b32 %r4;", "%r4"), [0xFFFFFFFF] * 32
    )
    branch = (
        "setp.ge.u32 %p3, %r2, 16; @%p3 ret; @%p1 bra LOW; "
        "activemask.b32 %r4; bra END; LOW: activemask.b32 %r4; END:"
    )
    np.testing.assert_array_equal(
        per_thread(START.format(-1) + branch, "%r4")[:16], [0xFF] * 8 + [0xFF00] * 8
    )
    guarded = per_thread(START.format(-1) + "@%p1 activemask.b32 %r4;", "%r4")
    np.testing.assert_array_equal(guarded, [0xFF] * 8 + [77] * 24)
