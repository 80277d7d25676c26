"""Defines EngineState: the device arrays of an engine, donated from step to step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ..config import Config
from ..kv_cache import PagedCache
from ..kv_cache.shapes import (
    PAGE_SIZE,
    Pages,
    State,
    heads_of,
    page_kinds,
    page_shapes,
    state_shapes,
)
from ..sampling.penalties import UNCOUNTED
from ..sharding.placement import Placement
from ..support.exportable import exportable
from .speculative.drafts import Draft, DraftModel, NextTokens


class Sizes(NamedTuple):
    """Sizes of an engine's arrays, which all its programs depend on.

    Attributes:
      slots: sequences that can run at a time, over all groups.
      kinds: kinds of layers that have block tables: None for full attention, or a window.
      pages: pages of each kind in each group.
      width: logical pages of a sequence.
      snapshots: snapshots of recurrent states in each group.
      context: maximum tokens of a sequence; it selects rope frequencies.
      penalizes: whether tokens are counted, for penalties.
      history: whether tokens are stored, for DRY, user functions and prompt lookup.
      groups: shards of the slots, each with pages of its own.
    """

    slots: int
    kinds: tuple[int | None, ...]
    pages: tuple[int, ...]
    width: int
    snapshots: int
    context: int
    penalizes: bool = False
    history: bool = False
    groups: int = 1


@exportable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Past:
    """Tokens of the slots' prompts and answers, as sampling stages read them.

    Attributes:
      seen: int32 (slots, vocab_size), occurrences of each token, and UNCOUNTED for those in the
        part of a prompt that is not counted; None unless penalties need it.
      history: int32 (slots, width * page size), the tokens; None unless DRY, user functions or
        prompt lookup need it.
    """

    seen: jax.Array | None = None
    history: jax.Array | None = None

    def with_prompts(
        self,
        slots: jax.Array,
        tokens: jax.Array,
        first: jax.Array,
        counts: jax.Array,
        uncounted: jax.Array,
    ) -> Past:
        """Adds pieces of prompts; a piece at position 0 replaces the slot's earlier sequence.

        slots: int32 (rows,). tokens: int32 (rows, time), of which the first `counts` (rows,) are
        added at positions from `first` (rows,) on. uncounted: int32 (rows,), number of first tokens
        of the sequence that are not counted in `seen`.
        """
        steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        valid = steps < counts[:, None]
        seen, history = self.seen, self.history
        if seen is not None:
            begins = jnp.where((first == 0) & (counts > 0), slots, len(seen))
            seen = seen.at[begins].set(0, mode="drop")
            counted, nowhere = first[:, None] + steps >= uncounted[:, None], seen.shape[1]
            # Uncounted tokens precede all counted ones, so that no count is lost.
            ids = jnp.where(valid & ~counted, tokens, nowhere)
            seen = seen.at[slots[:, None], ids].set(UNCOUNTED, mode="drop")
            ids = jnp.where(valid & counted, tokens, nowhere)
            seen = seen.at[slots[:, None], ids].add(1, mode="drop")
        if history is not None:
            at = jnp.where(valid, first[:, None] + steps, history.shape[1])
            history = history.at[slots[:, None], at].set(tokens, mode="drop")
        return Past(seen, history)

    def with_token(self, slots: jax.Array, tokens: jax.Array, lengths: jax.Array) -> Past:
        """Adds one token per row, int32 (rows,), at position `lengths` (rows,).

        slots: int32 (rows,); those out of range are ignored.
        """
        seen, history = self.seen, self.history
        if seen is not None:
            seen = seen.at[slots, tokens].add(1, mode="drop")
        if history is not None:
            history = history.at[slots, lengths].set(tokens, mode="drop")
        return Past(seen, history)


@exportable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftState:
    """State of speculative decoding on the device.

    Attributes:
      credit: float32 scalar, what drafts added to the credit of `SpeculationState` so far.
      pages, states: pages and recurrent states of the draft model; its pages have the ids of full
        attention. Empty without a draft model.
      vector: (slots, hidden_size), last output of a multi-token-prediction layer; None without one.
    """

    credit: jax.Array
    pages: list[Pages]
    states: list[State]
    vector: jax.Array | None = None


@exportable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EngineState:
    """Pages, block tables and what else an engine stores on the device.

    Attributes:
      pages: KV pages per layer, shared by all sequences; page ids count from a group's first page.
      tables: int32 (slots, width) for each kind of layers, page ids of each slot's sequence.
      states: recurrent state per layer, (slots, ...).
      snapshots: copies of recurrent states, like `states` but (places, ...).
      token: int32 (slots,), the last sampled token, not stored in the pages yet.
      ended: bool (slots,), whether that token is an end token.
      past: tokens of prompts and answers, if sampling reads them.
      draft: state of speculative decoding; None without it.
    """

    pages: list[Pages]
    tables: list[jax.Array]
    states: list[State]
    snapshots: list[State]
    token: jax.Array
    ended: jax.Array
    past: Past
    draft: DraftState | None = None

    @classmethod
    def create(
        cls,
        config: Config,
        sizes: Sizes,
        dtype: Any,
        array: Callable[[tuple[int, ...], Any, NamedSharding | None], Any],
        placement: Placement | None = None,
        draft: Draft | None = None,
    ) -> EngineState:
        """Creates the state of an engine without sequences.

        dtype: dtype of the pages. array: maps (shape, dtype, sharding) to zeros, or to their
        `jax.ShapeDtypeStruct`. draft: kind of drafts; None means no speculative decoding.
        """
        counts = dict(zip(sizes.kinds, sizes.pages, strict=True))
        whole = None if placement is None else placement.replicated
        over_rows = placement and NamedSharding(placement.mesh, PartitionSpec(placement.data))

        def pages(config: Config, *, is_draft: bool = False) -> list[Pages]:
            found: list[Pages] = []
            for layer in range(config.num_layers):
                count = counts.get(None if is_draft else config.window_of(layer), 0) * sizes.groups
                heads, over = heads_of(config, layer, None if is_draft else placement)
                shapes = page_shapes(config, layer, count, PAGE_SIZE, dtype, heads)
                found.append(tuple(array(shape, kind, over) for shape, kind in shapes))
            return found

        def states(config: Config, count: int) -> list[State]:
            layers = range(config.num_layers) if count else ()
            shapes = [state_shapes(config, layer, count) for layer in layers]
            return [tuple(array(shape, jnp.float32, over_rows) for shape in of) for of in shapes]

        def integers(*shape: int) -> Any:
            return array(shape, jnp.int32, whole)

        slots = sizes.slots
        drafting = None
        if draft is not None:
            other, vector = config_of(draft), None
            if isinstance(draft, NextTokens):
                vector = array((slots, config.hidden_size), jnp.float32, whole)
            drafting = DraftState(
                array((), jnp.float32, whole),
                [] if other is None else pages(other, is_draft=True),
                [] if other is None else states(other, slots),
                vector,
            )
        return cls(
            pages=pages(config),
            tables=[integers(slots, sizes.width) for _ in counts],
            states=states(config, slots),
            snapshots=states(config, sizes.snapshots * sizes.groups),
            token=integers(slots),
            ended=array((slots,), bool, whole),
            past=Past(
                integers(slots, config.vocab_size) if sizes.penalizes else None,
                integers(slots, sizes.width * PAGE_SIZE) if sizes.history else None,
            ),
            draft=drafting,
        )

    def view(
        self,
        config: Config,
        sizes: Sizes,
        slots: jax.Array | None,
        lengths: jax.Array,
        placement: Placement | None = None,
    ) -> PagedCache:
        """Returns the cache of some slots' sequences, for the decoder.

        slots: int32 (rows,); None means all slots in order. lengths: int32 (rows,), tokens stored
        of each sequence. placement: of the model; None means one device.
        """
        tables = self._tables(sizes, slots)
        any_table = next(iter(tables.values()))  # for kinds without layers
        return PagedCache(
            pages=self.pages,
            block_tables=tables.get(None, any_table),
            context_lens=lengths,
            window_tables=[tables.get(window, any_table) for window in config.windows],
            states=taken_states(self.states, slots, placement),
            shared_context=sizes.context,
        )

    def draft_view(
        self, config: Config, sizes: Sizes, slots: jax.Array | None, lengths: jax.Array
    ) -> PagedCache:
        """Returns the cache of the draft model, with this `config`, like `view`."""
        assert self.draft is not None
        table = self._tables(sizes, slots)[None]
        return PagedCache(
            pages=self.draft.pages,
            block_tables=table,
            context_lens=lengths,
            window_tables=[table for _ in config.windows],
            states=taken(self.draft.states, slots),
            shared_context=sizes.width * PAGE_SIZE,
        )

    def stored(
        self,
        cache: PagedCache,
        slots: jax.Array | None,
        drafts: PagedCache | None = None,
        vector: jax.Array | None = None,
        placement: Placement | None = None,
    ) -> EngineState:
        """Returns the state with the pages and recurrent states of a view after a pass.

        drafts, vector: the draft model's view, and the rows of `DraftState.vector`, if any.
        placement: of the model; None means one device.
        """
        draft = self.draft
        if draft is not None and drafts is not None:
            states = _put(draft.states, drafts.states, slots)
            draft = dataclasses.replace(draft, pages=drafts.pages, states=states)
        if draft is not None and vector is not None:
            draft = dataclasses.replace(draft, vector=_put(draft.vector, vector, slots))
        states = put_states(self.states, cache.states, slots, placement)
        return dataclasses.replace(self, pages=cache.pages, states=states, draft=draft)

    def _tables(self, sizes: Sizes, slots: jax.Array | None) -> dict[int | None, jax.Array]:
        tables = taken(self.tables, slots)
        if sizes.groups > 1:
            tables = [table.reshape(sizes.groups, -1, sizes.width) for table in tables]
        return dict(zip(sizes.kinds, tables, strict=True))


def config_of(draft: Draft) -> Config | None:
    """Returns the configuration of the draft model or layer; None for prompt lookup."""
    if isinstance(draft, DraftModel):
        return draft.model.config
    return draft.config if isinstance(draft, NextTokens) else None


def kinds_of(config: Config, draft: Draft | None) -> tuple[int | None, ...]:
    """Returns the kinds of layers that an engine has block tables for.

    All layers of a draft model use the tables of full attention.
    """
    kinds = page_kinds(config)
    needs_full = draft is not None and config_of(draft) is not None
    return kinds if None in kinds or not needs_full else (None, *kinds)


def taken_states(states: Any, rows: jax.Array | None, placement: Placement | None) -> Any:
    """Returns rows of recurrent states, whose rows may be sharded; None means all in order."""
    if rows is None or placement is None or not placement.explicit:
        return taken(states, rows)
    found = taken(jax.tree.map(placement.replicate_rows, states), rows)
    return jax.tree.map(placement.shard_rows, found)


def put_states(states: Any, new: Any, rows: jax.Array | None, placement: Placement | None) -> Any:
    """Returns recurrent states with some rows replaced; those out of range are not."""
    if rows is None or placement is None or not placement.explicit:
        return _put(states, new, rows)
    states, new = (jax.tree.map(placement.replicate_rows, tree) for tree in (states, new))
    return jax.tree.map(placement.shard_rows, _put(states, new, rows))


def copied_states(
    source: Any, target: Any, sources: jax.Array, targets: jax.Array, placement: Placement | None
) -> Any:
    """Returns `target` states with rows that are copied from `source` states, in each group.

    sources, targets: int32 (groups * n,), numbered within the group; targets out of range are
    ignored.
    """

    def copied(source: Any, target: Any, sources: jax.Array, targets: jax.Array) -> Any:
        return _put(target, taken(source, sources), targets)

    if placement is None or placement.data is None:
        return copied(source, target, sources, targets)
    rows = PartitionSpec(placement.data)
    in_groups = jax.shard_map(copied, mesh=placement.mesh, in_specs=rows, out_specs=rows)
    return in_groups(source, target, placement.shard_rows(sources), placement.shard_rows(targets))


def taken(arrays: Any, slots: jax.Array | None) -> Any:
    """Returns the rows of `slots` (rows,) of arrays (slots, ...); None means all in order."""
    if slots is None:
        return arrays
    return jax.tree.map(lambda x: jnp.take(x, slots, axis=0, mode="clip"), arrays)


def _put(arrays: Any, rows: Any, slots: jax.Array | None) -> Any:
    """Returns arrays (slots, ...) with the rows of `slots` replaced; those out of range are not."""
    if slots is None:
        return rows
    return jax.tree.map(lambda all, new: all.at[slots].set(new, mode="drop"), arrays, rows)
