"""Derivatives of an operation: none, those of a composition, or an operation that is linear."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from ..implementation import Selection, selected
from .backends import Operation, of_leaves
from .prefetch import own

Params = dict[str, Any]


class Linear(NamedTuple):
    """The derivative of an operation of one result that is linear in each operand of floats.

    The tangent is the operation itself, so it has derivatives in turn. Operands of integers are
    constants: uint8 planes, say, whose tangents are always zero.

    Attributes:
      tangent: parameters -> those of the result's tangent as a function of an operand's.
      transpose: parameters that `tangent` gave -> those of the operation that is its transpose, of
        the first operand. None: the reference's transpose.
    """

    tangent: Callable[[Params], Params] = dict
    transpose: Callable[[Params], Params] | None = None


def define(op: Operation, derivative: Linear | Callable[..., Any] | None) -> None:
    """Gives `op` its derivative; None: asking for one raises NotImplementedError.

    A function is a composition of differentiable operations with the same meaning. Its values are
    taken where a derivative is asked for: the derivative needs those in between, which the
    operation itself would compute a second time.
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
    """A rule that sees no weights that are prefetched."""
    primals, params = own(primals, params["tree"], params)
    return rule(primals, tangents[: len(primals)], **params)


def _own_transpose(
    rule: Callable[..., Any], cotangents: Sequence[Any], *operands: Any, **params: Any
) -> list[Any]:
    """As `_own_jvp`; weights that are prefetched have no cotangents."""
    given, params = own(operands, params["tree"], params)
    return [*rule(cotangents, *given, **params), *[None] * (len(operands) - len(given))]


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
    except (NotImplementedError, AssertionError, TypeError) as error:  # of one of the steps
        raise NotImplementedError(
            f"{op.name}: jax.linear_transpose takes functions that are linear, and this one is not "
            "in the operands that it is asked for; use jax.vjp"
        ) from error
    transposed = dict(zip(linear, found, strict=True))
    return [transposed.get(i) for i in range(len(operands))]


def _varied(
    composition: Callable[..., Any],
    varying: Sequence[int],
    operands: Sequence[Any],
    params: Params,
) -> Callable[..., list[Any]]:
    """The composition as a function of some of the operands' leaves, the implementation kept."""
    plain = {k: v for k, v in params.items() if k not in ("tree", "implementation")}
    whole = of_leaves(composition, params["tree"], plain)

    def function(*leaves: Any) -> list[Any]:
        varied = dict(zip(varying, leaves, strict=True))
        with selected(Selection(params["implementation"])):
            return whole(*(varied.get(i, operand) for i, operand in enumerate(operands)))

    return function
