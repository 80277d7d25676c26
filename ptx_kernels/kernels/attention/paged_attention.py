"""Decode attention kernel: one query token per sequence; keys and values in pages or contiguous."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ...ptx import MAX_CLUSTER, WARP, Builder, KernelError, Value, Var, f32, kernel, s32, u32
from ..heads import Heads
from ..pages import Pages, PageSizes, Spread, declare_pages
from ..vectors import dot
from .cluster_merge import ClusterState
from .config import PagedAttentionConfig
from .context import PageTable, QueryHeads, Task
from .head_output import Parts, Result, declare_parts, declare_result
from .online_softmax import BlockState, OnlineSoftmax, Team, merge_lanes
from .softmax import Softmax
from .tensor_cores import attend_by_tensor_cores, check_tensor_cores

_DEFAULT = PagedAttentionConfig()


@dataclass(frozen=True, kw_only=True)
class SequencePages(PageSizes):
    """Pages of a KV cache, and how many of them a sequence has.

    Attributes:
      contiguous: sequence b is page b, which holds all its tokens; there are no block tables.
    """

    pages_per_sequence: int
    contiguous: bool = False

    @property
    def capacity(self) -> int:
        """Tokens that a sequence's pages hold."""
        return self.page_size * self.pages_per_sequence

    def check(self, batch: int) -> None:
        """Raises KernelError unless contiguous pages are one per sequence."""
        if self.contiguous and (self.num_pages, self.pages_per_sequence) != (batch, 1):
            raise KernelError(
                f"contiguous: num_pages={self.num_pages} must be batch={batch}, "
                "pages_per_sequence 1"
            )


@dataclass(frozen=True)
class Token:
    """A cached token's key and value in registers: one lane's share of each (see `Pages.load`).

    `value` is empty if the key contains the values.

    Attributes:
      seen: whether the token is part of the context and has a page (predicate). If false, key and
        value are zeros.
    """

    seen: Value
    key: Sequence[Value]
    value: Sequence[Value]

    def registers(self) -> list[Value]:
        return [self.seen, *self.key, *self.value]

    def map(self, function: Callable[[Value], Value]) -> Token:
        return Token(
            function(self.seen), [function(x) for x in self.key], [function(x) for x in self.value]
        )


class _Prefetched:
    """A prefetched token, in registers from its load in one round to its use in the next."""

    def __init__(self, k: Builder, token: Token) -> None:
        self._copy = lambda value: k.var(value.type, value)
        self._token = token.map(self._copy)

    def exchange(self, next_token: Token) -> Token:
        """Stores `next_token`; returns the token held before."""
        token = self._token.map(self._copy)
        for held, value in zip(self._token.registers(), next_token.registers(), strict=True):
            assert isinstance(held, Var)
            held.set(value)
        return token


@dataclass(frozen=True)
class _Context:
    """Cached tokens of one sequence and KV head that a split reads, up to its `stop`.

    `values`: None for latent pages, whose keys hold the values.
    """

    keys: Pages
    values: Pages | None
    spread: Spread
    table: PageTable
    kv_head: Value
    stop: Value

    def page_of(self, token: Value) -> Value:
        return self.table.page_of(token, token < self.stop)

    def load(self, token: Value, page: Value) -> Token:
        """Starts the loads of a token's key and value; `page`: its page id, already loaded."""
        num_pages = self.keys.rows.shape[0]
        seen = (token < self.stop) & (page < num_pages)
        index = (page, self.kv_head, self.table.slot_of(token))
        return Token(
            seen,
            self.keys.load(self.spread, index, seen),
            [] if self.values is None else self.values.load(self.spread, index, seen),
        )


class _Streams:
    """Lane groups of a team, called streams: stream s takes tokens s, s + count, ...

    Attributes:
      number: index of the lane's stream (u32).
      count: streams of a team.
      step: tokens of a team in a round, `unroll` per stream.
    """

    def __init__(self, k: Builder, lanes: int, team: Team, unroll: int) -> None:
        thread = k.thread_id if team.count == 1 else k.thread_id % (WARP * team.warps)
        self.number = thread // lanes
        self.count = WARP // lanes * team.warps
        self.unroll, self.step = unroll, WARP // lanes * team.warps * unroll


