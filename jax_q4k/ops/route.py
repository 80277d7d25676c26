"""Router of a mixture of experts: selects each token's experts and their weights."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from ptx_kernels.limits import MAX_ROUTED, MAX_ROUTED_EXPERTS

from ..native import calls
from ..sharding.layout import Layout, Rows
from . import checks
from .op import KernelCall, Op
from .vmaps import by_rows

#: Functions from logits to scores.
GATINGS = ("softmax", "sigmoid")

#: Minimum sum of weights that `normalize` divides by: the smallest normal float16, as in llama.cpp.
LEAST_SUM = 6.103515625e-5


def route(
    logits: Any,
    top: int,
    *,
    gating: Literal["softmax", "sigmoid"] = "softmax",
    bias: Any = None,
    groups: int = 1,
    groups_used: int = 1,
    group_best: int = 2,
    normalize: bool = True,
    scale: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Returns the `top` experts of each token by score, and these scores as weights.

    Experts are selected by score + bias. If there are several groups of experts, groups are
    selected first, by the sum of their two best experts (https://arxiv.org/abs/2412.19437, 2.1.2)
    or by their best one (https://arxiv.org/abs/2405.04434, 2.2.2).
    Weights are the scores without the bias. Among equals, the lower id comes first.

    With `softmax` and `normalize`, weights are the softmax over the selected experts' logits, which
    is gpt-oss's rule, unless the clamp below 6.1e-5 acts.

    NaN counts as the largest score, so ids stay in range. Weights are then NaN: with `softmax` or
    `normalize` all of the token's, otherwise those of experts with a NaN logit.

    Args:
      logits: (..., experts) float32, bfloat16 or float16.
      top: experts per token, 1 to the number of experts in `groups_used` groups.
      gating: scores from logits: `softmax` over all experts, or `sigmoid` of each.
      bias: (experts,), added to scores for the selection only, or None.
      groups: number of equal groups of experts, a divisor of their number.
      groups_used: number of groups that a token's experts may come from.
      group_best: number of experts whose scores add up to their group's, 1 or 2.
      normalize: whether weights are divided by their sum, at least 6.1e-5.
      scale: final factor of the weights.

    Returns:
      ids int32 (..., top), best first, and weights float32 (..., top), differentiable in the
      logits.

    Raises:
      TypeError: a dtype that is not listed, an argument that is not a number. ValueError: shapes
        that don't fit, an unknown name, a number out of range.
    """
    choice = top, gating, bias, groups, groups_used, group_best, normalize, scale
    logits, bias, params = checked(logits, *choice)
    if logits.size == 0:
        shape = *logits.shape[:-1], params["top"]
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    rows = Rows.of(logits)
    ids, weights = op.bind(rows.merge(logits).astype(jnp.float32), bias, **params)
    return rows.split(ids), rows.split(weights)


def checked(
    logits: Any,
    top: int,
    gating: str,
    bias: Any,
    groups: int,
    groups_used: int,
    group_best: int,
    normalize: bool,
    scale: float,
    *,
    bias_name: str = "bias",
) -> tuple[jax.Array, jax.Array | None, dict[str, Any]]:
    """Checks the arguments; returns the logits, the bias, and the primitive's parameters."""
    logits = checks.float_array("logits", logits)
    if logits.ndim < 1 or logits.shape[-1] < 1:
        raise ValueError(f"logits has shape {logits.shape}; its last axis must hold an expert")
    experts = logits.shape[-1]
    if gating not in GATINGS:
        raise ValueError(f"gating={gating!r} must be one of {', '.join(GATINGS)}")
    groups, used = checks.integer("groups", groups), checks.integer("groups_used", groups_used)
    if groups < 1 or experts % groups:
        raise ValueError(f"groups={groups} must divide the number of experts, {experts}")
    if not 1 <= used <= groups:
        raise ValueError(f"groups_used={used} must be 1 to groups={groups}")
    if (best := checks.integer("group_best", group_best)) not in (1, 2):
        raise ValueError(f"group_best={best} must be 1 or 2")
    top, selectable = checks.integer("top", top), experts // groups * used
    if not 1 <= top <= selectable:
        raise ValueError(f"top={top} must be 1 to {selectable}, the experts to choose from")
    if bias is not None:
        bias = checks.float32(bias_name, bias, (experts,), "(experts,)")
    return (
        logits,
        bias,
        {
            "top": top,
            "gating": gating,
            "groups": groups,
            "groups_used": used,
            "group_best": best,
            "normalize": bool(normalize),
            "scale": checks.number("scale", scale),
        },
    )


