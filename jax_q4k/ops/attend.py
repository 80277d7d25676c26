"""Defines the attention primitive behind `paged_attention` and `attention`.

It attends with one query token per sequence, or with a chunk of tokens per sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..custom_call import ptx_name
from ..native import calls
from ..sharding.layout import Layout
from . import checks, quantize_f16, quantize_q8_1
from .groups import ungrouped
from .op import KernelCall, Op


class Operands(NamedTuple):
    """The primitive's operands.

    `q`: (batch, num_heads, head_dim), or with `lengths` chunks (batch, time, num_heads, head_dim).
    `k` and `v`: (num_pages, num_kv_heads, page_size, head_dim), or without block tables (batch,
    num_kv_heads, capacity, head_dim); if int8, they have scales with the first three axes. If `v`
    is None, `k` is a latent cache (MLA) whose rows begin with the values. `q_rest`, for a latent
    cache: the last elements of the queries, if `q` has only as many as values have. `gate`: like
    the result; its sigmoid multiplies it.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array | None
    k_scales: jax.Array | None
    v_scales: jax.Array | None
    block_tables: jax.Array | None
    context_lens: jax.Array
    lengths: jax.Array | None
    sinks: jax.Array | None
    q_rest: jax.Array | None = None
    gate: jax.Array | None = None

    def without_groups(self) -> Operands:
        """Returns the operands with page ids of all groups: (batch, pages_per_sequence)."""
        if self.block_tables is None:
            return self
        return self._replace(block_tables=ungrouped(self.block_tables, 2, self.k.shape[0]))

    def seen_by_token(self) -> jax.Array:
        """Returns the context length of each token of a chunk, (batch, time); 0 for padding."""
        assert self.lengths is not None
        lengths = jnp.clip(self.lengths, 0, self.q.shape[1])[:, None]
        steps = jax.lax.broadcasted_iota(jnp.int32, self.q.shape[:2], 1)
        before = jnp.maximum(self.context_lens[:, None] - lengths, 0)
        return jnp.where(steps < lengths, before + steps + 1, 0)

    def by_token(self) -> Operands:
        """Returns the operands with each token of a chunk as a separate sequence of one query."""
        if self.lengths is None or self.block_tables is None:
            return self
        q_rest, gate = (
            None if x is None else x.reshape(-1, *x.shape[2:]) for x in (self.q_rest, self.gate)
        )
        return self._replace(
            q=self.q.reshape(-1, *self.q.shape[2:]),
            q_rest=q_rest,
            gate=gate,
            block_tables=jnp.repeat(self.block_tables, self.q.shape[1], axis=-2),
            context_lens=self.seen_by_token().reshape(-1),
            lengths=None,
        )

    @property
    def contiguous(self) -> bool:
        return self.block_tables is None

    def computed_in_float32(self) -> Operands:
        """Returns the operands with queries and gate in float32, which the primitive requires."""
        of_tokens = {name: getattr(self, name) for name in ("q", "q_rest", "gate")}
        floats = {n: x.astype(jnp.float32) for n, x in of_tokens.items() if x is not None}
        return self._replace(**floats)

    def with_whole_queries(self) -> Operands:
        """Returns the operands with `q_rest` appended to `q`."""
        if self.q_rest is None:
            return self
        q = jnp.concatenate([self.q, self.q_rest], axis=-1)
        return self._replace(q=q, q_rest=None)

    def gated(self, out: jax.Array) -> jax.Array:
        """Multiplies attention's result by the sigmoid of `gate`, if there is one."""
        if self.gate is None:
            return out
        return out * jax.nn.sigmoid(self.gate.reshape(out.shape))

    def arrays(self) -> list[jax.Array]:
        """Returns the operands that are not None, in the order of the kernels' arguments."""
        return [array for array in self if array is not None]


