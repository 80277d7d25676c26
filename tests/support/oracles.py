"""Float64 oracles of the kernels, and adversarial operands."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ptx_kernels import formats
from ptx_kernels.kernels.matvec import MatvecConfig
from ptx_kernels.ptx.instructions import bf16_to_f32, f32_to_bf16


def random_planes(
    rng: np.random.Generator, format: str, n: int, blocks: int, *, kind: str = "random"
) -> tuple[np.ndarray, ...]:
    """Packed weights (n, blocks * block_size).

    `random`: all bits of quants and sub-block scales are random, scales have one magnitude.
    `extreme`: scales range from f16's subnormals to large values, with both signs. `zero` and
    `full`: all bits of quants and sub-block scales are clear or set.
    """
    block = formats.get(format)
    raw = rng.integers(0, 256, (n, blocks, block.block_bytes), np.uint8)
    if kind in ("zero", "full"):
        raw[...] = 0 if kind == "zero" else 255
    for field in block.scale_fields:
        scale = rng.uniform(0.5, 1.5, (n, blocks)) * 2.0**-8
        if kind == "extreme":
            scale = rng.choice([6e-8, 3e-6, 1e-3, 1.0, -1.0, -6e-8], (n, blocks))
        block.store_scale(raw, field, scale)
    return tuple(np.ascontiguousarray(p) for p in block.split(raw))


def weights(format: str, planes: tuple[np.ndarray, ...]) -> np.ndarray:
    """Decodes packed weights to float64 (n, k)."""
    return formats.get(format).decode(planes).astype(np.float64)


def quantized(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantizes float32 (m, k) in q8_1 groups of 32: int8 (m, k) and pairs (scale, scale * sum).

    The pairs are float32 (m, k / 32, 2).
    """
    values, scale = int8_vectors(x.reshape(x.shape[0], -1, 32))
    total = values.sum(-1, dtype=np.int32).astype(np.float32)
    return values.reshape(x.shape), np.stack([scale, scale * total], -1)


def dequantized(values: np.ndarray, scale_sum: np.ndarray) -> np.ndarray:
    """Dequantizes q8_1 groups to float64 (m, k)."""
    return (
        values.astype(np.float64).reshape(*scale_sum.shape[:2], 32) * scale_sum[..., :1]
    ).reshape(values.shape)


def halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Computes the results of `quantize_f16` for float32 (m, k): float16 (m, k) and scales.

    The scales are float32 (m, k / 256).
    """
    blocks = x.reshape(x.shape[0], -1, 256)
    with np.errstate(invalid="ignore", over="ignore"):
        exponent = np.frexp(np.abs(blocks).max(-1))[1] - 1  # mantissa in [1, 2)
        # zero and subnormals
        exponent = np.where(np.abs(blocks).max(-1) < 2.0**-126, -127, exponent)
        inverse = np.minimum(14 - exponent, 126)
        rounded = (blocks * np.exp2(inverse.astype(np.float32))[..., None]).astype(np.float16)
    scale = np.where(
        np.isfinite(blocks).all(-1), np.exp2(-inverse.astype(np.float32)), np.float32(np.nan)
    )
    return rounded.reshape(x.shape), scale


def half_rows(x: np.ndarray, below: int = 1 << 15) -> tuple[np.ndarray, np.ndarray]:
    """Divides rows of float32 (m, k) by powers of two: float16 (m, k), divisors float32 (m,).

    A divisor brings the row's largest magnitude into [below / 2, below). It is at least 2^-126.
    """
    largest = np.abs(x).max(-1)
    _, exponent = np.frexp(np.where(np.isfinite(largest), largest, 0))
    exponent = np.clip(exponent - (below.bit_length() - 1), -126, 126)
    exponent = np.where(largest == 0, -126, exponent)
    scale = np.where(np.isfinite(largest), np.exp2(exponent.astype(np.float64)), np.nan)
    with np.errstate(invalid="ignore"):
        values = (x / scale[:, None]).astype(np.float32).astype(np.float16)
    return values, scale.astype(np.float32)


def half_operands(x: np.ndarray) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Operands of f16 products for float32 x (m, k), and their exact values in float64."""
    values, scale = halves(x)
    means = values.reshape(x.shape[0], -1, 32).astype(np.float64).mean(-1)
    high = means.astype(np.float16)
    low = (means - high).astype(np.float16)
    # every 16 columns: eight pairs, those at even positions first
    pairs = values.reshape(x.shape[0], -1, 4, 2, 2).swapaxes(-3, -2).reshape(x.shape)
    exact = (values.astype(np.float64).reshape(*scale.shape, 256) * scale[..., None]).reshape(
        x.shape
    )
    return (pairs, np.stack([high, low], -1), scale), exact


