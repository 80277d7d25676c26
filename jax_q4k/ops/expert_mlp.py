"""Feed-forward networks of chosen experts (MoE), summed with routing weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..native import calls
from ..selection import activations_of, current_selection
from ..sharding.layout import Layout, Parts, Rows
from . import checks, expert_kernels, expert_matmul, linear_op, rms_norm
from .gates import ACTIVATION_FUNCTIONS, check_activation
from .op import KernelCall, Op
from .vmaps import by_examples, by_rows


def expert_mlp(
    x: Any,
    gate: Any,
    up: Any,
    down: Any,
    ids: Any,
    weights: Any,
    *,
    activation: str = "silu",
    biases: Sequence[Any] | None = None,
    down_scale: Any = None,
    norm_weight: Any = None,
    eps: float | None = None,
    residual: Any = None,
    activations: str | None = None,
) -> jax.Array:
    """residual + the sum over j of weights[..., j] * mlp_e(x), with experts e = ids[..., j].

    mlp_e(x) = down_scale[e] * (down[e] @ h) + db[e], h = activation(gate[e] @ x + gb[e],
    up[e] @ x + ub[e]). A token's experts are summed in the same order for any number of tokens and
    threads. For a shared expert, pass the result of its `mlp` as the residual.

    An id outside 0..experts - 1 adds nothing; ids of experts on other devices are out of range.

    Args:
      x: (..., n) float32, bfloat16 or float16.
      gate, up: QuantizedArrays (experts, inner, k), k = n, whose formats may differ, or float
        arrays.
      down: QuantizedArray (experts, n, inner), or a float array; n may differ from x's without a
        residual.
      ids, weights: integers and floats (..., top), such as the results of `route`.
      activation: one of `jax_q4k.ACTIVATION_FUNCTIONS`.
      biases: of gate and up (experts, inner) and of down (experts, n), each a float array or None;
        None means no biases.
      down_scale: (experts,), or None.
      norm_weight: (k,), the weight of an `rms_norm` of x with `eps`; None means no norm.
      residual: (..., n) or None.
      activations: see `matmul`; its rows are tokens here.

    Returns:
      (..., n) of x's dtype. Differentiable like the chain of `rms_norm` and `expert_matmul`, and in
      weights, biases, down_scale and residual.

    Raises:
      TypeError: a dtype that is not listed. ValueError: shapes that don't fit, an unknown name,
        norm_weight without eps.
    """
    activations = activations_of(activations)
    given, rows, dtype = checked(
        x, gate, up, down, activation, biases, down_scale, norm_weight, residual
    )
    ids = expert_matmul.expert_ids(ids)
    checks.same_shape("ids", ids, (*jnp.shape(x)[:-1], ids.shape[-1]), "(..., top)")
    weights = checks.float32("weights", weights, ids.shape, "ids' shape")
    given = given._replace(ids=rows.merge(ids), weights=rows.merge(weights))
    params: Any = {"activation": activation, "activations": activations}
    return applied(op, _derivative, given, rows, dtype, eps=eps, **params)


def applied(
    op: Op, derivative: Callable[..., jax.Array], given: Any, rows: Rows, dtype: Any, **params: Any
) -> jax.Array:
    """Runs the operation on checked operands; returns (..., n) of `dtype`.

    Runs `derivative`, a composition of differentiable operations, if fusion is disabled.
    """
    params["eps"] = 0.0 if given.norm_weight is None else checks.epsilon("eps", params["eps"])
    if not given.x.shape[0]:
        y = jnp.zeros((0, given.down.shape[1]), jnp.float32)
    else:
        y = (op.bind if current_selection().fuses(op.name) else derivative)(*given, **params)
    return rows.split(y).astype(dtype)


def checked(
    x: Any,
    gate: Any,
    up: Any,
    down: Any,
    activation: str,
    biases: Sequence[Any] | None,
    down_scale: Any,
    norm_weight: Any,
    residual: Any,
) -> tuple[Operands, Rows, Any]:
    """Checks the arguments of `expert_mlp`, except ids and weights.

    Returns the operands, with None for ids and weights; the Rows that merge and split x's leading
    axes; and x's dtype.
    """
    x = checks.float_array("x", x)
    check_activation(activation)
    named = {"gate": gate, "up": up, "down": down}
    gate, up, down = (expert_matmul.experts(name, w) for name, w in named.items())
    (count, inner, k), n = gate.shape, down.shape[1]
    checks.same_shape("up", up, gate.shape, "gate's shape")
    if (down.shape[0], down.shape[2]) != (count, inner):
        rule = f"it must be ({count}, n, {inner}), as gate is {gate.shape}"
        raise ValueError(f"down has shape {down.shape}; {rule}")
    if x.ndim < 1:
        raise ValueError(f"x has shape {x.shape}; it must be (..., k)")
    expert_matmul.check_columns(x, "gate", gate)
    if norm_weight is not None:
        norm_weight = checks.float32("norm_weight", norm_weight, (k,), "(k,)")
    if residual is not None:
        residual = checks.float32("residual", residual, (*x.shape[:-1], n), "(..., n)")
    if down_scale is not None:
        down_scale = checks.float32("down_scale", down_scale, (count,), "(experts,)")
    rows = Rows.of(x)
    given = Operands(
        rows.merge(x).astype(jnp.float32),
        None if residual is None else rows.merge(residual),
        None,
        None,
        norm_weight,
        gate,
        up,
        down,
        _biases(biases, count, inner, n),
        down_scale,
    )
    return given, rows, x.dtype


Bias = jax.Array | None


def _biases(biases: Any, count: int, inner: int, n: int) -> tuple[Bias, Bias, Bias]:
    given = (None,) * 3 if biases is None else tuple(biases)
    if len(given) != 3:
        raise ValueError(
            f"biases has {len(given)} elements; it must have one for each of gate, up and down"
        )
    gate, up, down = (
        None
        if bias is None
        else checks.float32(f"biases[{i}]", bias, (count, rows), f"(experts, {axis})")
        for i, (bias, rows, axis) in enumerate(
            zip(given, (inner, inner, n), ("inner", "inner", "n"), strict=True)
        )
    )
    return gate, up, down


class Operands(NamedTuple):
    """The primitive's operands; all but the ids and the matrices are float32."""

    x: jax.Array  # (m, k)
    residual: jax.Array | None  # (m, n)
    ids: Any  # int32 (m, top)
    weights: Any  # (m, top)
    norm_weight: jax.Array | None  # (k,)
    gate: Any  # packed or float (experts, inner, k), like `up`
    up: Any
    down: Any  # (experts, n, inner)
    biases: tuple[Bias, Bias, Bias]  # (experts, inner) twice, (experts, n)
    down_scale: jax.Array | None  # (experts,)