@kernel
def paged_attention(
    k: Builder,
    *,
    batch: int,
    heads: Heads,
    pages: SequencePages,
    dtype: str = "f32",
    softmax: Softmax,
    value_dim: int | None = None,
    q_rest: bool = False,
    gate: bool = False,
    output: str = "f32",
    config: PagedAttentionConfig = _DEFAULT,
) -> None:
    """Decode attention: out[b, h] = softmax(scale * q[b, h] . K) V over the context of sequence b.

    The context is the sequence's first context_lens[b] tokens. Tokens beyond the context, before
    the window or with a page id outside the pages do not count, whatever their contents. Without
    any token the result is zeros. Operands: q f32 (batch, num_heads, head_dim); the pages (see
    `declare_pages`); block_tables s32 (batch, pages_per_sequence); context_lens s32 (batch,); sinks
    f32 (num_heads,).

    Args:
      value_dim: if set, the pages are latent: values are the first `value_dim` elements of the
        keys' rows, which are read once. None means that values have their own pages, as wide as the
        keys'.
      q_rest: q has the first value_dim elements of the queries of latent pages, and an operand
        `q_rest` the others.
      gate: the sigmoid of an operand `gate`, f32 (batch, num_heads, width of values), multiplies
        the results; only with one split or a cluster.
      output: `f32`, or with one split or a cluster `q8_1` or `f16`; see `declare_result`. With
        several splits and no cluster, the results are `Parts`.
    """
    _check(config)
    pages.check(batch)
    num_heads, head_dim, group = heads.num_heads, heads.head_dim, heads.group
    if config.tensor_cores:
        check_tensor_cores(config, dtype, head_dim, pages.page_size, latent=value_dim is not None)
    splits, queries = config.splits, min(config.queries, group)
    out_dim = _value_dim(head_dim, value_dim)
    if q_rest and out_dim == head_dim:
        raise KernelError(f"q_rest=True needs value_dim={value_dim} below head_dim={head_dim}")
    q = k.input("q", f32, (batch, num_heads, out_dim if q_rest else head_dim))
    shape = pages.shape(heads.num_kv_heads, head_dim)
    keys, *value_pages = declare_pages(k.input, dtype, shape, latent=value_dim is not None)
    values = value_pages[0] if value_pages else None
    tables = batch, pages.pages_per_sequence
    block_tables = None if pages.contiguous else k.input("block_tables", s32, tables)
    context_lens = k.input("context_lens", s32, (batch,))
    sink_logits = softmax.input_sinks(k, num_heads)
    rest_shape = batch, num_heads, head_dim - out_dim
    rest = k.input("q_rest", f32, rest_shape) if q_rest else None
    result: Result | Parts
    if config.cluster or splits == 1:
        heads_per_block = config.whole_heads(group)
        shape_of_result = batch, num_heads, out_dim
        result = declare_result(k, *shape_of_result, output, heads_per_block, gate=gate)
    elif gate:
        raise KernelError(f"gate=True needs one split or a cluster, not splits={splits}")
    else:
        result = declare_parts(k, batch, num_heads, out_dim, output, splits)

    grid = (heads.num_kv_heads * -(-group // (queries * config.teams)), batch, splits)
    k.launch(
        grid,
        WARP * config.warps,
        resident_blocks=config.resident_blocks,
        cluster=(1, 1, splits if config.cluster else 1),
    )
    sequence, split = k.block_id("y"), k.block_id("z")
    team = Team(k, config.warps // config.teams, config.teams)
    query_heads = QueryHeads(k, group, queries, team)
    mine = [query_heads.index(i) for i in range(queries)]
    task = Task(
        q=q,
        q_rest=rest,
        dtype=dtype,
        heads=query_heads,
        keys=keys,
        values=values,
        value_dim=out_dim,
        sinks=sink_logits,
        table=PageTable(block_tables, sequence, pages.page_size),
        context_len=context_lens.at(sequence),
        capacity=pages.capacity,
        softmax=softmax,
        split=split,
        splits=splits,
        team=team,
    )
    if config.tensor_cores:
        state = attend_by_tensor_cores(k, task, queries)
    else:
        state = _attend_by_lanes(k, task, mine, config)
    if config.cluster:
        assert isinstance(result, Result)
        cluster = ClusterState(k, state, splits, result.run)
        cluster.leave()
        cluster.merge(query_heads, sequence, result, config.warps)
        return
    for some in state.merged(result.run):
        for piece, share in some:
            with query_heads.owned(piece) as head:
                if isinstance(result, Parts):
                    result.store(sequence, head, split, piece, share)
                else:
                    gates = result.gates(sequence, head, piece)
                    result.store(sequence, head, piece, share.normalized(k), gates)


def _attend_by_lanes(
    k: Builder, task: Task, mine: Sequence[Value], config: PagedAttentionConfig
) -> BlockState:
    """Emits attention without tensor cores: each lane group computes scores of its own tokens.

    Returns the softmax states of the thread block's warps. `mine`: indices of the team's query
    heads.
    """
    keys, values = task.keys, task.values
    out_dim, head_dim = task.value_dim, keys.rows.shape[3]
    run = config.load_bytes // keys.rows.type.size
    if values is None:
        spread = Spread.evenly(k, (out_dim, head_dim - out_dim), run)
        held = spread.front(out_dim // WARP)
    else:
        spread = held = Spread.in_runs(k, head_dim, run)
    streams = _Streams(k, spread.lanes, task.team, config.unroll)
    query = [[x * task.softmax.factor for x in _query(k, task, spread, head)] for head in mine]
    softmax = OnlineSoftmax(k, len(mine), held)
    if task.sinks is not None:
        logits = task.heads.load(task.sinks, softmax.owned())
        softmax.add_sinks(logits, (streams.number == 0) & (task.split == 0))
    share = task.share(k, streams.step)
    context = _Context(keys, values, spread, task.table, task.heads.kv_head, share.stop)
    for tokens in _rounds(k, context, streams, share.first):
        k_rows = [keys.values(k, spread, token.key) for token in tokens]
        if values is None:
            v_rows = [(row[: held.width], unit) for row, unit in k_rows]
        else:
            v_rows = [values.values(k, held, token.value) for token in tokens]
        scores = _scores(k, task, softmax, query, k_rows)
        softmax.add(scores, [token.seen for token in tokens], v_rows)
    return merge_lanes(softmax, out_dim, task.team)


def _query(k: Builder, task: Task, spread: Spread, head: Value) -> list[Value]:
    """Loads a lane's share of the query of `head`, laid out like the keys."""
    index, rest = (task.table.sequence, head), task.q_rest
    if rest is None:
        return spread.load(task.q.at(*index))
    front = spread.front(task.value_dim // WARP)
    others = Spread.evenly(k, rest.shape[-1:], max(length for _, length, _ in spread.parts))
    return front.load(task.q.at(*index)) + others.load(rest.at(*index))


def _check(config: PagedAttentionConfig) -> None:
    if config.load_bytes not in (8, 16):
        raise KernelError(f"load_bytes={config.load_bytes} must be 8 or 16")
    if config.cluster and not 2 <= config.splits <= MAX_CLUSTER:
        raise KernelError(f"cluster: splits={config.splits} must be 2 to {MAX_CLUSTER}")
    if config.warps % config.teams:
        raise KernelError(f"warps={config.warps} must be a multiple of teams={config.teams}")


def _value_dim(head_dim: int, value_dim: int | None) -> int:
    """Returns the width of the values: `value_dim`, or head_dim if it is None; checks it."""
    if value_dim is None:
        return head_dim
    if value_dim % WARP or value_dim > head_dim:
        raise KernelError(
            f"value_dim={value_dim} must be a multiple of {WARP}, at most head_dim={head_dim}"
        )
    return value_dim


def _rounds(
    k: Builder, context: _Context, streams: _Streams, start: Value | int
) -> Iterator[list[Token]]:
    """Yields the lane's tokens of each round; the body is emitted inside a loop.

    While a round computes, K and V of the next round are in flight, and the page ids of the round
    after that. Every stream has the same number of rounds, so that full warps reach the shuffles.
    """
    step = streams.step

    def load_next(token: Value, page: Var) -> Token:
        """Starts the loads of a token and of the page id of the stream's token one round later."""
        later = context.page_of(token + step)
        known = k.var(page.type, page)
        page.set(later)
        return context.load(token, known)

    offsets = [u * streams.count for u in range(streams.unroll)]
    first = [streams.number + offset + start for offset in offsets]
    pages = [k.var(u32, context.page_of(token)) for token in first]
    held = [_Prefetched(k, load_next(t, page)) for t, page in zip(first, pages, strict=True)]
    with k.loop(start, context.stop, step) as at:
        tokens = [at + (streams.number + (offset + step)) for offset in offsets]
        loaded = [load_next(t, page) for t, page in zip(tokens, pages, strict=True)]
        yield [mine.exchange(token) for mine, token in zip(held, loaded, strict=True)]


def _scores(
    k: Builder,
    task: Task,
    softmax: OnlineSoftmax,
    query: Sequence[Sequence[Value]],
    keys: Sequence[tuple[Sequence[Value], Value | float | None]],
) -> list[list[Value]]:
    """Emits Q . K of every token in base 2, each score in the lane that owns its query.

    See `OnlineSoftmax`. Each key comes with its dequantization factor; None means 1.
    """
    scores = [
        softmax.lanes.reduce_scatter([dot(k, mine, key) for mine in query]) for key, _ in keys
    ]
    scores = [
        token if unit is None else [score * unit for score in token]
        for token, (_, unit) in zip(scores, keys, strict=True)
    ]
    return [[task.softmax.capped(k, score) for score in token] for token in scores]
