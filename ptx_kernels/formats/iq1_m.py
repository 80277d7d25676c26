"""IQ1_M: 256 weights in 56 bytes; weight = d * (2 * scale + 1) * (entry +- 1 / 8).

Source: ggml, `block_iq1_m`. Each 8 weights have the low eight bits of a codebook index in `qs`, and
four bits of `qh`: the upper three and the sign of the eighth. Each 16 have a scale of three bits in
one of four u16 `scales`, whose top four bits are d's, an f16.
"""

from __future__ import annotations

from typing import Any

from .unpack.groups_of_eight import Get, Numbers, code_book_format


def _numbers(get: Get, i: Any) -> Numbers:
    four = get("qh", i >> 1, 1) >> ((i & 1) * 4)
    entry = get("qs", i, 1) | ((four & 7) << 8)
    scale = get("scales", (i >> 3) * 2, 2) >> (((i >> 1) & 3) * 3)
    return Numbers((entry,), scale & 7, lowered=(four >> 3) & 1)


def _d(get: Get) -> Any:
    a, b, c, d = (get("scales", 2 * j, 2) for j in range(4))
    return (a >> 12) | ((b >> 8) & 0xF0) | ((c >> 4) & 0xF00) | (d & 0xF000)


FORMAT = code_book_format(
    _numbers,
    _d,
    name="IQ1_M",
    unit=1.0,
    struct=(("qs", 32), ("qh", 16), ("scales", 8)),
    layout=(("qs", ("qs",)), ("qh", ("qh",)), ("scales", ("scales",))),
    quant_bits=1,
    book="IQ1_S",
    raised=True,
    spread_fields=("scales",),
)
