"""Subjects for products with selected experts; some ids select none."""

from __future__ import annotations

import numpy as np

from ptx_kernels import formats, simulator
from ptx_kernels.kernels.gemm import GemmConfig, gemm
from ptx_kernels.kernels.gemm.gemm import tile_count
from ptx_kernels.kernels.matvec import MatvecConfig, gated_matvec, matvec, mixture_matvec
from ptx_kernels.kernels.route import Routing, route
from ptx_kernels.kernels.router import RouterConfig, router
from support.oracles import (
    activation_operands,
    dequantized,
    gated,
    quantized,
    random_planes,
    rms_norm_oracle,
    weights,
)

from .base import Subject, rng_of

EXPERTS = 4
#: Ids of two tokens; they include a negative one and one just beyond the last expert.
IDS = np.array([[3, -1, 0], [EXPERTS, 2, 2]], np.int32)


def stack(
    format: str, n: int, columns: int, *seed: int, experts: int = EXPERTS
) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Planes (experts, n, ...) and their decoded weights, float64 (experts, n, columns)."""
    blocks = columns // formats.get(format).block_size
    each = [random_planes(rng_of(n, *seed, e), format, n, blocks) for e in range(experts)]
    planes = tuple(np.stack(parts) for parts in zip(*each, strict=True))
    return planes, np.stack([weights(format, part) for part in each])


def named() -> np.ndarray:
    """Mask (2, 3) of ids that select an expert."""
    return (IDS >= 0) & (IDS < EXPERTS)


def expert_products(x: np.ndarray, w: np.ndarray, ids: np.ndarray = IDS) -> np.ndarray:
    """Computes w[id] @ x per choice (2, 3, n); zeros where an id selects no expert.

    x is (2, columns) or (2, 3, columns). The precision is that of x and w.
    """
    x = np.broadcast_to(x if x.ndim == 3 else x[:, None], (*ids.shape, x.shape[-1]))
    y = np.einsum("tjnk,tjk->tjn", w[ids % len(w)], x)
    return np.where(((ids >= 0) & (ids < len(w)))[..., None], y, 0)


def expert_matvec_subject(config: MatvecConfig, format: str = "Q4_K") -> Subject:
    n, columns = 5, 1280
    planes, w = stack(format, n, columns)
    operands, x = activation_operands(
        config, (rng_of(1).standard_normal((2, columns), np.float32) + np.float32(0.5)) / 4
    )
    kernel = matvec(format=format, n=n, columns=columns, m=2, experts=EXPERTS, top=3, config=config)
    want = expert_products(x, w).reshape(-1, n)
    return Subject(kernel, (IDS, *planes, *operands), (want,), 1e-13)


def expert_gated_subject(
    config: MatvecConfig, activation: str, output: str = "f32", *, n: int = 64
) -> Subject:
    """Two formats and biases; q8_1 output is that of f32 output, except for ulps of the gate."""
    columns, pair = 768, ("Q4_K", "Q6_K")
    stacks = [stack(format, n, columns, i) for i, format in enumerate(pair)]
    rng = rng_of(13)
    operands, x = activation_operands(
        config, rng.standard_normal((2, columns), np.float32) * np.float32(0.1)
    )
    biases = [rng.standard_normal((EXPERTS, n), np.float32) for _ in pair]
    arguments = dict(
        formats=pair, n=n, columns=columns, m=2, experts=EXPERTS, top=3, activation=activation
    )
    kernel = gated_matvec(**arguments, biases=True, output=output, config=config)
    given = (IDS, *stacks[0][0], *stacks[1][0], *operands, *biases)
    gate, up = (
        expert_products(x, w) + bias[IDS % EXPERTS]
        for (_, w), bias in zip(stacks, biases, strict=True)
    )
    want = np.where(named()[..., None], gated(activation, gate, up), 0).reshape(-1, n)
    if output == "f32":
        return Subject(kernel, given, (want,), 1e-11)
    plain = gated_matvec(**arguments, biases=True, config=config)
    return Subject(kernel, given, quantized(simulator.run(plain, *given)[0]), 1e-13)


def routed_gated_subject(
    config: MatvecConfig,
    gating: str,
    output: str = "f32",
    *,
    n: int = 64,
    shared: bool = False,
    gated_by: bool = False,
) -> Subject:
    """Blocks that select their experts; the first blocks store all choices and weights.

    shared: with one more expert that all tokens use. gated_by: with a gate of its weight.
    """
    columns, pair = 768, ("Q4_K", "Q6_K")
    stacks = [
        stack(format, n, columns, 4, i, experts=EXPERTS + shared) for i, format in enumerate(pair)
    ]
    operands, x = activation_operands(
        config, rng_of(16).standard_normal((2, columns), np.float32) * np.float32(0.1)
    )
    routing, logits, ids, weights = routes(
        gating, rows=2, experts=EXPERTS, top=3, normalize=gating == "softmax"
    )
    arguments = dict(
        formats=pair,
        n=n,
        columns=columns,
        m=2,
        experts=EXPERTS,
        top=3,
        routing=routing,
        shared=shared,
        shared_gate=gated_by,
    )
    if gated_by:
        logits = *logits, np.array([[-3], [0.5]], np.float32)
    if shared:
        weight = 1 / (1 + np.exp(-logits[-1].astype(np.float64))) if gated_by else np.ones((2, 1))
        ids, weights = with_shared(ids), np.concatenate([weights, weight], 1)
    kernel = gated_matvec(**arguments, output=output, config=config)
    planes = [plane for planes, _ in stacks for plane in split_shared(planes, shared)]
    given = (*logits, *planes, *operands)
    gate, up = (expert_products(x, w, ids) for _, w in stacks)
    want = gated("silu", gate, up).reshape(-1, n)
    if output == "f32":
        return Subject(kernel, given, (ids, weights, want), 1e-11)
    plain = gated_matvec(**arguments, config=config)
    *_, y = simulator.run(plain, *given)
    return Subject(kernel, given, (ids, weights.astype(np.float32), *quantized(y)), 1e-11)


def with_shared(ids: np.ndarray) -> np.ndarray:
    """Appends the id of the shared expert, EXPERTS, to each token's ids."""
    return np.concatenate([ids, np.full((len(ids), 1), EXPERTS, np.int32)], axis=1)


