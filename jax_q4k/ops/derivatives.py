"""Defines an operation's JVP and transpose rules.

An operation has no derivative, is linear in its operands (`Linear`), or is differentiated as a
composition of differentiable operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from ..selection import selected
from .backends import Operation, of_leaves
from .prefetch import without_prefetch

Params = dict[str, Any]


class Linear(NamedTuple):
    """Derivative of an operation with one result that is linear in each float operand.

    The operation itself computes the tangent, so the tangent is differentiable again. Integer
    operands, such as uint8 planes, are constants: their tangents are always zero.

    Attributes:
      tangent: maps the operation's parameters to those of the operation that computes the tangent.
      transpose: maps the parameters from `tangent` to those of the operation that is the transpose
        in the first operand. None means that JAX transposes the reference.
    """

    tangent: Callable[[Params], Params] = dict
    transpose: Callable[[Params], Params] | None = None


def define(op: Operation, derivative: Linear | Callable[..., Any] | None) -> None:
    """Registers JVP and transpose of `op`; with None, differentiation raises NotImplementedError.

    A `derivative` that is a function is a composition of differentiable operations with the same
    results as `op`. Differentiation also takes the primal results from the composition: the
    derivative needs its intermediate values, which `op` itself would compute a second time.
    """
    if isinstance(derivative, Linear):
        ad.primitive_jvps[op.primitive] = functools.partial(_linear_jvp, op, derivative)
        transpose = derivative.transpose
        ad.primitive_transposes[op.primitive] = (
            functools.partial(_transpose_of, op, _tangent_of(op, derivative))
            if transpose is None
            else functools.partial(_transpose, op, derivative.tangent, transpose)
        )
    elif derivative is None:
        refuse = functools.partial(_no_derivative, op)
        ad.primitive_jvps[op.primitive] = ad.primitive_transposes[op.primitive] = refuse
    else:
        ad.primitive_jvps[op.primitive] = functools.partial(_jvp_of, derivative)
        ad.primitive_transposes[op.primitive] = functools.partial(_transpose_of, op, derivative)
    jvps: Any = ad.primitive_jvps
    transposes: Any = ad.primitive_transposes
    jvps[op.primitive] = functools.partial(_own_jvp, jvps[op.primitive])
    transposes[op.primitive] = functools.partial(_own_transpose, transposes[op.primitive])


def _own_jvp(
    rule: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> Any:
    """Calls a JVP rule without the operands that are only weights to prefetch."""
    primals, params = without_prefetch(primals, params["tree"], params)
    return rule(primals, tangents[: len(primals)], **params)


def _own_transpose(
    rule: Callable[..., Any], cotangents: Sequence[Any], *operands: Any, **params: Any
) -> list[Any]:
    """Calls a transpose rule without the weights to prefetch, whose cotangents are None."""
    args, params = without_prefetch(operands, params["tree"], params)
    return [*rule(cotangents, *args, **params), *[None] * (len(operands) - len(args))]


def _no_derivative(op: Operation, *_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        f"{op.name} has no derivative: keep gradients out of its operands by "
        "jax.lax.stop_gradient, or compute it in plain JAX"
    )


def _linear_jvp(
    op: Operation, linear: Linear, primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[Any, Any]:
    terms = [
        op.primitive.bind(*primals[:i], tangent, *primals[i + 1 :], **linear.tangent(params))[0]
        for i, tangent in enumerate(tangents)
        if not isinstance(tangent, ad.Zero)
    ]
    return op.primitive.bind(*primals, **params), [functools.reduce(jnp.add, terms)]


def _tangent_of(op: Operation, linear: Linear) -> Callable[..., Any]:
    return lambda *operands, **params: op.reference(*operands, **linear.tangent(params))


def _transpose(
    op: Operation,
    tangent: Callable[[Params], Params],
    transpose: Callable[[Params], Params],
    cotangents: Sequence[Any],
    _: Any,
    *others: Any,
    **params: Any,
) -> list[Any]:
    cotangent = ad.instantiate_zeros(cotangents[0])
    (out,) = op.primitive.bind(cotangent, *others, **transpose(tangent(params)))
    return [out, *(None for _ in others)]


def _jvp_of(
    composition: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[Any, Any]:
    moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    along = [primals[i] for i in moving], [tangents[i] for i in moving]
    return jax.jvp(_varied(composition, moving, primals, params), *along)


def _transpose_of(
    op: Operation,
    composition: Callable[..., Any],
    cotangents: Sequence[Any],
    *operands: Any,
    **params: Any,
) -> list[Any]:
    linear = [i for i, operand in enumerate(operands) if ad.is_undefined_primal(operand)]
    function = _varied(composition, linear, operands, params)
    try:
        transpose = jax.linear_transpose(function, *(operands[i].aval for i in linear))
        found = transpose([ad.instantiate_zeros(cotangent) for cotangent in cotangents])
    except (NotImplementedError, AssertionError, TypeError) as error:  # raised by a step
        raise NotImplementedError(
            f"{op.name}: jax.linear_transpose needs a function that is linear in the requested "
            "operands; use jax.vjp"
        ) from error
    transposed = dict(zip(linear, found, strict=True))
    return [transposed.get(i) for i in range(len(operands))]


def _varied(
    composition: Callable[..., Any],
    varying: Sequence[int],
    operands: Sequence[Any],
    params: Params,
) -> Callable[..., list[Any]]:
    """Returns the composition as a function of the leaves at positions `varying` only.

    The other operands are constants. The implementation in `params` is selected.
    """
    plain = {k: v for k, v in params.items() if k not in ("tree", "implementation")}
    composed = of_leaves(composition, params["tree"], plain)

    def function(*leaves: Any) -> list[Any]:
        varied = dict(zip(varying, leaves, strict=True))
        with selected(params["implementation"].selection):
            return composed(*(varied.get(i, operand) for i, operand in enumerate(operands)))

    return function
