"""Sources of a prompt's keys and values: separate arrays, or pages of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ...ptx import WARP, Builder, Pointer, Value, bf16, s32, u32
from ...ptx.types import Type
from ..vectors import FLOATS
from .context import PageTable
from .prompt_pages import HeadPages, PageRows
from .prompt_tiles import Before, Keys, TokenRows

Copies: TypeAlias = Sequence[TokenRows | PageRows]


@dataclass(frozen=True)
class Source:
    """Keys and values of a block's tokens.

    Attributes:
      copies: copies of keys and of values, or of both together.
      parts: number of parts of each.
      complete: whether all tokens are in a page; None: yes.
    """

    copies: Copies
    parts: int
    complete: Value | None = None
    pages: HeadPages | None = None

    def known(self, first: Value, count: int, stop: Value) -> list[Value] | None:
        """Returns for each 16 of `count` tokens from `first` on whether they are in a page."""
        return None if self.pages is None else self.pages.known(first, count, stop)


@dataclass(frozen=True)
class Fresh:
    """Parts of keys and of values: bf16 (batch, time, num_kv_heads, head_dim or value_dim)."""

    keys: Sequence[Pointer]
    values: Sequence[Pointer]
    type: Type = bf16

    @classmethod
    def declare(
        cls, k: Builder, shape: tuple[int, int, int], dims: tuple[int, int], parts: int
    ) -> Fresh:
        """Declares the kernel's operands, of `shape` and one of `dims` as the last axis."""
        keys, values = (
            [k.input(f"{name}{i}", bf16, (*shape, dim)) for i in range(parts)]
            for name, dim in zip("kv", dims, strict=True)
        )
        return cls(keys, values)

    def before(self, k: Builder, sequence: Value, length: Value) -> None:
        """Returns None: no tokens precede these."""

    def source(self, k: Builder, sequence: Value, head: Value, seen: Keys, warps: int) -> Source:
        """Returns the tokens of one sequence and KV head."""
        # if they are equally wide, one address serves keys and values
        alike = self.keys[0].shape == self.values[0].shape
        together = [[*self.keys, *self.values]] if alike else [self.keys, self.values]
        copies = [TokenRows(k, each, sequence, head, seen, WARP * warps) for each in together]
        return Source(copies, len(self.keys))


@dataclass(frozen=True)
class Cached:
    """Parts of pages of keys, then of values.

    Attributes:
      tables: s32 (batch, pages_per_sequence).
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
        """Declares the kernel's operands; `shape`: of pages, `tables`: of the block tables."""
        rows = [
            k.input(f"{kind}_pages{part or ''}", FLOATS[dtype], shape)
            for kind in "kv"
            for part in range(parts)
        ]
        ids = k.input("block_tables", s32, tables)
        return cls(rows, ids, k.input("context_lens", s32, tables[:1]), parts, named)

    def before(self, k: Builder, sequence: Value, length: Value) -> Before:
        """Returns the tokens of the sequence before its last `length` tokens."""
        total = self.context_lens.at(sequence).load()
        count = k.maximum(total - length.bits(s32), 0).bits(u32)
        return Before(count, self.tables.shape[1] * self.rows[0].shape[2])

    def source(self, k: Builder, sequence: Value, head: Value, seen: Keys, warps: int) -> Source:
        """Returns the tokens of one sequence and KV head.

        All of the block's threads must reach it.
        """
        table = PageTable(self.tables, sequence, self.rows[0].shape[2])
        pages = HeadPages(k, self.rows, table, head, self.named)
        complete = pages.are_known(seen, warps)
        return Source([PageRows(pages, seen, WARP * warps)], self.parts, complete, pages)
