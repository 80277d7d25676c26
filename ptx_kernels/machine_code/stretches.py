"""Splits a kernel's machine code into sections: prologue, hot loop, code around it, the rest.

The loops and their trips determine how long a warp runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .sass import Loop, SassInstruction, enclosing_loop, hot_loop, innermost_loops, ways_through

_DOTS = ("dp4a", "mma")


@dataclass(frozen=True)
class Stretches:
    """A kernel's machine code in sections; each instruction is in one of them.

    Attributes:
      body: the hot loop, or the code after the prologue if there is none (`looped` False). If
        several loops have as many dot products, each for a matrix, it is the first.
      peers: loops that multiply a matrix: `body`, and loops with more than half as many dot
        products (formats may need fewer).
      before, before_loops: the prologue's straight code, and its loops.
      outer, behind: code of the loop around the hot one, before and after the hot loop; empty if
        there is no such loop.
      once: all other code.
    """

    body: Loop
    looped: bool
    before: tuple[SassInstruction, ...] = ()
    before_loops: tuple[Loop, ...] = ()
    outer: tuple[SassInstruction, ...] = ()
    behind: tuple[SassInstruction, ...] = ()
    once: tuple[SassInstruction, ...] = ()
    peers: tuple[Loop, ...] = ()


def stretches(code: Sequence[SassInstruction]) -> Stretches:
    """Splits a kernel's machine code into sections.

    A kernel with dot products outside of loops has no hot loop: ptxas has unrolled it. Its prologue
    ends at the last barrier before the first dot product.
    """
    loops, hot = innermost_loops(code), hot_loop(code)
    if hot is not None and not _dots(hot.instructions) and _dots(code):
        hot = None
    if hot is None:
        end = _last_barrier(code)
        before, inner = _split(code[:end], loops)
        return Stretches(Loop(tuple(code[end:])), False, before, inner)
    most = _dots(hot.instructions)
    # gate and up, or the parts of a joined product, whose formats may need fewer
    peers = tuple(loop for loop in loops if 2 * _dots(loop.instructions) > most > 0)
    hot = next((loop for loop in peers if _dots(loop.instructions) == most), hot)
    code = ways_through(code, hot)
    loops = innermost_loops(code)
    wider = enclosing_loop(code, hot)
    # the trips of one stand for the others
    alike = [loop for loop in loops if 2 * _dots(loop.instructions) > most > 0]
    around_each = [enclosing_loop(code, loop) or loop for loop in (hot, *alike)]
    first = min(loop.instructions[0].address for loop in around_each)
    before, inner = _split([i for i in code if i.address < first], loops)
    work = {i.address for loop in (hot, *alike) for i in loop.instructions}
    around = {i.address for i in wider.instructions} - work if wider else set()
    start = hot.instructions[0].address
    rest = [i for i in code if i.address >= first and i.address not in work]
    return Stretches(
        hot,
        True,
        before,
        inner,
        tuple(i for i in rest if i.address in around and i.address < start),
        tuple(i for i in rest if i.address in around and i.address > start),
        tuple(i for i in rest if i.address not in around),
        peers or (hot,),
    )


def _dots(code: Sequence[SassInstruction]) -> int:
    return sum(i.category in _DOTS for i in code)


def _last_barrier(code: Sequence[SassInstruction]) -> int:
    """Returns the index after the last barrier before the first dot product; 0 if there is none."""
    first = next((n for n, i in enumerate(code) if i.category in _DOTS), 0)
    return max((n + 1 for n, i in enumerate(code[:first]) if i.name == "BAR"), default=0)


def _split(
    code: Sequence[SassInstruction], loops: Sequence[Loop]
) -> tuple[tuple[SassInstruction, ...], tuple[Loop, ...]]:
    """Returns (code outside of loops, the loops of `loops` that are in `code`)."""
    addresses = {i.address for i in code}
    inner = tuple(loop for loop in loops if addresses >= {i.address for i in loop.instructions})
    looped = {i.address for loop in inner for i in loop.instructions}
    return tuple(i for i in code if i.address not in looped), inner
