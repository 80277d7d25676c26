"""The table of each operation's expected behavior under each transform, and how to check it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_q4k as jq

from .operations import CASES, Case, Refusal
from .transforms import TRANSFORMS, finite_difference, split

#: Maximum NMSE of results, which are rounded to the dtype after each step.
TOLERANCES = {"float32": 1e-10, "bfloat16": 1e-4, "float16": 2e-6}
#: Transforms of the quick tier.
_FIRST = ("jit", "vmap x", "vmap w", "grad", "shard_map")
#: (implementation, dtype, part of the transforms) -> transforms that run with them on a CPU.
RUNS = {
    ("native", "float32", "first"): _FIRST,
    ("native", "float32", "others"): tuple(name for name in TRANSFORMS if name not in _FIRST),
    ("native", "bfloat16", "some"): ("jit", "grad", "hvp", "transpose"),
    ("native", "float16", "some"): ("jit", "grad"),
    ("xla", "float32", "some"): ("jit", "grad", "transpose"),
    ("sim", "float32", "some"): ("jit", "vmap x"),
    # only the full tier runs these, since it runs all transforms of "some"
    **{(name, dtype, "some"): () for name in ("xla", "sim") for dtype in ("bfloat16", "float16")},
}
#: Transforms that are lowered for CUDA.
LOWERED = tuple(TRANSFORMS)[: tuple(TRANSFORMS).index("export")]


def status(case: Case, transform: str) -> bool | Refusal:
    """True if the results must be right, False if the combination does not exist, or a Refusal."""
    asked = TRANSFORMS[transform]
    if not asked.applies(case) or (asked.derivative and not case.moving):
        return False
    if asked.derivative and "derivative" in case.refuses:
        return case.refuses["derivative"]
    return case.refuses.get(transform, True)


def results(case: Case, transforms: list[str], implementation: str, dtype: str) -> dict[str, Any]:
    """Runs transforms that must be right; those on one device share a program.

    Returns a dict from transform to leaves.
    """
    functions = {name: TRANSFORMS[name].of(case, case.call) for name in transforms}
    operands, found = case.given(dtype), {}
    with jq.implementation(implementation, activations="f32"):  # type: ignore[arg-type]
        together = {}
        for name, function in functions.items():
            asked = TRANSFORMS[name]
            if not asked.traced:
                found[name] = jax.device_get(jax.tree.leaves(function(*operands)))
            elif asked.mesh is not None:
                found |= run({name: function}, split(case, operands, asked.mesh))
            else:
                together[name] = function
        return found | run(together, operands)


def run(functions: dict[str, Any], operands: Any) -> dict[str, Any]:
    return jax.device_get(jax.jit(joined(functions))(*operands))


def joined(functions: dict[str, Any]) -> Any:
    """Combines functions of the operands into one that returns a dict: name -> result leaves."""
    return lambda *operands: {
        name: jax.tree.leaves(function(*operands)) for name, function in functions.items()
    }


def lowered(case: Case, transforms: list[str]) -> str:
    """Lowers these transforms to StableHLO for CUDA, with PTX kernels."""
    program = jax.jit(joined({name: TRANSFORMS[name].of(case, case.call) for name in transforms}))
    with jq.implementation("ptx"):
        traced = program.trace(*case.given("float32"))
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@functools.cache
def oracle(name: str, dtype: str) -> dict[str, Any]:
    """Computes the oracle of a case in float64: transform -> leaves, and "finite difference"."""
    operands = [in_float64(a) for a in CASES[name].given(dtype)]
    with jax.enable_x64(True):
        found = jax.device_get(_oracle(name)(*operands))
    return {title: found[_plain(title)] for title in TRANSFORMS if _plain(title) in found} | found


def _plain(transform: str) -> str:
    """Key of the oracle's result that this transform must reproduce."""
    plain = TRANSFORMS[transform].plain
    return plain.__name__ if plain else transform


@functools.cache
def _oracle(name: str) -> Any:
    case = CASES[name]
    functions = {
        _plain(title): (asked.plain or asked.of)(case, case.oracle)
        for title, asked in TRANSFORMS.items()
        if status(case, title) is True
    }
    if case.differentiable:
        functions["finite difference"] = finite_difference(case, case.oracle)
    return jax.jit(joined(functions))


def in_float64(x: Any) -> Any:
    if isinstance(x, jq.QuantizedArray):
        return np.asarray(x.dequantize()).astype(np.float64)
    return x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
