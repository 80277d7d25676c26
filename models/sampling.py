"""Ways to continue a prompt: `Sampling`, and the choice of the next token from logits in jit.

A filter that a `Sampling` leaves switched off costs nothing: what its fields say decides the graph,
so greedy decoding is an argmax, and a sort over the vocabulary happens only for top-p without
top-k.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_q4k as jq

from .stopping import StopStrings


def _field(default: Any, help: str, *, static: bool = True, **metadata: Any) -> Any:
    """A field, its text in the command line's help; `static`: whether programs depend on it."""
    return dataclasses.field(default=default, metadata=metadata | {"help": help, "static": static})


@dataclasses.dataclass(frozen=True)
class Sampling:
    """A way to continue a prompt; validated and hashable.

    Filters apply in llama.cpp's order: repetition penalty, top-k, top-p, min-p, then temperature,
    so which tokens stay does not depend on the temperature.

    Attributes:
      max_new_tokens: at least 1.
      temperature: 0 to 100; 0, and anything below 1e-5, takes the most likely token, whatever the
        filters.
      top_k: keeps this many of the most likely tokens; 0 keeps all.
      top_p: above 0, up to 1: keeps the fewest most likely tokens whose probabilities sum to this
        at least.
      min_p: 0 to 1: keeps tokens at least this fraction as likely as the most likely one.
      repetition_penalty: 0.01 to 100: divides positive logits of tokens seen before, prompt
        included, and multiplies negative ones.
      seed: 0 to 2^32 - 1; the rows of a batch draw differently.
      stop: strings that end a text, or one; they need a tokenizer. Kept as a tuple.
      ignore_end: does not end at the tokenizer's end tokens.
    """

    max_new_tokens: int = _field(64, "default: 64", static=False, short="-n", metavar="N")
    temperature: float = _field(0.0, "0, the default, takes the likeliest token", range=(0, 100))
    top_k: int = _field(0, "0, the default, keeps all tokens", range=(0, 2**31 - 1), metavar="K")
    top_p: float = _field(1.0, "default: 1, all tokens", range=(0, 1), open_low=True, metavar="P")
    min_p: float = _field(0.0, "default: 0, all tokens", range=(0, 1), metavar="P")
    repetition_penalty: float = _field(1.0, "default: 1, none", range=(0.01, 100), metavar="X")
    seed: int = _field(0, "default: 0", static=False, range=(0, 2**32 - 1))
    stop: str | Sequence[str] = _field(
        (), "end here; may be repeated", static=False, metavar="TEXT"
    )
    ignore_end: bool = _field(False, "go on beyond the model's end token", static=False)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if "range" in field.metadata:
                object.__setattr__(self, field.name, _in_range(field, getattr(self, field.name)))
        given = self.max_new_tokens
        try:
            object.__setattr__(self, "max_new_tokens", operator.index(given))
        except TypeError:
            raise TypeError(f"max_new_tokens={given!r} must be an integer") from None
        if given < 1:
            raise ValueError(f"max_new_tokens={given} must be at least 1")
        object.__setattr__(self, "stop", StopStrings(self.stop).stops)

    @property
    def static(self) -> tuple[float, ...]:
        """The fields that programs depend on: the same ones serve where these are equal."""
        fields = dataclasses.fields(self)
        return tuple(getattr(self, field.name) for field in fields if field.metadata["static"])

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def needs_seen(self) -> bool:
        """True where `sample` needs the mask of tokens seen before."""
        return self.repetition_penalty != 1

    def key(self) -> jax.Array:
        """The random key of `seed`.

        It is not for use inside jit: the seed is not part of what is compiled.
        """
        return _key(jax.device_put(np.uint32(self.seed)))


@jax.jit
def _key(seed: jax.Array) -> jax.Array:
    """One program: an eager `jax.random.key` is several, with constants on the host."""
    return jax.random.key(seed)


def _in_range(field: dataclasses.Field[Any], value: Any) -> float:
    kind = int if field.type == "int" else float
    (low, high), open_low = field.metadata["range"], field.metadata.get("open_low", False)
    bracket = "(" if open_low else "["
    message = f"{field.name}={value!r} must be {kind.__name__} in {bracket}{low}, {high}]"
    try:
        if isinstance(value, bool | str):
            raise TypeError
        number = operator.index(value) if kind is int else float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(message) from None
    # Written so that NaN fails.
    if not (low < number <= high if open_low else low <= number <= high):
        raise ValueError(message)
    return number


