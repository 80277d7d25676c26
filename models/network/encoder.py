"""Defines the Encoder, whose tokens attend to all tokens of their text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from .adapters import adapted_by_row
from .decoder import Decoder
from .layers import Dense, LayerCache, Linear, Norm, Whole


class TaskAdapters(nnx.Module):
    """LoRA adapters of one matrix or table, one per task.

    Attributes:
      a: (tasks, rank, k), of a table (tasks, rank, rows).
      b: (tasks, n, rank).
      scale: float32 (tasks,), factor of b @ a.
    """

    def __init__(self, a: Array, b: Array, scale: Array) -> None:
        self.a, self.b, self.scale = nnx.Param(a), nnx.Param(b), nnx.Param(scale)

    def stacks(self) -> dict[str, Array]:
        """Returns a, b and scale as in `adapted_by_row`."""
        a, b, scale = (part.get_value() for part in (self.a, self.b, self.scale))
        stacked = a.reshape(-1, a.shape[2]), b.swapaxes(0, 1).reshape(b.shape[1], -1)
        return {"a": stacked[0], "b": stacked[1], "scale": jnp.repeat(scale, a.shape[1])}

    def of_table(self, ids: Array, tasks: Array) -> Array:
        """Returns what a table's adapters add, float32 (batch, time, n), to rows `ids`.

        tasks: int32 (batch,), number of the row's task from 1, or 0 for none.
        """
        a, b, scale = (part.get_value() for part in (self.a, self.b, self.scale))
        chosen = tasks[:, None] == 1 + jnp.arange(len(scale))
        between = jnp.where(chosen[:, :, None, None], a[:, :, ids].transpose(2, 0, 1, 3), 0)
        return jnp.einsum("btrs,t,tnr->bsn", between, scale, b, precision="highest")


@dataclasses.dataclass(eq=False, repr=False)
class Encoder(Decoder):
    """A decoder's layers with attention to all tokens, which compute vectors and no logits.

    Attributes:
      norm: None if the last layer normalizes its output.
      positions: (context_length, hidden_size), added to embeddings; None if absent.
      token_types: (token_types, hidden_size), added to embeddings; None if absent.
      embedding_norm: norm of the sum of embeddings; None if absent.
      dense: dense layers after pooling; None if absent.
      tasks: GGUF name of a matrix or table -> its adapters for tasks; None if absent.
    """

    norm: Norm | None  # type: ignore[assignment]
    positions: nnx.Variable[Array] | None = None
    token_types: nnx.Variable[Array] | None = None
    embedding_norm: Norm | None = None
    dense: Dense | None = None
    tasks: nnx.Dict[TaskAdapters] | None = None

    def encode(
        self, tokens: Array, lengths: Array, seconds: Array, tasks: Array | None = None
    ) -> Array:
        """Computes the vectors of all tokens.

        Args:
          tokens: int32 (batch, time), padded on the right with any id.
          lengths: int32 (batch,), tokens of each row before padding.
          seconds: int32 (batch,), position from which on tokens have the second token type, as
            documents after a query do.
          tasks: int32 (batch,), number of each row's task from 1, 0 for the base weights; None
            means 0. Used only if the encoder has adapters.

        Returns:
          Outputs of the last norm, (batch, time, hidden_size); unspecified for padding.
        """
        positions = jax.lax.broadcasted_iota(jnp.int32, tokens.shape, 1)
        types = (positions >= seconds[:, None]).astype(jnp.int32)
        x = self.embedded(tokens)
        if self.token_types is not None:
            table = self.token_types.get_value()
            if len(table) > 1:
                x = x + jnp.where(types[..., None] > 0, table[1], table[0])
            else:
                types = jnp.zeros_like(types)
                x = x + table[0]
        if tasks is None or self.tasks is None:
            return self._encoded(x, tokens, lengths, positions)
        for name, ids in (("token_embd.weight", tokens), ("token_types.weight", types)):
            if name in self.tasks:
                x = x + self.tasks[name].of_table(ids, tasks).astype(x.dtype)
        matrices = {
            name: adapters.stacks()
            for name, adapters in self.tasks.items()
            if name.startswith("blk.")
        }
        count = len(next(iter(self.tasks.values())).scale.get_value())
        copy = nnx.merge(*nnx.split(self))  # adapters replace modules
        adapted: Any = adapted_by_row(copy, matrices, tasks, count)
        return adapted._encoded(x, tokens, lengths, positions)

    def _encoded(self, x: Array, tokens: Array, lengths: Array, positions: Array) -> Array:
        """Computes the vectors of all tokens from the sums of their embeddings."""
        config = self.config
        if self.positions is not None:
            x = x + self.positions.get_value()[: tokens.shape[1]][None]
        x = x if self.embedding_norm is None else self.embedding_norm(x)

        def layer_cache(layer: int, **options: Any) -> LayerCache:
            rotates = not math.isinf(config.ropes[config.rope_of(layer)].factor)
            return Whole(lengths=lengths, rotates=rotates, alibi=config.kind.alibi, **options)

        x, _ = self._hidden(tokens, positions, layer_cache, tokens.shape[1], x)
        return x if self.norm is None else self.norm(x)

    @property
    def _following(self) -> Sequence[Linear]:
        return []

    def logits(self, x: Array) -> NoReturn:
        """Raises ValueError: an encoder has no logits."""
        raise ValueError(f"{self.config.architecture} is an encoder, which has no logits")
