"""Lists the implementations of operations, and chooses one per platform.

Lowering and `explain` both call `decide`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.extend

from ptx_kernels.devices import Target

from .. import native
from ..custom_call import KernelCall, launch_ptx, launch_simulated
from ..errors import UnavailableError
from . import gpu


class Operation(Protocol):
    """The attributes of `Op` that this module reads; a function is None if the Op lacks it."""

    name: str
    primitive: jax.extend.core.Primitive
    reference: Callable[..., Any]
    native: Callable[..., Any] | None
    ptx: Callable[..., Any] | None


class Backend(NamedTuple):
    """An implementation: one row of `BACKENDS`.

    Attributes:
      composition: the Op's function that it runs; if the Op lacks that, its reference runs.
      platforms: platforms that it runs on: `cuda`, `cpu`, or `other`.
      elsewhere: end of the error message on another platform.
      launch: function that launches one kernel, the first argument of the `ptx` composition.
      by_callbacks: whether it runs in Python callbacks. A program numbers its callbacks, but not
        those in what XLA's partitioner lowers, so operands split over automatic axes are gathered.
    """

    composition: Literal["reference", "native", "ptx"]
    platforms: tuple[str, ...]
    elsewhere: str = ""
    launch: KernelCall | None = None
    by_callbacks: bool = False


BACKENDS: dict[str, Backend] = {
    "ptx": Backend(
        "ptx",
        ("cuda",),
        "needs a CUDA device; 'sim' runs the same kernels on the CPU, 'native' has CPU kernels, "
        "'xla' is plain JAX",
        launch_ptx,
    ),
    "native": Backend("native", ("cpu",), "runs on the CPU only; use 'ptx' or 'xla'"),
    "xla": Backend("reference", ("cpu", "cuda", "other")),
    "sim": Backend(
        "ptx",
        ("cpu",),
        "runs on the CPU only; on a CUDA device use 'ptx' or 'xla'",
        launch_simulated,
        by_callbacks=True,
    ),
}

#: Platform -> its default implementations, in order of preference; the first available one runs.
DEFAULTS: dict[str, tuple[str, ...]] = {
    "cuda": ("ptx", "xla"),
    "cpu": ("native", "xla"),
    "other": ("xla",),
}


class Decision(NamedTuple):
    """The implementation of an operation on a platform, and who selected it.

    Attributes:
      error, problem: why it cannot run, as text of lowering's error and of `explain`'s report; None
        if it can run.
      passed_over: the platform's preferred implementation if it is not available, else None.
    """

    implementation: str
    why: str
    error: str | None = None
    problem: str | None = None
    passed_over: str | None = None


def default_implementation(platform: str) -> str:
    """Returns the name of the default implementation on platform `cuda`, `cpu` or `other`."""
    return _default(platform, gpu.device() if platform == "cuda" else None)


def _default(platform: str, target: Target | None) -> str:
    return next(name for name in DEFAULTS[platform] if not _is_passed_over(name, target))


def decide(
    op: Operation, asked: str | None, platform: str, target: Target | None = None
) -> Decision:
    """Decides which implementation of `op` runs on a platform.

    Args:
      asked: name of the implementation that the user selected; None means the platform's default.
      target: GPU of platform `cuda`.
    """
    target = target if platform == "cuda" else None
    name = asked or _default(platform, target)
    why = "selected by name" if asked else f"the default on {platform}"
    backend, missing = BACKENDS[name], _missing(name, target)
    error = f"{op.name}: implementation {name!r}"
    if platform not in backend.platforms:
        where = f"it runs on {backend.platforms[0]} only: lowering raises UnavailableError"
        return Decision(name, why, f"{error} {backend.elsewhere}", where)
    if missing is not None:
        return Decision(name, why, f"{error}: {missing}", missing)
    first = DEFAULTS[platform][0]
    has_first = getattr(op, BACKENDS[first].composition) is not None
    if asked is None and name != first and has_first:
        return Decision(name, f"{why}, as {_missing(first, target)}", passed_over=first)
    return Decision(name, why)


def check_shapes(op: Operation, implementation: str, operands: Sequence[Any]) -> None:
    """Raises UnavailableError for symbolic shapes of `jax.export`, since kernels are per shape."""
    if getattr(op, BACKENDS[implementation].composition) is None:
        return  # XLA accepts symbolic shapes
    symbols = {str(n): None for aval in operands for n in aval.shape if not isinstance(n, int)}
    if symbols:
        raise UnavailableError(
            f"{op.name}: implementation {implementation!r} builds kernels for one shape, and the "
            f"sizes {', '.join(symbols)} are symbols: export it for each size, or by plain JAX "
            "inside jax_q4k.implementation('xla')"
        )


def composition(op: Operation, implementation: str, launch: KernelCall | None = None) -> Any:
    """Returns an implementation's function of `op`: (*operands, **params) -> results.

    `launch`, if not None, replaces the implementation's own function that launches a kernel.
    """
    backend = BACKENDS[implementation]
    function = getattr(op, backend.composition)
    if function is None:
        return op.reference
    launch = backend.launch and (launch or backend.launch)
    if launch is None:
        return function
    return lambda *operands, **params: function(launch, *operands, **params)


def of_leaves(
    function: Callable[..., Any], tree: Any, params: dict[str, Any]
) -> Callable[..., list[Any]]:
    """Wraps a function of operand pytrees as a function of flat leaves that returns flat leaves.

    tree: tree structure of the operands.
    """

    def flat(*leaves: Any) -> list[Any]:
        # Callers who forbid rank promotion mean their own code.
        with jax.numpy_rank_promotion("allow"):
            return jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves), **params))

    return flat


def _is_passed_over(implementation: str, target: Target | None) -> bool:
    """Returns whether the default is skipped, as it is unavailable and not in $JAX_Q4K_KERNELS."""
    forced = implementation == "native" and native.named()
    return _missing(implementation, target) is not None and not forced


def _missing(implementation: str, target: Target | None) -> str | None:
    """Returns why an implementation is unavailable; None if it is available.

    That is a missing native library, or a GPU too old for the PTX kernels.
    """
    if implementation == "native":
        return None if native.available() else native.problem()
    return gpu.problem(target) if implementation == "ptx" and target is not None else None
