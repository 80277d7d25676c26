"""A thread block's tile of query rows in prompt attention, and the range of keys it attends to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...ptx import Builder, Pointer, Value, bf16, f16, f32, s32, u8, u32, u64
from ..gemm.fragments import TILE_ROWS
from ..gemm.pipeline import odd_pitch
from ..quantize_f16 import f16_scale
from ..vectors import RUN
from .bf16_parts import split


@dataclass(frozen=True)
class Row:
    """A query row of a tile: one query head of one token.

    `token` (u32) is the token's index in the prompt or chunk, `head` the head's index in its group,
    `position` the token's position in the sequence. For a full prompt it equals `token`; for a
    chunk it includes the tokens before the chunk.
    """

    token: Value
    head: Value
    position: Value


@dataclass(frozen=True)
class Before:
    """Number of tokens that precede a chunk in its sequence, and the sequence's capacity.

    `count` is a u32; `capacity` is the number of tokens that the sequence's pages hold.
    """

    count: Value
    capacity: int


@dataclass(frozen=True)
class Keys:
    """Range of tokens whose keys and values are read: from `first` to below `stop`.

    They are read in steps of `step` tokens. Tokens before `oldest` are masked; None means none are.
    """

    k: Builder
    first: Value
    stop: Value
    step: int
    oldest: Value | None = None

    @property
    def count(self) -> Value:
        """Number of steps; 0 if the range is empty."""
        tokens = self.k.maximum(self.stop, self.first) - self.first
        return (tokens + (self.step - 1)) // self.step

    def part(self, number: Value, parts: int) -> Keys:
        """Returns part `number` of `parts` equal parts of the range, each of complete steps.

        The last parts may have fewer steps or none.
        """
        if parts == 1:
            return self
        share = (self.count + (parts - 1)) // parts * self.step
        first = self.first + number * share
        return replace(self, first=first, stop=self.k.minimum(first + share, self.stop))


class QueryTile:
    """Tile of `count` query rows: all heads of a token's group, then those of the next token.

    A group is the query heads that share a KV head. `before`: tokens that precede the chunk; None
    means that there are none.
    """

    def __init__(
        self,
        k: Builder,
        first: Value,
        count: int,
        group: int,
        time: int,
        before: Before | None = None,
    ) -> None:
        self._k, self._first, self._group, self._before = k, first, group, before
        self.count = count
        self.first_token = first // group
        self.last_token = k.minimum((first + (count - 1)) // group, time - 1)
        self._first_position, self._last_position = map(
            self._position, (self.first_token, self.last_token)
        )

    def _position(self, token: Value) -> Value:
        """Returns a token's position in the sequence, limited to the sequence's capacity."""
        if (before := self._before) is None:
            return token
        return self._k.minimum(token + before.count, before.capacity - 1)

    def row(self, number: Value) -> Row:
        """Returns row `number` of the tile; its token may be past the prompt's last one."""
        at = self._first + number
        token = at // self._group
        return Row(token, at % self._group, self._position(token))

    def keys(self, length: Value, window: int | None, step: int) -> Keys:
        """Returns the range of tokens that the tile's rows see; empty if all rows are padding.

        For a chunk the range begins at a multiple of 16, so that each 16 tokens share a page.
        """
        k, before = self._k, self._before
        end = k.minimum(self.last_token + 1, length)
        if before is not None:
            end = k.minimum(end + before.count, before.capacity)
        stop = k.select(self.first_token < length, end, 0)
        if window is None:
            return Keys(k, k.const(u32, 0), stop, step)
        oldest = k.maximum(self._first_position + 1, window) - window
        if before is None:
            return Keys(k, oldest, stop, step)
        return Keys(k, oldest & (1 << 32) - TILE_ROWS, stop, step, oldest)

    def scales(self, q: Pointer, length: Value, factor: float) -> Pointer:
        """Emits `f16_scale` of factor * q for each row; returns shared memory, f32 (count, 2).

        `q`, `length`: see `stage`. Two lanes of the warp that multiplies by a row each have half of
        it.
        """
        k, head_dim = self._k, q.shape[2]
        shared = k.shared("scales", f32, (self.count, 2), dynamic=True)
        number = k.warp_id * TILE_ROWS + k.lane_id // 2
        row = self.row(number)
        valid = row.token < length
        address = q.at(row.token, row.head, k.lane_id % 2 * RUN)
        largest = k.const(f32, 0.0)
        for first in range(0, head_dim, 2 * RUN):
            for x in address.load_run(first, RUN, where=valid):
                largest = k.maximum(largest, k.abs(x * factor))
        pair = f16_scale(k, k.warp_max(largest, lanes=2))
        shared.at(number).store(0, pair, where=k.lane_id % 2 == 0)
        k.barrier()
        return shared

    def stage(
        self,
        q: Pointer,
        length: Value,
        factor: float,
        parts: int,
        threads: int,
        scales: Pointer | None = None,
    ) -> Pointer:
        """Emits the copy of factor * q, split into parts, to shared memory; returns its address.

        The shared memory is bf16 (parts * count, pitch as u8).

        Args:
          q: (time, heads, head_dim), from the group's first head on. Rows of padding become zeros.
          scales: of the rows, whose parts are then f16; None means bf16 without scales.
        """
        k, head_dim, type = self._k, q.shape[2], bf16 if scales is None else f16
        pitch, chunks = odd_pitch(head_dim * bf16.size), head_dim // RUN
        shared = k.shared("queries", u8, (parts * self.count, pitch), dynamic=True)
        for base in range(0, self.count * chunks, threads):
            number, chunk = (k.thread_id + base) // chunks, (k.thread_id + base) % chunks
            inside = number < self.count if base + threads > self.count * chunks else None
            row = self.row(number)
            valid = row.token < length if inside is None else (row.token < length) & inside
            address = q.at(row.token, row.head, chunk * RUN)
            values = [x * factor for x in address.load_run(0, RUN, where=valid)]
            if scales is not None:
                inverse = scales.at(number).load(where=inside)
                values = [x * inverse for x in values]
            pairs = (split(k, pair, parts, type) for pair in (values[:2], values[2:]))
            words = zip(*pairs, strict=True)
            target = shared.at(number, chunk * (RUN * bf16.size)).cast(u32)
            for part, pair in enumerate(words):
                target.store(part * self.count * pitch // u32.size, pair, where=inside)
        return shared

    def ranges(
        self, keys: Keys, window: int | None, complete: Value | None = None
    ) -> list[tuple[Value | int, Value, bool]]:
        """Returns ranges of steps: (first, one past the last, whether all rows see all its tokens).

        Only the middle range needs no mask. The range before it has tokens before some row's
        window, the range after it has tokens after some row's own. If `complete` (whether all
        tokens have a page) is false, the middle range is empty.
        """
        k, count = self._k, keys.count
        # tokens that all rows see end with the first row's own
        whole = k.maximum(self._first_position + 1, keys.first) - keys.first
        inner_stop = k.minimum(whole // keys.step, count)
        if complete is not None:
            inner_stop = k.select(complete, inner_stop, 0)
        if window is None:
            return [(0, inner_stop, True), (inner_stop, count, False)]
        before = k.maximum(self._last_position + 1, keys.first + window) - window - keys.first
        inner_start = k.minimum((before + (keys.step - 1)) // keys.step, inner_stop)
        return [
            (0, inner_start, False),
            (inner_start, inner_stop, True),
            (inner_stop, count, False),
        ]


class TokenRows:
    """Copies the next step's keys or values of a head into shared memory, all parts stacked.

    `parts`: bf16 (batch, time, heads, dim). Tokens at or beyond `keys.stop` become zeros. A power
    of two of threads shares a row.
    """

    def __init__(
        self,
        k: Builder,
        parts: Sequence[Pointer],
        sequence: Value,
        head: Value,
        keys: Keys,
        threads: int,
    ) -> None:
        _, time, heads, dim = parts[0].shape
        self._k, self._keys = k, keys
        self._sources = [part.reshape().cast(u8) for part in parts]
        # tokens from this step's first one on; rows past them become zeros
        self._left = k.var(s32, (keys.stop - keys.first).bits(s32))
        row_bytes = dim * bf16.size
        self._stride = heads * row_bytes
        self.pitch = odd_pitch(row_bytes)
        self.size = len(parts) * keys.step * self.pitch
        column = 0
        self._columns = []  # (rows at once, the thread's first row, target, source offset)
        while column < row_bytes // 16:
            width = min(1 << (row_bytes // 16 - column).bit_length() - 1, threads)
            row, chunk = k.thread_id // width, k.thread_id % width + column
            # the same for all sources: one register pair that advances
            rows = (sequence * time + keys.first + row) * heads + head
            offset = k.var(u64, rows.to(u64) * row_bytes + (chunk * 16).to(u64))
            self._columns.append((threads // width, row, row * self.pitch + chunk * 16, offset))
            column += width

    def start(self, address: Pointer) -> None:
        """Emits the asynchronous copies of the next step's rows to shared memory at `address`."""
        k, keys = self._k, self._keys
        for height, row, at, offset in self._columns:
            target, left = address.at(at), self._left - row.bits(s32)
            sources = [source.at(offset) for source in self._sources]
            for r in range(0, keys.step, height):
                size = k.select(left > r, k.const(u32, 16), 0)
                where = row < keys.step - r if height > keys.step - r else None
                for part, source in enumerate(sources):
                    to = target.at((part * keys.step + r) * self.pitch)
                    k.cp_async(to, source.at(r * self._stride), 16, size=size, where=where)
            offset += keys.step * self._stride
        self._left -= keys.step


def lane_rows(k: Builder, rows: Pointer) -> Pointer:
    """Returns the lane's `ldmatrix` address for a 16 x 16 tile, 16 rows of 32 bytes.

    `ldmatrix` then loads one operand A of mma or, transposed, two operands B.
    """
    return rows.at(k.lane_id % TILE_ROWS, k.lane_id // TILE_ROWS * 16)
