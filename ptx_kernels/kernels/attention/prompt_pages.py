"""Loads keys and values of a prompt chunk from pages of a cache."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from ...ptx import WARP, Builder, Pointer, Value, Var, s32, u8, u32
from ..gemm.pipeline import odd_pitch
from .context import PageTable
from .prompt_tiles import Keys
from .step_rows import STEP

ELEMENT = 2  # bytes per element of a key or value


@dataclass(frozen=True)
class HeadPages:
    """Pages of keys and values of one sequence and KV head.

    Attributes:
      rows: parts of keys, then of values, bf16 or f16 (num_pages, num_kv_heads, page_size,
        head_dim).
      named: if set, `rows` has its pages in the order of the block tables, and an id of the tables
        is valid if it is below `named`. None means that the ids are indices of the pages.
    """

    k: Builder
    rows: Sequence[Pointer]
    table: PageTable
    head: Value
    named: int | None = None

    @property
    def num_pages(self) -> int:
        return self.rows[0].shape[0]

    def id(self, number: Value, where: Value | None = None) -> Value:
        """Returns the id (u32) of the sequence's page `number`, an index into `rows`.

        The id is `num_pages` or more if the page does not exist.
        """
        found = self.table.entry(number, where).bits(u32)
        if self.named is None:
            return found
        assert self.table.entries is not None
        index = self.table.sequence * self.table.entries.shape[1] + number
        return self.k.select(found < self.named, index, self.num_pages)

    def are_known(self, keys: Keys, warps: int) -> Value:
        """Returns, in all threads, whether all pages of tokens `keys` exist; emits a barrier."""
        k, size = self.k, self.table.page_size
        flags = k.shared("flags", u32, (warps,), dynamic=True)
        missing = k.var(u32, 0)
        pages = keys.first // size, (keys.stop + (size - 1)) // size
        with k.loop(pages[0] + k.thread_id, pages[1], WARP * warps) as page:
            missing.set(k.select(self.id(page) < self.num_pages, missing, 1))
        found = k.warp_any(missing != 0)
        flags.at(k.warp_id).store(0, k.select(found, k.const(u32, 1), 0), where=k.lane_id == 0)
        k.barrier()
        return reduce(operator.or_, flags.load_run(0, warps)) == 0

    def known(self, first: Value, count: int, stop: Value) -> list[Value]:
        """Returns for each 16 of `count` tokens, from `first` on, whether their page exists."""
        tokens = [first + at for at in range(0, count, STEP)]
        ids = [self.id(token // self.table.page_size, token < stop) for token in tokens]
        return [page < self.num_pages for page in ids]


@dataclass(frozen=True)
class _Columns:
    """Adjacent columns of a step's rows, of which each thread copies 16 bytes per row.

    Attributes:
      height: rows copied at once.
      row: the thread's first row.
      block: the first of the 16 rows, with the thread's row among them, that share a page.
      target: byte offset in shared memory.
      starts: source address in page 0, for each array of `HeadPages.rows`.
      pages: ids of the pages of the next step, for `each` rows.
    """

    height: int
    row: Value
    block: Value | int
    target: Value
    starts: Sequence[Pointer]
    pages: Sequence[Var]
    each: int


class PageRows:
    """Copies the next step's keys and values of a head from KV pages into shared memory.

    Like `TokenRows`, but for pages. Values are stored after the keys. Tokens outside `keys`, or
    without a page, become zeros. The ids of a step's pages are loaded one step in advance.
    """

    def __init__(self, pages: HeadPages, keys: Keys, threads: int) -> None:
        k = pages.k
        self._row_bytes = row_bytes = pages.rows[0].shape[3] * ELEMENT
        self._k, self._keys, self._pages = k, keys, pages
        self._at = k.var(u32, keys.first)
        self.pitch = odd_pitch(row_bytes)
        self.size = len(pages.rows) * keys.step * self.pitch
        self._columns: list[_Columns] = []
        column = 0
        while column < row_bytes // 16:
            width = min(1 << (row_bytes // 16 - column).bit_length() - 1, threads)
            row, chunk = k.thread_id // width, k.thread_id % width + column
            height = threads // width
            far = height > STEP  # its rows are in different pages from thread to thread
            within = row % STEP if far else row
            each = max(height, STEP)
            self._columns.append(
                _Columns(
                    height,
                    row,
                    row // STEP * STEP if far else 0,
                    row * self.pitch + chunk * 16,
                    [
                        rows.at(0, pages.head, within, chunk * (16 // ELEMENT))
                        for rows in pages.rows
                    ],
                    [k.var(u32) for _ in range(0, keys.step, each)],
                    each,
                )
            )
            column += width
        self._ask()

    def _ask(self) -> None:
        """Loads the ids of the next step's pages."""
        for columns in self._columns:
            for i, page in enumerate(columns.pages):
                token = self._at + columns.block + i * columns.each
                number = token // self._pages.table.page_size
                page.set(self._pages.id(number, token < self._keys.stop))

    def start(self, address: Pointer) -> None:
        """Emits the asynchronous copies of the next step's rows to shared memory at `address`."""
        k, keys = self._k, self._keys
        left = (keys.stop - self._at).bits(s32)
        before = None if keys.oldest is None else (keys.oldest - self._at).bits(s32)
        for columns in self._columns:
            row = columns.row.bits(s32)
            for i, page in enumerate(columns.pages):
                slot = self._pages.table.slot_of(self._at + columns.block + i * columns.each)
                sources = [
                    start.reshape(*rows.shape).at(page, 0, slot).cast(u8)
                    for start, rows in zip(columns.starts, self._pages.rows, strict=True)
                ]
                rest = k.select(page < self._pages.num_pages, left - row, 0)
                for r in range(
                    i * columns.each, min((i + 1) * columns.each, keys.step), columns.height
                ):
                    seen = rest > r
                    if before is not None:
                        seen = seen & (before - row <= r)
                    size = k.select(seen, k.const(u32, 16), 0)
                    inside = None
                    if columns.height > keys.step - r:
                        inside = columns.row < keys.step - r
                    for part, source in enumerate(sources):
                        to = address.at(columns.target).at((part * keys.step + r) * self.pitch)
                        origin = source.at((r - i * columns.each) * self._row_bytes)
                        k.cp_async(to, origin, 16, size=size, where=inside)
        self._at += keys.step
        self._ask()