class Steps(NamedTuple):
    """Functions for a norm and an expert matmul, of which the operation is composed."""

    norm: Callable[[jax.Array, jax.Array, float], jax.Array]  # (x, weight, eps) -> RMSNorm
    #: (x (m, k) or (m, top, k), w (experts, n, k), ids (m, top)) -> (m, top, n)
    product: Callable[[jax.Array, Any, jax.Array], jax.Array]


def _hidden(given: Operands, eps: float, activation: str, steps: Steps) -> jax.Array:
    """Gate and up projections and the activation function: returns (m, top, inner)."""
    x, ids = given.x, given.ids
    x = x if given.norm_weight is None else steps.norm(x, given.norm_weight, eps)
    gate, up = (
        linear_op.plus(
            steps.product(x, w, ids), None if bias is None else bias[_known(given)], None
        )
        for w, bias in zip((given.gate, given.up), given.biases[:2], strict=True)
    )
    return ACTIVATION_FUNCTIONS[activation](gate, up)


def _added_up(given: Operands, h: jax.Array, steps: Steps) -> jax.Array:
    """Down projections of h, summed with the routing weights, plus the residual: (m, n)."""
    y, known = steps.product(h, given.down, given.ids), _known(given)
    if given.down_scale is not None:
        y = y * given.down_scale[known][..., None]
    if given.biases[2] is not None:
        y = y + given.biases[2][known]
    here = (known == given.ids)[..., None]
    y = jnp.sum(jnp.where(here, y * given.weights[..., None], 0), axis=1)
    return linear_op.plus(y, None, given.residual)


def _known(given: Operands) -> jax.Array:
    """Returns the expert ids, clamped to 0..experts - 1."""
    return jnp.clip(given.ids, 0, given.gate.shape[0] - 1)


def _chain(given: Operands, eps: float, activation: str, steps: Steps) -> jax.Array:
    return _added_up(given, _hidden(given, eps, activation, steps), steps)


def reference(*operands: Any, eps: float, activation: str, activations: str | None) -> jax.Array:
    """The operation in plain JAX."""
    steps = Steps(
        lambda x, weight, eps: rms_norm.reference(x, weight, eps=eps),
        lambda x, w, ids: expert_matmul.reference(x, ids, w, activations=activations),
    )
    return _chain(Operands(*operands), eps, activation, steps)


def ptx(
    launch: KernelCall, *operands: Any, eps: float, activation: str, activations: str | None
) -> jax.Array:
    """The operation by two mat-vecs, the first with q8_1 results; `activations` None means q8_1.

    More tokens than mat-vecs take use tensor cores, or XLA's matmuls if activations are float32.
    """
    given = Operands(*operands)
    matrices = [given.gate, given.up, given.down]
    if not expert_kernels.takes(matrices, *given.ids.shape):
        if not expert_kernels.groups(matrices, activations):
            return reference(*operands, eps=eps, activation=activation, activations=activations)
        steps = Steps(
            lambda x, weight, eps: rms_norm.ptx(launch, x, weight, eps=eps),
            lambda x, w, ids: expert_kernels.grouped(launch, x, ids, w),
        )
        return _chain(given, eps, activation, steps)
    return mat_vecs(launch, given, given.ids, eps, activation, activations)


