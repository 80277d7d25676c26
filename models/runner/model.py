"""A decoder ready to run: weights as flat arrays, a tokenizer and compiled programs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jax_q4k import current_selection, explaining_loads, gguf

from ..config import Config
from ..network.parts import Parts, split
from ..sampling.grammars import Grammars
from ..sampling.stages import SharedStages
from ..sharding.placement import Placement
from ..support.buckets import bucket, fine_bucket
from ..support.lru_cache import LRUCache
from ..support.warn import warn
from ..tokenizer import Tokenizer
from .programs import Decode, Network, compiler_options

if TYPE_CHECKING:
    from jax_q4k.cache.program_cache import ProgramCache

    from ..network.decoder import Decoder


#: Maximum number of compiled programs in memory per model, of about 10 MB each.
MOST_PROGRAMS = 64


class Model:
    """A decoder with its weights, its tokenizer, and its compiled programs.

    The module tree is split once, and programs take the weights as a flat list of arguments.
    Weights that a program closes over would become its constants, and splitting the tree at every
    call costs more than a step.

    Attributes:
      config: configuration of the decoder.
      tokenizer: None if the file has no vocabulary; prompts must then be token ids.
      metadata: GGUF metadata for a saved file, without the keys of a checkpoint folder's tokenizer,
        which `tokenizer.gguf_metadata` returns.
      weights: arrays of the decoder; packed ones as their planes.
      layout: names of the weights in the decoder, and formats of packed ones, as a string.
      placement: sharding over several devices; None means one device.
      network: the decoder without its weights, on which programs depend.
      ready: LRU cache of compiled programs, keyed by everything that they depend on.
      stage_sets: sampling stages that programs have been compiled for.
      program_cache: on-disk cache of compiled generation programs; None means memory only.
      tasks: tasks of an embedding model that have adapters: name -> prompt before texts.
      fused: names of the fused tensors, such as blk.0.attn_qkv.weight, in the GGUF file that the
        model comes from; None without a file, which fuses what its architecture's files fuse.
    """

    def __init__(
        self,
        decoder: Decoder | Parts,
        tokenizer: Tokenizer | None = None,
        metadata: Mapping[str, Any] | None = None,
        placement: Placement | None = None,
        tasks: Mapping[str, str] | None = None,
    ) -> None:
        """Splits the decoder, and completes `metadata`.

        Metadata without `general.architecture` gets the keys of the config.
        """
        parts = decoder if isinstance(decoder, Parts) else split(decoder)
        self.config: Config = parts.config
        self.tokenizer = tokenizer
        self.tasks: Mapping[str, str] = dict(tasks or {})
        self.metadata = gguf.Metadata(metadata)
        if "general.architecture" not in self.metadata:
            self.metadata = gguf.Metadata({**self.config.to_metadata(), **self.metadata})
        self.weights, tree = jax.tree.flatten(parts.state)
        self.layout = str(tree)
        if placement is not None:
            self.weights = placement.spread(self.weights)

        # Programs hold this instead of the model, since a reference cycle would keep the weights
        # alive after the last use.
        put_together = parts.merge
        self._tree, self._put_together, self._static = tree, put_together, parts.static

        def merge(weights: list[jax.Array]) -> Decoder:
            return put_together(jax.tree.unflatten(tree, weights))

        about = parts.static, self.layout, [f"{a.dtype} {a.shape}" for a in self.weights]
        fingerprint = functools.cache(functools.partial(_fingerprint, self.config, *about))
        self.network = Network(self.config, merge, fingerprint, self._on_gpu(), placement)
        self.program_cache: ProgramCache | None = None
        self.fused: frozenset[str] | None = None
        self.ready = LRUCache(MOST_PROGRAMS)
        self.stage_sets = SharedStages()
        rows = (lambda x: x) if placement is None else placement.shard_rows

        on_gpu = self.network.on_gpu

        def full_pass() -> Any:
            return jax.jit(
                lambda weights, tokens, *rest: merge(weights)(rows(tokens), *rest),
                compiler_options=compiler_options(on_gpu=on_gpu),
            )

        self._full_pass = full_pass

    @property
    def placement(self) -> Placement | None:
        return self.network.placement

    @property
    def spans_processes(self) -> bool:
        """Whether the model is on a mesh that has devices of other processes."""
        return self.placement is not None and self.placement.spans_processes

    def decoder(self, weights: list[jax.Array] | None = None) -> Decoder:
        """Builds the decoder's modules from `weights`, which may be tracers.

        Uses the model's own weights if None.
        """
        return self.network.merge(self.weights if weights is None else weights)

    def parts(self) -> Parts:
        """Returns the decoder split into Parts, with this model's weights."""
        state = jax.tree.unflatten(self._tree, self.weights)
        return Parts(self.config, state, self._put_together, self._static)

    def logits(self, tokens: Any) -> jax.Array:
        """Returns logits, float32 (batch, time, vocab_size), of integer tokens (batch, time).

        Runs a full causal pass; position t predicts token t + 1. One program serves all lengths up
        to the next of 8, 16, 32, ... Inside your own jitted function call
        `model.decoder(weights)(tokens)`, with `model.weights` as its argument.

        Raises:
          TypeError: `tokens` are not integers, or are traced. ValueError: not two axes, more tokens
            than the context, or an id outside the vocabulary.
        """
        self.check_generates()
        if isinstance(tokens, jax.core.Tracer):
            raise TypeError(
                "tokens is traced; inside a program call model.decoder(weights)(tokens)"
            )
        array = np.asarray(tokens)
        if array.ndim != 2:
            raise ValueError(f"tokens has shape {array.shape}; it must be (batch, time)")
        batch, time = array.shape
        if time > self.config.context_length:
            raise ValueError(
                f"tokens has time={time}; the context length is {self.config.context_length}"
            )
        if array.size == 0:
            return jnp.zeros((batch, time, self.config.vocab_size), jnp.float32)
        self.check_ids("tokens", array)
        padded = np.zeros((batch, self.padded_length(time)), np.int32)
        padded[:, :time] = array
        args = self.put((padded, np.full(batch, time, np.int32)))
        with self.on_devices():
            key = "logits", padded.shape, current_selection().graphs
            full_pass = self.ready.get(key, self._full_pass)
            return _first(full_pass(self.weights, *args), time)

    def put(self, arrays: Any) -> Any:
        """Replicates NumPy arrays on the model's devices; they must be equal in every process."""
        return jax.device_put(arrays) if self.placement is None else self.placement.put(arrays)

    @contextlib.contextmanager
    def on_devices(self) -> Iterator[None]:
        """Context of calls: sets the mesh if its axes are explicit, and explains failed loads."""
        mesh: Any = contextlib.nullcontext()
        if self.placement is not None and self.placement.explicit:
            mesh = jax.set_mesh(self.placement.mesh)
        with explaining_loads(), mesh:
            yield

    def padded_length(self, time: int) -> int:
        """Returns the length that a prompt of `time` tokens is padded to, to limit compilations.

        On a GPU, where compiling costs more than padding, it is a power of two. Elsewhere padding
        adds at most a quarter from 64 on.
        """
        return bucket(time) if self._on_gpu() else fine_bucket(time)

    def padded_batch(self, rows: int) -> int:
        """Returns the number of rows that a batch of `rows` is padded to.

        The result divides evenly over devices. Batches above 8 are rounded up, to limit
        compilations.
        """
        groups = 1 if self.placement is None else self.placement.groups
        if rows > 8:
            step = bucket(rows) // 8
            rows = -(-rows // step) * step
        return -(-rows // groups) * groups

    def check_ids(self, name: str, ids: np.ndarray) -> None:
        """Raises TypeError unless `ids` are integers, ValueError for an id outside 0..vocab-1."""
        if not np.issubdtype(ids.dtype, np.integer):
            raise TypeError(f"{name} has dtype {ids.dtype}; it must hold integers")
        wrong = ids[(ids < 0) | (ids >= self.config.vocab_size)]
        if wrong.size:
            raise ValueError(
                f"{name} holds token id {wrong[0]}; ids must be 0 to {self.config.vocab_size - 1}"
            )

    @property
    def decode_step(self) -> Any:
        """Jitted (weights, token (batch,), cache) -> logits, cache; it donates the cache."""
        key = "decode step", current_selection().graphs
        return self.ready.get(key, Decode(self.network).jitted)

    def _on_gpu(self) -> bool:
        # abstract weights have no devices
        devices = getattr(self.weights[0], "devices", None)
        return devices is not None and next(iter(devices())).platform == "gpu"

    @property
    def kept(self) -> ProgramCache | None:
        """Deprecated name of `program_cache`."""
        warn("Model.kept is now Model.program_cache", DeprecationWarning)
        return self.program_cache

    @kept.setter
    def kept(self, cache: ProgramCache | None) -> None:
        warn("Model.kept is now Model.program_cache", DeprecationWarning)
        self.program_cache = cache

    @functools.cached_property
    def grammars(self) -> Grammars | None:
        """Compiler of constraints for the model's vocabulary; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return Grammars(self.tokenizer, self.config.vocab_size)

    def check_generates(self) -> None:
        """Raises ValueError for an encoder, which generates no text."""
        if self.config.kind.bidirectional:
            raise ValueError(
                f"the model is an encoder, {self.config.architecture}: it makes embeddings "
                "(models.embed), and no text"
            )

    @functools.cached_property
    def has_head(self) -> bool:
        """Whether the model has a reranker's classification head."""
        return self.decoder().head is not None

    @functools.cached_property
    def weight_bytes(self) -> int:
        """Size of the weights in bytes, over all devices."""
        return sum(leaf.nbytes for leaf in self.weights)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies the decoder without programs, which are compiled again."""
        return type(self), (self.decoder(), self.tokenizer, self.metadata, None, self.tasks)

    if not TYPE_CHECKING:  # type checkers know the attributes

        def __getattr__(self, name: str) -> Any:
            """Raises AttributeError, with the function that other libraries have as a method."""
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in ("generate", "stream", "score", "embed"):
                message = f"{message}: write models.{name}(model, ...)"
            raise AttributeError(message, name=name, obj=self)

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Raises TypeError, with the two calls that may be meant."""
        raise TypeError(
            "a Model is not a function: models.generate(model, prompt) makes text, and "
            "model.decoder()(tokens), with tokens (batch, time), the logits"
        )

    def __repr__(self) -> str:
        about = f"{self.config.architecture}, {self.config.num_layers} layers"
        return f"Model({about}, {self.weight_bytes} bytes of weights)"


def _fingerprint(config: Config, static: Any, layout: str, shapes: list[str]) -> str:
    """Returns a SHA-256 of everything in a model that programs depend on, without weight values."""
    parts = [repr(dataclasses.asdict(config)), repr(static), layout, *shapes]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@functools.partial(jax.jit, static_argnames="count")
def _first(logits: jax.Array, count: int) -> jax.Array:
    """Returns the logits (batch, count, vocab_size) of the first `count` tokens."""
    return logits[:, :count]
