"""Declares an operation: its JAX primitive, implementations, `vmap` rule and derivatives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.extend
from jax.interpreters import batching, mlir

from .. import native
from ..custom_call import KernelCall, launch_simulated
from ..errors import UnavailableError
from ..jax_internals import (
    Primitive,
    lower_with_devices,
    lowering_devices,
    partitioned_devices,
    run_eagerly,
    varying_as,
)
from ..selection import Asked, current_selection
from ..sharding.layout import Layout, Parts, Plan, explicit_mesh, explicit_plan, over_devices
from . import backends, derivatives, gpu, reports
from .derivatives import Linear
from .partition import partitioned
from .prefetch import with_prefetch, without_prefetch
from .vmaps import Rule, by_examples

__all__ = ["OPS", "KernelCall", "Op"]

Params = dict[str, Any]
#: (op, *operands, **params) -> results.
Call = Callable[..., Any]

#: All operations, by their primitives.
OPS: dict[jax.extend.core.Primitive, Op] = {}


class Op:
    """A JAX primitive with a plain JAX reference, PTX kernels and native kernels.

    Operands and results are pytrees of arrays. All functions take `(*operands, **params)`;
    parameters are static and hashable.

    Args:
      name: name of the primitive in jaxprs.
      reference: the operation in plain JAX, which defines its meaning, shapes and dtypes.
      shapes: the results' shapes and dtypes, for operands that have only these. Tracing the
        reference would take milliseconds to find them.
      ptx: `(launch, *operands, **params)`, a composition of PTX kernels. `launch(kernel, *arrays)`
        runs one kernel; plain JAX may be in between. None means that XLA compiles the reference
        for a GPU.
      native: composition of FFI handlers of `jax_q4k.native`; None means that XLA compiles the
        reference for a CPU.
      vmap: the rule, `by_rows`, `by_examples` or `by_reference` of `vmaps`.
      derivative: None means that differentiation raises an error; `reference` differentiates the
        reference. Otherwise a Linear, or a function that composes differentiable operations with
        the same meaning. Differentiation takes the values from the composition, too, so that there
        is one forward pass.
      layout: `(*operands, **params)` -> the Layout of axes that may be split over devices; None
        means that operands are gathered.
      split: `(parts, call, *operands, **params)`, the operation on a device's shards if a combined
        name of the layout is split; `call(op, *operands, **params)` runs an operation on one
        device.
      computed: result leaves -> those whose values are computed and not only moved;
        `jax.experimental.checkify` looks for NaN in them.
      indices: `(*operands, **params)` -> indices and the shape of the array whose rows they select;
        checkify looks for indices out of range.
    """

    def __init__(
        self,
        name: str,
        reference: Callable[..., Any],
        *,
        shapes: Callable[..., Any],
        ptx: Callable[..., Any] | None = None,
        native: Callable[..., Any] | None = None,
        vmap: Rule = by_examples,
        derivative: Literal["reference"] | Linear | Callable[..., Any] | None = None,
        layout: Callable[..., Layout] | None = None,
        split: Callable[..., Any] | None = None,
        computed: reports.Computed = lambda results: results,
        indices: reports.Indices | None = None,
    ) -> None:
        self.name, self.reference, self.ptx, self.native = name, reference, ptx, native
        self.layout, self._split, self._shapes = layout, split, shapes
        # (tree of operands, parameters) -> tree of results, which does not depend on shapes.
        self._result_trees: dict[Any, Any] = {}
        self.primitive: jax.extend.core.Primitive = Primitive(name)
        self.primitive.multiple_results = True
        self.primitive.def_abstract_eval(self._abstract_eval)
        self.primitive.def_impl(functools.partial(run_eagerly, self.primitive))
        OPS[self.primitive] = self
        lower_with_devices(self.primitive)
        batching.primitive_batchers[self.primitive] = functools.partial(_mapped, self, vmap)
        derivatives.define(self, reference if derivative == "reference" else derivative)
        reports.define(self, computed, indices)
        for platform in ("cpu", "cuda", None):  # None: any other
            lowering = functools.partial(self._lower, platform or "other")
            mlir.register_lowering(self.primitive, lowering, platform=platform)

    def bind(self, *operands: Any, prefetch: Any = (), **params: Any) -> Any:
        """Binds the primitive, with the implementation that `jax_q4k.implementation` selected.

        Returns the results. If operands are on an explicit mesh, runs per device under shard_map.

        prefetch: weights of the next operation, which the `ptx` composition gets as a keyword;
        ignored if operands are on several devices.
        """
        leaves, tree = jax.tree.flatten(operands)
        asked = current_selection().asked
        kind = tree, tuple(sorted(params.items()))
        mesh = None if self.layout is None else explicit_mesh(self.name, leaves)
        if self.layout is not None and mesh is not None:
            layout, shapes = self.layout(*operands, **params), self._shapes(*operands, **params)
            placed = explicit_plan(self.name, mesh, layout, operands, shapes)
            results = _over_devices(self, kind, mesh, placed)(*leaves)
        else:
            more, extra = with_prefetch(prefetch)
            results = self.primitive.bind(
                *leaves, *more, tree=tree, implementation=asked, **params, **extra
            )
        if kind not in self._result_trees:
            self._result_trees[kind] = jax.tree.structure(self._shapes(*operands, **params))
        return jax.tree.unflatten(self._result_trees[kind], results)

    def on_parts(self, call: Call, tree: Any, params: Params) -> Callable[..., list[Any]]:
        """Returns the function (parts, *leaves) -> result leaves that runs on each device.

        The leaves are one device's shards of the operands, and `call` runs an operation on them.
        """

        def function(parts: Parts, *leaves: Any) -> list[Any]:
            operands = jax.tree.unflatten(tree, leaves)
            assert self.layout is not None
            combined = self.layout(*operands, **params).combined.split()
            if any(parts.split(name) for name in combined):
                assert self._split is not None, f"{self.name} combines {combined}"
                results = self._split(parts, call, *operands, **params)
            else:
                results = call(self, *operands, **params)
            return jax.tree.leaves(results)

        return function

    def _abstract_eval(self, *avals: Any, tree: Any, implementation: Any, **params: Any) -> Any:
        args, params = without_prefetch(avals, tree, params)
        shapes = tuple((aval.shape, aval.dtype) for aval in args)
        results = _results(self._shapes, shapes, tree, tuple(sorted(params.items())))
        return varying_as(args, results)

    def _lower(
        self,
        platform: str,
        ctx: mlir.LoweringRuleContext,
        *leaves: Any,
        tree: Any,
        implementation: Asked,
        **params: Any,
    ) -> Any:
        find = functools.partial(gpu.device, lowering_devices(ctx), implementation)
        target = find() if platform == "cuda" else None
        decision = backends.decide(self, implementation.implementation, platform, target)
        if decision.error is not None:
            raise UnavailableError(decision.error)
        if decision.passed_over == "native":
            native.warn_if_unavailable()
        elif decision.passed_over == "ptx" and target is not None:
            gpu.warn_of(str(gpu.problem(target)))
        function = self._of_leaves(decision.implementation, tree, params)
        backend = backends.BACKENDS[decision.implementation]
        split = not backend.by_callbacks and partitioned_devices(ctx) > 1
        if self.layout is not None and split:
            args, params = without_prefetch(ctx.avals_in, tree, params)  # type: ignore[attr-defined]
            shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]
            operands = jax.tree.unflatten(tree, shapes)
            function = partitioned(
                self.name,
                self.on_parts(
                    functools.partial(_run, decision.implementation, implementation), tree, params
                ),
                self.layout(*operands, **params),
                operands,
                self._shapes(*operands, **params),
            )
        lower = mlir.lower_fun(function, multiple_results=True)
        if backend.launch is None:
            return lower(ctx, *leaves)
        backends.check_shapes(self, decision.implementation, ctx.avals_in)  # type: ignore[attr-defined]
        from ptx_kernels import tuning  # only for kernel launches: it chooses their Configs

        with tuning.on_device(target or find()):
            return lower(ctx, *leaves)

    def _of_leaves(
        self, implementation: str, tree: Any, params: Params, launch: KernelCall | None = None
    ) -> Callable[..., list[Any]]:
        """Returns an implementation's function (*leaves) -> result leaves.

        The leaves are those of the operands, then those of the weights to prefetch.
        """
        composition = backends.composition(self, implementation, launch)
        launches = backends.BACKENDS[implementation].launch is not None and self.ptx is not None
        prefetch = params.get("prefetch") if launches else None

        def function(*leaves: Any) -> list[Any]:
            mine, own_params = without_prefetch(leaves, tree, params)
            if prefetch is not None:
                own_params["prefetch"] = jax.tree.unflatten(prefetch, leaves[len(mine) :])
            return backends.of_leaves(composition, tree, own_params)(*mine)

        return function

    def inspected(self, implementation: str, tree: Any, params: Params) -> Callable[..., Any]:
        """Returns the function (*leaves) -> result leaves of an implementation, for `explain`.

        Unlike at lowering, kernels run as simulated launches, which can be inspected.
        """
        return self._of_leaves(implementation, tree, params, launch_simulated)


def _mapped(op: Op, rule: Rule, leaves: Any, axes: Any, **params: Any) -> Any:
    """Applies a `vmap` rule to the operands' leaves, without the weights to prefetch."""
    count = params["tree"].num_leaves
    leaves, params = without_prefetch(leaves, params["tree"], params)
    return rule(op, leaves, axes[:count], params)


