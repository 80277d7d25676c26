"""JAX's transforms, each as a function that transforms a function of a case's operands."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding

import jax_q4k as jq

from .operations import Case

Function = Callable[..., Any]


class Transform(NamedTuple):
    """A transform.

    Attributes:
      of: (case, function of its operands) -> transformed function.
      note: description for the docs.
      plain: how the oracle computes the expected result; None: with the same transform.
      derivative: whether it needs one.
      applies: whether it exists for a case.
      mesh: axis type of a mesh of two devices that the operands are split over first.
      traced: whether `jax.jit` traces it; otherwise it is called directly.
    """

    of: Callable[[Case, Function], Function]
    note: str
    plain: Callable[[Case, Function], Function] | None = None
    derivative: bool = False
    applies: Callable[[Case], bool] = lambda case: True
    mesh: AxisType | None = None
    traced: bool = True


def flipped(x: Any, axis: int = 0) -> Any:
    """Makes another example of the same values: reverses rows of arrays and packed weights."""
    return jax.tree.map(lambda leaf: jnp.flip(leaf, axis), x)


# --- losses and derivatives ---


def loss(ys: Any) -> Any:
    """Scalar loss of the float results; integers are ignored."""
    floats = [y for y in jax.tree.leaves(ys) if jnp.issubdtype(y.dtype, jnp.floating)]
    wide = [y.astype(jnp.promote_types(y.dtype, jnp.float32)) for y in floats]
    return sum((jnp.sum(jnp.sin(y)) for y in wide), start=jnp.zeros(()))


def of_moving(case: Case, function: Function, operands: Any) -> tuple[Function, list[Any]]:
    """Returns a function of only the operands to differentiate, and these operands."""

    def of(*moving: Any) -> Any:
        given = list(operands)
        for at, value in zip(case.moving, moving, strict=True):
            given[at] = value
        return function(*given)

    return of, [operands[at] for at in case.moving]


def gradient(case: Case, function: Function) -> Function:
    def run(*operands: Any) -> Any:
        of, moving = of_moving(case, function, operands)
        return jax.grad(lambda *m: loss(of(*m)), argnums=tuple(range(len(moving))))(*moving)

    return run


def value_and_gradient(case: Case, function: Function) -> Function:
    """Returns the results, and the gradients if the case has any."""
    if not case.differentiable:
        return function

    def run(*operands: Any) -> Any:
        of, moving = of_moving(case, function, operands)

        def with_results(*moving: Any) -> Any:
            results = of(*moving)
            return loss(results), results

        places = tuple(range(len(moving)))
        return jax.grad(with_results, argnums=places, has_aux=True)(*moving)

    return run


def tangents(moving: list[Any]) -> list[Any]:
    return [flipped(x, -1) for x in moving]


def tangent(case: Case, function: Function) -> Function:
    def run(*operands: Any) -> Any:
        of, moving = of_moving(case, function, operands)
        _, along = jax.jvp(of, moving, tangents(moving))
        return [y for y in jax.tree.leaves(along) if y.dtype != jax.dtypes.float0]

    return run


def finite_difference(case: Case, function: Function, step: float = 1e-5) -> Function:
    """Slope of the loss along the tangents: by finite differences, and from the gradient."""

    def run(*operands: Any) -> Any:
        of, moving = of_moving(case, function, operands)
        along = tangents(moving)
        above, below = (
            loss(of(*(x + sign * step * dx for x, dx in zip(moving, along, strict=True))))
            for sign in (1, -1)
        )
        slopes = gradient(case, function)(*operands)
        said = sum(jnp.vdot(dx, slope) for dx, slope in zip(along, slopes, strict=True))
        return (above - below) / (2 * step), said

    return run


def hessian_vector(case: Case, function: Function) -> Function:
    def run(*operands: Any) -> Any:
        of, moving = of_moving(case, function, operands)
        slope = jax.grad(lambda *m: loss(of(*m)), argnums=tuple(range(len(moving))))
        return jax.jvp(slope, moving, tangents(moving))[1]

    return run


def transpose(case: Case, function: Function) -> Function:
    def run(*operands: Any) -> Any:
        def of(x: Any) -> Any:
            given = list(operands)
            given[case.linear] = x
            return function(*given)

        x = operands[case.linear]
        return jax.linear_transpose(of, x)(of(x))

    return run


# --- control flow ---


def carried(case: Case, function: Function) -> Function:
    """Runs a scan with the results as its carry; each iteration scales the activations."""

    def run(*operands: Any) -> Any:
        shapes = jax.eval_shape(function, *operands)
        start = jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), shapes)

        def turn(carry: Any, scale: Any) -> Any:
            given = [
                a * scale.astype(a.dtype) if i in case.activations else a
                for i, a in enumerate(operands)
            ]
            return function(*given), carry

        return jax.lax.scan(turn, start, jnp.array([1.0, 0.5]))

    return run


def branch(case: Case, function: Function) -> Function:
    def run(*operands: Any) -> Any:
        shapes = jax.eval_shape(function, *operands)
        zeros = jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), shapes)
        first = jax.tree.leaves(operands)[0]
        return jax.lax.cond(jnp.all(first == first), lambda: function(*operands), lambda: zeros)

    return run


# --- vmap ---


def mapped(case: Case, function: Function, over: tuple[int, ...]) -> Function:
    axes = tuple(0 if i in over else None for i in range(len(case.operands)))

    def run(*operands: Any) -> Any:
        given = [
            jax.tree.map(lambda a, b: jnp.stack([a, b]), x, flipped(x)) if i in over else x
            for i, x in enumerate(operands)
        ]
        return jax.vmap(function, in_axes=axes)(*given)

    return run


# --- devices ---


def mesh(kind: AxisType) -> Any:
    return jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])


def in_shard_map(case: Case, function: Function, check: bool) -> Function:
    return jax.shard_map(
        function,
        mesh=mesh(AxisType.Auto),
        in_specs=case.specs,
        out_specs=case.results,
        check_vma=check,
    )


def split(case: Case, operands: Any, kind: AxisType) -> Any:
    """Puts the operands on two devices."""
    on = mesh(kind)
    return tuple(
        jax.device_put(a, NamedSharding(on, spec))
        for a, spec in zip(operands, case.specs, strict=True)
    )


# --- exported programs ---


def exported(case: Case, function: Function) -> Function:
    def run(*operands: Any) -> Any:
        program = export.export(jax.jit(function), disabled_checks=jq.EXPORT_CHECKS)(
            *jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), operands)
        )
        return export.deserialize(program.serialize()).call(*operands)

    return run


# --- modes ---


def checked(case: Case, function: Function) -> Function:
    found = checkify.checkify(function, errors=checkify.float_checks)
    return lambda *operands: found(*operands)[1]


def without_jit(case: Case, function: Function) -> Function:
    return jax.disable_jit()(function)


def among_nans(case: Case, function: Function) -> Function:
    """Returns the results; checks that a NaN activation raises if a result is a float."""

    def run(*operands: Any) -> Any:
        spoiled = list(operands)
        at = case.activations[0]
        spoiled[at] = spoiled[at].copy()
        spoiled[at].flat[0] = np.nan
        with jax.debug_nans(True):
            results = jax.jit(function)(*operands)
            floats = any(jnp.issubdtype(y.dtype, jnp.floating) for y in jax.tree.leaves(results))
            with pytest.raises(FloatingPointError, match="nan") if floats else nullcontext():
                jax.jit(function)(*spoiled)
        return results

    return run


def unchanged(case: Case, function: Function) -> Function:
    return function


def with_examples(case: Case) -> bool:
    return bool(case.examples)


#: Keyed by the headings of the table's columns.
TRANSFORMS = {
    "jit": Transform(unchanged, "`jax.jit`", plain=unchanged),
    "vmap x": Transform(
        lambda case, f: mapped(case, f, case.examples),
        "`jax.vmap` over examples: activations, ids, sequences",
        applies=with_examples,
    ),
    "vmap w": Transform(
        lambda case, f: mapped(case, f, case.weights),
        "`jax.vmap` over weights, quantized or not, or over caches",
        applies=lambda case: bool(case.weights),
    ),
    "grad": Transform(gradient, "`jax.grad`", derivative=True),
    "jvp": Transform(tangent, "`jax.jvp`", derivative=True),
    "hvp": Transform(hessian_vector, "`jax.jvp` of `jax.grad`", derivative=True),
    "vmap grad": Transform(
        lambda case, f: mapped(case, gradient(case, f), case.examples),
        "`jax.vmap` of `jax.grad`: a gradient for each example",
        derivative=True,
        applies=with_examples,
    ),
    "transpose": Transform(
        transpose,
        "`jax.linear_transpose`, in an operand that the operation is linear in",
        applies=lambda case: case.linear is not None,
    ),
    "scan": Transform(
        lambda case, f: value_and_gradient(case, carried(case, f)),
        "`jax.lax.scan` with the results as its carry, and its gradient",
    ),
    "cond": Transform(
        lambda case, f: value_and_gradient(case, branch(case, f)),
        "a branch of `jax.lax.cond`, and its gradient",
        plain=value_and_gradient,
    ),
    "remat": Transform(
        lambda case, f: value_and_gradient(case, jax.checkpoint(f)),
        "`jax.checkpoint`, and its gradient",
        plain=value_and_gradient,
    ),
    "export": Transform(
        exported, "`jax.export` for a CPU: serialized, read back and called", plain=unchanged
    ),
    "checkify": Transform(
        checked,
        "`checkify.checkify` with `float_checks`; what it reports: `tests/jax_q4k/test_reports.py`",
        plain=unchanged,
    ),
    "shard_map": Transform(
        lambda case, f: value_and_gradient(case, in_shard_map(case, f, check=True)),
        "`jax.shard_map` over two devices, and the gradient through it",
        plain=value_and_gradient,
    ),
    "unchecked": Transform(
        functools.partial(in_shard_map, check=False),
        "the same with `check_vma=False`",
        plain=unchanged,
    ),
    "explicit": Transform(
        unchanged,
        "operands split over two devices of a mesh of explicit axes; gradients, and where results "
        "lie: `tests/jax_q4k/sharding/test_sharding.py`",
        plain=unchanged,
        mesh=AxisType.Explicit,
    ),
    "auto": Transform(
        unchanged, "the same with automatic axes", plain=unchanged, mesh=AxisType.Auto
    ),
    "disable_jit": Transform(without_jit, "inside `jax.disable_jit()`", unchanged, traced=False),
    "debug_nans": Transform(
        among_nans,
        "inside `jax.debug_nans(True)`; a NaN among the activations is a `FloatingPointError`",
        unchanged,
        applies=lambda case: bool(case.activations),
        traced=False,
    ),
}
