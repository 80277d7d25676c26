"""Kernel of the gated delta rule over a prompt: updates the recurrent state token by token."""

from __future__ import annotations

from dataclasses import dataclass

from ...ptx import WARP, Builder, all_of, f32, kernel, u32
from .columns import StateColumns, StateConfig, check_sizes, k_head_of
from .rounds import Rounds, Rows


@dataclass(frozen=True)
class GatedDeltaRuleConfig(StateConfig):
    """Tiling of a head's state; several thread blocks may share a head's columns.

    Attributes:
      tokens: tokens per round, a multiple of warps. One round is in shared memory while the next
        round's tokens are in flight.
    """

    lanes: int = 16
    tokens: int = 16


@kernel
def gated_delta_rule(
    k: Builder,
    *,
    batch: int,
    time: int,
    num_k_heads: int,
    num_v_heads: int,
    key_dim: int,
    value_dim: int,
    scale: float,
    tiled: bool = False,
    config: GatedDeltaRuleConfig = GatedDeltaRuleConfig(),
) -> None:
    """Kernel: for each token, S *= exp(g); d = beta (v - S^T k); S += k d^T; o = scale S^T q.

    S is a v head's state. v head h uses k head h / (num_v_heads / num_k_heads), or h % num_k_heads
    if tiled. A token with beta = 0 and g = 0 leaves the state unchanged, whatever its key and
    value. A thread block holds a head's state, or some of its columns, in registers from the first
    token to the last.
    """
    check_sizes(num_k_heads, num_v_heads, key_dim, value_dim, config)
    q, keys = (k.input(name, f32, (batch, time, num_k_heads, key_dim)) for name in ("q", "keys"))
    v = k.input("v", f32, (batch, time, num_v_heads, value_dim))
    g, beta = (k.input(name, f32, (batch, time, num_v_heads)) for name in ("g", "beta"))
    o = k.output("o", f32, (batch, time, num_v_heads, value_dim))
    state = k.inout("state", f32, (batch, num_v_heads, key_dim, value_dim))
    count = config.block_columns
    parts = value_dim // count  # blocks per head
    k.launch((batch * num_v_heads * parts,), WARP * config.warps)

    head, first = k.block_id() // parts % num_v_heads, k.block_id() % parts * count
    sequence = k.block_id() // (parts * num_v_heads)
    k_head = k_head_of(head, num_k_heads, num_v_heads, tiled)
    stride, v_stride = num_k_heads * key_dim, num_v_heads * value_dim
    rounds = Rounds(
        k,
        vectors=(
            Rows(q.at(sequence, 0, k_head), stride, key_dim),
            Rows(keys.at(sequence, 0, k_head), stride, key_dim),
            Rows(v.at(sequence, 0, head, first), v_stride, count),
        ),
        gates=[Rows(gate.at(sequence, 0, head), num_v_heads, 1) for gate in (g, beta)],
        time=time,
        tokens=config.tokens,
        warps=config.warps,
    )
    rounds.fetch(k.const(u32, 0))
    columns = StateColumns(k, key_dim, config)
    address = state.at(sequence, head, columns.row, first + columns.column)
    held = columns.load(address, value_dim)
    results = Rows(o.at(sequence, 0, head, first + columns.column), v_stride, config.columns)
    with k.loop(0, rounds.count) as round:
        k.cp_async_wait()
        rounds.prepare(round, scale)
        k.barrier()
        with k.when(round < rounds.count - 1):
            rounds.fetch(round + 1)
        with k.loop(0, config.tokens) as slot:
            staged, number = rounds.staged(round, slot), rounds.token(round, slot)
            outputs = columns.absorb(
                held,
                columns.vector(staged.key),
                columns.vector(staged.query),
                staged.values.at(columns.column).load_run(0, config.columns),
                staged.token(),
            )
            valid = all_of(columns.leads, rounds.inside(number))
            results.of(number).store_run(0, outputs, where=valid)
    columns.store(address, value_dim, held)
