"""Defines Program, the base of a model's jitted programs, and a single decode step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jax_q4k import current_selection

from ..config import Config
from ..kv_cache import PagedCache
from ..sharding.placement import Placement
from .speculative.drafts import Draft, tokens_of

if TYPE_CHECKING:
    from ..network.decoder import Decoder

#: Makes XLA put the whole loop with its kernels into one CUDA graph, which runs without the host.
#: Products of dequantized weights use cuBLAS. When XLA compiles ahead of time and cannot measure,
#: it would otherwise choose Triton kernels with tiles far too small for long prompts.
CUDA_COMPILER_OPTIONS: dict[str, str] = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,"
    "DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL",
    "xla_gpu_graph_min_graph_size": "1",
    "xla_gpu_enable_triton_gemm": "False",
}

#: Turns XLA's CUDA graphs off.
_NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}


def compiler_options(*, on_gpu: bool) -> dict[str, str] | None:
    """Returns XLA's options for a model's programs; None means the defaults.

    `jq.implementation(graphs=False)` around the call turns CUDA graphs off.
    """
    if not on_gpu:
        return None
    return CUDA_COMPILER_OPTIONS | ({} if current_selection().graphs else _NO_GRAPHS)


#: Weights of a model, alone or first in a tuple.
Weights = Any


class AllWeights(NamedTuple):
    """Weights that the programs of an engine read.

    Attributes:
      model: those of the model.
      adapters: stacks of `adapters.stacks_for`; None without adapters.
      drafter: those of a draft model or a multi-token-prediction layer; None without one.
    """

    model: Weights
    adapters: Any = None
    drafter: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """A model without its weights: everything that its programs depend on besides arguments.

    Compared by identity; each model has its own.

    Attributes:
      merge: maps weights, which may be tracers, to the decoder.
      fingerprint: returns a SHA-256; networks with equal fingerprints have equal programs.
      on_gpu: whether the weights are on a GPU.
    """

    config: Config
    merge: Callable[[Weights], Decoder]
    fingerprint: Callable[[], str]
    on_gpu: bool = False
    placement: Placement | None = None


@dataclasses.dataclass(frozen=True)
class Program:
    """Base of a model's programs: a function of arrays to be jitted, such as prefill or decode.

    A program depends only on its class, its fields, the types of its arguments and JAX's settings,
    so equal programs compile to the same code. Caches in memory use the program itself as key, and
    caches on disk use `about`.

    Attributes:
      draft: kind of drafts; None means no speculative decoding.
    """

    network: Network
    draft: Draft | None = None

    #: Positions of the arguments that are donated.
    donated: ClassVar[tuple[int, ...]] = ()
    #: Whether the first argument is the weights.
    takes_weights: ClassVar[bool] = True
    #: Whether an engine's program returns its state alone, not a tuple of state and results.
    returns_state: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return type(self).__qualname__.lower()

    def jitted(self, *, keep_unused: bool = False, shardings: Any = None) -> Any:
        """Returns the jitted function, whose compiled code is freed with its last reference.

        shardings: of the results; None means that the program determines them.
        keep_unused: pass True only for `jax_q4k.cache.program_cache`, which needs it. With it JAX
        0.12 never frees compiled code: its cache of jaxprs without dead code holds its own keys.
        """
        run: Any = self

        def function(*arguments: Any) -> Any:
            return run(*arguments)

        # JAX caches executables by function, and functions of equal programs are not equal.
        function.__name__ = function.__qualname__ = self.name
        return jax.jit(
            function,
            donate_argnums=self.donated,
            compiler_options=compiler_options(on_gpu=self.network.on_gpu),
            keep_unused=keep_unused,
            out_shardings=shardings,
        )

    @property
    def calls_functions(self) -> bool:
        """Whether user functions are part of the program."""
        return False

    def results(self, arguments: tuple[Any, ...]) -> Any:
        """Returns shapes and dtypes of the result, for programs in the on-disk cache."""
        raise NotImplementedError

    def about(self) -> dict[str, Any]:
        """Returns the program's fields as JSON, for the key of the on-disk cache.

        Raises TypeError for a field that text cannot identify, such as a user's function.
        """
        return {"program": type(self).__name__, **_fields_as_json(self)}

    @property
    def draft_tokens(self) -> int:
        return 0 if self.draft is None else tokens_of(self.draft, self.network.on_gpu)

    def part_of(self, weights: Weights) -> Weights:
        """Returns the part of an engine's weights that the program takes."""
        return AllWeights(weights.model) if isinstance(weights, AllWeights) else weights

    def _decoder(self, weights: Weights) -> Decoder:
        return self.network.merge(self._main_weights(weights))

    def _main_weights(self, weights: Weights) -> Weights:
        """Returns the main model's weights, a list of arrays."""
        return weights[0] if isinstance(weights, tuple) else weights

    def _rows(self, x: jax.Array) -> jax.Array:
        placement = self.network.placement
        return x if placement is None else placement.shard_rows(x)


@dataclasses.dataclass(frozen=True)
class Decode(Program):
    """Single decode step: (weights, token (batch,), cache) -> logits, cache. Donates the cache."""

    donated: ClassVar[tuple[int, ...]] = (2,)

    def __call__(
        self, weights: Weights, token: jax.Array, cache: PagedCache
    ) -> tuple[jax.Array, PagedCache]:
        return self._decoder(weights).decode(self._rows(token), cache)


def shapes_of(tree: Any) -> Any:
    """Returns a tree of arrays as `jax.ShapeDtypeStruct`s."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _fields_as_json(value: Any) -> dict[str, Any]:
    return {f.name: _as_json(getattr(value, f.name)) for f in dataclasses.fields(value)}


def _as_json(value: Any) -> Any:
    """Returns the value of a program's field as JSON; unequal values have unequal JSON."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.dtype):
        return str(value)
    if isinstance(value, Network):
        if value.placement is not None:
            raise TypeError("programs over several devices have no key")
        return {"fingerprint": value.fingerprint(), "on_gpu": value.on_gpu}
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None)
        items = [_as_json(item) for item in value]
        return dict(zip(names, items, strict=True)) if names else items
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {type(value).__name__: _fields_as_json(value)}
    raise TypeError(f"a {type(value).__name__} cannot be part of a key")


def _padded(tokens: jax.Array, capacity: int) -> jax.Array:
    """Pads prompts (batch, time) to (batch, capacity)."""
    time = min(tokens.shape[1], capacity)  # a padded prompt may be longer than the cache
    return jnp.pad(tokens[:, :time], ((0, 0), (0, capacity - time)))


def replicated(logits: jax.Array) -> jax.Array:
    """Replicates logits over devices; JAX cannot sort or index split axes of an explicit mesh."""
    sharding = jax.typeof(logits).sharding
    if all(axes is None for axes in sharding.spec):
        return logits
    return jax.sharding.reshard(logits, NamedSharding(sharding.mesh, PartitionSpec()))
