"""Computes text embeddings: pooled hidden states after a decoder's final norm."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..config.pooling import POOLINGS, normalizes, pooling_of
from ..runner.model import Model

#: Tokens per batch, padding included; a longer text is a batch of its own.
TOKENS = 4096
MAX_ROWS = 64


def embed(
    model: Model,
    texts: Any,
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Any:
    """Computes embeddings of texts, float32 (rows, hidden_size), from the final norm's output.

    Embeddings do not depend on the other texts of a batch, except for rounding. BOS and EOS are
    added as the model's file asks, and are pooled like other tokens.

    Args:
      texts: a text, a sequence of token ids, or a list of either kind with any lengths.
      pooling: "mean" over all tokens; "last", the last token, which attends to the whole
        text; "cls", the first token; or "none", one vector per token. None means the model's own
        pooling (`pooling_type`, or a folder's 1_Pooling), by default "mean".
      normalize: divides vectors by their length, except those of length 0. None means what the
        model's folder says (modules.json).
      progress: called with (texts done, number of texts).

    Returns:
      An array (rows, hidden_size), or (hidden_size,) for a single text; with pooling="none" a list
      of arrays (tokens, hidden_size), or one of them.

    Raises:
      ValueError: no texts, a text without tokens or beyond the context length, an id outside the
        vocabulary, a string but no tokenizer, an unknown pooling, or an unsupported one in the
        model's file. TypeError: texts of another type.
        All are raised before any computation.
    """
    if pooling is None:
        pooling = pooling_of(model.metadata, model.config.architecture)
    if normalize is None:
        normalize = normalizes(model.metadata)
    if pooling not in POOLINGS:
        raise ValueError(f"pooling={pooling!r} must be one of {', '.join(POOLINGS)}")
    rows, single = _rows(model, texts)
    found: list[Any] = [None] * len(rows)
    done = 0
    for batch in _batches(model, rows):
        vectors = _of_batch(model, [rows[i] for i in batch], pooling, normalize)
        for i, vector in zip(batch, vectors, strict=True):
            found[i] = vector
        done += len(batch)
        if progress is not None:
            progress(done, len(rows))
    if single:
        return found[0]
    return found if pooling == "none" else np.stack(found)


def numbers(vector: np.ndarray) -> list[Any]:
    """Returns the elements of a vector or matrix, rounded to the precision of float32."""
    if vector.ndim > 1:
        return [numbers(row) for row in vector]
    return [float(f"{x:.9g}") for x in vector.tolist()]


def _rows(model: Model, texts: Any) -> tuple[list[np.ndarray], bool]:
    """Tokenizes texts: returns int32 ids per text, and whether `texts` was a single one."""
    if not isinstance(texts, Sequence | np.ndarray | jax.Array) or isinstance(texts, bytes):
        rule = "it must be a text, ids, or a list of either"
        raise TypeError(f"texts is of type {type(texts).__name__}; {rule}")
    if not isinstance(texts, str) and len(texts) == 0:
        raise ValueError("texts is empty; at least one text is needed")
    single = isinstance(texts, str) or (not isinstance(texts[0], str) and np.ndim(texts[0]) == 0)
    prompts = [texts] if single else list(texts)
    names = ["texts"] if single else [f"texts[{i}]" for i in range(len(prompts))]
    return [_ids(model, text, name) for text, name in zip(prompts, names, strict=True)], single


def _ids(model: Model, text: Any, name: str) -> np.ndarray:
    if isinstance(text, str):
        if model.tokenizer is None:
            raise ValueError(f"{name} is a text, but the model has no tokenizer: pass token ids")
        text = np.array(model.tokenizer.encode(text), np.int32)
    ids = np.asarray(text)
    if ids.ndim != 1 or ids.size == 0:
        found = f"{name} has shape {ids.shape}"
        raise ValueError(f"{found}; it must be a text or ids (time,), of at least one token")
    model.check_ids(name, ids)
    context = model.config.context_length
    if len(ids) > context:
        raise ValueError(f"{name} has {len(ids)} tokens; the context length is {context}")
    return ids.astype(np.int32)


def _batches(model: Model, rows: list[np.ndarray]) -> Iterator[list[int]]:
    """Yields batches of texts as lists of indices, by descending number of tokens."""
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    while order:
        count = min(max(TOKENS // model.padded_length(len(rows[order[0]])), 1), MAX_ROWS)
        yield order[:count]
        order = order[count:]


def _of_batch(
    model: Model, rows: list[np.ndarray], pooling: str, normalize: bool
) -> list[np.ndarray]:
    # The number of rows is padded to a power of two, to limit compilations.
    batch = model.padded_batch(1 << (len(rows) - 1).bit_length())
    tokens = np.zeros((batch, model.padded_length(max(map(len, rows)))), np.int32)
    lengths = np.ones(batch, np.int32)
    for i, ids in enumerate(rows):
        tokens[i, : len(ids)], lengths[i] = ids, len(ids)
    with model.on_devices():
        found = model.vectors(tokens, lengths)
        vectors = np.asarray(_pooled(found, model.put(lengths), pooling, normalize))
    if pooling == "none":
        return [vectors[i, : len(ids)] for i, ids in enumerate(rows)]
    return list(vectors[: len(rows)])


@functools.partial(jax.jit, static_argnames=("pooling", "normalize"))
def _pooled(x: jax.Array, lengths: jax.Array, pooling: str, normalize: bool) -> jax.Array:
    """Pools x (batch, time, hidden_size) to (batch, hidden_size); "none" keeps all tokens.

    lengths: (batch,), tokens of each row before padding.
    """
    x = x.astype(jnp.float32)
    if pooling == "mean":
        counts = jax.lax.broadcasted_iota(jnp.int32, x.shape[:2], 1) < lengths[:, None]
        total = jnp.sum(x, axis=1, where=counts[..., None])
        x = total / lengths[:, None].astype(jnp.float32)
    elif pooling == "last":
        x = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    elif pooling == "cls":
        x = x[:, 0]
    if normalize:
        size = jnp.linalg.norm(x, axis=-1, keepdims=True)
        x = x / jnp.where(size > 0, size, 1)
    return x
