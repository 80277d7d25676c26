"""Emits loads, stores and updates of a gated delta net's recurrent state held in registers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...ptx import WARP, Builder, KernelError, LanePartition, Pointer, Value, Var, f32
from ..vectors import RUN, dot


@dataclass(frozen=True)
class StateConfig:
    """Tiling of a v head's state, f32 (key_dim, value_dim), over the lanes of a thread block.

    Attributes:
      warps: per thread block.
      lanes: lanes that share a state column, each with an equal number of its rows; a power of two.
      columns: adjacent state columns per lane: 1, 2 or 4. A lane loads and stores this many at
        once.
    """

    warps: int = 8
    lanes: int = 4
    columns: int = 2

    @property
    def block_columns(self) -> int:
        """State columns that a thread block holds at once."""
        return self.warps * WARP // self.lanes * self.columns


@dataclass(frozen=True)
class Token:
    """Factors (f32) with which one token updates the state, for unnormalized keys and queries.

    Let S be the state, k the key's unit vector and q the query's; the attributes are factors of
    keys and queries as they are stored.

    Attributes:
      decay: factor of the state, exp(g).
      beta: fraction of the value that is written.
      recall: factor of S^T keys that gives decay S^T k.
      answer: factor of S^T queries that gives scale decay S^T q.
      echo: scale k^T q.
      write: factor of keys that gives k; None means 1.
      writes: whether the state changes at all, the same for all lanes of a warp; None means yes.
    """

    decay: Value
    beta: Value
    recall: Value
    answer: Value
    echo: Value
    write: Value | None = None
    writes: Value | None = None


class StateColumns:
    """A thread block's columns of one head's state in registers, `config.columns` per lane.

    The rows of a lane are runs of up to four, interleaved over the lanes of a column. The lanes of
    a warp then read a vector over the rows without bank conflicts.

    Attributes:
      row: the lane's first row (u32).
      column: the lane's first column in the thread block (u32).
      leads: whether the lane is the first of those that share its columns.
    """

    def __init__(self, k: Builder, key_dim: int, config: StateConfig) -> None:
        lanes, width = config.lanes, config.columns
        self._k, self._width = k, width
        self._run = math.gcd(key_dim // lanes, RUN)
        self._starts = range(0, key_dim, lanes * self._run)
        self._sums = LanePartition(k, 2 * width, lanes)
        lane = k.lane_id % lanes
        self.row, self.column = lane * self._run, k.thread_id // lanes * width
        self.leads = lane == 0

    def load(self, address: Pointer, value_dim: int) -> list[list[Var]]:
        """Loads the lane's columns as variables, (rows, columns).

        `address`: address of their first row.
        """
        rows = [address.load_run(row * value_dim, self._width) for row in self._rows()]
        return [[self._k.var(f32, value) for value in values] for values in rows]

    def store(self, address: Pointer, value_dim: int, state: Sequence[Sequence[Value]]) -> None:
        """Stores the lane's columns; `address`: address of their first row, as for `load`."""
        for row, values in zip(self._rows(), state, strict=True):
            address.store_run(row * value_dim, values)

    def _rows(self) -> list[int]:
        """Returns the indices of the lane's rows, relative to its first row."""
        return [start + i for start in self._starts for i in range(self._run)]

    def vector(self, vector: Pointer) -> list[Value]:
        """Loads the elements of a vector f32 (key_dim,) at the lane's rows."""
        mine = vector.at(self.row)
        return [x for start in self._starts for x in mine.load_run(start, self._run)]

    def absorb(
        self,
        state: Sequence[Sequence[Var]],
        keys: Sequence[Value],
        queries: Sequence[Value],
        values: Sequence[Value],
        token: Token,
    ) -> list[Value]:
        """Emits the state's update by one token; returns the token's outputs in the lane's columns.

        d = beta (v - decay S^T k) and o = scale (decay S^T q + (k^T q) d) depend only on the
        previous state, so one reduction over lanes serves both.

        Args:
          keys, queries: the token's key and query, at the lane's rows.
          values: the token's value, at the lane's columns.
        """
        k, columns = self._k, [list(column) for column in zip(*state, strict=True)]
        shares = [dot(k, column, rows) for rows in (keys, queries) for column in columns]
        totals = self._sums.all_gather(self._sums.reduce_scatter(shares))
        outputs, written = [], []
        for value, recalled, asked in zip(
            values, totals[: self._width], totals[self._width :], strict=True
        ):
            change = k.fma(-token.recall, recalled, value) * token.beta
            outputs.append(k.fma(token.echo, change, token.answer * asked))
            written.append(change if token.write is None else change * token.write)
        with contextlib.nullcontext() if token.writes is None else k.when(token.writes):
            for column, change in zip(columns, written, strict=True):
                for element, key in zip(column, keys, strict=True):
                    element.set(k.fma(key, change, element * token.decay))
        return outputs


def lane_runs(k: Builder, count: int) -> list[tuple[Value, Value | None]]:
    """Returns a lane's runs if a warp divides `count` floats: (first float, whether it is inside).

    None instead of a condition means that the run is always inside the vector.
    """
    span, found = RUN * WARP, []
    for start in range(0, count, span):
        first = k.lane_id * RUN + start if start else k.lane_id * RUN
        found.append((first, first < count if start + span > count else None))
    return found


def check_sizes(
    num_k_heads: int, num_v_heads: int, key_dim: int, value_dim: int, config: StateConfig
) -> None:
    """Raises KernelError unless the tiling is valid, fits the heads, and v heads share k heads."""
    lanes, width = config.lanes, config.columns
    if lanes & (lanes - 1) or not 2 <= lanes <= WARP or width not in (1, 2, 4):
        raise KernelError(
            f"lanes={lanes} must be a power of two from 2 to {WARP}, and columns={width} 1, 2 or 4"
        )
    if num_v_heads % num_k_heads:
        raise KernelError(
            f"num_v_heads={num_v_heads} must be a multiple of num_k_heads={num_k_heads}"
        )
    if key_dim % RUN or key_dim % lanes:
        raise KernelError(f"key_dim={key_dim} must be a multiple of {RUN} and of lanes={lanes}")
    count = config.block_columns
    if value_dim % count or count % RUN:
        raise KernelError(
            f"the columns={count} of a block must divide value_dim={value_dim} and be a multiple of"
            f" {RUN}"
        )


def k_head_of(head: Value, num_k_heads: int, num_v_heads: int, tiled: bool) -> Value:
    """Returns the k head that v head `head` uses.

    The v heads of a k head are adjacent or, if `tiled`, num_k_heads apart.
    """
    return head % num_k_heads if tiled else head // (num_v_heads // num_k_heads)