def split_shared(planes: tuple[np.ndarray, ...], shared: bool) -> tuple[np.ndarray, ...]:
    """Returns operands for the planes of a stack: those of the last expert apart if `shared`."""
    return (*(p[:-1] for p in planes), *(p[-1] for p in planes)) if shared else planes


def mixture_subject(
    config: MatvecConfig,
    format: str = "Q4_K",
    *,
    n: int = 5,
    columns: int = 768,
    shared: bool = False,
) -> Subject:
    """All terms: weights, a residual, biases and scales of experts unless one is `shared`."""
    planes, w = stack(format, n, columns, 2, experts=EXPERTS + shared)
    rng, ids = rng_of(14), with_shared(IDS[:, :2]) if shared else IDS
    operands, h = activation_operands(config, rng.standard_normal((6, columns), np.float32))
    factors = rng.standard_normal(IDS.shape, np.float32)
    biases = rng.standard_normal((EXPERTS, n), np.float32)
    scales = rng.uniform(0.5, 2, EXPERTS).astype(np.float32)
    residual = rng.standard_normal((2, n), np.float32)
    kernel = mixture_matvec(
        format=format,
        n=n,
        columns=columns,
        m=2,
        experts=EXPERTS,
        top=2 if shared else 3,
        shared=shared,
        biases=not shared,
        scales=not shared,
        residual=True,
        config=config,
    )
    each = expert_products(h.reshape(*ids.shape, -1), w, ids)
    if not shared:
        at = ids % EXPERTS
        each = each * scales[at][..., None] + biases[at]
    named = (ids >= 0) & (ids < len(w))
    want = residual + np.sum((factors * named)[..., None] * each, axis=1)
    given = (ids, factors, *split_shared(planes, shared), *operands)
    return Subject(
        kernel, (*given, *([] if shared else [biases, scales]), residual), (want,), 1e-11
    )


#: Rows of each expert in `expert_gemm_subject`; the last entry counts rows of no expert. One expert
#: has none, one has one more than a tile of 16. Ends are at even and odd rows of both halves of a
#: tile.
GROUPS = (5, 0, 6, 28, 9, 3)
GEMM_EXPERTS = len(GROUPS) - 1


