"""Feed-forward networks of the experts that a router selects (MoE), summed with its weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from ..arrays.indexed import Packed
from ..selection import activations_of
from ..sharding.layout import Layout, Parts
from . import checks, expert_kernels, expert_mlp, linear, linear_op, mlp, route
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
    shared: Sequence[Any] | None = None,
    shared_logits: Any = None,
    residual: Any = None,
    activations: str | None = None,
) -> jax.Array:
    """`expert_mlp` of x, with the experts and weights that `route` selects from the logits.

    A `shared` expert, which every token uses, adds sigmoid(shared_logits) times its `mlp` of the
    same normalized x.

    On CUDA, for few tokens, the mat-vec of gate and up selects the experts, which saves a launch.
    For up to eight tokens the shared expert is one more expert of these launches, if its matrices
    have the other experts' formats and sizes, and there are no biases and no down_scale.

    Args:
      x: (..., k) float32, bfloat16 or float16.
      logits: (..., experts).
      top, gating, groups, groups_used, group_best, normalize, scale: see `route`.
      selection_bias: (experts,), the bias of `route`, or None.
      gate, up, down, activation, biases, down_scale, norm_weight, eps, residual, activations: see
        `expert_mlp`.
      shared: gate and up (inner, k) and down (n, inner) of the shared expert, QuantizedArrays or
        float arrays, or None. Its inner axis may have another size than the experts'.
      shared_logits: (..., 1), or None, which means that the shared expert's factor is 1.

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
    if shared is not None:
        shared = _checked_shared(shared, given)
    if shared_logits is not None:
        if shared is None:
            raise ValueError("shared_logits need a shared expert")
        shape = *jnp.shape(x)[:-1], 1
        shared_logits = rows.merge(
            checks.float32("shared_logits", shared_logits, shape, "(..., 1)")
        )
    operands = Operands(
        given.x,
        given.residual,
        rows.merge(logits).astype(jnp.float32),
        shared_logits,
        bias,
        given.norm_weight,
        given.gate,
        given.up,
        given.down,
        given.biases,
        given.down_scale,
        shared,
    )
    params: Any = {"activation": activation, "activations": activations}
    if shared is not None and not all(isinstance(w, Packed) and w.shape[0] for w in shared):
        operands = _with_shared(operands, _public_mlp(eps=eps, **params))
    params["routing"] = tuple(sorted(routing.items()))
    return expert_mlp.applied(op, _derivative, operands, rows, dtype, eps=eps, **params)


def _checked_shared(shared: Sequence[Any], given: expert_mlp.Operands) -> tuple[Any, Any, Any]:
    """Checks the matrices of the shared expert."""
    if len(shared) != 3:
        raise ValueError(f"shared has {len(shared)} matrices; it must have gate, up and down")
    names = (f"shared[{i}]" for i in range(3))
    gate, up, last = checks.weights(dict(zip(names, shared, strict=True)), None).values()
    checks.same_shape("shared[1]", up, gate.shape, "the shape of shared[0]")
    linear.check_columns(given.x, "shared[0]", gate)
    rule = "(n, inner), for down (experts, n, _) and shared[0] (inner, k)"
    checks.same_shape("shared[2]", last, (given.down.shape[1], gate.shape[0]), rule)
    return gate, up, last


class Operands(NamedTuple):
    """The primitive's operands; all but the matrices are float32."""

    x: jax.Array  # (m, k)
    residual: jax.Array | None  # (m, n)
    logits: jax.Array  # (m, experts)
    shared_logits: jax.Array | None  # (m, 1)
    selection_bias: jax.Array | None  # (experts,)
    norm_weight: jax.Array | None  # (k,)
    gate: Any  # packed or float (experts, inner, k), like `up`
    up: Any
    down: Any  # (experts, n, inner)
    biases: tuple[Any, Any, Any]  # (experts, inner) twice, (experts, n)
    down_scale: jax.Array | None  # (experts,)
    shared: tuple[Any, Any, Any] | None  # packed (inner, k) twice, (n, inner)

    def of_experts(self, ids: Any = None, weights: Any = None) -> expert_mlp.Operands:
        """Returns the operands of `expert_mlp`, with the given expert ids and routing weights."""
        return expert_mlp.Operands(self.x, self.residual, ids, weights, *self[5:-1])


