"""Derivatives of an operation: none, those of a composition, or an operation that is linear."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
from jax.interpreters import ad

from ..implementation import Selection, selected
from .backends import Operation, of_leaves

Params = dict[str, Any]


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


def define(op: Operation, derivative: Linear | Callable[..., Any] | None) -> None:
    """Gives `op` its derivative; None: asking for one raises NotImplementedError.

    A function is a composition of differentiable operations with the same meaning.
    """
    if isinstance(derivative, Linear):
        ad.primitive_jvps[op.primitive] = functools.partial(_linear_jvp, op, derivative)
        ad.primitive_transposes[op.primitive] = functools.partial(_transpose, op, derivative)
    elif derivative is None:
        ad.primitive_jvps[op.primitive] = functools.partial(_no_derivative, op)
    else:
        ad.primitive_jvps[op.primitive] = functools.partial(_jvp_of, op, derivative)


def _no_derivative(op: Operation, *_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        f"{op.name} has no derivative: keep gradients out of its operands by "
        "jax.lax.stop_gradient, or compute it in plain JAX"
    )


def _linear_jvp(
    op: Operation, linear: Linear, primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[Any, Any]:
    # JAX asks for a tangent only if some operand has one, and only the first can.
    out = op.primitive.bind(*primals, **params)
    return out, op.primitive.bind(tangents[0], *primals[1:], **linear.tangent(params))


def _transpose(
    op: Operation, linear: Linear, cotangents: Sequence[Any], _: Any, *others: Any, **params: Any
) -> list[Any]:
    cotangent = ad.instantiate_zeros(cotangents[0])
    params = linear.transpose(linear.tangent(params))
    (out,) = op.primitive.bind(cotangent, *others, **params)
    return [out, *(None for _ in others)]


def _jvp_of(
    op: Operation,
    composition: Callable[..., Any],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    **params: Any,
) -> tuple[Any, Any]:
    moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    plain = {k: v for k, v in params.items() if k not in ("tree", "implementation")}
    whole = of_leaves(composition, params["tree"], plain)

    def function(*leaves: Any) -> Any:
        varied = dict(zip(moving, leaves, strict=True))
        return whole(*(varied.get(i, primal) for i, primal in enumerate(primals)))

    along = [primals[i] for i in moving], [tangents[i] for i in moving]
    out = op.primitive.bind(*primals, **params)
    with selected(Selection(params["implementation"])):
        return out, jax.jvp(function, *along)[1]
