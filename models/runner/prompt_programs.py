"""Programs on the hidden states of prompts: log-probabilities of tokens, embeddings, divergence.

`PrefillPieces` returns these hidden states. The LM head runs on a few tokens at a time, because the
logits of a whole piece would take more memory than everything else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_q4k as jq

from ..sampling.sampler import Logprobs
from ..support.exportable import exportable
from .programs import Network, Program, Weights, replicated

#: Tokens whose logits are in memory at a time.
CPU_CHUNK, GPU_CHUNK = 32, 256

#: Less likely tokens of the base model do not count for a divergence, as in llama.cpp.
LEAST_LOG_P = -16.0


@exportable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenScores:
    """Log-probabilities of given tokens.

    Attributes:
      logprobs: those of the tokens, and of the most likely tokens in their places.
      ranks: int32, number of tokens that are more likely, plus 1.
    """

    logprobs: Logprobs
    ranks: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptProgram(Program):
    """Base of programs on the hidden states float32 (rows, time, hidden_size) of pieces.

    Attributes:
      rows, time: sizes of the prefill program.
    """

    rows: int
    time: int

    def _vectors(self, x: jax.Array) -> jax.Array:
        """Replicates the rows, which may be sharded."""
        placement = self.network.placement
        return x if placement is None else placement.replicate_rows(x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreTokens(PromptProgram):
    """Computes log-probabilities of the tokens that follow some of a step's tokens.

    (weights, vectors, tokens int32 (2, rows * time), count int32 ()) -> TokenScores of (rows *
    time,). `tokens` has the place of each hidden state, row * time + step, and the token that
    follows; only the first `count` are computed.

    Attributes:
      top: number of most likely tokens.
    """

    top: int

    def __call__(
        self, weights: Weights, vectors: jax.Array, tokens: jax.Array, count: jax.Array
    ) -> TokenScores:
        decoder = self._decoder(weights)
        flat = self._vectors(vectors).reshape(self.rows * self.time, -1)

        def scores(tokens: jax.Array) -> TokenScores:
            at, token = tokens[:, 0], tokens[:, 1]
            logits = replicated(decoder.logits(flat[at])).astype(jnp.float32)
            shifted, norm = _normalized(logits)
            chosen = jnp.take_along_axis(shifted, token[:, None], axis=1)
            ranks = 1 + jnp.sum(shifted > chosen, axis=1, dtype=jnp.int32)
            likeliest, ids = shifted[:, :0], jnp.zeros((len(at), 0), jnp.int32)
            if self.top:
                likeliest, ids = jq.top_k(shifted, self._top)
                if (placement := self.network.placement) is not None:
                    ids = placement.replicate(ids)  # their type lacks the mesh
            return TokenScores(Logprobs((chosen - norm)[:, 0], ids, likeliest - norm), ranks)

        return _in_chunks(self.network, scores, tokens.T, count)

    @property
    def _top(self) -> int:
        return min(self.top, self.network.config.vocab_size)

    def results(self, arguments: tuple[Any, ...]) -> TokenScores:
        """Returns shapes and dtypes of the results."""
        count = self.rows * self.time

        def array(dtype: Any, *shape: int) -> Any:
            return jax.ShapeDtypeStruct((count, *shape), dtype)

        top = array(jnp.int32, self._top), array(jnp.float32, self._top)
        return TokenScores(Logprobs(array(jnp.float32), *top), array(jnp.int32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolTokens(PromptProgram):
    """Adds up the outputs of the final norm of each row's tokens, each times its share.

    (weights, vectors, shares float32 (rows, time)) -> float32 (rows, hidden_size).
    """

    def __call__(self, weights: Weights, vectors: jax.Array, shares: jax.Array) -> jax.Array:
        x = self._decoder(weights).norm(self._vectors(vectors)).astype(jnp.float32)
        shares = shares[..., None]
        return jnp.sum(x * shares, axis=1, where=shares != 0)  # padding may be infinite

    def results(self, arguments: tuple[Any, ...]) -> Any:
        """Returns shapes and dtypes of the results."""
        return jax.ShapeDtypeStruct((self.rows, self.network.config.hidden_size), jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadTokens(PromptProgram):
    """Returns the hidden states of each token, on one device: (weights, vectors) -> float32.

    Attributes:
      normed: whether they are outputs of the final norm, instead of its inputs.
    """

    normed: bool

    def __call__(self, weights: Weights, vectors: jax.Array) -> jax.Array:
        x = self._vectors(vectors)
        x = self._decoder(weights).norm(x) if self.normed else x
        return x.astype(jnp.float32)

    def results(self, arguments: tuple[Any, ...]) -> Any:
        """Returns shapes and dtypes of the results."""
        shape = self.rows, self.time, self.network.config.hidden_size
        return jax.ShapeDtypeStruct(shape, jnp.float32)


@exportable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Compared:
    """Predictions of two models for each token, (count,) each.

    Attributes:
      divergence: float32, Kullback-Leibler divergence from the base model's distribution, in nats.
      nats, base_nats: float32, -log p of the token that follows, by the model and by the base.
      agrees: bool, whether their most likely tokens are the same.
    """

    divergence: jax.Array
    nats: jax.Array
    base_nats: jax.Array
    agrees: jax.Array


@dataclasses.dataclass(frozen=True)
class TokenLogits(Program):
    """Computes logits of hidden states: (weights, vectors (n, hidden_size)) -> float32 (n, vocab).

    The vectors are inputs of the final norm.
    """

    def __call__(self, weights: Weights, vectors: jax.Array) -> jax.Array:
        decoder = self._decoder(weights)

        def logits(x: jax.Array) -> jax.Array:
            return decoder.logits(x).astype(jnp.float32)

        found: jax.Array = _in_chunks(self.network, logits, vectors, jnp.int32(len(vectors)))
        return found

    def results(self, arguments: tuple[Any, ...]) -> Any:
        """Returns shapes and dtypes of the results."""
        shape = len(arguments[-1]), self.network.config.vocab_size
        return jax.ShapeDtypeStruct(shape, jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareTokens(Program):
    """Compares two models' distributions of the tokens that follow.

    ((weights, base weights), vectors (n, hidden_size), base, tokens int32 (n,)) -> Compared. The
    vectors are inputs of the final norm, and so is `base`, (n, the base's hidden_size).

    Attributes:
      base: network of the base model, with the same vocabulary. None means that `base` is a file's
        log-probabilities instead: codes uint16 (n, vocab), and float32 (n, 2), each row's scale
        and least log-probability.
    """

    base: Network | None

    def __call__(
        self, weights: Weights, vectors: jax.Array, base: Any, tokens: jax.Array
    ) -> Compared:
        decoder = self._decoder(weights)
        base_decoder = None if self.base is None else self.base.merge(weights[1])

        def compared(part: tuple[Any, ...]) -> Compared:
            x, of_base, token = part
            log_p, nats, best = _predicted(decoder.logits(x).astype(jnp.float32), token)
            if base_decoder is not None:
                logits = base_decoder.logits(of_base).astype(jnp.float32)
                base_log_p, base_nats, base_best = _predicted(logits, token)
            else:
                codes, ranges = of_base
                base_log_p = codes.astype(jnp.float32) * ranges[:, :1] + ranges[:, 1:]
                base_nats, base_best = _nats(base_log_p, token), jnp.argmax(base_log_p, axis=1)
            terms = jnp.exp(base_log_p) * (base_log_p - log_p)
            divergence = jnp.sum(terms, axis=1, where=base_log_p > LEAST_LOG_P)
            return Compared(divergence, nats, base_nats, best == base_best)

        parts = vectors, base, tokens
        return _in_chunks(self.network, compared, parts, jnp.int32(len(tokens)))

    def results(self, arguments: tuple[Any, ...]) -> Compared:
        """Returns shapes and dtypes of the results."""
        value: Any = jax.ShapeDtypeStruct(arguments[-1].shape, jnp.float32)
        agrees: Any = jax.ShapeDtypeStruct(arguments[-1].shape, jnp.bool)
        return Compared(value, value, value, agrees)


def _normalized(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns logits minus their maximum, and the logarithm of the sum of their exponentials."""
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    return shifted, jnp.log(jnp.sum(jnp.exp(shifted), axis=-1, keepdims=True))


def _predicted(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns log-probabilities (n, vocab_size), -log p of `tokens`, and the most likely tokens."""
    shifted, norm = _normalized(logits)
    log_p = shifted - norm
    return log_p, _nats(log_p, tokens), jnp.argmax(logits, axis=1)


def _nats(log_p: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns -log p of `tokens` (n,), given log-probabilities (n, vocab_size)."""
    return -jnp.take_along_axis(log_p, tokens[:, None], axis=1)[:, 0]


def _in_chunks(
    network: Network, function: Callable[[Any], Any], arrays: Any, count: jax.Array
) -> Any:
    """Maps the first `count` rows of arrays, some at a time; the other rows of the results are 0.

    function: maps a tree of arrays (chunk, ...) to another one; rows must not depend on each other.
    """
    chunk = GPU_CHUNK if network.on_gpu else CPU_CHUNK
    length = len(jax.tree.leaves(arrays)[0])
    padding = -length % chunk

    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, padding), *[(0, 0)] * (x.ndim - 1)])

    def part(x: jax.Array, at: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, at, chunk)

    arrays = jax.tree.map(padded, arrays)
    shapes = jax.eval_shape(function, jax.tree.map(lambda x: x[:chunk], arrays))
    nothing = jax.tree.map(lambda x: jnp.zeros((length + padding, *x.shape[1:]), x.dtype), shapes)

    def step(i: jax.Array, results: Any) -> Any:
        new = function(jax.tree.map(lambda x: part(x, i * chunk), arrays))
        return jax.tree.map(
            lambda all, x: jax.lax.dynamic_update_slice_in_dim(all, x, i * chunk, axis=0),
            results,
            new,
        )

    count = (count + chunk - 1) // chunk
    results = jax.lax.fori_loop(0, count, step, nothing)
    return jax.tree.map(lambda x: x[:length], results)
