"""An operation as one declaration: the JAX primitive, its implementations, `vmap`, derivatives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

import jax
import jax.extend
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from ptx_kernels import tuning
from ptx_kernels.devices import REFERENCE

from .. import native
from ..custom_call import KernelCall, launch_simulated
from ..errors import UnavailableError
from ..implementation import Selection, current_selection, selected
from . import backends

__all__ = ["OPS", "KernelCall", "Linear", "Op", "device"]

Params = dict[str, Any]

#: Every operation, by its primitive.
OPS: dict[jax.extend.core.Primitive, Op] = {}


class Linear(NamedTuple):
    """The derivative of an operation of one result that is linear in its first operand.

    Both maps are the operation itself with other parameters, so they have derivatives in turn. The
    other operands are constants: uint8 planes, say, whose tangents are always zero.

    Attributes:
      tangent: parameters -> those of the result's tangent as a function of the first operand's.
      transpose: parameters that `tangent` gave -> those of the transposed map.
    """

    tangent: Callable[[Params], Params]
    transpose: Callable[[Params], Params]


class Op:
    """A JAX primitive with a plain JAX reference, PTX kernels and the CPU's kernels.

    Operands and results are pytrees of arrays. All functions take `(*operands, **params)`;
    parameters are static and hashable.

    Args:
      name: the primitive's name in jaxprs.
      reference: the operation's meaning in plain JAX; results of the others have its shapes and
        dtypes.
      shapes: the results' shapes and dtypes, of operands that have these alone: the reference's,
        which tracing it would take milliseconds to find.
      ptx: `(launch, *operands, **params)`: a composition of PTX kernels; `launch(kernel, *arrays)`
        runs one, and plain JAX may stand between. None: XLA compiles the reference for a GPU.
      native: by handlers of `jax_q4k.native`; None: XLA compiles the reference for a CPU.
      vmap: `examples`, one after the other; `reference`, whose `vmap` it takes; or `rows`: where
        nothing but rows is mapped, a single call on the rows of all examples, (batch * rows, k),
        and else what a second name says, or `examples`.
      row_operands: how many operands, the first ones, have rows; so have all results.
      derivative: None: asking for one raises; `reference`: its; a Linear; or a function, a
        composition of differentiable operations with the same meaning. Its value is not used, so
        what is computed does not depend on whether somebody asks for a derivative.
    """

    def __init__(
        self,
        name: str,
        reference: Callable[..., Any],
        *,
        shapes: Callable[..., Any],
        ptx: Callable[..., Any] | None = None,
        native: Callable[..., Any] | None = None,
        vmap: str | tuple[str, ...] = "examples",
        row_operands: int = 1,
        derivative: Literal["reference"] | Linear | Callable[..., Any] | None = None,
    ) -> None:
        self.name, self.reference, self.ptx, self.native = name, reference, ptx, native
        self._shapes = shapes
        self.primitive = jax.extend.core.Primitive(name)
        self.primitive.multiple_results = True
        self.primitive.def_abstract_eval(self._abstract_eval)
        self.primitive.def_impl(self._run_eagerly)
        OPS[self.primitive] = self
        rules = {"examples": self._map_examples, "reference": self._map_reference}
        first, second = (vmap, "examples") if isinstance(vmap, str) else vmap
        batching.primitive_batchers[self.primitive] = (
            functools.partial(self._map_rows, row_operands, rules[second])
            if first == "rows"
            else rules[first]
        )
        self._differentiate(reference if derivative == "reference" else derivative)
        for platform in ("cpu", "cuda", None):  # None: any other
            lowering = functools.partial(self._lower, platform or "other")
            mlir.register_lowering(self.primitive, lowering, platform=platform)

    def bind(self, *operands: Any, **params: Any) -> Any:
        """The results, by the implementation that `jax_q4k.implementation` selected."""
        leaves, tree = jax.tree.flatten(operands)
        asked = current_selection().implementation
        results = self.primitive.bind(*leaves, tree=tree, implementation=asked, **params)
        shapes = tuple((jnp.shape(leaf), jnp.dtype(leaf.dtype)) for leaf in leaves)
        _, result_tree = _results(self._shapes, shapes, tree, tuple(sorted(params.items())))
        return jax.tree.unflatten(result_tree, results)

    def composition(self, *operands: Any, **params: Any) -> Any:
        """Results of the PTX kernels that `ptx` and `sim` run, to look at.

        Each kernel is launched in the simulator.
        """
        return backends.composition(self, "sim")(*operands, **params)

    def _abstract_eval(self, *avals: Any, tree: Any, implementation: Any, **params: Any) -> Any:
        shapes = tuple((aval.shape, aval.dtype) for aval in avals)
        return _results(self._shapes, shapes, tree, tuple(sorted(params.items())))[0]

    def _run_eagerly(self, *leaves: jax.Array, **params: Any) -> Sequence[jax.Array]:
        return _compiled(self.primitive, tuple(sorted(params.items())))(*leaves)

    def _lower(
        self,
        platform: str,
        ctx: mlir.LoweringRuleContext,
        *leaves: Any,
        tree: Any,
        implementation: str | None,
        **params: Any,
    ) -> Any:
        decision = backends.decide(self, implementation, platform)
        if decision.error is not None:
            raise UnavailableError(decision.error)
        if decision.passed_over == "native":
            native.warn_if_unavailable()
        function = self._flat(backends.composition(self, decision.implementation), tree, params)
        with tuning.on_device(device()):
            return mlir.lower_fun(function, multiple_results=True)(ctx, *leaves)

    def inspected(self, implementation: str, tree: Any, params: Params) -> Callable[..., Any]:
        """Function of the operands' leaves to the results' leaves, as lowering runs it.

        Its launches can be looked at.
        """
        return self._flat(
            backends.composition(self, implementation, launch_simulated), tree, params
        )

    @staticmethod
    def _flat(function: Callable[..., Any], tree: Any, params: Params) -> Callable[..., Any]:
        return lambda *leaves: jax.tree.leaves(
            function(*jax.tree.unflatten(tree, leaves), **params)
        )

    def _differentiate(self, derivative: Linear | Callable[..., Any] | None) -> None:
        if isinstance(derivative, Linear):
            ad.primitive_jvps[self.primitive] = functools.partial(self._linear_jvp, derivative)
            ad.primitive_transposes[self.primitive] = functools.partial(self._transpose, derivative)
        elif derivative is None:
            ad.primitive_jvps[self.primitive] = self._no_derivative
        else:
            ad.primitive_jvps[self.primitive] = functools.partial(self._jvp_of, derivative)

    def _no_derivative(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"{self.name} has no derivative: keep gradients out of its operands by "
            "jax.lax.stop_gradient, or compute it in plain JAX"
        )

    def _linear_jvp(
        self, linear: Linear, primals: Sequence[Any], tangents: Sequence[Any], **params: Any
    ) -> tuple[Any, Any]:
        # JAX asks for a tangent only if some operand has one, and only the first can.
        out = self.primitive.bind(*primals, **params)
        return out, self.primitive.bind(tangents[0], *primals[1:], **linear.tangent(params))

    def _transpose(
        self, linear: Linear, cotangents: Sequence[Any], _: Any, *others: Any, **params: Any
    ) -> list[Any]:
        cotangent = ad.instantiate_zeros(cotangents[0])
        params = linear.transpose(linear.tangent(params))
        (out,) = self.primitive.bind(cotangent, *others, **params)
        return [out, *(None for _ in others)]

    def _jvp_of(
        self,
        composition: Callable[..., Any],
        primals: Sequence[Any],
        tangents: Sequence[Any],
        **params: Any,
    ) -> tuple[Any, Any]:
        moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
        plain = {k: v for k, v in params.items() if k not in ("tree", "implementation")}
        whole = self._flat(composition, params["tree"], plain)

        def function(*leaves: Any) -> Any:
            varied = dict(zip(moving, leaves, strict=True))
            return whole(*(varied.get(i, primal) for i, primal in enumerate(primals)))

        along = [primals[i] for i in moving], [tangents[i] for i in moving]
        out = self.primitive.bind(*primals, **params)
        with selected(Selection(params["implementation"])):
            return out, jax.jvp(function, *along)[1]

    def _map_reference(
        self, leaves: Sequence[Any], axes: Sequence[int | None], *, tree: Any, **params: Any
    ) -> tuple[list[Any], list[int]]:
        del params["implementation"]
        out = jax.vmap(self._flat(self.reference, tree, params), in_axes=tuple(axes))(*leaves)
        return out, [0] * len(out)

    def _map_rows(
        self,
        row_operands: int,
        otherwise: Callable[..., Any],
        leaves: Sequence[Any],
        axes: Sequence[int | None],
        **params: Any,
    ) -> tuple[list[Any], list[int]]:
        count = sum(child.num_leaves for child in params["tree"].children()[:row_operands])
        (batch,) = {a.shape[axis] for a, axis in zip(leaves, axes, strict=True) if axis is not None}
        if not batch or any(axis is not None for axis in axes[count:]):  # no kernel has zero rows
            return otherwise(leaves, axes, **params)
        with_rows = [
            jnp.broadcast_to(a, (batch, *a.shape)) if axis is None else jnp.moveaxis(a, axis, 0)
            for a, axis in zip(leaves[:count], axes[:count], strict=True)
        ]
        m = with_rows[0].shape[1]
        flat = (a.reshape(batch * m, *a.shape[2:]) for a in with_rows)
        out = self.primitive.bind(*flat, *leaves[count:], **params)
        return [y.reshape(batch, m, *y.shape[1:]) for y in out], [0] * len(out)

    def _map_examples(
        self, leaves: Sequence[Any], axes: Sequence[int | None], **params: Any
    ) -> tuple[list[Any], list[int]]:
        """Runs one example after the other.

        `axes` holds the mapped axis of each array, None where it has none.
        """
        mapped = [
            jnp.moveaxis(a, axis, 0)
            for a, axis in zip(leaves, axes, strict=True)
            if axis is not None
        ]

        def example(parts: list[Any]) -> Any:
            left = iter(parts)
            given = (
                a if axis is None else next(left) for a, axis in zip(leaves, axes, strict=True)
            )
            return self.primitive.bind(*given, **params)

        out = jax.lax.map(example, mapped)
        return out, [0] * len(out)


@functools.lru_cache(maxsize=4096)
def _results(
    shapes_of: Callable[..., Any], operands: Any, tree: Any, params: tuple[tuple[str, Any], ...]
) -> tuple[list[jax.core.ShapedArray], Any]:
    """The avals of the results' leaves, and the results' tree."""
    leaves = [jax.ShapeDtypeStruct(*operand) for operand in operands]
    found = shapes_of(*jax.tree.unflatten(tree, leaves), **dict(params))
    flat, result_tree = jax.tree.flatten(found)
    return [jax.core.ShapedArray(leaf.shape, leaf.dtype) for leaf in flat], result_tree


def device() -> tuning.Target:
    """The GPU that programs run on, with the multiprocessors that it reports.

    Without one, it is the device that kernels are tuned for. Of several, it is the first: a program
    is lowered once for all of them.
    """
    if jax.default_backend() != "gpu":
        return tuning.target(REFERENCE.name)
    gpu = jax.devices()[0]
    return tuning.target(gpu.device_kind, getattr(gpu, "core_count", None))


@functools.lru_cache(maxsize=4096)
def _compiled(
    primitive: jax.extend.core.Primitive, params: tuple[tuple[str, Any], ...]
) -> Callable[..., Sequence[jax.Array]]:
    """The primitive alone, compiled: an eager call."""
    return jax.jit(functools.partial(primitive.bind, **dict(params)))