def activation_operands(
    config: MatvecConfig, x: np.ndarray
) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """A mat-vec's operands for float32 x (m, k), and the values its products use, in float64."""
    if config.activations == "f32":
        return (x,), x.astype(np.float64)
    q8_1 = quantized(x)
    return (x,) if config.activations == "inline_q8" else q8_1, dequantized(*q8_1)


def gated(activation: str, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Gated activation of a feed-forward network, in the precision of its operands.

    One of silu(gate) * up, gelu(gate) * up (tanh approximation), and gpt-oss's `swiglu_oai`.
    """
    if activation == "swiglu_oai":
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
        return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    z = gate if activation == "silu" else 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    return gate * np.exp(-np.logaddexp(0, -z)) * up  # the logistic function without underflow to 0


def rms_norm_oracle(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * weight along the last axis, float64."""
    x = x.astype(np.float64)
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    """Applies rope to (tokens, heads, head_dim) as a product of complex numbers.

    Cosines and sines are (tokens, rope_dim / 2).
    """
    out, half = x.astype(np.float64), cos.shape[1]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        turned = (out[..., a] + 1j * out[..., b]) * (cos[:, i].astype(float) + 1j * sin[:, i])[
            :, None
        ]
        out[..., a], out[..., b] = turned.real, turned.imag
    return out


def attention(
    q: np.ndarray,
    k_pages: np.ndarray,
    v_pages: np.ndarray,
    block_tables: np.ndarray,
    context_lens: np.ndarray,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Computes attention token by token in float64: (batch, heads, value width)."""
    batch, heads, _ = q.shape
    num_pages, kv_heads, page_size, _ = k_pages.shape
    out = np.zeros((batch, heads, v_pages.shape[-1]))
    for b in range(batch):
        length = min(max(int(context_lens[b]), 0), block_tables.shape[1] * page_size)
        first = 0 if window is None else max(0, length - window)
        places = [(block_tables[b, t // page_size], t % page_size) for t in range(first, length)]
        places = [(page, slot) for page, slot in places if 0 <= page < num_pages]
        if not places:
            continue
        for h in range(heads):
            g = h // (heads // kv_heads)
            keys = np.stack([k_pages[page, g, slot] for page, slot in places]).astype(np.float64)
            values = np.stack([v_pages[page, g, slot] for page, slot in places]).astype(np.float64)
            scores = keys @ q[b, h].astype(np.float64) * scale
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            highest = scores.max() if sinks is None else max(scores.max(), sinks[h])
            p = np.exp(scores - highest)
            total = p.sum() if sinks is None else p.sum() + np.exp(np.float64(sinks[h]) - highest)
            out[b, h] = p @ values / total
    return out


def causal_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    lengths: np.ndarray,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Causal attention of every token in float64; tokens at or beyond the length get zeros."""
    out = np.zeros((*q.shape[:3], v.shape[3]))
    group = q.shape[2] // k.shape[2]
    for b, t, h in np.ndindex(*q.shape[:3]):
        if t >= lengths[b]:
            continue
        past = slice(0 if window is None else max(0, t + 1 - window), t + 1)
        scores = k[b, past, h // group].astype(np.float64) @ q[b, t, h].astype(np.float64) * scale
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        p = np.exp(scores - scores.max())
        total = p.sum()
        if sinks is not None:
            total += np.exp(np.float64(sinks[h]) - scores.max())
        out[b, t, h] = p @ v[b, past, h // group] / total
    return out


def bf16_parts(x: np.ndarray, count: int) -> list[np.ndarray]:
    """Splits x into bf16 arrays (as bits) whose sum is x.

    Each array rounds the remainder that the arrays before it leave.
    """
    parts = []
    for _ in range(count):
        bits = x.astype(np.float32).view(np.uint32)
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        parts.append(bits.astype(np.uint16))
        x = x - (bits << 16).view(np.float32)
    return parts


def gated_delta_rule(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    state: np.ndarray,
    *,
    scale: float,
    tiled: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Runs the rule token by token in float64.

    Returns o (batch, time, num_v_heads, value_dim) and the state.

    q and k are (batch, time, num_k_heads, key_dim), the state (batch, num_v_heads, key_dim,
    value_dim).
    """
    q, k, v, g, beta, state = (x.astype(np.float64) for x in (q, k, v, g, beta, state))
    k_heads, v_heads = k.shape[2], v.shape[2]
    heads = np.arange(v_heads)
    mine = heads % k_heads if tiled else heads // (v_heads // k_heads)
    out = np.zeros(v.shape)
    for t in range(v.shape[1]):
        state *= np.exp(g[:, t, :, None, None])
        recalled = np.einsum("bhkv,bhk->bhv", state, k[:, t, mine])
        change = beta[:, t, :, None] * (v[:, t] - recalled)
        state += k[:, t, mine, :, None] * change[:, :, None]
        out[:, t] = scale * np.einsum("bhkv,bhk->bhv", state, q[:, t, mine])
    return out, state


def gated_delta_step(
    qkv: np.ndarray,
    z: np.ndarray,
    alpha: np.ndarray,
    beta: np.ndarray,
    columns: np.ndarray,
    state: np.ndarray,
    positions: np.ndarray,
    conv_weight: np.ndarray,
    dt_bias: np.ndarray,
    decay: np.ndarray,
    norm_weight: np.ndarray,
    *,
    scale: float,
    eps: float,
    tiled: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Runs a decode step sequence by sequence in float64; returns y, columns and state."""
    y, columns, after = np.zeros(z.shape), columns.copy(), state.astype(np.float64)
    (_, v_heads, key_dim, value_dim), width = state.shape, columns.shape[1]
    keys = (qkv.shape[1] - v_heads * value_dim) // 2
    for b, position in enumerate(positions):
        if position < 0:
            continue
        columns[b, position % width] = qkv[b]
        past = [columns[b, (position - age) % width] for age in range(min(width, position + 1))]
        taps = np.stack(past).astype(np.float64) * conv_weight.T[::-1][: len(past)]
        u = silu(taps.sum(0))
        q, k = (x.reshape(1, 1, -1, key_dim) for x in (u[:keys], u[keys : 2 * keys]))
        q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + eps) for x in (q, k))
        v = u[2 * keys :].reshape(1, 1, v_heads, value_dim)
        g = np.logaddexp(0, alpha[b].astype(np.float64) + dt_bias) * decay
        share = 1 / (1 + np.exp(-beta[b].astype(np.float64)))
        before = np.zeros_like(after[b : b + 1]) if position == 0 else after[b : b + 1]
        gates = g[None, None], share[None, None]
        o, after[b : b + 1] = gated_delta_rule(q, k, v, *gates, before, scale=scale, tiled=tiled)
        y[b] = rms_norm_oracle(o[0, 0], norm_weight, eps).ravel() * silu(z[b].astype(np.float64))
    return y, columns, after


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def stored(x: np.ndarray, dtype: str) -> np.ndarray:
    """Converts float32 to the content of a buffer of the kernel type `f32`, `f16`, `bf16` or `fp8`.

    The last two are bits.
    """
    if dtype == "bf16":
        return f32_to_bf16(x)
    if dtype == "fp8":
        return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return x.astype({"f32": np.float32, "f16": np.float16}[dtype])


def loaded(x: np.ndarray, dtype: str) -> np.ndarray:
    """Inverts `stored`, to float32."""
    if dtype == "fp8":
        x = x.view(ml_dtypes.float8_e4m3fn)
    return bf16_to_f32(x) if dtype == "bf16" else x.astype(np.float32)


def int8_vectors(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantizes float32 (..., head_dim) to int8 of the same shape and scales (...).

    A scale is the largest magnitude / 127.
    """
    amax = np.abs(x).max(-1)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = np.where(amax == 0, np.float32(0), np.float32(127) / amax)
        scaled = np.nan_to_num(np.rint(x * inverse[..., None]), posinf=127, neginf=-127)
    return np.clip(scaled, -127, 127).astype(np.int8), amax * np.float32(1 / 127)
