"""Declares and copies a prompt's keys and values, from separate arrays or pages of a KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ...ptx import WARP, Builder, Pointer, Value, bf16, s32, u32
from ...ptx.types import Type
from ..pages import PageSizes
from ..vectors import FLOATS
from .context import PageTable
from .prompt_pages import HeadPages, PageRows
from .prompt_tiles import Before, Keys, TokenRows

Copies: TypeAlias = Sequence[TokenRows | PageRows]


@dataclass(frozen=True, kw_only=True)
class PromptPages(PageSizes):
    """Pages of a KV cache that hold the keys and values of prompt chunks.

    Attributes:
      dtype: of the pages; None means that there are no pages, but arrays of keys and values.
    """

    dtype: str | None = None
    num_pages: int = 0
    page_size: int = 0
    pages_per_sequence: int = 0


@dataclass(frozen=True)
class Source:
    """Copies of the keys and values that a thread block's queries attend to.

    Attributes:
      copies: two copies, one of keys and one of values, or a single copy of both.
      parts: number of parts of each key and value.
      complete: whether all tokens are in a page; None means yes.
    """

    copies: Copies
    parts: int
    complete: Value | None = None
    pages: HeadPages | None = None

    def known(self, first: Value, count: int, stop: Value) -> list[Value] | None:
        """Returns for each 16 of `count` tokens, from `first` on, whether their page exists.

        None means that there are no pages.
        """
        return None if self.pages is None else self.pages.known(first, count, stop)


@dataclass(frozen=True)
class Fresh:
    """Keys and values of full prompts, as parts.

    Each part of keys or values is bf16 (batch, time, num_kv_heads, head_dim or value_dim).
    """

    keys: Sequence[Pointer]
    values: Sequence[Pointer]
    type: Type = bf16

    @classmethod
    def declare(
        cls, k: Builder, shape: tuple[int, int, int], dims: tuple[int, int], parts: int
    ) -> Fresh:
        """Declares the kernel's operands: `parts` arrays (*shape, dim) for keys and for values.

        `dims`: head_dim and value_dim.
        """
        keys, values = (
            [k.input(f"{name}{i}", bf16, (*shape, dim)) for i in range(parts)]
            for name, dim in zip("kv", dims, strict=True)
        )
        return cls(keys, values)

    def before(self, k: Builder, sequence: Value, length: Value) -> None:
        """Returns None: no tokens of the sequence precede a full prompt."""

    def source(self, k: Builder, sequence: Value, head: Value, seen: Keys, warps: int) -> Source:
        """Returns the copies of one sequence and KV head."""
        # if they are equally wide, one address serves keys and values
        alike = self.keys[0].shape == self.values[0].shape
        together = [[*self.keys, *self.values]] if alike else [self.keys, self.values]
        copies = [TokenRows(k, each, sequence, head, seen, WARP * warps) for each in together]
        return Source(copies, len(self.keys))


@dataclass(frozen=True)
class Cached:
    """Keys and values of prompt chunks in pages of a KV cache, as parts.

    Attributes:
      rows: pages of each part of the keys, then of the values.
      tables: block tables, s32 (batch, pages_per_sequence).
      context_lens: s32 (batch,).
      named: see `HeadPages`.
    """

    rows: Sequence[Pointer]
    tables: Pointer
    context_lens: Pointer
    parts: int
    named: int | None

    @property
    def type(self) -> Type:
        return self.rows[0].type

    @classmethod
    def declare(
        cls,
        k: Builder,
        dtype: str,
        shape: tuple[int, int, int, int],
        tables: tuple[int, int],
        parts: int,
        named: int | None,
    ) -> Cached:
        """Declares the kernel's operands.

        `shape`: (num_pages, num_kv_heads, page_size, head_dim); `tables`: shape of the block
        tables.
        """
        rows = [
            k.input(f"{kind}_pages{part or ''}", FLOATS[dtype], shape)
            for kind in "kv"
            for part in range(parts)
        ]
        ids = k.input("block_tables", s32, tables)
        return cls(rows, ids, k.input("context_lens", s32, tables[:1]), parts, named)

    def before(self, k: Builder, sequence: Value, length: Value) -> Before:
        """Returns how many tokens of the sequence precede its last `length` tokens."""
        total = self.context_lens.at(sequence).load()
        count = k.maximum(total - length.bits(s32), 0).bits(u32)
        return Before(count, self.tables.shape[1] * self.rows[0].shape[2])

    def source(self, k: Builder, sequence: Value, head: Value, seen: Keys, warps: int) -> Source:
        """Returns the copies of one sequence and KV head.

        All threads of the thread block must reach it.
        """
        table = PageTable(self.tables, sequence, self.rows[0].shape[2])
        pages = HeadPages(k, self.rows, table, head, self.named)
        complete = pages.are_known(seen, warps)
        return Source([PageRows(pages, seen, WARP * warps)], self.parts, complete, pages)
