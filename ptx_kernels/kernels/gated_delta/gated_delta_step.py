"""Decode step kernel of a gated delta net: everything between its input and output projections.

Per sequence and v head it computes the causal convolution, gates, state update, and RMSNorm times
silu(z) for one token. The projections (qkv, z, alpha, beta) are operands.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from ...ptx import WARP, Builder, Pointer, Value, all_of, f32, kernel, s32, u32
from ..activation import LOG2_E, sigmoid, softplus
from ..reduce import across_warps
from ..vectors import RUN, dot
from .columns import StateColumns, StateConfig, Token, check_sizes, k_head_of, lane_runs


@dataclass(frozen=True)
class GatedDeltaStepConfig(StateConfig):
    """Tiling of a head's state: a thread block has a full head, in several passes if too large.

    Attributes:
      resident_blocks: thread blocks per multiprocessor that the registers must suffice for.
    """

    lanes: int = 8
    columns: int = 4
    resident_blocks: int = 1


@dataclass(frozen=True)
class _Channel:
    """A convolution channel that a thread computes.

    Attributes:
      index: among a thread block's channels: query, key, values.
      number: index among all channels.
      valid: whether the channel exists; None means yes.
      of_head: whether the channel belongs only to this v head; other channels may be shared by v
        heads.
    """

    index: Value
    number: Value
    valid: Value | None
    of_head: Value | bool


def _channels(
    k: Builder, threads: int, head: Value, k_head: Value, sizes: tuple[int, int, int]
) -> list[_Channel]:
    """Returns this thread's convolution channels of v head `head` and its k head.

    sizes: (num_k_heads, key_dim, value_dim).
    """
    num_k_heads, key_dim, value_dim = sizes
    total, found = 2 * key_dim + value_dim, []
    query, key = k_head * key_dim, (k_head + (num_k_heads - 1)) * key_dim
    value = head * value_dim + 2 * key_dim * (num_k_heads - 1)
    for start in range(0, total, threads):
        index, last = k.thread_id + start, start + threads - 1
        base: Value = query
        of_head: Value | bool = False
        for bound, other in ((key_dim, key), (2 * key_dim, value)):
            if start < bound <= last:
                of_head = index >= bound
                base = k.select(of_head, other, base)
            else:
                of_head = start >= bound
                base = other if of_head else base
        valid = index < total if last >= total else None
        found.append(_Channel(index, base + index, valid, of_head))
    return found


class _Convolution:
    """Emits the causal convolution of a thread's channels at one position of a sequence."""

    def __init__(
        self, k: Builder, channels: Sequence[_Channel], newest: Pointer, weight: Pointer
    ) -> None:
        """Starts the loads that do not depend on the position.

        Args:
          newest: the token's inputs, f32 (channels,).
          weight: f32 (channels, width).
        """
        self._k, self._channels, self._width = k, channels, weight.shape[1]
        self._newest = [newest.at(c.number).load(where=c.valid) for c in channels]
        self._taps = [weight.at(c.number).load_run(0, self._width, where=c.valid) for c in channels]

    def outputs(self, ring: Pointer, sequence: Value, position: Value) -> list[Value]:
        """Returns silu(convolution) of each channel; inputs before position 0 count as zeros.

        ring: earlier inputs, f32 (batch, width, channels); the slot of the position itself is not
        read.
        """
        k, ages = self._k, range(1, self._width)
        slots = [(position.bits(u32) + (self._width - age)) % self._width for age in ages]
        seen = [position >= age for age in ages]
        before = [
            [
                ring.at(sequence, slot, c.number).load(where=all_of(c.valid, known))
                for slot, known in zip(slots, seen, strict=True)
            ]
            for c in self._channels
        ]
        totals = [
            dot(k, [newest, *old], taps[::-1])
            for newest, old, taps in zip(self._newest, before, self._taps, strict=True)
        ]
        return [total * sigmoid(k, total) for total in totals]

    def store(self, ring: Pointer, sequence: Value, position: Value, first: Value | None) -> None:
        """Stores the token's inputs in slot position % width of the ring.

        Query and key channels are stored only if `first` (the v head is the first of its k head);
        None means true.
        """
        slot = position.bits(u32) % self._width
        for c, newest in zip(self._channels, self._newest, strict=True):
            stores = first
            if first is not None and c.of_head is not False:
                stores = None if c.of_head is True else first | c.of_head
            ring.at(sequence, slot, c.number).store(0, newest, where=all_of(c.valid, stores))


def _token(
    k: Builder, vectors: Pointer, key_dim: int, gates: tuple[Value, Value], scale: float, eps: float
) -> Token:
    """Emits the token's factors from its query and key in shared memory at `vectors`.

    Each warp computes the factors redundantly. `gates`: (g, beta).
    """
    sums = [k.const(f32, 0.0)] * 3
    for first, inside in lane_runs(k, key_dim):
        query, key = (
            vectors.at(start).at(first).load_run(0, RUN, where=inside) for start in (0, key_dim)
        )
        pairs = (query, query), (key, key), (query, key)
        sums = [total + dot(k, a, b) for total, (a, b) in zip(sums, pairs, strict=True)]
    of_query, of_key, product = (k.warp_sum(total) for total in sums)
    by_query, by_key = (k.instruction("rsqrt.approx.f32", x + eps) for x in (of_query, of_key))
    g, beta = gates
    decay, by_query = k.exp2(g * LOG2_E), by_query * scale
    return Token(decay, beta, decay * by_key, decay * by_query, product * by_key * by_query, by_key)


