"""Table rows of thread block clusters (sm_90): access to other thread blocks' shared memory.

PTX ISA 9.7.9.23 (mapa), 9.7.9.8 and 9.7.9.11 define them. The cluster's barrier (9.7.13.4) has no
row: it is control flow, like the thread block's.
"""

from __future__ import annotations

from .machine_row import At, From, Operands, To, Words, define_machine
from .row import Version

#: Launches of clusters, their special registers, and their shared memory.
CLUSTERS: Version = ((7, 8), 90)
#: The cluster's barrier with its memory semantics spelled out.
CLUSTER_BARRIERS: Version = ((8, 0), 90)

_SPACE = "shared::cluster"
_SMALL = "[bus](?:8|16|32)|f32"
_ALL = "[bus](?:8|16|32|64)|f32"

define_machine(
    "mapa",
    f".{_SPACE}.u32",
    (To("u32"), From("u32", registers=True), From("u32")),
    needs=CLUSTERS,
)


def _define_moves(vector: str, count: int | None, types: str) -> None:
    def load(words: Words) -> Operands:
        return To(words["type"], count, wider=True), At(_SPACE)

    def store(words: Words) -> Operands:
        return At(_SPACE), From(words["type"], count, wider=True)

    words = {"order": "weak", "space": _SPACE, "vector": vector, "type": types}
    rest = "{.order}.{space}" + (".{vector}.{type}" if vector else ".{type}")
    define_machine("ld", rest, load, needs=CLUSTERS, **words)
    define_machine("st", rest, store, needs=CLUSTERS, **words)


for _vector, _count, _types in (("", None, _ALL), ("v2", 2, _ALL), ("v4", 4, _SMALL)):
    _define_moves(_vector, _count, _types)
