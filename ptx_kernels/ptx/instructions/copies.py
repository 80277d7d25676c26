"""Table rows of asynchronous copies from global to shared memory (PTX ISA 9.7.9.25.3)."""

from __future__ import annotations

from .machine_row import At, From, Number, Operands, Words, define_machine
from .row import SM80


def _copy(words: Words) -> Operands:
    sizes = (16,) if words["cache"] == "cg" else (4, 8, 16)
    size = Number(f"copies {' or '.join(map(str, sizes))} bytes", sizes)
    return At("shared"), At("global"), size, From("u32", optional=True)


define_machine(
    "cp.async",
    ".{cache}.{space}.global{.hint}",
    _copy,
    needs=SM80,
    cache="ca|cg",
    space="shared|shared::cta",
    hint=r"L2::\w+",
)
define_machine("cp.async.commit_group", "", (), needs=SM80)
define_machine("cp.async.wait_group", "", (Number("waits for a number of groups"),), needs=SM80)
define_machine("cp.async.wait_all", "", (), needs=SM80)