def mat_vecs(
    launch: KernelCall,
    given: Operands,
    choice: jax.Array | expert_kernels.Router,
    eps: float,
    activation: str,
    activations: str | None,
    shared: tuple[Any, Any, Any] | None = None,
) -> jax.Array:
    """Runs the mat-vecs for gate and up, then for down; returns (m, n).

    choice: the expert ids of `given`, or a Router, whose ids and weights replace those of `given`.
    shared: with a Router, gate, up and down of one more expert of each token (`takes_shared`).
    """
    exact = activations == "f32"
    h = expert_kernels.products(
        launch,
        given.x,
        choice,
        [given.gate, given.up],
        shared=() if shared is None else shared[:2],
        norm_weight=given.norm_weight,
        eps=eps,
        biases=given.biases[:2],
        activation=activation,
        activations=activations,
        output="f32" if exact else "q8_1",
    )
    ids, weights = given.ids, given.weights
    if isinstance(choice, expert_kernels.Router):
        ids, weights, *h = h
    return expert_kernels.mixture(
        launch,
        h,
        ids,
        weights,
        given.down,
        shared=None if shared is None else shared[2],
        bias=given.biases[2],
        scale=given.down_scale,
        residual=given.residual,
        exact=exact,
    )


def native(*operands: Any, eps: float, activation: str, activations: str | None) -> jax.Array:
    """Runs the operation by one call of the native kernels; `activations` None means q8_1."""
    given = Operands(*operands)
    m = given.x.shape[0]
    return calls.expert_mlp(
        given.x,
        given.ids,
        given.weights,
        (given.gate, given.up, given.down),
        quantized=(
            expert_matmul.quantizes_natively([given.gate, given.up], m, activations),
            expert_matmul.quantizes_natively([given.down], m, activations),
        ),
        activation=activation,
        biases=given.biases,
        down_scale=given.down_scale,
        norm_weight=given.norm_weight,
        eps=eps,
        residual=given.residual,
    )


def _derivative(*operands: Any, eps: float, activation: str, activations: str | None) -> jax.Array:
    """Composes the operation from differentiable ones."""
    steps = Steps(
        lambda x, weight, eps: rms_norm.rms_norm(x, weight, eps=eps),
        functools.partial(expert_matmul.expert_matmul, activations=activations),
    )
    return _chain(Operands(*operands), eps, activation, steps)


def layout(*_: Any, **__: Any) -> Layout:
    """Returns the Layout; the inner axis is f in gate and up, and g in down.

    The names differ, as a shard boundary of f may cut quantization blocks of down.
    """
    rows, inner = ("m _", "m n", "m _", "m _"), ("e f _", "e f _", "e n g")
    return Layout((*rows, "_", *inner, ("e f", "e f", "e n"), "e"), "m n", combined="e f g")


def split(
    parts: Parts, call: Any, *operands: Any, eps: float, activation: str, activations: str | None
) -> jax.Array:
    """Runs a device's experts and shard of the inner axis; adds the residual after the sum.

    If only gate and up, or only down, are split along the inner axis, that axis of the activations
    is gathered or sliced.
    """
    given = Operands(*operands)
    residual, bias = given.residual, given.biases[2]
    given = given._replace(residual=None, ids=expert_matmul.local(parts, given.ids, given.gate))
    if bias is not None and parts.split("g"):  # added by one device, not with every partial sum
        first = jnp.where(parts.index("g") == 0, bias, 0)
        given = given._replace(biases=(*given.biases[:2], first))
    if parts.alike("f", "g"):
        y = call(op, *given, eps=eps, activation=activation, activations=activations)
    else:
        steps = Steps(
            lambda x, weight, eps: rms_norm.reference(x, weight, eps=eps),
            lambda x, w, ids: call(expert_matmul.op, x, ids, w, activations=activations),
        )
        h = _hidden(given, eps, activation, steps)
        (m, top), inner = given.ids.shape, h.shape[2]
        h = parts.along(h.reshape(m * top, inner), "f", "g").reshape(m, top, -1)
        y = _added_up(given, h, steps)
    return linear_op.plus(parts.sum(parts.sum(y, "g"), "e"), None, residual)


def shapes(*operands: Any, **_: Any) -> Any:
    """Returns the result's shape and dtype."""
    given = Operands(*operands)
    return jax.ShapeDtypeStruct((given.x.shape[0], given.down.shape[1]), jnp.float32)


#: The primitive.
op = Op(
    "expert_mlp",
    reference,
    shapes=shapes,
    ptx=ptx,
    native=native,
    vmap=functools.partial(by_rows, operands=4, otherwise=by_examples),  # x to weights
    derivative=_derivative,
    layout=layout,
    split=split,
)
