"""Emits decode attention on tensor cores: per step, a warp takes 16 tokens for up to 16 heads.

Let g = lane / 4 and t = lane % 4.

1. Scores, Q K^T: m16n8k16 with queries as rows of A and eight tokens as columns of B. B is used as
  loaded from memory: lane (g, t) loads runs of token g's key. The dimension that mma takes for 2t
  or 2t + 8 of a product can therefore be any dimension of such a run; Q uses the same one.
2. Softmax: a lane has the scores of rows g and g + 8 and tokens 2t, 2t + 1, 2t + 8 and 2t + 9.
3. Values, P V: the scores already have the layout of operand A. The lane loads the values of the
  same four tokens, for dimensions of g. Permutations pair the tokens of one dimension to operand B.

Q and P are sums of two 16-bit floats, high and low, which keep 16 bits (bf16) or 22 (f16). Up to
eight queries have their high parts in rows 0 to 7 and their low parts in rows 8 to 15 of one
product, whose halves are added. More queries take two products. The loads of the next step's keys
are issued after the scores, those of its values after the products, into the same registers.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Sequence

from ...formats.unpack import e4m3 as fp8
from ...ptx import Builder, KernelError, Value, Var, all_of, e4m3, f16, f32, u32
from ...ptx.types import Type
from ..quantize_f16 import f16_scale
from ..quantize_q8_1 import largest_magnitude
from ..vectors import load_floats, store_floats, two_floats
from .config import PagedAttentionConfig
from .context import Share, Task
from .online_softmax import LOWEST, BlockState
from .step_rows import COLUMNS, SCORED, STEP, TYPES, Lane, StepRows, Words
from .tensor_softmax import HEADROOM

MOST_QUERIES = 16
MOST_HEAD_DIM = 128  # sums, keys and values fit in a lane's registers
_ONE = 127 << 23  # bits of 1.0; the bits of a power of two and of its inverse add up to twice this

Fragment = tuple[Value, Value, Value, Value]  # operand A, see `Builder.mma`


def tensor_cores_take(dtype: str, head_dim: int, page_size: int, latent: bool) -> bool:
    """Returns whether tensor cores support such pages: all tokens of a step must be in one page."""
    return dtype in TYPES and not latent and head_dim <= MOST_HEAD_DIM and page_size % STEP == 0


def check_tensor_cores(
    config: PagedAttentionConfig, dtype: str, head_dim: int, page_size: int, *, latent: bool
) -> None:
    """Raises KernelError for parameters that only the kernel without tensor cores supports."""
    if config.queries > MOST_QUERIES or config.teams > 1:
        raise KernelError(
            f"tensor_cores: queries={config.queries} must be at most {MOST_QUERIES}, "
            f"teams={config.teams} 1"
        )
    if not tensor_cores_take(dtype, head_dim, page_size, latent):
        raise KernelError(
            f"tensor_cores: dtype={dtype!r} must be one of {', '.join(TYPES)}, "
            f"page_size={page_size} a multiple of {STEP}, head_dim={head_dim} at most "
            f"{MOST_HEAD_DIM}, and no pages latent"
        )


class _Softmax:
    """Running softmax of a warp's queries, in mma's accumulators: FlashAttention's m, l and O.

    Attributes:
      rows: queries of a lane's accumulators: 1, or 2 (g and g + 8).
      m: the highest score of each row, in all four lanes of the row.
      l: the part of each row's sum of weights that the lane computed.
      o: accumulators of eight dimensions each.
      top: a power of two above all scales of values so far; weights include these scales, divided
        by `top`. None means that values have no scales.
    """

    def __init__(self, k: Builder, queries: int, tiles: int, type: Type, scaled: bool) -> None:
        self.k, self.rows, self.type = k, -(-queries // COLUMNS), type
        self.m = [k.var(f32, LOWEST) for _ in range(self.rows)]
        self.l = [k.var(f32, 0.0) for _ in range(self.rows)]
        self.o = [[k.var(f32, 0.0) for _ in range(4)] for _ in range(tiles)]
        self.top = k.var(u32, 1 << 23) if scaled else None

    def by_row(self, sums: Sequence[Value]) -> list[list[Value]]:
        """Returns the two accumulators of each of the lane's rows, high and low parts added."""
        a, b, c, d = sums
        return [[a, b], [c, d]] if self.rows == 2 else [[a + c, b + d]]

    def fragments(self, rows: Sequence[tuple[Value, Value, Value, Value]]) -> list[Fragment]:
        """Returns operands A with the high and low 16-bit parts of each row's four floats."""
        split = [(*self._split(a, b), *self._split(c, d)) for a, b, c, d in rows]
        if self.rows == 1:
            ((high, low, high_2, low_2),) = split
            return [(high, low, high_2, low_2)]
        first, second = split
        return [(first[i], second[i], first[i + 2], second[i + 2]) for i in range(2)]

    def _split(self, a: Value, b: Value) -> tuple[Value, Value]:
        """Splits two f32 into packed pairs of 16-bit floats: the rounded values, the remainders."""
        high = self._pair(a, b)
        x, y = two_floats(high, self.type)
        return high, self._pair(a - x, b - y)

    def _pair(self, a: Value, b: Value) -> Value:
        return self.k.pair(a, b, self.type)

    def multiply(
        self, fragments: Sequence[Fragment], b: Words, sums: Sequence[Value]
    ) -> tuple[Value, ...]:
        """Returns `sums` + A B, summed over the operands A in `fragments`."""
        total = tuple(sums)
        for a in fragments:
            total = self.k.mma(a, b, total, self.type)
        return total

    def weights(
        self, scores: Sequence[Sequence[Value]], scales: Sequence[Value] | None
    ) -> list[list[Value]]:
        """Returns 2^(score - m) of each row's tokens, times the values' scales divided by `top`.

        First updates m and `top`, and rescales l and o accordingly.
        """
        k = self.k
        highest: list[Value] = []
        for m, row in zip(self.m, scores, strict=True):
            top = k.warp_max(functools.reduce(k.maximum, row), lanes=4)
            highest.append(k.maximum(m, top - HEADROOM if self.type is f16 else top))
        conditions = [new > m for m, new in zip(self.m, highest, strict=True)]
        largest = None
        if scales is not None:
            assert self.top is not None
            largest = functools.reduce(k.maximum, [k.abs(scale) for scale in scales])
            conditions.append(largest >= self.top.bits(f32))
        with k.when(k.warp_any(functools.reduce(operator.or_, conditions))):
            self._rescale(highest, largest)
        found = []
        for m, total, row in zip(self.m, self.l, scores, strict=True):
            weights = [k.instruction("ex2.approx.ftz.f32", score - m) for score in row]
            total += (weights[0] + weights[1]) + (weights[2] + weights[3])
            found.append(weights)
        if scales is None:
            return found
        assert self.top is not None
        inverse = (2 * _ONE - self.top).bits(f32)
        factors = [scale * inverse for scale in scales]
        return [[w * factor for w, factor in zip(row, factors, strict=True)] for row in found]

    def _rescale(self, highest: Sequence[Value], largest: Value | None) -> None:
        """Sets m = highest, and `top` above the `largest` scale in any lane; rescales l and o."""
        k = self.k
        factors = [k.exp2(m - new) for m, new in zip(self.m, highest, strict=True)]
        for m, total, new, factor in zip(self.m, self.l, highest, factors, strict=True):
            m.set(new)
            total *= factor
        if self.top is not None and largest is not None:
            power = (k.redux(largest.bits(u32), "max") & 0x7F800000) + (1 << 23)
            top = k.maximum(self.top, k.minimum(power, 2 * _ONE - (1 << 23)))
            change = self.top.bits(f32) * (2 * _ONE - top).bits(f32)
            factors = [factor * change for factor in factors]
            self.top.set(top)
        for sums in self.o:
            for i, value in enumerate(sums):
                value *= factors[i // 2 % self.rows]

    def add(self, weights: Sequence[Sequence[Value]], tiles: Iterator[Words]) -> None:
        """Adds weights times values to o; `tiles`: operand B of each eight dimensions."""
        fragments = self.fragments([(w[0], w[1], w[2], w[3]) for w in weights])
        for sums, b in zip(self.o, tiles, strict=True):
            for var, value in zip(sums, self.multiply(fragments, b, sums), strict=True):
                var.set(value)

    def add_sinks(self, logits: Sequence[Value], once: Value, lane: Lane) -> None:
        """Initializes m and l with each row's sink logit, where `once` is true.

        The state must be empty.
        """
        k = self.k
        for m, total, logit in zip(self.m, self.l, logits, strict=True):
            # minus infinity has no effect
            bounded = k.select(logit < LOWEST, k.const(f32, LOWEST), logit)
            m.set(k.select(once, bounded, LOWEST))
            total.set(k.select(once & (lane.pair == 0), k.const(f32, 1.0), 0.0))


def attend_by_tensor_cores(k: Builder, task: Task, queries: int) -> BlockState:
    """Emits attention of the thread block's `queries` heads; returns the warps' softmax states."""
    assert task.values is not None
    lane, warps = Lane.of(k), task.team.warps
    stride = STEP * warps
    share = task.share(k, stride, STEP)
    first = share.first + task.team.warp * STEP
    kv_head = task.heads.kv_head
    # keys of tokens g and g + 8; values of the tokens whose scores the lane has
    both, scored = (lane.row, (0, COLUMNS)), (lane.pair * 2, SCORED)
    keys = StepRows(k, task.keys, kv_head, both, (lane.pair, 4), lane.pair)
    values = StepRows(k, task.values, kv_head, scored, (lane.row, 8), lane.pair)
    walk = _Walk(k, task, share, first, stride)
    keys.load(*walk.next_step)
    values.load(*walk.next_step)
    tiles, scaled = sum(length for _, length in values.runs), values.scales is not None
    softmax = _Softmax(k, queries, tiles, TYPES[task.dtype], scaled)
    members = [k.minimum(lane.row + COLUMNS * i, queries - 1) for i in range(softmax.rows)]
    query, units = _query(k, task, softmax, members, keys, lane)
    if task.sinks is not None:
        once = (task.team.warp == 0) & (task.split == 0)
        softmax.add_sinks(task.heads.load(task.sinks, members), once, lane)
    with k.loop(first, share.stop, stride) as at:
        limit = walk.advance(at)
        scores = _scores(k, task, softmax, query, units, keys)
        keys.load(*walk.next_step)
        _hide(k, at, share, limit, lane, scores, values)
        softmax.add(softmax.weights(scores, values.scales), values.value_operands())
        values.load(*walk.next_step)
    return _state(k, task, softmax, values, lane, queries)


class _Walk:
    """Iterates over a warp's steps of 16 tokens, one step ahead of the computation.

    Attributes:
      next_step: (page, slot, whether the step exists) of the step to load.
    """

    def __init__(self, k: Builder, task: Task, share: Share, first: Value, stride: int) -> None:
        self._k, self._task, self._share, self._stride = k, task, share, stride
        self._num_pages = task.keys.rows.shape[0]
        page = task.table.page_of(first, first < share.stop)
        self._page = k.var(u32, task.table.page_of(first + stride, first + stride < share.stop))
        self._limit = k.var(u32, self._limit_of(page))
        self.next_step = self._locate(page, first)

    def _limit_of(self, page: Value) -> Value:
        """Returns one past the last visible token of a step in `page`; 0 if the page is missing."""
        return self._k.select(page < self._num_pages, self._share.stop, 0)

    def _locate(self, page: Value, token: Value) -> tuple[Value, Value, Value]:
        # a missing page is replaced by another, whose tokens are masked
        known = self._k.minimum(page, self._num_pages - 1)
        return known, self._task.table.slot_of(token), token < self._share.stop

    def advance(self, at: Value) -> Value:
        """Advances to the step after the one at token `at`.

        Returns one past the last visible token of the step at `at`.
        """
        k, table, after = self._k, self._task.table, at + self._stride
        limit = k.var(u32, self._limit)
        self.next_step = self._locate(self._page, after)
        self._limit.set(self._limit_of(self._page))
        later = after + self._stride
        self._page.set(table.page_of(later, later < self._share.stop))
        return limit


def _query(
    k: Builder,
    task: Task,
    softmax: _Softmax,
    members: Sequence[Value],
    keys: StepRows,
    lane: Lane,
) -> tuple[list[list[Fragment]], list[Value] | None]:
    """Returns the queries as operands A, for each 16 dimensions, of which a lane has four.

    For f16 it also returns the scale of each row's products (a power of two brings the row's
    queries into the range of f16), else None.
    """
    rows = [task.q.at(task.table.sequence, task.heads.index(member)) for member in members]
    loaded = [
        [x for first, n in keys.runs for x in load_floats(row.at(lane.pair * n + first), n)]
        for row in rows
    ]
    scaled = [[x * task.softmax.factor for x in row] for row in loaded]
    units = None
    if softmax.type is f16:
        unit = fp8.UNIT if task.keys.rows.type is e4m3 else 1.0
        scales = [f16_scale(k, largest_magnitude(k, row, 4)) for row in scaled]
        scaled = [
            [x * inverse for x in row] for row, (inverse, _) in zip(scaled, scales, strict=True)
        ]
        units = [scale * unit for _, scale in scales]
    a, b, c, d = keys.order()
    fragments = [
        softmax.fragments([(x[i + a], x[i + b], x[i + c], x[i + d]) for x in scaled])
        for i in range(0, len(scaled[0]), 4)
    ]
    return fragments, units


def _scores(
    k: Builder,
    task: Task,
    softmax: _Softmax,
    query: Sequence[Sequence[Fragment]],
    units: Sequence[Value] | None,
    keys: StepRows,
) -> list[list[Var]]:
    """Emits the scores of each row's tokens, in base 2, before masking."""
    zero = k.const(f32, 0.0)
    sums: list[tuple[Value, ...]] = [(zero,) * 4 for _ in keys.words]
    for fragments, operands in zip(query, keys.key_operands(), strict=True):
        sums = [softmax.multiply(fragments, b, c) for b, c in zip(operands, sums, strict=True)]
    first, second = (softmax.by_row(total) for total in sums)
    products = [a + b for a, b in zip(first, second, strict=True)]
    if keys.scales is not None:
        products = [[x * s for x, s in zip(row, keys.scales, strict=True)] for row in products]
    if units is not None:
        products = [[x * unit for x in row] for row, unit in zip(products, units, strict=True)]
    return [[k.var(f32, task.softmax.capped(k, product)) for product in row] for row in products]


def _hide(
    k: Builder,
    at: Value,
    share: Share,
    limit: Value,
    lane: Lane,
    scores: Sequence[Sequence[Var]],
    values: StepRows,
) -> None:
    """Masks tokens that are not seen: scores become minus infinity, and values have no effect.

    Most steps have no such tokens, and take one branch.
    """
    complete = at + STEP <= limit
    if isinstance(share.oldest, Value):
        complete = complete & (at >= share.oldest)
    with k.when(~complete):
        for i, offset in enumerate(SCORED):
            token = at + lane.pair * 2 + offset
            seen = token < limit
            if isinstance(share.oldest, Value):
                seen = seen & (token >= share.oldest)
            for row in scores:
                row[i].set(k.select(seen, row[i], -math.inf))
            values.hide(i, seen)


def _state(
    k: Builder, task: Task, softmax: _Softmax, values: StepRows, lane: Lane, queries: int
) -> BlockState:
    """Emits the stores of the warps' states to shared memory; returns the `BlockState`.

    A lane has dimensions of runs 2t and 2t + 1, which are adjacent. Eight lanes store 16 bytes of
    two queries at once. The queries are half a run's banks apart, so the stores use all banks.
    """
    state = BlockState(k, queries, task.value_dim, task.team, shift=values.runs[0][1])
    unit = softmax.top.bits(f32) if softmax.top is not None else None
    if task.keys.rows.type is e4m3:
        unit = k.const(f32, fp8.UNIT)
    sums = [softmax.by_row(tile) for tile in softmax.o]
    for row in range(softmax.rows):
        query = lane.row + COLUMNS * row
        mine = query < queries if queries % COLUMNS and row == softmax.rows - 1 else None
        total = k.warp_sum(softmax.l[row], lanes=4)
        first_lane = all_of(mine, lane.pair == 0)
        state.marks.at(task.team.warp, query).store(0, (softmax.m[row], total), where=first_lane)
        tile = 0
        for first, length in values.runs:
            dims = [sums[tile + e][row][c] for c in range(2) for e in range(length)]
            dims = dims if unit is None else [x * unit for x in dims]
            address = state.address(query, lane.pair * (2 * length) + first)
            store_floats(address, dims, where=mine)
            tile += length
    return state
