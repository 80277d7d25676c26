"""Recurrent and convolution state of a layer, for a chunk of tokens or one token.

A causal convolution combines a token with the last ones before it. Its weights are `taps`
(channels, width); the last is the current token's. The state keeps the last `width` inputs in a
ring buffer (batch, width, channels), with token t in slot t % width.
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from ...kv_cache.shapes import State

RecurrentCache: TypeAlias = "Chunk | Step"


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A layer's recurrent state and the chunk of tokens per row that updates it.

    Differentiable without a state. Hidden states are (batch, time, n) or (batch * time, n).

    Attributes:
      lengths: int32 (batch,), tokens of each row that are not padding.
      first: int32 (batch,), position of each row's first token; None means 0.
      state: recurrent state; () means that no state is kept.
      trial: whether the tokens are drafts; `state` does not change until some are accepted.
      inputs: only of a trial, the layer's inputs, from which to compute the state after accepted
        tokens.
    """

    lengths: Array
    first: Array | None = None
    state: State = ()
    trial: bool = False
    inputs: tuple[Array, ...] = ()

    def rows(self, x: Array) -> Array:
        """Reshapes hidden states to (batch, time, n)."""
        return x.reshape(self.lengths.shape[0], -1, x.shape[-1])

    def convolved(self, x: Array, taps: Array) -> tuple[Array, Array | None]:
        """Convolves x (batch, time, channels) in float32; also returns the updated ring buffer."""
        x = x.astype(jnp.float32)
        width, time = taps.shape[1], x.shape[1]
        if self.first is None:
            padded = jnp.pad(x, [(0, 0), (width - 1, 0), (0, 0)])
        else:
            at = self.first[:, None] - (width - 1) + _counted(width - 1)
            ring = jnp.take_along_axis(self.state[0], (at % width)[..., None], axis=1)
            padded = jnp.concatenate([jnp.where(at[..., None] < 0, 0.0, ring), x], axis=1)
        y = jnp.zeros_like(x)
        for i in range(width):
            y = y + padded[:, i : i + time] * taps[None, None, :, i]
        return y, self.ring(x, width) if self.state else None

    def before(self, matrices: Array) -> Array:
        """Returns the state matrices before the first token, zero where a sequence begins."""
        if self.first is None:
            return jnp.zeros_like(matrices)
        return jnp.where((self.first == 0)[:, None, None, None], 0.0, matrices)

    def real(self, time: int) -> Array:
        """Returns the mask (batch, time) of tokens that are not padding."""
        return _counted(time) < self.lengths[:, None]

    def with_state(self, after: State, *inputs: Array) -> Chunk:
        """Returns the chunk with its new state `after`; a trial stores `inputs` instead.

        Rows without tokens keep their old state.
        """
        if self.trial:
            return dataclasses.replace(self, inputs=inputs)
        some = self.lengths > 0

        def chosen(new: Array, old: Array) -> Array:
            return jnp.where(some.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        return dataclasses.replace(self, state=tuple(map(chosen, after, self.state)))

    def shortened(self, lengths: Array) -> Chunk:
        """Returns the trial as a normal chunk of its first `lengths` (batch,) tokens."""
        return dataclasses.replace(self, lengths=lengths, trial=False, inputs=())

    def _first(self) -> Array:
        return jnp.zeros_like(self.lengths) if self.first is None else self.first

    def ring(self, x: Array, width: int) -> Array:
        """Returns the ring buffer after x (batch, time, channels): the last inputs of each row."""
        first, slots = self._first()[:, None], _counted(width)
        last = first + self.lengths[:, None] - 1
        at = last - (last - slots) % width  # the latest position stored in each slot
        new = jnp.clip(at - first, 0, x.shape[1] - 1)
        newest = jnp.take_along_axis(x, new[..., None], axis=1)
        return jnp.where((at >= first)[..., None], newest, self.state[0])


@dataclasses.dataclass(frozen=True)
class Step:
    """A layer's recurrent state and the single token per sequence that updates it.

    Attributes:
      positions: int32 (batch,), position of each token; -1 means that the sequence has no token and
        keeps its state.
    """

    positions: Array
    state: State

    def convolved(self, x: Array, taps: Array) -> tuple[Array, Array]:
        """Convolves x (batch, channels) in float32; also returns the updated ring buffer."""
        width, positions = taps.shape[1], self.positions
        new = (_counted(width) == positions[:, None] % width) & (positions >= 0)[:, None]
        ring = jnp.where(new[..., None], x.astype(jnp.float32)[:, None], self.state[0])
        at = positions[:, None] - (width - 1) + _counted(width)
        seen = jnp.take_along_axis(ring, (at % width)[..., None], axis=1)
        seen = jnp.where(at[..., None] < 0, 0.0, seen)
        return jnp.sum(seen * taps.T[None], axis=1), ring

    def with_state(self, after: State, *_: Array) -> Step:
        """Returns the step with its new state `after`."""
        return dataclasses.replace(self, state=after)


def _counted(count: int) -> Array:
    """Returns 0, 1, ..., as int32 (1, count)."""
    return jnp.arange(count, dtype=jnp.int32)[None]


def unit_length(x: Array, eps: float) -> Array:
    """Returns x / sqrt(sum(x^2) + eps) along the last axis."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + eps)