def expert_tiles(m_tile: int) -> np.ndarray:
    """(expert, first row, end) of every tile of GROUPS; surplus tiles have no rows."""
    tiles, first = [], 0
    for expert, rows in enumerate(GROUPS):
        end = first + rows
        tiles += [(expert, at, min(at + m_tile, end)) for at in range(first, end, m_tile)]
        first = end
    count = tile_count(sum(GROUPS), GEMM_EXPERTS, m_tile)
    return np.array(tiles + [(GEMM_EXPERTS, 0, 0)] * (count - len(tiles)), np.int32)


def expert_gemm_subject(
    config: GemmConfig, format: str = "Q4_K", *, n: int = 21, columns: int = 1280
) -> Subject:
    planes, w = stack(format, n, columns, 3, experts=GEMM_EXPERTS)
    m = sum(GROUPS)
    operands, x = quantized(rng_of(15).standard_normal((m, columns), np.float32) + np.float32(0.5))
    exact = dequantized(operands, x)
    of = np.repeat(np.arange(GEMM_EXPERTS + 1), GROUPS)
    kernel = gemm(format=format, n=n, columns=columns, m=m, experts=GEMM_EXPERTS, config=config)
    want = np.einsum("mnk,mk->mn", w[of % GEMM_EXPERTS], exact) * (of < GEMM_EXPERTS)[:, None]
    given = (expert_tiles(config.m_tile), *planes, operands, x)
    return Subject(kernel, given, (want,), 1e-12)


def routes(
    gating: str, *, rows: int, experts: int, top: int, normalize: bool
) -> tuple[Routing, tuple[np.ndarray, ...], np.ndarray, np.ndarray]:
    """Returns a routing, its logits and bias, the ids, and the weights in float64.

    The best experts tie. The sigmoid also has a bias; the last row's sigmoids are all 0, so that
    its best scores are neighboring floats below 0, the smaller first.
    """
    rng = rng_of(experts, top)
    logits = rng.standard_normal((rows, experts), np.float32) * np.float32(2)
    logits[1, [experts - 1, 2]] = 9
    logits[-1, 3] = -np.inf
    exact = logits.astype(np.float64)
    powers, bias = np.exp(exact - exact.max(-1, keepdims=True)), np.zeros(experts, np.float32)
    scores = powers / powers.sum(-1, keepdims=True)
    given: tuple[np.ndarray, ...] = (logits,)
    if gating == "sigmoid":
        bias = -rng.uniform(0.5, 1.5, experts).astype(np.float32)
        close = np.array([0xBE99999B, 0xBE99999A, 0xBEA00001, 0xBEA00000], np.uint32)
        bias[[1, 2, -2, -1]] = close.view(np.float32)
        logits[-1] = exact[-1] = -np.inf
        scores, given = 1 / (1 + np.exp(-exact)), (logits, bias)
    ids = np.argsort(-(scores + bias), axis=-1, kind="stable")[:, :top]
    weights = np.take_along_axis(scores, ids, -1) * 2.5
    if normalize:
        weights = weights / weights.sum(-1, keepdims=True) * 2.5
    biased = gating == "sigmoid"
    routing = Routing(top=top, gating=gating, bias=biased, normalize=normalize, scale=2.5)
    return routing, given, ids.astype(np.int32), weights


def route_subject(
    gating: str, *, experts: int = 40, top: int = 3, normalize: bool = False
) -> Subject:
    routing, given, *want = routes(gating, rows=3, experts=experts, top=top, normalize=normalize)
    return Subject(route(rows=3, experts=experts, routing=routing), given, tuple(want), 1e-13)


def router_subject(
    m: int, columns: int, *, rows: tuple[int, ...] = (5,), norm: bool = True, biases: bool = False
) -> Subject:
    """Two warps per row of weights."""
    rng = rng_of(17, columns)
    matrices = [rng.standard_normal((n, columns), np.float32) for n in rows]
    x = (rng.standard_normal((m, columns)) * 3 + 1).astype(np.float32)
    factors = rng.standard_normal(columns, np.float32)
    addends = [rng.standard_normal(n, np.float32) for n in rows]
    kernel = router(
        rows=rows, columns=columns, m=m, norm=norm, eps=1e-2, biases=biases, config=RouterConfig(2)
    )
    h = rms_norm_oracle(x, factors, 1e-2) if norm else x.astype(np.float64)
    want = tuple(
        h @ w.T.astype(np.float64) + (addend if biases else 0)
        for w, addend in zip(matrices, addends, strict=True)
    )
    given = (*matrices, x, *([factors] if norm else []), *(addends if biases else []))
    return Subject(kernel, given, want, 1e-13)
