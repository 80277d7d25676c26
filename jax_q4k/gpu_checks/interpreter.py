"""Evaluates a traced program equation by equation, with other meanings of some primitives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend

#: (equation, operands) -> results.
Rule = Callable[[Any, Sequence[Any]], Sequence[Any]]


def evaluated(
    closed: Any, operands: Sequence[Any], rules: Mapping[jax.extend.core.Primitive, Rule]
) -> list[Any]:
    """Returns the results of a closed jaxpr; equations of primitives in `rules` run by their rule.

    Raises NotImplementedError for such an equation inside a loop or a branch.
    """
    jaxpr = closed.jaxpr
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values |= zip(jaxpr.invars, operands, strict=True)

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jax.extend.core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        primitive, arguments = equation.primitive, [read(atom) for atom in equation.invars]
        if primitive in rules:
            results = rules[primitive](equation, arguments)
        elif not any(inner.primitive in rules for inner in _inside(equation)):
            results = _plain(equation)(*arguments)
        elif primitive.name == "jit":
            results = evaluated(equation.params["jaxpr"], arguments, rules)
        else:
            raise NotImplementedError(
                f"{primitive.name} contains operations, which must be outside"
            )
        values |= zip(equation.outvars, results, strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def _plain(equation: Any) -> Callable[..., Sequence[Any]]:
    """Returns the function of an equation's operands, as JAX evaluates it."""
    primitive, params = equation.primitive, equation.params
    if primitive.name == "jit":
        return jax.jit(jax.extend.core.jaxpr_as_fun(params["jaxpr"]))
    return lambda *operands: jax.tree.leaves(primitive.bind(*operands, **params))


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr and of the jaxprs inside them."""
    for equation in jaxpr.eqns:
        yield equation
        yield from _inside(equation)


def _inside(equation: Any) -> Iterator[Any]:
    for param in equation.params.values():
        for inner in param if isinstance(param, (tuple, list)) else (param,):
            inner = getattr(inner, "jaxpr", inner)  # the jaxpr of a closed one
            if hasattr(inner, "eqns"):
                yield from equations(inner)
