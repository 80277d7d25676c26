"""Where recurrent layers have what they keep: states of sequences, for whole texts or one token.

A causal convolution sees a token and the last ones before it: `taps` (channels, width), of which
the last is the token's own. A state keeps the last `width` inputs as a ring (batch, width,
channels), token t's in slot t % width.
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from ...kv_cache.shapes import State

Memory: TypeAlias = "Chunk | Step"


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Tokens of whole rows, which follow those of a state; differentiable where there is none.

    Vectors of tokens are (batch, time, n), or (batch * time, n).

    Attributes:
      lengths: int32 (batch,), tokens that are not padding.
      first: int32 (batch,), the position of each row's first token; None: 0.
      state: (): nothing is kept.
      trial: the state stays that before the tokens, since not all of them may stay.
      inputs: of a trial: what the state after some of the tokens is computed from.
    """

    lengths: Array
    first: Array | None = None
    state: State = ()
    trial: bool = False
    inputs: tuple[Array, ...] = ()

    def rows(self, x: Array) -> Array:
        """Vectors of tokens as (batch, time, n)."""
        return x.reshape(self.lengths.shape[0], -1, x.shape[-1])

    def convolved(self, x: Array, taps: Array) -> tuple[Array, Array | None]:
        """The convolution of x (batch, time, channels), float32; and the ring with x."""
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
        """A state's matrices before the first token."""
        if self.first is None:
            return jnp.zeros_like(matrices)
        return jnp.where((self.first == 0)[:, None, None, None], 0.0, matrices)

    def real(self, time: int) -> Array:
        """True of tokens that are not padding, bool (batch, time)."""
        return _counted(time) < self.lengths[:, None]

    def kept(self, after: State, *inputs: Array) -> Chunk:
        """With a state after the tokens, or a trial's inputs; rows without tokens keep theirs."""
        if self.trial:
            return dataclasses.replace(self, inputs=inputs)
        some = self.lengths > 0

        def chosen(new: Array, old: Array) -> Array:
            return jnp.where(some.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        return dataclasses.replace(self, state=tuple(map(chosen, after, self.state)))

    def shortened(self, lengths: Array) -> Chunk:
        """Of a trial, of whose tokens the first `lengths` (batch,) stay."""
        return dataclasses.replace(self, lengths=lengths, trial=False, inputs=())

    def _first(self) -> Array:
        return jnp.zeros_like(self.lengths) if self.first is None else self.first

    def ring(self, x: Array, width: int) -> Array:
        """The last inputs of each row, of x (batch, time, channels) or those before them."""
        first, slots = self._first()[:, None], _counted(width)
        last = first + self.lengths[:, None] - 1
        at = last - (last - slots) % width  # the last position of each slot
        new = jnp.clip(at - first, 0, x.shape[1] - 1)
        given = jnp.take_along_axis(x, new[..., None], axis=1)
        return jnp.where((at >= first)[..., None], given, self.state[0])


@dataclasses.dataclass(frozen=True)
class Step:
    """One token of each sequence.

    Attributes:
      positions: int32 (batch,), tokens before it; -1: this sequence has no token, and its state
        stays as it is.
    """

    positions: Array
    state: State

    def convolved(self, x: Array, taps: Array) -> tuple[Array, Array]:
        """The convolution of x (batch, channels), float32; and the ring with x."""
        width, positions = taps.shape[1], self.positions
        new = (_counted(width) == positions[:, None] % width) & (positions >= 0)[:, None]
        ring = jnp.where(new[..., None], x.astype(jnp.float32)[:, None], self.state[0])
        at = positions[:, None] - (width - 1) + _counted(width)
        seen = jnp.take_along_axis(ring, (at % width)[..., None], axis=1)
        seen = jnp.where(at[..., None] < 0, 0.0, seen)
        return jnp.sum(seen * taps.T[None], axis=1), ring

    def kept(self, after: State, *_: Array) -> Step:
        """With a state after the token."""
        return dataclasses.replace(self, state=after)


def _counted(count: int) -> Array:
    """0, 1, ...: int32 (1, count)."""
    return jnp.arange(count, dtype=jnp.int32)[None]


def unit_length(x: Array, eps: float) -> Array:
    """x / sqrt(sum(x^2) + eps) along the last axis."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + eps)
