"""Launches mat-vec kernels, fused with norm, bias, residual and activation.

A mat-vec multiplies one to eight rows of activations by packed matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from ptx_kernels.limits import MAX_MATRICES, MAX_ROWS

from ..arrays.indexed import Packed, layers
from ..custom_call import ptx_name
from . import quantize_q8_1, rms_norm
from .op import KernelCall

if TYPE_CHECKING:
    from ptx_kernels.kernels.family import Rule
    from ptx_kernels.kernels.matvec import MatvecConfig

__all__ = ["MAX_ROWS", "activation_operands", "gemv", "quantized_ahead", "takes"]

#: Rows of activations: floats (m, k), or q8_1 with values s8 (m, k), and scale and sum f32
#: (m, k / 32, 2).
Rows = jax.Array | Sequence[jax.Array]


def takes(weights: Sequence[Packed], m: int) -> bool:
    """Returns whether one mat-vec kernel multiplies m rows of activations by these matrices."""
    return m <= MAX_ROWS and len(weights) <= MAX_MATRICES


def quantized_ahead(w: Packed, m: int, activations: str | None) -> bool:
    """Returns whether the kernel before a mat-vec by `w` should write its m rows as q8_1.

    It should if the mat-vec would not quantize m rows in its own prologue.
    """
    from ptx_kernels.kernels.matvec import fused_matvec_rule
    from ptx_kernels.tuning import decide

    if activations == "f32" or not takes([w], m):
        return False
    # `decide` keeps no record, because this question launches nothing.
    asked = decide(fused_matvec_rule, (w.format,), w.shape[:1], w.shape[1], m, floats=True)
    return bool(asked.config.activations == "q8_1")


def gemv(
    launch: KernelCall,
    x: Rows,
    weights: Sequence[Packed],
    *,
    norm_weight: jax.Array | None = None,
    eps: float = 0.0,
    biases: Sequence[jax.Array | None] | None = None,
    residual: jax.Array | None = None,
    activation: str | None = None,
    activations: str | None = None,
    output: Literal["f32", "q8_1"] = "f32",
) -> list[jax.Array]:
    """[residual +] [rms_norm](x) @ dequantize(w).T [+ bias] for each w, in one launch.

    If the mat-vec's prologue does not quantize or normalize, a launch before it does.

    With `activation`, the two weights are a gate and an up projection, and the result is
    activation(gate, up). With `output` q8_1, the result is quantized as by `quantize_q8_1`.
    """
    from ptx_kernels.kernels.matvec import (
        float_matvec_rule,
        fused_matvec_rule,
        gated_matvec,
        matvec,
        matvec_rule,
        qkv_matvec,
    )
    from ptx_kernels.tuning import choose, decide

    floats = isinstance(x, jax.Array)
    m, columns = x.shape if isinstance(x, jax.Array) else x[0].shape
    count = 1 if activation else len(weights)
    formats, rows = tuple(w.format for w in weights), tuple(w.shape[0] for w in weights)
    products = formats, rows[:count], columns, m
    terms = [bias for bias in biases or () if bias is not None]
    rule: Rule[MatvecConfig]
    shape: tuple[Any, ...]
    if activations == "f32":
        rule, shape = float_matvec_rule, (*products, norm_weight is not None)
    else:
        rule, shape = fused_matvec_rule, (*products, floats, output)
        plain = len(weights) == 1 and norm_weight is residual is None and not terms
        if floats and plain and decide(rule, *shape).config.activations == "q8_1":
            rule, shape = matvec_rule, (formats[0], rows[0], columns, m)
    config = choose(rule, *shape)
    operands, norm = activation_operands(launch, config, x, norm_weight, eps)
    (stack,) = {layers(w) for w in weights}
    common: dict[str, Any] = {"columns": columns, "m": m, "layers": stack, "config": config, **norm}
    if config.activations != "q8_1":
        common["dtype"] = ptx_name(operands[0].dtype)
    if activation:
        kernel = gated_matvec(
            formats=formats, n=rows[0], activation=activation, output=output, **common
        )
    elif len(weights) == 1:
        terms += [] if residual is None else [residual]
        kernel = matvec(
            format=formats[0],
            n=rows[0],
            bias=bool(biases and biases[0] is not None),
            residual=residual is not None,
            **common,
        )
    else:
        terms = all_or_none(weights, biases or [None] * len(weights))
        kernel = qkv_matvec(formats=formats, rows=rows, biases=bool(terms), **common)
    return launch(kernel, *jax.tree.leaves(list(weights)), *operands, *terms)


class Heads(NamedTuple):
    """Operands of a mat-vec that projects to q, k and v, rotates them and appends k and v.

    They are rotary angles, KV-cache pages and slots, as in `rope_append`.
    """

    pages: tuple[jax.Array, ...]  # (num_pages, num_kv_heads, page_size, head_dim), for k and v
    slot_mapping: jax.Array  # int32 (m,)
    cos: jax.Array  # float32 (m, rope_dim / 2)
    sin: jax.Array
    interleaved: bool

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments that build the kernel."""
        num_pages, num_kv_heads, page_size, head_dim = self.pages[0].shape
        return {
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "rope_dim": 2 * self.cos.shape[1],
            "interleaved": self.interleaved,
            "num_pages": num_pages,
            "page_size": page_size,
            "pages": ptx_name(self.pages[0].dtype),
        }