def checked(
    operands: Operands,
    *,
    scale: float | None,
    window: int | None,
    soft_cap: float | None,
    value_dim: int | None = None,
) -> tuple[Operands, dict[str, Any]]:
    """Checks the number of heads, scale, soft_cap and sinks, which `checks` has not checked yet.

    Returns the primitive's operands and parameters.

    `value_dim`: width of the values in rows of a latent cache; None for another cache.
    """
    num_kv_heads = operands.k.shape[1]
    num_heads, head_dim = operands.q.shape[-2], operands.k.shape[-1]
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}")
    return operands._replace(sinks=checks.sinks(operands.sinks, num_heads)), {
        "scale": head_dim**-0.5 if scale is None else checks.positive("scale", scale),
        "window": window,
        "soft_cap": None if soft_cap is None else checks.positive("soft_cap", soft_cap),
        "value_dim": value_dim,
    }


def attend(operands: Operands, params: dict[str, Any]) -> jax.Array:
    """Runs the primitive on the results of `checked`.

    Returns attention's result in q's dtype; the shape is q's, with the values' width as last axis.
    """
    if 0 in operands.q.shape[:-2]:
        return operands.q[..., : params["value_dim"]]
    out: jax.Array = op.bind(*operands.computed_in_float32(), **params)
    return out.astype(operands.q.dtype)


def reference(
    *operands: jax.Array | None,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    value_dim: int | None,
) -> jax.Array:
    """The primitive in plain JAX."""
    args = Operands(*operands).without_groups().with_whole_queries()  # type: ignore[arg-type]
    keys, values, known = _tokens(args, value_dim)

    def attended(q: jax.Array, lengths: jax.Array) -> jax.Array:
        """Attends with q (batch, num_heads, head_dim) to the first `lengths` cached tokens."""
        batch, num_kv_heads, capacity, _ = keys.shape
        lengths = jnp.clip(lengths, 0, capacity)[:, None]
        visible = (jnp.arange(capacity) < lengths) & known
        if window is not None:
            visible &= jnp.arange(capacity) >= lengths - window
        mask = visible[:, None, None, :]
        groups = q.reshape(batch, num_kv_heads, -1, q.shape[-1])
        highest = jax.lax.Precision.HIGHEST
        scores = jnp.einsum("bhgd,bhtd->bhgt", groups, keys, precision=highest) * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(mask, scores, -jnp.inf)
        top = jnp.max(scores, axis=-1, keepdims=True)
        if args.sinks is not None:
            logits = args.sinks.reshape(1, num_kv_heads, -1, 1)
            top = jnp.maximum(top, logits)
        # Scores masked to -inf stay out of `exp`: in an empty sequence top is -inf too, and their
        # difference would be NaN.
        weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores - top, 0.0)), 0.0)
        # 0 * NaN would be NaN
        seen_values = jnp.where(visible[:, None, :, None], values, 0.0)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        if args.sinks is not None:
            total += jnp.exp(logits - top)
        out = jnp.einsum("bhgt,bhtd->bhgd", weights, seen_values, precision=highest)
        out = jnp.where(jnp.any(mask, axis=-1, keepdims=True), out / total, 0.0)
        return out.reshape(*q.shape[:2], values.shape[-1])

    if args.lengths is None:
        return args.gated(attended(args.q, args.context_lens))
    pieces: jax.Array = jax.vmap(attended, 1, 1)(args.q, args.seen_by_token())
    return args.gated(pieces)


