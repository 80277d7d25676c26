"""Copies a prompt's tokens to shared memory in double-buffered rounds; computes their factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...ptx import Builder, KernelError, Pointer, Value, all_of, f32, u32
from ..activation import LOG2_E
from ..vectors import RUN, dot
from .columns import Token, lane_runs

_IDLE = 0x80000000  # bits of -0.0, the beta of padding


@dataclass(frozen=True)
class Rows:
    """One operand of a sequence and head in global memory: `count` f32 per token.

    `first`: the first token's floats; each next token is `stride` floats later.
    """

    first: Pointer
    stride: int
    count: int

    def of(self, token: Value) -> Pointer:
        return self.first.reshape(1, self.stride).at(token)


@dataclass(frozen=True)
class StagedToken:
    """Pointers to one token in shared memory: its query, key, values, and gates (g, beta).

    `Rounds.prepare` replaces the gates by factors: decay, beta, scale decay, scale k^T q.
    """

    query: Pointer
    key: Pointer
    values: Pointer
    gates: Pointer

    def token(self) -> Token:
        """Loads the token's factors."""
        decay, beta, answer, echo = self.gates.load_run(0, RUN)
        return Token(decay, beta, decay, answer, echo, writes=beta.bits(u32) != _IDLE)


class Rounds:
    """Double buffer in shared memory for rounds of `tokens` tokens.

    Each warp fetches and prepares its own tokens, and each lane uses what it fetched itself, so no
    barrier is needed before the factors are computed.

    Attributes:
      count: number of rounds.
    """

    def __init__(
        self,
        k: Builder,
        *,
        vectors: Sequence[Rows],
        gates: Sequence[Rows],
        time: int,
        tokens: int,
        warps: int,
    ) -> None:
        """Declares shared memory for two rounds.

        `vectors` are query, key and values; `gates` are g and beta.
        """
        if tokens % warps:
            raise KernelError(f"tokens={tokens} must be a multiple of warps={warps}")
        self._k, self._vectors, self._gates = k, vectors, gates
        self._time, self._tokens, self._warps = time, tokens, warps
        self.count = -(-time // tokens)
        pitch = sum(rows.count for rows in vectors) + RUN
        self._memory = k.shared("tokens", f32, (2, tokens, pitch))

    def token(self, round: Value, slot: Value) -> Value:
        """Returns the index in the prompt of the token in slot `slot` of a round."""
        return round * self._tokens + slot

    def inside(self, token: Value) -> Value | None:
        """Returns whether a token is inside the sequence; None means that all are."""
        return token < self._time if self._time % self._tokens else None

    def staged(self, round: Value, slot: Value) -> StagedToken:
        base = self._memory.at(round & 1, slot)
        query, key, values = (rows.count for rows in self._vectors)
        ends = query, query + key, query + key + values
        return StagedToken(base, *(base.at(end) for end in ends))

    def fetch(self, round: Value) -> None:
        """Starts this warp's copies of a round's tokens; tokens past the sequence become zeros."""
        k = self._k
        for slot in self._slots():
            token, staged = self.token(round, slot), self.staged(round, slot)
            inside = self.inside(token)
            run, word = (
                None if inside is None else k.select(inside, k.const(u32, nbytes), 0)
                for nbytes in (4 * RUN, 4)
            )
            targets = (staged.query, staged.key, staged.values)
            for rows, target in zip(self._vectors, targets, strict=True):
                for first, valid in lane_runs(k, rows.count):
                    source = rows.of(token).at(first)
                    k.cp_async(target.at(first), source, 4 * RUN, size=run, where=valid)
            for i, rows in enumerate(self._gates):
                target = staged.gates.at(i)
                k.cp_async(target, rows.of(token), 4, size=word, where=k.lane_id == 0)
        k.cp_async_commit()

    def prepare(self, round: Value, scale: float) -> None:
        """Computes the factors of a round's tokens, once their copies have arrived.

        A token with beta = 0 and g = 0 is padding: its key and values become zeros, and its beta -0
        as a mark.
        """
        k, none = self._k, self._k.const(f32, 0.0)
        for slot in self._slots():
            staged = self.staged(round, slot)
            g, beta = staged.gates.load_run(0, 2, where=k.lane_id == 0)
            idle = k.select((g == 0.0) & (beta == 0.0), k.const(u32, 1), 0)
            idle = k.shuffle(idle, 0) != 0
            share = none
            for first, valid in lane_runs(k, self._vectors[1].count):
                queries, keys = (
                    vector.at(first).load_run(0, RUN, where=valid)
                    for vector in (staged.query, staged.key)
                )
                keys = [k.select(idle, none, key) for key in keys]
                share = share + dot(k, queries, keys)
            for rows, vector in zip(self._vectors[1:], (staged.key, staged.values), strict=True):
                for first, valid in lane_runs(k, rows.count):
                    vector.at(first).store_run(0, [none] * RUN, where=all_of(idle, valid))
            decay = k.exp2(g * LOG2_E)
            beta = k.select(idle, k.const(f32, -0.0), beta)
            factors = [decay, beta, decay * scale, k.warp_sum(share) * scale]
            staged.gates.store_run(0, factors, where=k.lane_id == 0)

    def _slots(self) -> list[Value]:
        """Returns the slots of a round that this warp fetches."""
        return [self._k.warp_id + start for start in range(0, self._tokens, self._warps)]
