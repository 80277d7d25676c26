"""A block's part of a prompt: rows of queries, and the tokens whose keys and values they see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...ptx import Builder, Pointer, Value, bf16, s32, u8, u32, u64
from ..gemm.fragments import TILE_ROWS
from ..gemm.pipeline import odd_pitch
from ..vectors import RUN
from .bf16_parts import split


@dataclass(frozen=True)
class Row:
    """A query: its token (u32), and its head's number in the group."""

    token: Value
    head: Value


@dataclass(frozen=True)
class Keys:
    """Tokens from `first` on, up to `stop`, in steps of `step`."""

    k: Builder
    first: Value
    stop: Value
    step: int

    @property
    def count(self) -> Value:
        """Steps; none where no token is before `stop`."""
        behind = self.k.maximum(self.stop, self.first) - self.first
        return (behind + (self.step - 1)) // self.step


class QueryTile:
    """`count` queries of a KV head's group: all heads of a token, then those of the next token."""

    def __init__(self, k: Builder, first: Value, count: int, group: int, time: int) -> None:
        self._k, self._first, self._group, self._time = k, first, group, time
        self.count = count
        self.first_token = first // group
        self.last_token = k.minimum((first + (count - 1)) // group, time - 1)

    def row(self, number: Value) -> Row:
        """Row `number` of the tile; its token may lie beyond the last one."""
        at = self._first + number
        return Row(at // self._group, at % self._group)

    def keys(self, length: Value, window: int | None, step: int) -> Keys:
        """The tokens of a sequence that the tile's rows see; none where all of them are padding."""
        k = self._k
        stop = k.select(self.first_token < length, k.minimum(self.last_token + 1, length), 0)
        if window is None:
            return Keys(k, k.const(u32, 0), stop, step)
        return Keys(k, k.maximum(self.first_token + 1, window) - window, stop, step)

    def stage(self, q: Pointer, length: Value, factor: float, parts: int, threads: int) -> Pointer:
        """The parts of factor * q in shared memory, bf16 (parts * count, pitch as u8).

        `q`: (time, heads, head_dim) from the group's first head on. Padding becomes zeros.
        """
        k, head_dim = self._k, q.shape[2]
        pitch, chunks = odd_pitch(head_dim * bf16.size), head_dim // RUN
        shared = k.shared("queries", u8, (parts * self.count, pitch), dynamic=True)
        for base in range(0, self.count * chunks, threads):
            number, chunk = (k.thread_id + base) // chunks, (k.thread_id + base) % chunks
            inside = number < self.count if base + threads > self.count * chunks else None
            row = self.row(number)
            there = row.token < length if inside is None else (row.token < length) & inside
            place = q.at(row.token, row.head, chunk * RUN)
            values = [x * factor for x in place.load_run(0, RUN, where=there)]
            words = zip(split(k, values[:2], parts), split(k, values[2:], parts), strict=True)
            target = shared.at(number, chunk * (RUN * bf16.size)).cast(u32)
            for part, pair in enumerate(words):
                target.store(part * self.count * pitch // u32.size, pair, where=inside)
        return shared

    def ranges(self, keys: Keys, window: int | None) -> list[tuple[Value | int, Value, bool]]:
        """Ranges of steps: the first one, the one past the last, and whether rows see all of it.

        Those in the middle have tokens that every row sees. In front of them are some before a
        row's window, behind them some after a row's own token.
        """
        k, count = self._k, keys.count
        # tokens that all rows see end behind the first row's own
        whole = k.maximum(self.first_token + 1, keys.first) - keys.first
        inner_stop = k.minimum(whole // keys.step, count)
        if window is None:
            return [(0, inner_stop, True), (inner_stop, count, False)]
        before = k.maximum(self.last_token + 1, keys.first + window) - window - keys.first
        inner_start = k.minimum((before + (keys.step - 1)) // keys.step, inner_stop)
        return [
            (0, inner_start, False),
            (inner_start, inner_stop, True),
            (inner_stop, count, False),
        ]


class TokenRows:
    """Copies of the next rows of a head's keys or values, all parts one below the other.

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
        # tokens from this step's first one on; a row that is not among them becomes zeros
        self._left = k.var(s32, (keys.stop - keys.first).bits(s32))
        row_bytes = dim * bf16.size
        self._stride = heads * row_bytes
        self.pitch = odd_pitch(row_bytes)
        self.size = len(parts) * keys.step * self.pitch
        column = 0
        self._columns = []  # (rows at once, the thread's first row, target, offset of the source)
        while column < row_bytes // 16:
            width = min(1 << (row_bytes // 16 - column).bit_length() - 1, threads)
            row, chunk = k.thread_id // width, k.thread_id % width + column
            # of all sources alike: one register pair, which moves
            rows = (sequence * time + keys.first + row) * heads + head
            offset = k.var(u64, rows.to(u64) * row_bytes + (chunk * 16).to(u64))
            self._columns.append((threads // width, row, row * self.pitch + chunk * 16, offset))
            column += width

    def start(self, place: Pointer) -> None:
        """Starts the copies of the next step to `place`."""
        k, keys = self._k, self._keys
        for height, row, at, offset in self._columns:
            target, left = place.at(at), self._left - row.bits(s32)
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
    """The lane's place for `ldmatrix` of 16 rows of 32 bytes: operand A, or, transposed, two B."""
    return rows.at(k.lane_id % TILE_ROWS, k.lane_id // TILE_ROWS * 16)
