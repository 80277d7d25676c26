"""Layers of a file that predict further tokens (multi-token prediction): drafts of its own.

Such a layer gets the trunk's normalized vector of a token and the embedding of the token behind it,
and gives the vector that the token behind both is predicted from
(https://arxiv.org/abs/2412.19437, section 2.2).
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from jax_q4k import GGUFError, QuantizedArray, gguf

from .config import Config
from .kv_cache import PagedCache, last_tokens
from .tensors import check_tensors, float_array

if TYPE_CHECKING:
    from .decoder import Decoder

#: GGUF's names of its own tensors, behind `blk.N.nextn.`, to the one that takes their place where a
#: file lacks them.
_OWN = {
    "eh_proj": None,
    "enorm": None,
    "hnorm": None,
    "shared_head_norm": "output_norm.weight",
    "embed_tokens": "token_embd.weight",
    "shared_head_head": "output.weight",
}
_PREFIX = "blk.0."


@dataclasses.dataclass(frozen=True, eq=False)
class NextTokens:
    """The layer behind a model's last, as its draft model.

    Attributes:
      config: that of a decoder of this layer alone.
      weights: GGUF's names -> its tensors, the layer's as those of `blk.0`.
      tokens: of a draft, of which the layer predicts one after another; None: as many as pay.
    """

    config: Config
    weights: Mapping[str, QuantizedArray | jax.Array]
    tokens: int | None = None

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, tokens: int | None = None) -> NextTokens:
        """The layer of a GGUF file, of which nothing else is read.

        Raises:
          jax_q4k.GGUFError: the file is malformed, has no such layer or several, or its tensors are
            not those of one. OSError: it cannot be read.
        """
        file = os.fsdecode(path)
        header = gguf.read_header(path)
        trunk = Config.from_metadata(header.metadata, file)
        key = f"{trunk.architecture}.nextn_predict_layers"
        count = header.metadata.get(key, 0)
        if not trunk.kind.predicts_further or count != 1:
            problem = f"is {count}; drafts take one such layer, of qwen35 or qwen35moe"
            raise GGUFError(file, key, problem)
        prefix = f"blk.{trunk.num_layers}."
        own = re.compile(re.escape(prefix) + r"nextn\.(\w+)\.weight")

        def select(header: gguf.Header) -> dict[str, gguf.TensorInfo]:
            return {n: info for n, info in header.tensors.items() if n.startswith(prefix)}

        read = gguf.read(path, select=select).tensors
        config = dataclasses.replace(trunk, num_layers=1, mixers=None)
        layer, weights = {}, {}
        for name, tensor in read.items():
            if match := own.fullmatch(name):
                weights[match[1]] = tensor
            else:
                layer[name.replace(prefix, _PREFIX, 1)] = tensor
        _check(config, layer, weights, file, prefix)
        held = {n: t if len(t.shape) > 1 else float_array(t) for n, t in layer.items()}
        norms = ("enorm", "hnorm", "shared_head_norm")
        weights = {n: float_array(t) if n in norms else t for n, t in weights.items()}
        return cls(config, held | weights, tokens)

    def drafter(self, weights: Mapping[str, Any], trunk: Decoder) -> Drafter:
        """The layer with `weights`, which may be tracers, beside the trunk's modules."""
        from .build import build
        from .layers import Linear, RMSNorm

        tensors = {n: t for n, t in weights.items() if n.startswith(_PREFIX)}
        tensors["output_norm.weight"] = weights.get("shared_head_norm", trunk.norm.weight[...])
        tensors["token_embd.weight"] = weights.get("embed_tokens", trunk.embedding.get_value())
        head = weights.get("shared_head_head")
        if head is None and trunk.output is not None:
            head = trunk.output.weight.get_value()
        if head is not None:
            tensors["output.weight"] = head
        decoder = build(self.config, tensors)
        eps = self.config.norm_eps
        norms = (RMSNorm(weights[name], eps) for name in ("enorm", "hnorm"))
        return Drafter(decoder, Linear(weights["eh_proj"]), *norms)


