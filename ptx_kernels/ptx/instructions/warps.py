"""Table rows of warp instructions (PTX ISA 9.7.9, 9.7.13, 9.7.14).

Shuffles, votes, matches, reductions, the warp barrier, and matrices.
"""

from __future__ import annotations

from .machine_row import At, From, Operands, To, Words, define_machine
from .row import SM70, SM75, SM80

_MASK = From("u32")

define_machine(
    "shfl.sync",
    ".{mode}.b32",
    (To("b32", second="pred"), From("b32"), *[From("u32", untyped=True)] * 3),
    mode="up|down|bfly|idx",
)
define_machine("activemask", ".b32", (To("u32"),))
define_machine("bar.warp.sync", "", (_MASK,))

_VOTES = (From("pred", negatable=True), _MASK)
define_machine("vote.sync", ".{mode}.pred", (To("pred"), *_VOTES), mode="any|all|uni")
define_machine("vote.sync", ".{mode}.b32", (To("u32"), *_VOTES), mode="ballot")


def _same(words: Words) -> Operands:
    return To(words["type"]), From(words["type"]), _MASK


def _match(words: Words) -> Operands:
    return To("u32", second="pred" if words["mode"] == "all" else ""), From(words["type"]), _MASK


define_machine("redux.sync", ".{op}.{type}", _same, needs=SM80, op="add|min|max", type="u32|s32")
# despite .b32, ptxas takes no f32 registers
define_machine(
    "redux.sync", ".{op}.b32", (To("u32"), From("u32"), _MASK), needs=SM80, op="and|or|xor"
)
define_machine("match", ".{mode}.sync.{type}", _match, needs=SM70, mode="any|all", type="b32|b64")


# --- matrices: 16 x k times k x 8 ---


def _products(words: Words) -> Operands:
    """Returns the operands of an mma.

    The k elements of a row of A, or of a column of B, lie in 8 or 16 bytes of each of 4 lanes.
    """
    width = 1 if words["a"] in ("s8", "u8") else 2
    b = int(words["k"]) * width // 16
    c = words["c"]
    return (
        To(c, 4),
        From("u32", 2 * b, registers=True),
        From("u32", b, registers=True),
        From(c, 4, registers=True),
    )


_SHAPE = ".m16n8k{k}.row.col"
define_machine(
    "mma.sync.aligned",
    f"{_SHAPE}.{{c}}.{{a}}.{{b}}.s32",
    _products,
    needs=SM80,
    k="16|32",
    a="s8|u8",
    b="s8|u8",
    c="s32",
)
for _type, _k, _needs in (("f16", "8", SM75), ("f16", "16", SM80), ("bf16", "8|16", SM80)):
    define_machine(
        "mma.sync.aligned",
        f"{_SHAPE}.{{c}}.{{a}}.{{b}}.f32",
        _products,
        needs=_needs,
        k=_k,
        a=_type,
        b=_type,
        c="f32",
    )
# 8 rows of A instead of 16
define_machine(
    "mma.sync.aligned.m8n8k16",
    ".row.col.{c}.{a}.{b}.s32",
    (To("s32", 2), *[From("u32", 1, registers=True)] * 2, From("s32", 2, registers=True)),
    needs=SM75,
    a="s8|u8",
    b="s8|u8",
    c="s32",
)


def _matrices(words: Words) -> Operands:
    return To("u32", int(words["count"])), At("shared")


define_machine(
    "ldmatrix.sync.aligned",
    ".m8n8.x{count}{.trans}.{space}.b16",
    _matrices,
    needs=SM75,
    count="1|2|4",
    trans="trans",
    space="shared|shared::cta",
)