def reference(
    logits: jax.Array,
    bias: jax.Array | None,
    *,
    top: int,
    gating: str,
    groups: int,
    groups_used: int,
    group_best: int,
    normalize: bool,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """`route` of float32 logits (m, experts), in plain JAX."""
    scores = jax.nn.softmax(logits, axis=-1) if gating == "softmax" else jax.nn.sigmoid(logits)
    ids = _chosen(jax.lax.stop_gradient(scores), bias, top, groups, groups_used, group_best)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if normalize:
        weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), LEAST_SUM)
    return ids, weights * scale


def ptx(
    launch: KernelCall,
    logits: jax.Array,
    bias: jax.Array | None,
    **params: Any,
) -> tuple[jax.Array, jax.Array]:
    """`route` in one launch, or in plain JAX with groups or beyond the kernel's limits."""
    m, experts = logits.shape
    if not a_warp_routes(experts, **params):
        return reference(logits, bias, **params)
    from ptx_kernels.kernels.route import route as route_kernel

    routing = kernel_routing(bias, **params)
    kernel = route_kernel(rows=m, experts=experts, routing=routing)
    ids, weights = launch(kernel, logits, *([] if bias is None else [bias]))
    return ids, weights


def native(
    logits: jax.Array, bias: jax.Array | None, *, gating: str, group_best: int, **params: Any
) -> tuple[jax.Array, jax.Array]:
    """`route` by the native kernel; a token's bits do not depend on the number of tokens.

    Groups that are selected by their best expert alone are selected in plain JAX.
    """
    if params["groups"] > 1 and group_best != 2:
        return reference(logits, bias, gating=gating, group_best=group_best, **params)
    return calls.route(logits, bias, softmax=gating == "softmax", least_sum=LEAST_SUM, **params)


def a_warp_routes(experts: int, *, top: int, groups: int, **_: Any) -> bool:
    """Returns whether one warp of a kernel can select the top experts among this many."""
    return groups == 1 and experts <= MAX_ROUTED_EXPERTS and top <= MAX_ROUTED


def kernel_routing(bias: jax.Array | None, **params: Any) -> Any:
    """Returns the kernels' `Routing` for the parameters of `route`, whose groups it ignores."""
    from ptx_kernels.kernels.route import Routing

    params = {name: value for name, value in params.items() if not name.startswith("group")}
    return Routing(bias=bias is not None, least=LEAST_SUM, **params)


def _chosen(
    scores: jax.Array,
    bias: jax.Array | None,
    top: int,
    groups: int,
    groups_used: int,
    group_best: int,
) -> jax.Array:
    """Returns the ids int32 (m, top) of the best scores (m, experts)."""
    m, experts = scores.shape
    biased = scores if bias is None else scores + bias
    biased = jnp.where(jnp.isnan(biased), jnp.inf, biased)
    if groups > 1:
        members = biased.reshape(m, groups, experts // groups)
        best, _ = jax.lax.top_k(members, min(group_best, experts // groups))
        _, used = jax.lax.top_k(jnp.sum(best, axis=-1), groups_used)
        allowed = jnp.any(used[:, :, None] == jnp.arange(groups)[None, None], axis=1)
        biased = jnp.where(allowed[:, :, None], members, -jnp.inf).reshape(m, experts)
    _, ids = jax.lax.top_k(biased, top)
    return ids


def _shapes(logits: Any, _: Any, *, top: int, **__: Any) -> Any:
    shape = logits.shape[0], top
    return jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)


#: The primitive. A token's logits are never split over devices.
op = Op(
    "route",
    reference,
    shapes=_shapes,
    ptx=ptx,
    native=native,
    vmap=by_rows,
    derivative="reference",
    layout=lambda *_, **__: Layout(("m _", "_"), ("m _", "m _")),
    computed=lambda results: results[1:],
)