def _with_shared(given: Operands, run: Callable[[mlp.Operands], jax.Array]) -> Operands:
    """Returns operands without a shared expert, whose result by `run` is added to the residual."""
    if given.shared is None:
        return given
    logits, residual = given.shared_logits, given.residual
    args = mlp.Operands(given.x, residual, given.norm_weight, *given.shared)
    if logits is None:
        y = run(args)
    else:
        y = linear_op.plus(
            jax.nn.sigmoid(logits) * run(args._replace(residual=None)), None, residual
        )
    return given._replace(residual=y, shared=None, shared_logits=None)


def _public_mlp(**params: Any) -> Callable[[mlp.Operands], jax.Array]:
    """Returns a function that runs the differentiable operation `mlp`."""
    return lambda args: mlp.mlp(**args._asdict(), **params)


def reference(*operands: Any, routing: Any, **params: Any) -> jax.Array:
    """The operation in plain JAX."""
    given = _with_shared(Operands(*operands), lambda args: mlp.reference(*args, **params))
    chosen = route.reference(given.logits, given.selection_bias, **dict(routing))
    return expert_mlp.reference(*given.of_experts(*chosen), **params)


def ptx(launch: KernelCall, *operands: Any, routing: Any, **params: Any) -> jax.Array:
    """The operation by two mat-vecs, the first of which selects the experts.

    If a mat-vec cannot, runs `route`, then `expert_mlp`, and before them `mlp` for a shared expert
    that they do not take.
    """
    given, options = Operands(*operands), dict(routing)
    (m, experts), matrices = given.logits.shape, [given.gate, given.up, given.down]
    mat_vecs = expert_kernels.takes(matrices, m, options["top"])
    mat_vecs = mat_vecs and route.a_warp_routes(experts, **options)
    if given.shared is not None:
        plain = all(term is None for term in (*given.biases, given.down_scale))
        takes_shared = expert_kernels.takes_shared(matrices, given.shared, m, options["top"])
        if not (mat_vecs and plain and takes_shared):
            given = _with_shared(given, lambda args: mlp.ptx(launch, *args, **params))
    if not mat_vecs:
        chosen = route.ptx(launch, given.logits, given.selection_bias, **options)
        return expert_mlp.ptx(launch, *given.of_experts(*chosen), **params)
    kernel_routing = route.kernel_routing(given.selection_bias, **options)
    router = expert_kernels.Router(
        given.logits, given.selection_bias, kernel_routing, given.shared_logits
    )
    return expert_mlp.mat_vecs(launch, given.of_experts(), router, shared=given.shared, **params)


def native(*operands: Any, routing: Any, **params: Any) -> jax.Array:
    """Runs the native kernels of `route` and `expert_mlp`, and of `mlp` for a shared expert."""
    given = _with_shared(Operands(*operands), lambda args: mlp.native(*args, **params))
    chosen = route.native(given.logits, given.selection_bias, **dict(routing))
    return expert_mlp.native(*given.of_experts(*chosen), **params)


def _derivative(*operands: Any, routing: Any, **params: Any) -> jax.Array:
    """Composes the operation from differentiable ones."""
    given, options = Operands(*operands), dict(routing)
    given, bias = _with_shared(given, _public_mlp(**params)), given.selection_bias
    ids, weights = route.route(given.logits, options.pop("top"), bias=bias, **options)
    of_experts = given.of_experts(ids, weights)._asdict()
    return expert_mlp.expert_mlp(**of_experts, **params)


def _layout(*operands: Any, **_: Any) -> Layout:
    """Returns the Layout of `expert_mlp` with logits and a bias; a token's logits are not split.

    The inner axis of a shared expert is i in gate and up, and j in down (see `mlp`).
    """
    inner = expert_mlp.layout()
    shared = "_" if Operands(*operands).shared is None else ("i _", "i _", "n j")
    x, residual, ids, weights, *others = inner.operands
    return inner._replace(
        operands=(x, residual, ids, weights, "_", *others, shared),
        combined=f"{inner.combined} i j",
    )


def _split(parts: Parts, call: Any, *operands: Any, routing: Any, **params: Any) -> jax.Array:
    """Runs a device's experts and shard of the inner axis; every device runs the router."""
    of_shared = Parts({"f": parts.axes.get("i", ()), "g": parts.axes.get("j", ())})
    given = _with_shared(
        Operands(*operands), lambda args: mlp.split(of_shared, call, *args, **params)
    )
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
    vmap=functools.partial(by_rows, operands=4, otherwise=by_examples),  # x to shared_logits
    derivative=_derivative,
    layout=_layout,
    split=_split,
)
