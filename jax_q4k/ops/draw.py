"""Draws tokens from logits with a temperature, top-k, top-p and min-p.

Nothing sorts the vocabulary. In plain JAX, a row's token is drawn from its most likely tokens. If a
token beyond them may win, the row's whole vocabulary is searched, in a loop over such rows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..native import calls
from ..sharding.layout import Layout
from .op import Op
from .top_k import argmax, order_keys, top_k
from .vmaps import by_rows

__all__ = ["DrawParameters", "draw"]

#: Lower temperatures count as 0.
LEAST_TEMPERATURE = 1e-30
#: Number of most likely tokens that a row is drawn from, unless another token may win.
CANDIDATES = 1024
#: Upper bound of the noise added to logits, whose largest value is -log(-log(1 - 2^-24)) = 16.64.
MOST_NOISE = 16.7


class DrawParameters(NamedTuple):
    """Parameters of rows, arrays (m,).

    Attributes:
      seed: uint32.
      temperature: float32; 0 takes the most likely token.
      top_k: int32, the number of most likely tokens to keep; 0 keeps all.
      top_p: float32, keeps the fewest tokens whose share of what top-k keeps is at least this.
      min_p: float32, keeps tokens at least this many times as likely as the most likely one.
      step: int32, number of tokens drawn before with this seed.
    """

    seed: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    step: jax.Array


def draw(logits: jax.Array, parameters: DrawParameters) -> jax.Array:
    """Draws a token, int32 (m,), for each row of logits (m, vocab), vocab at least 1.

    Logits of any float dtype are converted to float32. A row's token depends only on its own logits
    and parameters. The first NaN among them wins.
    """
    (tokens,) = op.bind(logits.astype(jnp.float32), parameters)
    return tokens


def reference(logits: jax.Array, parameters: DrawParameters) -> list[jax.Array]:
    """`draw` in plain JAX."""
    remaining, tokens, limit = filter_candidates(logits, parameters)
    scores = jax.vmap(_scores)(remaining, tokens, parameters)
    at = argmax(scores)[:, None]
    chosen, score = (jnp.take_along_axis(x, at, axis=1)[:, 0] for x in (tokens, scores))
    if tokens.shape[1] == logits.shape[1]:
        return [chosen]
    # False if the score is NaN: the first NaN among the logits wins.
    undecided = score <= _scaled(limit - remaining[:, 0], parameters) + MOST_NOISE

    def search(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Samples the first undecided row's token from its whole vocabulary."""
        undecided, chosen = state
        row = jnp.argmax(undecided)
        of_row = jax.tree.map(lambda x: jnp.asarray(x)[row], (logits, parameters))
        every_token = jnp.arange(logits.shape[1], dtype=jnp.int32)
        scores = _scores(filter_row(*of_row), every_token, of_row[1])
        return undecided.at[row].set(False), chosen.at[row].set(argmax(scores))

    return [jax.lax.while_loop(lambda state: state[0].any(), search, (undecided, chosen))[1]]


def native(logits: jax.Array, parameters: DrawParameters) -> list[jax.Array]:
    """`draw` by the native kernel."""
    return [calls.draw(logits, *parameters, least_temperature=LEAST_TEMPERATURE)]