def _check(
    config: Config,
    layer: Mapping[str, Any],
    own: Mapping[str, Any],
    file: str,
    prefix: str,
) -> None:
    """Raises GGUFError unless a layer's tensors, and its own, are all there and fit."""
    size, vocab = config.hidden_size, config.vocab_size
    expected: dict[str, tuple[int, ...]] = {"eh_proj": (size, 2 * size)}
    expected |= dict.fromkeys(("enorm", "hnorm", "shared_head_norm"), (size,))
    expected |= dict.fromkeys(("embed_tokens", "shared_head_head"), (vocab, size))
    for name, shape in expected.items():
        full = f"{prefix}nextn.{name}.weight"
        if name not in own:
            if _OWN[name] is None:
                problem = f"is missing, expected with shape {shape}"
                raise GGUFError(file, f"tensor {full!r}", problem)
        elif tuple(own[name].shape) != shape:
            problem = f"has shape {tuple(own[name].shape)}, expected {shape}"
            raise GGUFError(file, f"tensor {full!r}", problem)
    if unknown := own.keys() - expected.keys():
        name = f"{prefix}nextn.{min(unknown)}.weight"
        raise GGUFError(file, f"tensor {name!r}", "is not part of a layer of further tokens")
    zeros = jax.ShapeDtypeStruct((vocab, size), jnp.float32)
    whole = {"token_embd.weight": zeros, "output_norm.weight": jax.ShapeDtypeStruct((size,), "f4")}
    check_tensors(config, whole | dict(layer), file)


@dataclasses.dataclass(frozen=True)
class Drafter:
    """A layer of further tokens with its weights.

    Its cache holds a token's pair at the token's place: its vector, and the token behind it.

    Attributes:
      decoder: of the layer alone, with the head.
      projection: of the embedding's vector and the trunk's, behind each other.
    """

    decoder: Decoder
    projection: Any
    embedding_norm: Any
    vector_norm: Any

    def begin(
        self, tokens: Array, vectors: Array, lengths: Array, cache: PagedCache
    ) -> tuple[Array, PagedCache]:
        """A prompt's pairs: tokens int32 (batch, time), vectors (batch, time, hidden_size).

        Returns the normalized vector behind each row's last pair (batch, hidden_size), and a cache.
        """
        given = self._given(tokens, vectors)
        x, cache = self.decoder.prefill_vectors(tokens, lengths, cache, given)
        return self.decoder.norm(last_tokens(x, lengths)), cache

    def follow(
        self, tokens: Array, vectors: Array, lengths: Array, cache: PagedCache
    ) -> tuple[Array, PagedCache]:
        """As `begin`, of pairs that follow those of the cache; of rows without, meaningless."""
        given = self._given(tokens, vectors)
        x, cache = self.decoder.extend_vectors(tokens, lengths, cache, given)
        return self.decoder.norm(last_tokens(x, lengths)), cache

    def drafts(
        self, vector: Array, cache: PagedCache, count: int, active: Array
    ) -> tuple[Array, PagedCache]:
        """The likeliest tokens (batch, count), behind the vector (batch, hidden_size) of the last.

        The cache that is returned has the same pairs as before, its pages updated in place.
        """
        tokens, lens = [], cache.context_lens
        for i in range(count):
            tokens.append(jnp.argmax(self._logits(vector), axis=-1).astype(jnp.int32))
            if i + 1 < count:
                given = self._given(tokens[-1], vector)
                x, cache = self.decoder.decode_vectors(tokens[-1], cache, active, given)
                vector = self.decoder.norm(x)
        return jnp.stack(tokens, axis=1), dataclasses.replace(cache, context_lens=lens)

    def _given(self, tokens: Array, vectors: Array) -> Array:
        embedded = self.embedding_norm(self.decoder.embedded(tokens))
        both = jnp.concatenate([embedded, self.vector_norm(vectors)], axis=-1)
        return self.projection(both)

    def _logits(self, vector: Array) -> Array:
        """Logits of a vector that is normalized."""
        from .layers import Linear

        return (self.decoder.output or Linear(self.decoder.embedding.get_value()))(vector)
