"""Implementations of operations as data: which one runs where.

Lowering and `explain` both ask `decide`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.extend

from .. import native
from ..custom_call import KernelCall, launch_ptx, launch_simulated
from ..errors import UnavailableError


class Operation(Protocol):
    """An operation's primitive and functions, as `Op` holds them; None: there is none."""

    name: str
    primitive: jax.extend.core.Primitive
    reference: Callable[..., Any]
    native: Callable[..., Any] | None
    ptx: Callable[..., Any] | None


class Backend(NamedTuple):
    """An implementation: one row of `BACKENDS`.

    Attributes:
      composition: the function of an Op that it runs; the reference where the Op has none.
      platforms: where it runs: `cuda`, `cpu`, or `other`.
      elsewhere: the end of the error on another platform.
      launch: one kernel's launch, the first argument of the `ptx` composition.
      by_callbacks: it runs in callbacks of Python. A program's are numbered, but not those in what
        XLA's partitioner lowers: operands that automatic axes split are given to it whole.
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
        "needs a CUDA device; 'sim' runs the same kernels on the CPU, 'native' kernels of its own, "
        "'xla' plain JAX",
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

#: Platform -> what runs where nobody asked: the first that is available.
DEFAULTS: dict[str, tuple[str, ...]] = {
    "cuda": ("ptx",),
    "cpu": ("native", "xla"),
    "other": ("xla",),
}


class Decision(NamedTuple):
    """The implementation of an operation on a platform, and who chose it.

    Attributes:
      error, problem: what keeps it from running, as lowering raises it and as a report says it;
        None: it runs.
      passed_over: the platform's first choice, which is not available; None: this is it.
    """

    implementation: str
    why: str
    error: str | None = None
    problem: str | None = None
    passed_over: str | None = None


def default_implementation(platform: str) -> str:
    """The implementation that runs on `cuda`, `cpu` or `other` where nobody asked for one."""
    return next(name for name in DEFAULTS[platform] if not _is_passed_over(name))


def decide(op: Operation, asked: str | None, platform: str) -> Decision:
    """The implementation of `op` on a platform, where `asked` was selected, or None: nothing."""
    name = asked or default_implementation(platform)
    why = "asked for by name" if asked else f"the default on {platform}"
    backend, missing = BACKENDS[name], _missing(name)
    error = f"{op.name}: implementation {name!r}"
    if platform not in backend.platforms:
        where = f"it runs on {backend.platforms[0]} only: lowering raises UnavailableError"
        return Decision(name, why, f"{error} {backend.elsewhere}", where)
    if missing is not None:
        return Decision(name, why, f"{error}: {missing}", missing)
    if asked is None and op.native is not None and name != (first := DEFAULTS[platform][0]):
        return Decision(name, f"{why}, as {_missing(first)}", passed_over=first)
    return Decision(name, why)


def check_shapes(op: Operation, implementation: str, operands: Sequence[Any]) -> None:
    """Raises UnavailableError for symbolic shapes, of `jax.export`: a kernel is built for one."""
    if getattr(op, BACKENDS[implementation].composition) is None:
        return  # XLA's
    symbols = {str(n): None for aval in operands for n in aval.shape if not isinstance(n, int)}
    if symbols:
        raise UnavailableError(
            f"{op.name}: implementation {implementation!r} builds kernels for one shape, and the "
            f"sizes {', '.join(symbols)} are symbols: export it for each size, or by plain JAX "
            "inside jax_q4k.implementation('xla')"
        )


def composition(op: Operation, implementation: str, launch: KernelCall | None = None) -> Any:
    """Function (*operands, **params) -> results of `op` by an implementation.

    `launch` takes the place of the implementation's own.
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
    """A function of operands as one of their leaves, to its results' leaves."""

    def whole(*leaves: Any) -> list[Any]:
        # A caller who wants no ranks promoted means the caller's own code.
        with jax.numpy_rank_promotion("allow"):
            return jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves), **params))

    return whole


def _is_passed_over(implementation: str) -> bool:
    """True if something else is the default: not where $JAX_Q4K_KERNELS names the CPU's kernels."""
    return _missing(implementation) is not None and not native.named()


def _missing(implementation: str) -> str | None:
    """The part that an implementation lacks here, such as the library of the CPU's kernels."""
    return native.problem() if implementation == "native" and not native.available() else None