def _inverse_rms(
    k: Builder, outputs: Sequence[Value], value_dim: int, eps: float, config: StateConfig
) -> Value:
    """Emits 1 / sqrt(mean(o^2) + eps) of the thread block's outputs.

    All lanes that share a column hold the same outputs.
    """
    parts = k.shared("parts", f32, (config.warps,))
    squares = dot(k, outputs, outputs)
    total = across_warps(k, parts, squares, operator.add, warps=config.warps)
    mean = total * (1 / (value_dim * config.lanes))
    return k.instruction("rsqrt.approx.f32", mean + eps)


@kernel
def gated_delta_step(
    k: Builder,
    *,
    batch: int,
    num_k_heads: int,
    num_v_heads: int,
    key_dim: int,
    value_dim: int,
    width: int,
    scale: float,
    eps: float,
    tiled: bool = False,
    config: GatedDeltaStepConfig = GatedDeltaStepConfig(),
) -> None:
    """Kernel: convolution and silu, unit queries and keys, gated delta rule, RMSNorm times silu(z).

    `qkv` holds the newest token's inputs of the convolution; they are stored in slot position %
    width of `columns`. No thread block reads that slot, so thread blocks need not wait for each
    other. At position 0 the state and earlier columns count as zeros. At a negative position
    (padding) columns and state are unchanged, and y is zeros. A thread block has one v head of a
    sequence. The state is loaded before the position is known.
    """
    check_sizes(num_k_heads, num_v_heads, key_dim, value_dim, config)
    values = num_v_heads * value_dim
    channels, group = 2 * num_k_heads * key_dim + values, num_v_heads // num_k_heads
    y = k.output("y", f32, (batch, values))
    qkv, z = k.input("qkv", f32, (batch, channels)), k.input("z", f32, (batch, values))
    alpha, beta = (k.input(name, f32, (batch, num_v_heads)) for name in ("alpha", "beta"))
    ring = k.inout("columns", f32, (batch, width, channels))
    state = k.inout("state", f32, (batch, num_v_heads, key_dim, value_dim))
    positions = k.input("positions", s32, (batch,))
    conv_weight = k.input("conv_weight", f32, (channels, width), constant=True)
    dt_bias, decay = (
        k.input(name, f32, (num_v_heads,), constant=True) for name in ("dt_bias", "decay")
    )
    norm_weight = k.input("norm_weight", f32, (value_dim,), constant=True)
    threads = WARP * config.warps
    k.launch((batch * num_v_heads,), threads, resident_blocks=config.resident_blocks)

    sequence, head = k.block_id() // num_v_heads, k.block_id() % num_v_heads
    k_head = k_head_of(head, num_k_heads, num_v_heads, tiled)
    position = positions.at(sequence).load()
    mine = _channels(k, threads, head, k_head, (num_k_heads, key_dim, value_dim))
    convolution = _Convolution(k, mine, qkv.at(sequence).reshape(channels), conv_weight)
    here = [gate.at(sequence, head).load() for gate in (alpha, beta)]
    bias, rate = (constant.at(head).load() for constant in (dt_bias, decay))
    columns = StateColumns(k, key_dim, config)
    starts = [columns.column + start for start in range(0, value_dim, config.block_columns)]
    addresses = [state.at(sequence, head, columns.row, start) for start in starts]
    z_here, y_here = (
        x.reshape(batch, num_v_heads, value_dim).at(sequence, head).reshape(value_dim)
        for x in (z, y)
    )
    weights, doors = (
        [x for start in starts for x in vector.at(start).load_run(0, config.columns)]
        for vector in (norm_weight, z_here)
    )
    held = columns.load(addresses[0], value_dim)

    k.barrier()  # keeps ptxas from sinking the loads into the branch, which waits for the position
    with k.when(position >= 0) as real:
        vectors = k.shared("vectors", f32, (2 * key_dim + value_dim,))
        for c, made in zip(mine, convolution.outputs(ring, sequence, position), strict=True):
            vectors.at(c.index).store(0, made, where=c.valid)
        gates = softplus(k, here[0] + bias) * rate, sigmoid(k, here[1])
        factors = [w * (z * sigmoid(k, z)) for w, z in zip(weights, doors, strict=True)]
        k.barrier()
        token = _token(k, vectors, key_dim, gates, scale, eps)
        queries, keys = (columns.vector(vectors.at(start)) for start in (0, key_dim))
        outputs: list[Value] = []
        for start, address in zip(starts, addresses, strict=True):
            held = columns.load(address, value_dim) if outputs else held
            with k.when(position == 0):
                for element in itertools.chain(*held):
                    element.set(0.0)
            token_values = vectors.at(2 * key_dim).at(start).load_run(0, config.columns)
            outputs += columns.absorb(held, keys, queries, token_values, token)
            columns.store(address, value_dim, held)
        first = None if group == 1 else head < num_k_heads if tiled else head % group == 0
        convolution.store(ring, sequence, position, first)
        inverse = _inverse_rms(k, outputs, value_dim, eps, config)
        results = [o * inverse * factor for o, factor in zip(outputs, factors, strict=True)]
        for i, start in enumerate(starts):
            run = results[i * config.columns :][: config.columns]
            y_here.at(start).store_run(0, run, where=columns.leads)
    with real.otherwise():
        for start in starts:
            none = [k.const(f32, 0.0)] * config.columns
            y_here.at(start).store_run(0, none, where=columns.leads)