def filter_candidates(
    logits: jax.Array, parameters: DrawParameters
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Applies top-k, top-p and min-p to the most likely tokens of logits float32 (batch, vocab).

    Returns logits float32 (batch, n), with -inf for dropped tokens; the tokens int32 (batch, n), in
    descending order of their logits, equal ones by id; and per row a limit, float32 (batch,), of
    the logits of other tokens that pass the filters: -inf if none does, +inf if the candidates do
    not determine what passes.
    """
    vocab, top_p = logits.shape[1], parameters.top_p
    count = min(CANDIDATES, vocab)
    values, tokens = top_k(logits, count)
    best, last = values[:, :1], values[:, -1]
    most = jnp.where(parameters.top_k == 0, vocab, jnp.minimum(parameters.top_k, vocab))
    in_top_k = jnp.arange(count, dtype=jnp.int32)[None] < most[:, None]
    sums = jnp.cumsum(jnp.where(in_top_k, jnp.exp(values - best), 0.0), axis=1)
    # Top-p is a share of the tokens that top-k keeps.
    total = jax.lax.cond(
        jnp.any((most == vocab) & (top_p < 1)),
        lambda: jnp.where(most == vocab, jnp.exp(logits - best).sum(axis=1), sums[:, -1]),
        lambda: sums[:, -1],
    )
    goal = jnp.where(top_p < 1, top_p * total, jnp.inf)
    before = jnp.pad(sums[:, :-1], ((0, 0), (1, 0)))
    least = best[:, 0] + jnp.log(parameters.min_p)
    dropped = ~in_top_k | (before >= goal[:, None]) | (values < least[:, None])
    complete = (most <= count) | (sums[:, -1] >= goal) | (last < least)
    unknown = (count < most) & (most < vocab) & (top_p < 1)  # `total` lacks some of the top k
    limit = jnp.where(unknown, jnp.inf, jnp.where(complete, -jnp.inf, last))
    greedy = parameters.temperature < LEAST_TEMPERATURE
    return jnp.where(dropped, -jnp.inf, values), tokens, jnp.where(greedy, -jnp.inf, limit)


def filter_row(logits: jax.Array, parameters: DrawParameters) -> jax.Array:
    """Applies top-k, top-p and min-p to one row's logits float32 (vocab,), which have no NaN.

    Returns the logits, with -inf for dropped tokens. Keeps the same tokens as a stable sort in
    exact arithmetic, except that sums of shares have a relative error of about 1e-7.
    """
    keys, best = order_keys(logits), jnp.max(logits)

    def keep(stage: jax.Array, kept: jax.Array) -> jax.Array:
        """Applies top-k in stage 0, top-p in stage 1; as a loop, since the search compiles long."""
        weights = jnp.where(kept, jnp.where(stage == 0, 1.0, jnp.exp(logits - best)), 0.0)
        count = parameters.top_k.astype(jnp.float32)
        goal = jnp.where(stage == 0, count, parameters.top_p * jnp.sum(weights))
        filters = jnp.where(stage == 0, parameters.top_k > 0, parameters.top_p < 1)
        return jax.lax.cond(filters, lambda: kept & _likeliest(keys, weights, goal), lambda: kept)

    kept = jax.lax.fori_loop(0, 2, keep, jnp.ones(logits.shape, bool))
    return jnp.where(kept & ~(logits < best + jnp.log(parameters.min_p)), logits, -jnp.inf)


def _likeliest(keys: jax.Array, weights: jax.Array, goal: jax.Array) -> jax.Array:
    """Returns a mask of the fewest tokens with the largest keys whose weights sum to `goal`.

    Keeps all if their weights sum to less. Of equal keys, keeps the first tokens; their weights
    must be equal, or 0 from some token on.
    """
    threshold = _threshold(keys, weights, goal)
    above, equal = keys > threshold, (keys == threshold).astype(jnp.float32)
    missing = goal - jnp.sum(jnp.where(above, weights, 0.0))
    count = jnp.maximum(jnp.ceil(missing / jnp.max(equal * weights)), 1.0)
    count = jnp.where(count < jnp.sum(equal), count, jnp.inf)  # infinite: all, without a search
    from_end = -jnp.arange(len(keys), dtype=jnp.int32)
    return above | (equal > 0) & (from_end >= _threshold(from_end, equal, count))


def _threshold(keys: jax.Array, weights: jax.Array, goal: jax.Array) -> jax.Array:
    """Returns the largest key for which the weights of all keys not below it sum to `goal`.

    Returns the smallest key if all weights sum to less. Bisection is exact, although sums round:
    they are added in the same order, so another weight never makes a sum smaller.
    """

    def reaches(key: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(keys >= key, weights, 0.0)) >= goal

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, without overflow
        enough = reaches(middle)
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    low = jnp.min(keys)
    high = jnp.where(reaches(low), jnp.max(keys), low)
    return jax.lax.while_loop(lambda bounds: bounds[0] < bounds[1], halve, (low, high))[0]


def _scaled(logits: jax.Array, parameters: DrawParameters) -> jax.Array:
    return logits / jnp.maximum(parameters.temperature, LEAST_TEMPERATURE)


def _scores(logits: jax.Array, tokens: jax.Array, parameters: DrawParameters) -> jax.Array:
    """Returns scores float32 (n,) of one row's tokens int32 (n,); the largest one's is sampled.

    Adds Gumbel noise to logits float32 (n,) (https://arxiv.org/abs/1411.0030). It depends on each
    token's id, not its index.
    """
    # Shifted so that a tiny temperature results in -inf, never in inf - inf.
    logits = logits - jnp.max(logits)
    scores = _scaled(logits, parameters) + _noise(parameters.seed, parameters.step, tokens)
    return jnp.where(parameters.temperature < LEAST_TEMPERATURE, logits, scores)


def _noise(seed: jax.Array, step: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns Gumbel noise float32 (n,) from the bits of `fold_in(fold_in(key, step), token)`."""
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step)
    bits = _threefry(jax.random.key_data(key), tokens.astype(jnp.uint32))
    # 23 bits plus half a bit, so that the result is neither 0 nor 1.
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2**-23
    return -jnp.log(-jnp.log(uniform))


def _threefry(key: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the first word of Threefry-2x32 of the words 0 and x uint32 (n,), for a key (2,).

    The function of https://doi.org/10.1145/2063384.2063405, with 20 rounds. On a CPU, jax.random
    computes the rounds in a loop over arrays, which takes three times as long.
    """
    keys = key[0], key[1], key[0] ^ key[1] ^ np.uint32(0x1BD11BDA)
    a, b = jnp.broadcast_to(keys[0], x.shape), x + keys[1]
    for group in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            a = a + b
            b = a ^ (b << np.uint32(rotation) | b >> np.uint32(32 - rotation))
        a, b = a + keys[(group + 1) % 3], b + keys[(group + 2) % 3] + np.uint32(group + 1)
    return a


#: The primitive.
op = Op(
    "q4k_draw",
    reference,
    shapes=lambda logits, _: [jax.ShapeDtypeStruct(logits.shape[:1], jnp.int32)],
    native=native,
    vmap=by_rows,
    layout=lambda *_: Layout(("m _", "m"), ("m",)),
    computed=lambda _: (),
)
