"""Work of one thread block in decode attention: its query heads, and its tokens in KV pages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...ptx import Builder, Pointer, Value, all_of, u32
from ..activation import LOG2_E
from ..pages import Pages
from .online_softmax import Piece, Team
from .softmax import Softmax


@dataclass(frozen=True)
class PageTable:
    """Looks up the KV pages of one sequence.

    Attributes:
      entries: block tables, s32 (batch, pages_per_sequence); None means that the sequence is a
        single page.
    """

    entries: Pointer | None
    sequence: Value
    page_size: int

    def page_of(self, token: Value, where: Value) -> Value:
        """Returns the id of a token's page (u32); 0 where `where` is false."""
        if self.entries is None:
            return self.sequence
        return self.entry(token // self.page_size, where).bits(u32)

    def entry(self, page: Value, where: Value | None = None) -> Value:
        """Returns the id (s32) of the sequence's page number `page`; 0 where `where` is false."""
        assert self.entries is not None
        return self.entries.at(self.sequence, page).load(where=where)

    def slot_of(self, token: Value) -> Value:
        """Returns the token's slot in its page."""
        return token if self.entries is None else token % self.page_size


class QueryHeads:
    """Query heads of a team of warps: `count` of the `group` heads that share a KV head.

    If a group's last thread block has fewer heads, its last head repeats.
    """

    def __init__(self, k: Builder, group: int, count: int, team: Team) -> None:
        together = count * team.count
        blocks = -(-group // together)
        self._k, self._group = k, group
        self.kv_head, self._of_block = k.block_id() // blocks, (k.block_id() % blocks) * together
        self._first = self._of_block
        if team.count > 1:
            self._first = self._first + team.member(0, count)
        self._ragged = group % together != 0

    def _in_group(self, i: Value | int) -> Value:
        return self._k.minimum(self._first + i, self._group - 1)

    def index(self, i: Value | int) -> Value:
        """Returns the index, among all query heads, of the team's head i."""
        return self.kv_head * self._group + self._in_group(i)

    def load(self, logits: Pointer, numbers: Sequence[Value]) -> list[Value]:
        """Loads the sink logits of the team's heads `numbers`, in base 2."""
        members = [self._in_group(i) for i in numbers]
        return [logits.at(self.kv_head * self._group + i).load() * LOG2_E for i in members]

    def of(self, piece: Piece) -> Value:
        """Returns the query head of a piece, or the head that it repeats."""
        member = self._of_block + piece.query
        if self._ragged:
            member = self._k.minimum(member, self._group - 1)
        return self.kv_head * self._group + member

    @contextlib.contextmanager
    def owned(self, piece: Piece) -> Iterator[Value]:
        """Yields the query head of a piece; the body is skipped if the head is a repetition."""
        member = self._of_block + piece.query
        inside = all_of(piece.known, member < self._group if self._ragged else None)
        with contextlib.nullcontext() if inside is None else self._k.when(inside):
            yield self.kv_head * self._group + member


@dataclass(frozen=True)
class Share:
    """Token range of a split: from `first` to below `stop`; tokens before `oldest` are masked."""

    first: Value | int
    stop: Value
    oldest: Value | int


@dataclass(frozen=True)
class Task:
    """Decode attention of one thread block: its query heads over its split's tokens of a sequence.

    Attributes:
      q: f32 (batch, num_heads, head_dim); with `q_rest`, (batch, num_heads, value_dim).
      q_rest: f32 (batch, num_heads, head_dim - value_dim), the rest of the queries, if `q` has only
        the elements that values have, too; else None.
      dtype: of the pages, see `PAGE_TYPES`.
      values: pages of values; None if the pages are latent.
      value_dim: width of the values.
      sinks: f32 (num_heads,), None if absent.
      context_len: of the sequence, s32.
      capacity: tokens that the sequence's pages hold.
      split: index of the thread block's split, of the `splits` that share the sequence's tokens.
    """

    q: Pointer
    q_rest: Pointer | None
    dtype: str
    heads: QueryHeads
    keys: Pages
    values: Pages | None
    value_dim: int
    sinks: Pointer | None
    table: PageTable
    context_len: Pointer
    capacity: int
    softmax: Softmax
    split: Value
    splits: int
    team: Team

    def share(self, k: Builder, step: int, unit: int = 1) -> Share:
        """Returns the token range of this split: equal for all splits, at least `step` tokens.

        The last splits may have fewer tokens or none.

        `unit`: a power of two that divides `step` and the first token.
        """
        # 0 for a negative length, at most as many as the pages hold
        length = k.minimum(k.maximum(self.context_len.load(), 0), self.capacity)
        oldest: Value | int = 0
        if (window := self.softmax.window) is not None:
            oldest = k.maximum(length - window, 0).bits(u32)
        start = oldest & (1 << 32) - unit if unit > 1 and isinstance(oldest, Value) else oldest
        stop = length.bits(u32)
        if self.splits == 1:
            return Share(start, stop, oldest)
        share = k.maximum((stop - start + (self.splits - 1)) // self.splits, step)
        if unit > 1:
            share = share + (unit - 1) & (1 << 32) - unit
        first = self.split * share + start
        return Share(first, k.minimum(first + share, stop), oldest)
