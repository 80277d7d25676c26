"""Merge kernel of flash decoding: combines the splits' partial results of each query head."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from ...ptx import WARP, Builder, f32, kernel
from ..pages import Spread
from ..vectors import RUN
from .head_output import declare_result
from .online_softmax import OnlineSoftmax, Team, merge_lanes


@dataclass(frozen=True)
class MergeConfig:
    warps: int = 4  # per block, one query head each
    unroll: int = 2  # splits in flight per lane


@kernel
def merge_attention(
    k: Builder,
    *,
    batch: int,
    num_heads: int,
    head_dim: int,
    splits: int,
    output: str = "f32",
    gate: bool = False,
    config: MergeConfig = MergeConfig(),
) -> None:
    """Kernel: merges the partial results (`parts`, `marks`) that `paged_attention` left per split.

    A split is merged like attention adds a token: it has a highest score, a sum of weights, and
    weighted values. An empty split has a score below all others and sums of 0. Results, and
    `gate`: see `declare_result`.
    """
    parts = k.input("parts", f32, (batch, num_heads, splits, head_dim))
    marks = k.input("marks", f32, (batch, num_heads, splits, 2))
    result = declare_result(k, batch, num_heads, head_dim, output, gate=gate)
    k.launch((num_heads, batch), WARP * config.warps)
    spread = Spread.in_runs(k, head_dim, RUN)
    streams = WARP // spread.lanes * config.warps
    sequence, head, stream = k.block_id("y"), k.block_id(), k.thread_id // spread.lanes
    softmax = OnlineSoftmax(k, 1, spread)
    with k.loop(0, splits, streams * config.unroll) as first:
        mine = [first + stream + u * streams for u in range(config.unroll)]
        seen = [split < splits for split in mine]
        each = list(zip(mine, seen, strict=True))
        both = [marks.at(sequence, head, split).load(vector=2, where=ok) for split, ok in each]
        values = [(spread.load(parts.at(sequence, head, split), ok), None) for split, ok in each]
        scores, totals = zip(*both, strict=True)
        softmax.add([[score] for score in scores], seen, values, totals)
    for some in merge_lanes(softmax, head_dim, Team(k, config.warps)).merged(result.run):
        for piece, merged in some:
            with contextlib.nullcontext() if piece.known is None else k.when(piece.known):
                gates = result.gates(sequence, head, piece)
                result.store(sequence, head, piece, merged.normalized(k), gates)