def _tokens(operands: Operands, value_dim: int | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns keys and values, float32 (batch, num_kv_heads, capacity, width), and `known`.

    `known`, bool (batch, capacity), marks tokens in valid pages.
    """
    rows = [operands.k] if operands.v is None else [operands.k, operands.v]
    floats = [r.astype(jnp.float32) for r in rows]
    scales = (operands.k_scales, operands.v_scales)
    floats = [f if s is None else f * s[..., None] for f, s in zip(floats, scales, strict=False)]
    if operands.block_tables is None:
        known = jnp.ones((operands.k.shape[0], operands.k.shape[2]), jnp.bool_)
        return floats[0], floats[-1][..., :value_dim], known
    num_pages, num_kv_heads, page_size, head_dim = operands.k.shape
    known = (operands.block_tables >= 0) & (operands.block_tables < num_pages)
    pages = jnp.where(known, operands.block_tables, 0)
    shape = (pages.shape[0], num_kv_heads, pages.shape[1] * page_size, head_dim)
    floats = [jnp.moveaxis(f[pages], 2, 1).reshape(shape) for f in floats]
    return floats[0], floats[-1][..., :value_dim], jnp.repeat(known, page_size, axis=1)


def ptx(launch: KernelCall, *operands: jax.Array | None, **params: Any) -> jax.Array:
    """The primitive by PTX kernels."""
    args = Operands(*operands)  # type: ignore[arg-type]
    (out,) = launches(launch, args, **params)
    return out.reshape(*args.q.shape[:-1], out.shape[-1])


def launches(
    launch: KernelCall,
    operands: Operands,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    value_dim: int | None,
    output: str = "f32",
) -> list[jax.Array]:
    """Launches the attention kernel, and a merge kernel if the context is split without a cluster.

    Returns [out] (batch, num_heads, width of values), for chunks (batch * time, num_heads, width of
    values), or the arrays of a quantized `output`.

    output: f32, or a quantized (rows, num_heads * head_dim) if head_dim is a multiple of 32. `q8_1`
    returns the arrays that `quantize_q8_1` returns. `f16` returns those of `quantize_f16` if a
    thread block of the last kernel has complete super-blocks, otherwise q8_1.
    """
    from ptx_kernels.kernels.attention import (
        leaves_f16,
        paged_attention,
        paged_attention_rule,
        piece_attention_rule,
    )
    from ptx_kernels.tuning import choose

    operands = operands.without_groups()
    num_pages, num_kv_heads, page_size, head_dim = operands.k.shape
    per_sequence = 1 if operands.block_tables is None else operands.block_tables.shape[1]
    capacity = min(per_sequence * page_size, window or per_sequence * page_size)
    dtype = ptx_name(operands.k.dtype)
    if operands.lengths is not None:
        pieces = *operands.q.shape[:2], num_kv_heads, head_dim, capacity, dtype, value_dim
        if choose(piece_attention_rule, *pieces, per_sequence * page_size):
            options = {"scale": scale, "window": window, "soft_cap": soft_cap}
            return _of_pieces(launch, operands, capacity, options, output)
        operands = operands.by_token()
    batch, num_heads, _ = operands.q.shape
    gate = operands.gate
    heads = num_heads, num_kv_heads, head_dim
    config = choose(paged_attention_rule, batch, *heads, capacity, dtype, value_dim, page_size)
    unsplit = config.splits == 1 or config.cluster
    if unsplit and output == "f16":
        together = config.whole_heads(num_heads // num_kv_heads)
        output = output if leaves_f16(value_dim or head_dim, together) else "q8_1"
    kernel = paged_attention(
        batch=batch,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_pages=num_pages,
        page_size=page_size,
        pages_per_sequence=per_sequence,
        scale=scale,
        dtype=dtype,
        contiguous=operands.contiguous,
        window=window,
        soft_cap=soft_cap,
        sinks=operands.sinks is not None,
        value_dim=value_dim,
        q_rest=operands.q_rest is not None,
        gate=unsplit and gate is not None,
        output=output if unsplit else "f32",
        config=config,
    )
    if unsplit:
        return launch(kernel, *operands.arrays())
    results = launch(kernel, *operands._replace(gate=None).arrays())
    return _merged(launch, results, output, gate)


def _merged(
    launch: KernelCall, parts: Sequence[jax.Array], output: str, gate: jax.Array | None
) -> list[jax.Array]:
    """Merges partial attention results of splits of the context into `output`.

    The first part is (rows, num_heads, splits, width of values); gate: (..., num_heads, width of
    values) or None.
    """
    from ptx_kernels.kernels.attention import leaves_f16, merge_attention, merge_attention_rule
    from ptx_kernels.tuning import choose

    rows, num_heads, splits, width = parts[0].shape
    if output == "f16" and not leaves_f16(width, 1):
        output = "q8_1"
    config = choose(merge_attention_rule, width, splits)
    sizes: dict[str, Any] = {"batch": rows, "num_heads": num_heads, "head_dim": width}
    sizes |= {"splits": splits, "output": output, "gate": gate is not None, "config": config}
    gates = [] if gate is None else [gate.reshape(rows, num_heads, width)]
    return launch(merge_attention(**sizes), *parts, *gates)


def _of_pieces(
    launch: KernelCall, args: Operands, capacity: int, options: dict[str, Any], output: str
) -> list[jax.Array]:
    """Launches the prefill kernel on chunks of tokens; it reads pages once per tile of queries.

    Returns the same arrays as `launches`.

    capacity: capacity of the window, or of a sequence's pages, in tokens.
    """
    from ptx_kernels.kernels.attention import causal_attention, causal_attention_rule, split_keys
    from ptx_kernels.limits import PIECE_KEY_PARTS, PIECE_PARTS
    from ptx_kernels.tuning import choose

    assert args.block_tables is not None
    batch, time, num_heads, head_dim = args.q.shape
    num_pages, num_kv_heads, page_size, _ = args.k.shape
    per_sequence = args.block_tables.shape[1]
    sizes: dict[str, Any] = {
        "batch": batch,
        "time": time,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "value_dim": head_dim,
        "num_pages": num_pages,
        "page_size": page_size,
        "pages_per_sequence": per_sequence,
    }
    dtype, parts = ptx_name(args.k.dtype), 1
    pages = [x for x in (args.k, args.v, args.k_scales, args.v_scales) if x is not None]
    tables, window = (args.block_tables, args.context_lens), options["window"]
    if dtype in PIECE_KEY_PARTS:
        parts = PIECE_KEY_PARTS[dtype]
        seen = None if window is None else window + time - 1
        splitting = split_keys(**sizes, parts=parts, dtype=dtype, seen=seen)
        pages, dtype = launch(splitting, *pages, *tables), "bf16"
        sizes |= {"num_pages": batch * per_sequence, "named_pages": num_pages}
    rows = batch * num_kv_heads, time * num_heads // num_kv_heads
    dims = head_dim, head_dim, PIECE_PARTS, parts
    config = choose(causal_attention_rule, *rows, *dims, dtype, capacity)
    kernel = causal_attention(
        **sizes,
        num_heads=num_heads,
        sinks=args.sinks is not None,
        parts=PIECE_PARTS,
        key_parts=parts,
        dtype=dtype,
        config=config,
        **options,
    )
    others = [x for x in (args.lengths, args.sinks) if x is not None]
    results = launch(kernel, args.q, *pages, *tables, *others)
    if config.splits > 1:
        return _merged(launch, results, output, args.gate)
    (out,) = results
    out = args.gated(out)
    if output != "f32":
        to = quantize_f16 if output == "f16" else quantize_q8_1
        return list(to.ptx(launch, out.reshape(batch * time, -1)))
    return [out.reshape(batch * time, num_heads, head_dim)]


def native(*operands: jax.Array | None, **params: Any) -> jax.Array:
    """The primitive by the native kernels."""
    given = Operands(*operands).without_groups().with_whole_queries()  # type: ignore[arg-type]
    q, pieces = given.q, given.lengths is not None
    args = given._replace(q=q if pieces else q[:, None], gate=None)
    options = {"contiguous": args.contiguous, "pieces": pieces, "sinks": args.sinks is not None}
    out = calls.paged_attention(args.arrays(), **options, **params)
    return given.gated(out.reshape(*q.shape[:-1], out.shape[-1]))


def shapes(q: Any, *_: Any, value_dim: int | None, **__: Any) -> Any:
    """Returns the result's shape and dtype: q's, with value_dim as last axis for a latent cache."""
    return jax.ShapeDtypeStruct((*q.shape[:-1], value_dim or q.shape[-1]), q.dtype)


def layout(*operands: Any, **_: Any) -> Layout:
    """Returns the Layout: the batch and the heads may be split over devices.

    Pages serve any sequence of their group and are split with the groups. A single KV head is
    replicated on every device that has some of its query heads.
    """
    args = Operands(*operands)
    tables, heads = args.block_tables, "h" if args.k.shape[1] > 1 else "_"
    rows = f"b {heads}" if tables is None or tables.ndim == 3 else f"_ {heads}"
    q = "b h _" if args.lengths is None else "b _ h _"
    names = Operands(q, rows, rows, rows, rows, "b _", "b", "b", "h", q, q)  # type: ignore[arg-type]
    return Layout(tuple(names), q)


#: The primitive.
op = Op(
    "paged_attention",
    reference,
    shapes=shapes,
    ptx=ptx,
    native=native,
    layout=layout,
)