def append_rule(
    weights: Sequence[Packed], m: int, heads: Heads, activations: str | None
) -> tuple[Rule[MatvecConfig], tuple[Any, ...]] | None:
    """Returns the tuning rule, and its arguments, of a launch that projects, rotates and appends.

    None if no kernel projects m rows of floats and appends in one launch. The rule of the
    projections alone is preferred, if its Config gives each warp pairs of rows.
    """
    from ptx_kernels.kernels.matvec import (
        float_matvec_rule,
        fused_matvec_rule,
        qkv_append_rule,
        takes_heads,
    )
    from ptx_kernels.tuning import decide

    formats, rows = tuple(w.format for w in weights), tuple(w.shape[0] for w in weights)
    head_args = heads.arguments
    names = ("head_dim", "rope_dim", "interleaved", "pages")
    if not takes(weights, m) or not takes_heads(*(head_args[name] for name in names)):
        return None
    shape = formats, rows, weights[0].shape[1], m
    asked: list[tuple[Rule[MatvecConfig], tuple[Any, ...]]]
    if activations == "f32":
        asked = [(float_matvec_rule, (*shape, True))]
    else:
        asked = [(fused_matvec_rule, (*shape, True)), (qkv_append_rule, (True, *shape))]
    for rule, arguments in asked:
        pairs = decide(rule, *arguments).config.rows_per_warp
        if pairs % 2 == 0 == head_args["head_dim"] % pairs:
            return rule, arguments
    return None


def append(
    launch: KernelCall,
    x: jax.Array,
    weights: Sequence[Packed],
    heads: Heads,
    config: MatvecConfig,
    *,
    norm_weight: jax.Array | None,
    eps: float,
    biases: Sequence[jax.Array | None],
) -> list[jax.Array]:
    """Launches the mat-vec that projects x to q, k and v, rotates, and appends k and v to pages.

    `config` comes from `append_rule`. Returns the pages, then q float32 (m, num_heads * head_dim).
    """
    from ptx_kernels.kernels.matvec import qkv_append_matvec

    operands, norm = activation_operands(launch, config, x, norm_weight, eps)
    (stack,) = {layers(w) for w in weights}
    if config.activations != "q8_1":
        norm["dtype"] = ptx_name(operands[0].dtype)
    terms = all_or_none(weights, biases)
    arguments = heads.arguments
    kernel = qkv_append_matvec(
        formats=tuple(w.format for w in weights),
        num_heads=weights[0].shape[0] // arguments["head_dim"],
        columns=x.shape[1],
        m=x.shape[0],
        layers=stack,
        biases=bool(terms),
        config=config,
        **arguments,
        **norm,
    )
    planes = jax.tree.leaves(list(weights))
    angles = heads.slot_mapping, heads.cos, heads.sin
    return launch(kernel, *heads.pages, *planes, *operands, *angles, *terms)


def all_or_none(
    weights: Sequence[Packed | jax.Array], biases: Sequence[jax.Array | None]
) -> list[jax.Array]:
    """Returns the biases of all matrices, zeros for missing ones; [] if all are missing."""
    if all(bias is None for bias in biases):
        return []
    pairs = zip(weights, biases, strict=True)
    return [jnp.zeros(w.shape[0]) if bias is None else bias for w, bias in pairs]


def router(
    launch: KernelCall,
    x: jax.Array,
    weights: Sequence[jax.Array],
    norm_weight: jax.Array | None,
    eps: float,
    biases: Sequence[jax.Array | None],
) -> list[jax.Array]:
    """[rms_norm](x) @ w.T [+ bias] for each w in one launch, for float32 x and weights.

    `router_takes` must be true of their sizes.
    """
    from ptx_kernels.kernels.router import router as router_kernel
    from ptx_kernels.kernels.router import router_rule
    from ptx_kernels.tuning import choose

    columns, terms = x.shape[1], all_or_none(weights, biases)
    kernel = router_kernel(
        rows=tuple(w.shape[0] for w in weights),
        columns=columns,
        m=x.shape[0],
        norm=norm_weight is not None,
        eps=eps,
        biases=bool(terms),
        config=choose(router_rule, columns),
    )
    norms = [] if norm_weight is None else [norm_weight]
    return launch(kernel, *weights, x, *norms, *terms)


def activation_operands(
    launch: KernelCall,
    config: MatvecConfig,
    x: Rows,
    norm_weight: jax.Array | None,
    eps: float,
) -> tuple[Sequence[jax.Array], dict[str, Any]]:
    """Returns a mat-vec's activation operands for [rms_norm](x), and its arguments for the norm.

    The mat-vec's prologue quantizes and normalizes, or this launches a kernel that does.
    """
    if not isinstance(x, jax.Array):
        return x, {}
    if norm_weight is None:
        return quantize_q8_1.ptx(launch, x) if config.activations == "q8_1" else [x], {}
    if config.activations == "inline_q8" or config.stage == "whole":
        return [x, norm_weight], {"norm": True, "eps": eps}
    output: Literal["f32", "q8_1"] = "q8_1" if config.activations == "q8_1" else "f32"
    return rms_norm.launches(launch, x, norm_weight, eps=eps, output=output), {}
