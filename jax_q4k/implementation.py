"""The selected implementation of operations.

It is one of PTX kernels, plain JAX, the CPU's own kernels, and PTX simulated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, cast, get_args

import jax

Implementation = Literal["ptx", "native", "xla", "sim"]
Activations = Literal["f32", "q8_1"]

IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)
ACTIVATIONS: tuple[str, ...] = get_args(Activations)

#: Operations that can be fewer kernels than their steps; `matmul`: with its bias and residual.
FUSIONS: tuple[str, ...] = (
    "matmul",
    "rms_norm_matmul",
    "qkv_matmul",
    "gated_matmul",
    "mlp",
    "expert_mlp",
    "routed_mlp",
    "rope_append",
    "qkv_rope_append",
    "paged_attention_matmul",
)


class Selection(NamedTuple):
    """The arguments of an `implementation(...)`; None leaves it to the platform's default."""

    implementation: Implementation | None = None
    activations: Activations | None = None
    fused: frozenset[str] | None = None
    prefetch: bool = True

    def fuses(self, name: str) -> bool:
        """True if the operation `name` of FUSIONS may be one kernel."""
        return self.fused is None or name in self.fused


# A user context is part of jit's cache key: a function traced under one choice is traced again
# under another.
_selection = jax.make_user_context(Selection())


def check_selection(
    implementation: str | None,
    activations: str | None = None,
    fused: Collection[str] | Literal[False] | None = None,
    prefetch: bool = True,
) -> Selection:
    """Validates names; raises ValueError naming the argument and what it may be."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r} must be one of {', '.join(IMPLEMENTATIONS)}, "
            "or None"
        )
    if activations is not None and activations not in ACTIVATIONS:
        raise ValueError(
            f"activations={activations!r} must be one of {', '.join(ACTIVATIONS)}, or None"
        )
    if not isinstance(prefetch, bool):
        raise ValueError(f"prefetch={prefetch!r} must be True or False")
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
    )


@contextlib.contextmanager
def implementation(
    name: Implementation | None = None,
    *,
    activations: Activations | None = None,
    fused: Collection[str] | Literal[False] | None = None,
    prefetch: bool = True,
) -> Iterator[None]:
    """Selects the implementation of every jax_q4k operation traced inside the block.

    A block inside another starts from the defaults: it inherits nothing. As a decorator it selects
    for a function: `jq.implementation("sim")(jq.matmul)(x, w)`.

    Args:
      name: `ptx` (PTX kernels; CUDA only), `native` (C++ kernels; CPU only), `xla` (plain JAX, any
        platform), `sim` (the PTX kernels run by the simulator; CPU only), or None: `ptx` on CUDA;
        on a CPU `native`, or where the library of these kernels is not there, `xla` with a
        NativeUnavailableWarning; `xla` elsewhere.
      activations: how matmul treats its activations. `q8_1`: int8 in groups of 32, wherever the
        CUDA path has a kernel that takes them so; `f32`: never quantized; None: `f32` for xla,
        `q8_1` for native, what is fastest for ptx and sim: `q8_1`, or float16 for many rows on some
        GPUs, of long prompts together with decoded weights (`jq.explain` says which).
      fused: names out of `jax_q4k.FUSIONS`: the operations that may be fewer kernels than their
        steps; the others are chains of simpler ones. False: none. None: all, each wherever it pays.
      prefetch: whether launches ask for weights of later ones, those that operations are told by
        their `prefetch`, where the GPU can.

    Raises:
      ValueError: an unknown name. A choice that cannot run on the platform raises when it is
        lowered.
    """
    with selected(check_selection(name, activations, fused, prefetch)):
        yield


def selected(selection: Selection) -> AbstractContextManager[None]:
    """A block that traces under `selection`: one that `current_selection` gave elsewhere."""
    return _selection(selection)


def activations_of(asked: str | None) -> str | None:
    """A call's `activations`: those that it asks for, or else the selected ones.

    Raises ValueError for an unknown name.
    """
    return check_selection(None, asked).activations or current_selection().activations


def current_selection() -> Selection:
    """The selection of the innermost `implementation(...)`, for `selected`, or the defaults."""
    return _selection.value
