"""Feed-forward networks of the experts that a router selects (MoE), summed with its weights."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from ..selection import activations_of
from ..sharding.layout import Layout, Parts
from . import checks, expert_kernels, expert_mlp, route
from .op import KernelCall, Op
from .vmaps import by_examples, by_rows


def routed_mlp(
    x: Any,
    logits: Any,
    gate: Any,
    up: Any,
    down: Any,
    top: int,
    *,
    gating: Literal["softmax", "sigmoid"] = "softmax",
    selection_bias: Any = None,
    groups: int = 1,
    groups_used: int = 1,
    group_best: int = 2,
    normalize: bool = True,
    scale: float = 1.0,
    activation: str = "silu",
    biases: Sequence[Any] | None = None,
    down_scale: Any = None,
    norm_weight: Any = None,
    eps: float | None = None,
    residual: Any = None,
    activations: str | None = None,
) -> jax.Array:
    """`expert_mlp` of x, with the experts and weights that `route` selects from the logits.

    On CUDA, for few tokens, the mat-vec of gate and up selects the experts, which saves a launch.

    Args:
      x: (..., k) float32, bfloat16 or float16.
      logits: (..., experts).
      top, gating, groups, groups_used, group_best, normalize, scale: see `route`.
      selection_bias: (experts,), the bias of `route`, or None.
      gate, up, down, activation, biases, down_scale, norm_weight, eps, residual, activations: see
        `expert_mlp`.

    Returns:
      (..., n) of x's dtype. Differentiable like the chain of `route` and `expert_mlp`.

    Raises:
      TypeError: a dtype that is not listed, an argument that is not a number. ValueError: shapes
        that don't fit, an unknown name, a number out of range, norm_weight without eps.
    """
    activations = activations_of(activations)
    given, rows, dtype = expert_mlp.checked(
        x, gate, up, down, activation, biases, down_scale, norm_weight, residual
    )
    choice = top, gating, selection_bias, groups, groups_used, group_best, normalize, scale
    logits, bias, routing = route.checked(logits, *choice, bias_name="selection_bias")
    shape = *jnp.shape(x)[:-1], given.gate.shape[0]
    checks.same_shape("logits", logits, shape, "(..., experts)")
    operands = Operands(
        given.x,
        given.residual,
        rows.merge(logits).astype(jnp.float32),
        bias,
        given.norm_weight,
        given.gate,
        given.up,
        given.down,
        given.biases,
        given.down_scale,
    )
    params: Any = {
        "routing": tuple(sorted(routing.items())),
        "activation": activation,
        "activations": activations,
    }
    return expert_mlp.applied(op, _derivative, operands, rows, dtype, eps=eps, **params)


class Operands(NamedTuple):
    """The primitive's operands; all but the matrices are float32."""

    x: jax.Array  # (m, k)
    residual: jax.Array | None  # (m, n)
    logits: jax.Array  # (m, experts)
    selection_bias: jax.Array | None  # (experts,)
    norm_weight: jax.Array | None  # (k,)
    gate: Any  # packed or float (experts, inner, k), like `up`
    up: Any
    down: Any  # (experts, n, inner)
    biases: tuple[Any, Any, Any]  # (experts, inner) twice, (experts, n)
    down_scale: jax.Array | None  # (experts,)

    def of_experts(self, ids: Any = None, weights: Any = None) -> expert_mlp.Operands:
        """Returns the operands of `expert_mlp`, with the given expert ids and routing weights."""
        return expert_mlp.Operands(self.x, self.residual, ids, weights, *self[4:])


def reference(*operands: Any, routing: Any, **params: Any) -> jax.Array:
    """The operation in plain JAX."""
    given = Operands(*operands)
    chosen = route.reference(given.logits, given.selection_bias, **dict(routing))
    return expert_mlp.reference(*given.of_experts(*chosen), **params)


def ptx(launch: KernelCall, *operands: Any, routing: Any, **params: Any) -> jax.Array:
    """The operation by two mat-vecs, the first of which selects the experts.

    If a mat-vec cannot, runs `route`, then `expert_mlp`.
    """
    given, options = Operands(*operands), dict(routing)
    (m, experts), matrices = given.logits.shape, [given.gate, given.up, given.down]
    mat_vecs = expert_kernels.takes(matrices, m, options["top"])
    if not (mat_vecs and route.a_warp_routes(experts, **options)):
        chosen = route.ptx(launch, given.logits, given.selection_bias, **options)
        return expert_mlp.ptx(launch, *given.of_experts(*chosen), **params)
    kernel_routing = route.kernel_routing(given.selection_bias, **options)
    router = expert_kernels.Router(given.logits, given.selection_bias, kernel_routing)
    return expert_mlp.mat_vecs(launch, given.of_experts(), router, **params)


def native(*operands: Any, routing: Any, **params: Any) -> jax.Array:
    """Runs the native kernels of `route` and `expert_mlp`."""
    given = Operands(*operands)
    chosen = route.native(given.logits, given.selection_bias, **dict(routing))
    return expert_mlp.native(*given.of_experts(*chosen), **params)


def _derivative(*operands: Any, routing: Any, **params: Any) -> jax.Array:
    """Composes the operation from differentiable ones."""
    given, options = Operands(*operands), dict(routing)
    bias = given.selection_bias
    ids, weights = route.route(given.logits, options.pop("top"), bias=bias, **options)
    of_experts = given.of_experts(ids, weights)._asdict()
    return expert_mlp.expert_mlp(**of_experts, **params)


def _layout(*_: Any, **__: Any) -> Layout:
    """Returns the Layout of `expert_mlp` with logits and a bias; a token's logits are not split."""
    inner = expert_mlp.layout()
    x, residual, ids, _, *others = inner.operands
    return inner._replace(operands=(x, residual, ids, "_", *others))


def _split(parts: Parts, call: Any, *operands: Any, routing: Any, **params: Any) -> jax.Array:
    """Runs a device's experts and shard of the inner axis; every device runs the router."""
    given = Operands(*operands)
    chosen = call(route.op, given.logits, given.selection_bias, **dict(routing))
    return expert_mlp.split(parts, call, *given.of_experts(*chosen), **params)


def _shapes(*operands: Any, **_: Any) -> Any:
    return expert_mlp.shapes(*Operands(*operands).of_experts())


#: The primitive.
op = Op(
    "routed_mlp",
    reference,
    shapes=_shapes,
    ptx=ptx,
    native=native,
    vmap=functools.partial(by_rows, operands=3, otherwise=by_examples),  # x to logits
    derivative=_derivative,
    layout=_layout,
    split=_split,
)
