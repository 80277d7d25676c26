"""Selects the implementation of operations: PTX, C++ (CPU), plain JAX, or simulated PTX."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, cast

import jax

from .implementations import ACTIVATIONS, FUSIONS, IMPLEMENTATIONS, Activations, Implementation


class Asked(NamedTuple):
    """Part of a `Selection` that a primitive keeps until it is lowered."""

    implementation: Implementation | None = None
    clusters: bool = True
    decoded_products: bool | None = None

    @property
    def selection(self) -> Selection:
        """Returns the selection with these fields, and defaults for the others."""
        return Selection(**self._asdict())


class Selection(NamedTuple):
    """Arguments of `implementation(...)`; `implementation` None means the platform's default.

    Attributes:
      batch_invariant: whether the native products of experts with float activations add in one
        order however many of a batch's tokens choose an expert. Deterministic engines set it.
    """

    implementation: Implementation | None = None
    activations: Activations | None = None
    fused: frozenset[str] | None = None
    prefetch: bool = True
    batch_invariant: bool = False
    clusters: bool = True
    decoded_products: bool | None = None
    graphs: bool = True

    @property
    def asked(self) -> Asked:
        return Asked(self.implementation, self.clusters, self.decoded_products)

    def fuses(self, name: str) -> bool:
        """Returns whether the operation `name` of FUSIONS may be fused."""
        return self.fused is None or name in self.fused


# A user context is part of jit's cache key: a function traced under one selection is traced again
# under another.
_selection = jax.make_user_context(Selection())


def check_selection(
    implementation: str | None,
    activations: str | None = None,
    fused: Collection[str] | Literal[False] | None = None,
    prefetch: bool = True,
    clusters: bool = True,
    decoded_products: bool | None = None,
    graphs: bool = True,
) -> Selection:
    """Checks the arguments; raises ValueError with the argument's name and its valid values."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r} must be one of {', '.join(IMPLEMENTATIONS)}, "
            "or None"
        )
    if activations is not None and activations not in ACTIVATIONS:
        raise ValueError(
            f"activations={activations!r} must be one of {', '.join(ACTIVATIONS)}, or None"
        )
    for name, value in (("prefetch", prefetch), ("clusters", clusters), ("graphs", graphs)):
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} must be True or False")
    if not isinstance(decoded_products, bool | None):
        raise ValueError(f"decoded_products={decoded_products!r} must be True, False or None")
    names: tuple[Any, ...] | None
    if fused is None:
        names = None
    elif fused is False:
        names = ()
    else:
        names = (
            tuple(fused)
            if isinstance(fused, Collection) and not isinstance(fused, str)
            else (fused,)
        )
    for name in names or ():
        if name not in FUSIONS:
            raise ValueError(
                f"fused={name!r} must be a collection of {', '.join(FUSIONS)}, or False, or None"
            )
    return Selection(
        cast("Implementation | None", implementation),
        cast("Activations | None", activations),
        None if names is None else frozenset(names),
        prefetch,
        clusters=clusters,
        decoded_products=decoded_products,
        graphs=graphs,
    )


@contextlib.contextmanager
def implementation(
    name: Implementation | None = None,
    *,
    activations: Activations | None = None,
    fused: Collection[str] | Literal[False] | None = None,
    prefetch: bool = True,
    clusters: bool = True,
    decoded_products: bool | None = None,
    graphs: bool = True,
) -> Iterator[None]:
    """Selects the implementation of every jax_q4k operation traced inside the block.

    A nested block starts from the defaults and inherits nothing. As a decorator, applies to one
    function: `jq.implementation("sim")(jq.matmul)(x, w)`.

    Args:
      name: `ptx` (PTX kernels; CUDA only), `native` (C++ kernels; CPU only), `xla` (plain JAX, any
        platform), `sim` (the PTX kernels in the simulator; CPU only), or None. None selects `ptx`
        on CUDA; `native` on a CPU, or `xla` with a NativeUnavailableWarning if the native library
        is not available; `xla` elsewhere.
      activations: type of matmul's activations in the dot products. `q8_1`: int8 in groups of 32,
        wherever the CUDA path has a kernel for them; `f32`: never quantized; None means `f32` for
        xla, `q8_1` for native, and the fastest for ptx and sim. The fastest is `q8_1`, or on some
        GPUs float16 with decoded weights for the many rows of long prompts (`jq.explain` says
        which).
      fused: names from `jax_q4k.FUSIONS` of operations that may be fused into fewer kernels; other
        operations run as chains of simpler ones. False means none; None means all, each where it is
        faster.
      prefetch: whether kernels prefetch the weights of later ones, which operations receive as
        `prefetch`, on GPUs that support it.
      clusters: whether kernels may run as thread block clusters, on GPUs that support them. Without
        clusters, one more launch merges the splits of an attention.
      decoded_products: whether weights are decoded to float16 for XLA's product of more than 64
        rows, on a GPU and without `activations`. False means never; True, wherever rows and columns
        are multiples of 8; None, where a table or `decoded_products_rule` finds it faster.
      graphs: whether programs of `jax_q4k.models` run as CUDA graphs. Without graphs the host
        launches each kernel. No operation depends on it: a `jax.jit` of your own has its own
        `compiler_options`.

    Raises:
      ValueError: an unknown name. A selection that cannot run on the platform raises when it is
        lowered.
    """
    selection = check_selection(
        name, activations, fused, prefetch, clusters, decoded_products, graphs
    )
    with selected(selection):
        yield


def selected(selection: Selection) -> AbstractContextManager[None]:
    """Returns a context manager that traces under `selection`, a value of `current_selection`."""
    return _selection(selection)


def activations_of(asked: str | None) -> str | None:
    """Returns the `activations` passed to a call; if None, those of the current selection.

    Raises ValueError for an unknown name.
    """
    return check_selection(None, asked).activations or current_selection().activations


def current_selection() -> Selection:
    """Returns the selection of the innermost `implementation(...)`, or the defaults."""
    return _selection.value
