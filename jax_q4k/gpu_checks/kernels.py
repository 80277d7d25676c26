"""Runs the PTX kernels of a program one by one and compares their results with plain JAX's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.extend
import numpy as np

from ..custom_call import as_jax, simulate_p
from ..implementations import Activations
from ..ops.gpu import device as device_here
from ..ops.op import OPS
from ..ops.prefetch import without_prefetch
from ..selection import Asked
from .interpreter import Rule, equations, evaluated

if TYPE_CHECKING:
    from ptx_kernels.devices import Target
    from ptx_kernels.driver import Device
    from ptx_kernels.ptx import Kernel

__all__ = ["BAR", "Comparison", "compare_kernels", "nmse"]

#: Largest NMSE of a right result. Plain JAX may round ties of int8 activations differently: one of
#: 256 changes a row by 1e-6. A wrong one of 4096 elements changes a result by 1e-4 or more.
BAR = 1e-5


@dataclass(frozen=True)
class Comparison:
    """Results of one operation's kernels, on the operands that plain JAX gives the operation.

    Attributes:
      operation: name of the primitive.
      kernels: names of its launches, in order.
      texts: their PTX.
      nmse: largest normalized mean squared error of the results; None if a launch failed.
      error: exception of that launch.
    """

    operation: str
    kernels: tuple[str, ...]
    texts: tuple[str, ...]
    nmse: float | None = None
    error: Exception | None = None

    @property
    def right(self) -> bool:
        return self.nmse is not None and self.nmse <= BAR

    @property
    def fatal(self) -> bool:
        """Whether the device failed, and refuses everything that follows in this process."""
        from ptx_kernels.driver import DriverError, ModuleLoadError

        return isinstance(self.error, DriverError) and not isinstance(self.error, ModuleLoadError)


def compare_kernels(
    function: Callable[[], Any],
    device: Device,
    target: Target,
    starting: Callable[[str], object] = lambda line: None,
) -> list[Comparison]:
    """Runs each distinct kernel of `function` on `device`, and compares with plain JAX.

    Every operation gets operands that plain JAX computed, so an error stays where it occurs. A
    fatal one ends the comparison.

    Args:
      function: its operations may be inside `jit`, but not inside loops.
      target: device for which kernels are chosen.
      starting: called with the names of an operation and its kernels before they run.

    Raises:
      NotImplementedError: an operation inside a loop or a branch.
    """
    from ptx_kernels import tuning
    from ptx_kernels.driver import DriverError

    found: list[Comparison] = []
    seen: set[str] = set()

    def compare(equation: Any, leaves: Sequence[Any]) -> list[Any]:
        op, params = OPS[equation.primitive], dict(equation.params)
        tree, asked = params.pop("tree"), params.pop("implementation")
        with tuning.on_device(target), tuning.on_device(device_here(asked=asked)):
            composed = jax.make_jaxpr(op.inspected("ptx", tree, params))(*leaves)
        own, params = without_prefetch(leaves, tree, params)
        kernels = [
            e.params["kernel"] for e in equations(composed.jaxpr) if e.primitive is simulate_p
        ]
        if "activations" in params:
            params["activations"] = params["activations"] or _activations(kernels)
        want = equation.primitive.bind(*own, tree=tree, implementation=Asked("xla"), **params)
        names, texts = (tuple(getattr(k, a) for k in kernels) for a in ("name", "text"))
        if seen.issuperset(texts) or (found and found[-1].fatal):
            return want
        seen.update(texts)
        starting(f"{op.name}: {', '.join(names)}")
        try:
            got = evaluated(composed, leaves, {simulate_p: _launching(device)})
        except (DriverError, TypeError) as error:
            found.append(Comparison(op.name, names, texts, error=error))
        else:
            errors = [nmse(*pair) for pair in zip(got, want, strict=True)]
            found.append(Comparison(op.name, names, texts, float(np.max(errors))))
        return want

    evaluated(jax.make_jaxpr(function)(), (), dict.fromkeys(OPS, compare))
    return found


def _activations(kernels: Sequence[Kernel]) -> Activations:
    """Returns the activations with which plain JAX has the same results as the kernels."""
    products = {getattr(k.arguments.get("config"), "products", None) for k in kernels}
    f16 = "f16" in products or any(kernel.name == "f16_rows" for kernel in kernels)
    return "f32" if f16 else "q8_1"


def _launching(device: Device) -> Rule:
    def launch(equation: Any, operands: Sequence[Any]) -> list[np.ndarray]:
        kernel: Kernel = equation.params["kernel"]
        return as_jax(kernel, device.run(kernel, *map(np.asarray, operands)))

    return launch


def nmse(got: Any, want: Any) -> float:
    """Returns the normalized mean squared error of `got`, 0 for equal arrays."""
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    if np.array_equal(got, want):
        return 0.0
    return float(np.sum((got - want) ** 2) / np.sum(want**2))