@functools.lru_cache(maxsize=1024)
def _over_devices(op: Op, kind: Any, mesh: Any, placed: Plan) -> Callable[..., Any]:
    """Returns the function that runs the operation on each device's shards."""
    tree, params = kind
    parts = Parts(dict(placed.axes))
    run = functools.partial(op.on_parts(Op.bind, tree, dict(params)), parts)
    return over_devices(op.name, run, mesh, placed)


def _run(implementation: str, asked: Asked, op: Op, *operands: Any, **params: Any) -> Any:
    """Runs an operation by an implementation, inside another operation's lowering."""
    composition = backends.composition(op, implementation)
    if backends.BACKENDS[implementation].launch is None:
        return composition(*operands, **params)
    from ptx_kernels import tuning

    with tuning.on_device(gpu.device(asked=asked)):
        return composition(*operands, **params)


@functools.lru_cache(maxsize=4096)
def _results(
    shapes_of: Callable[..., Any], operands: Any, tree: Any, params: tuple[tuple[str, Any], ...]
) -> list[jax.core.ShapedArray]:
    """Returns the abstract values (shapes and dtypes) of the result leaves."""
    leaves = [jax.ShapeDtypeStruct(*operand) for operand in operands]
    found = shapes_of(*jax.tree.unflatten(tree, leaves), **dict(params))
    return [jax.core.ShapedArray(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(found)]
