"""Table rows of loads, stores, atomics and fences (PTX ISA 9.7.9, 9.7.13)."""

from __future__ import annotations

from .machine_row import At, From, Operands, To, Words, define_machine
from .row import BASELINE, SM70, Version

#: Versions for loads that do not allocate in L1, and prefetch 256 or 128 bytes into L2.
STREAMED_LOADS: Version = ((7, 4), 80)
STREAMED_LOADS_128: Version = ((7, 4), 75)

_SCOPE = "cta|cluster|gpu|sys"
_ORDER = rf"weak|volatile|(?:mmio\.)?(?:relaxed|acquire|release)\.(?:{_SCOPE})"
_WRITABLE = "global|shared|shared::cta|local"
_READABLE = f"{_WRITABLE}|const"
_HINT = r"(?:ca|cg|cs|lu|cv|wb|wt|L[12]::\w+)"
_CACHE = rf"{_HINT}(?:\.{_HINT})*"
_SMALL = "[bus](?:8|16|32)|f32"
_ALL = "[bus](?:8|16|32|64)|f32"

#: vector of an opcode -> (registers, types whose vectors have at most 16 bytes)
_VECTORS = {"": (None, _ALL), "v2": (2, _ALL), "v4": (4, _SMALL)}


def space_of(words: Words) -> str:
    """Returns the state space that an opcode names; `.shared::cta` is the same as `.shared`."""
    return (words.get("space") or "generic").removesuffix("::cta")


def _define_moves(vector: str, count: int | None, types: str) -> None:
    def load(words: Words) -> Operands:
        return To(words["type"], count, wider=True), At(space_of(words))

    def store(words: Words) -> Operands:
        return At(space_of(words)), From(words["type"], count, wider=True)

    words = {"order": _ORDER, "hints": _CACHE, "more": _CACHE, "vector": vector, "type": types}
    end = ".{vector}.{type}" if vector else ".{type}"
    rest = "{.order}{.space}{.hints}" + end
    define_machine("ld", rest, load, needs=BASELINE, space=_READABLE, **words)
    define_machine("st", rest, store, needs=BASELINE, space=_WRITABLE, **words)
    non_coherent = "{.order}.{space}{.hints}.{nc}{.more}" + end
    define_machine("ld", non_coherent, load, needs=BASELINE, space="global", nc="nc", **words)


for _vector, (_count, _types) in _VECTORS.items():
    _define_moves(_vector, _count, _types)

_INTEGERS = "u32|s32|u64|s64"
_BITS = "b32|b64"
#: operation -> (types, operands in addition to the address)
_ATOMICS = {
    "add": ("u32|s32|u64|f32", 1),
    "min": (_INTEGERS, 1),
    "max": (_INTEGERS, 1),
    "and": (_BITS, 1),
    "or": (_BITS, 1),
    "xor": (_BITS, 1),
    "exch": (_BITS, 1),
    "cas": (_BITS, 2),
    "inc": ("u32", 1),
    "dec": ("u32", 1),
}


def _define_atomic(operation: str, types: str, count: int) -> None:
    def update(words: Words) -> Operands:
        return At(space_of(words)), *[From(words["type"])] * count

    def fetch(words: Words) -> Operands:
        return To(words["type"]), *update(words)

    words = {
        "order": "relaxed|acquire|release|acq_rel",
        "scope": _SCOPE,
        "space": "global|shared|shared::cta",
        "operation": operation,
        "type": types,
    }
    for order, needs in (("", BASELINE), (".{order}", SM70)):
        rest = order + "{.scope}{.space}.{operation}.{type}"
        define_machine("atom", rest, fetch, needs=needs, **words)
        if operation not in ("exch", "cas"):
            define_machine("red", rest, update, needs=needs, **words)


for _operation, (_types, _count) in _ATOMICS.items():
    _define_atomic(_operation, _types, _count)

define_machine("membar", ".{scope}", (), scope="cta|gl|sys")
define_machine("fence", "{.order}.{scope}", (), needs=SM70, order="sc|acq_rel", scope=_SCOPE)