def seen_tokens(tokens: jax.Array, lengths: jax.Array, vocab_size: int) -> jax.Array:
    """Mask of the tokens in right-padded prompts: bool (batch, vocab).

    tokens: int32 (batch, time); lengths: int32 (batch,), what follows is padding and not counted.
    """
    rows, steps = jnp.arange(tokens.shape[0])[:, None], jnp.arange(tokens.shape[1])[None, :]
    # Padding goes to an index out of range, which mode="drop" leaves out.
    index = jnp.where(steps < lengths[:, None], tokens, vocab_size)
    return jnp.zeros((tokens.shape[0], vocab_size), bool).at[rows, index].set(True, mode="drop")


def mark_seen(seen: jax.Array, tokens: jax.Array) -> jax.Array:
    """`seen` (batch, vocab) with one more token, int32 (batch,), in each row."""
    return seen.at[jnp.arange(seen.shape[0]), tokens].set(True)


def sample(
    logits: jax.Array, key: jax.Array | None, sampling: Sampling, seen: jax.Array | None = None
) -> jax.Array:
    """Next tokens, int32 (batch,).

    logits: float (batch, vocab). key: a random key, a new one for each step, or (batch,) of them,
    one for each row; greedy ignores it, and takes None.
    seen: bool or counts (batch, vocab), needed if `sampling.needs_seen`; see `seen_tokens` and
    `mark_seen`. Raises ValueError at trace time where shapes do not fit.
    """
    if logits.ndim != 2 or 0 in logits.shape:
        raise ValueError(f"logits of shape {logits.shape} must be (batch, vocab), neither empty")
    logits = logits.astype(jnp.float32)
    if sampling.needs_seen:
        logits = _penalize(logits, seen, sampling.repetition_penalty)
    if sampling.greedy:
        return jq.argmax(logits)
    logits, indices = filter_logits(logits, sampling)
    # Shifted so that a tiny temperature gives -inf, never inf - inf.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / sampling.temperature
    if key is None:
        raise ValueError("key is None; only greedy sampling needs no random key")
    draw = jax.random.categorical if key.ndim == 0 else jax.vmap(jax.random.categorical)
    choice = draw(key, logits).astype(jnp.int32)
    return (
        choice if indices is None else jnp.take_along_axis(indices, choice[:, None], axis=-1)[:, 0]
    )


def row_keys(key: jax.Array, rows: jax.Array, steps: jax.Array) -> jax.Array:
    """The random keys of rows' draws, each by its row and by how many it has made: (n,)."""
    return jax.vmap(lambda row, step: jax.random.fold_in(jax.random.fold_in(key, row), step))(
        rows, steps
    )


def filter_logits(logits: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array | None]:
    """Top-k, top-p and min-p of logits float32 (batch, vocab): dropped ones become -inf.

    Returns (logits, None), or, where they had to be ordered, the most likely first, float32 (batch,
    k), with their tokens, int32 (batch, k). Of equal logits the lower token counts as the more
    likely.
    """
    vocab = logits.shape[-1]
    indices = None
    if 0 < sampling.top_k < vocab:
        logits, indices = jq.top_k(logits, sampling.top_k)
    elif sampling.top_p < 1:
        tokens = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        negated, indices = jax.lax.sort((-logits, tokens), num_keys=1, is_stable=True)
        logits = -negated
    if sampling.top_p < 1:
        probabilities = jax.nn.softmax(logits, axis=-1)
        before = jnp.cumsum(probabilities[:, :-1], axis=-1)  # of all tokens that are more likely
        keep = jnp.pad(before < sampling.top_p, ((0, 0), (1, 0)), constant_values=True)
        logits = jnp.where(keep, logits, -jnp.inf)
    if sampling.min_p > 0:
        threshold = jnp.max(logits, axis=-1, keepdims=True) + math.log(sampling.min_p)
        logits = jnp.where(logits < threshold, -jnp.inf, logits)
    return logits, indices


def _penalize(logits: jax.Array, seen: jax.Array | None, penalty: float) -> jax.Array:
    if seen is None:
        raise ValueError(f"repetition_penalty={penalty} needs the tokens seen so far: pass seen")
    if seen.shape != logits.shape:
        raise ValueError(
            f"seen of shape {seen.shape} must be (batch, vocab) as logits, {logits.shape}"
        )
    # llama.cpp's rule (CTRL, Keskar et al. 2019, with the sign respected).
    penalized = jnp.where(logits > 0, logits / penalty, logits * penalty)
    return jnp.where(seen.astype(bool), penalized, logits)
