"""Kernel that applies RoPE to a step's queries and keys, and appends keys, values to KV pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..ptx import WARP, Builder, KernelError, Pointer, Value, f32, kernel, s32, u32
from .family import Case, Family, once
from .heads import Heads, Rope
from .pages import (
    PAGE_OPERANDS,
    SLOT_OPERANDS,
    PageSizes,
    Spread,
    declare_pages,
    store_runs,
    touched_slots,
)
from .rms_norm import inverse_rms
from .vectors import RUN, Run

#: cos, sin, and whether the pair rotates (None: yes).
Angle = tuple[Value, Value, Value | None]


@dataclass(frozen=True)
class RopeAppendConfig:
    warps: int = 4  # per block, one head of one token each


class _Head:
    """Layout of a head's vector over a warp's lanes: lane i has pairs i, i + 32, ... of values.

    RoPE rotates pairs: adjacent values if interleaved, else values half of the rotated dimensions
    apart. Values that are not rotated form adjacent pairs.
    """

    def __init__(self, k: Builder, head_dim: int, rope: Rope) -> None:
        self._k, self._head_dim, self._half = k, head_dim, rope.rope_dim // 2
        # pair numbers, and whether they are rotated (None: yes)
        self._pairs: list[tuple[Value, Value | None]] = []
        # dimension of each of the lane's values, and whether the head has it (None: yes)
        self._dims: list[tuple[Value, Value | None]] = []
        pairs = head_dim // 2
        for start in range(0, pairs, WARP):
            number = k.lane_id + start
            inside = number < pairs if start + WARP > pairs else None
            rotated = number < self._half if start + WARP > self._half else None
            dims = number * 2, number * 2 + 1
            if not rope.interleaved:
                dims = self._select(rotated, (number, number + self._half), dims)
            self._pairs.append((number, rotated))
            self._dims += [(dim, inside) for dim in dims]

    def _select(
        self, rotated: Value | None, a: tuple[Value, Value], b: tuple[Value, Value]
    ) -> tuple[Value, Value]:
        return (
            a
            if rotated is None
            else (self._k.select(rotated, a[0], b[0]), self._k.select(rotated, a[1], b[1]))
        )

    def load(self, vector: Pointer) -> list[Value]:
        """Loads this lane's values of the head_dim f32 at `vector`, pair by pair.

        Zeros for values that the head does not have.
        """
        return [vector.at(dim).load(where=inside) for dim, inside in self._dims]

    def runs(self, values: Sequence[Value]) -> list[Run]:
        """Returns this lane's values as runs, for `Pages.store`."""
        return [
            Run(dim, [value], inside)
            for (dim, inside), value in zip(self._dims, values, strict=True)
        ]

    def load_angles(self, cos: Pointer, sin: Pointer) -> list[Angle]:
        """Loads (cos, sin, whether it rotates) of the lane's rotated pairs.

        `cos` and `sin`: of pair i's angle at index i.
        """
        return [
            (cos.at(number).load(where=rotated), sin.at(number).load(where=rotated), rotated)
            for number, rotated in self._pairs[: -(-self._half // WARP)]
        ]

    def rotated(
        self,
        values: Sequence[Value],
        angles: Sequence[Angle],
        weight: Sequence[Value] | None,
        eps: float,
    ) -> list[Run]:
        """Emits the rotation of each pair by its angle, after an RMSNorm if there is a `weight`."""
        if weight is not None:
            values = _normalized(self._k, values, weight, count=self._head_dim, eps=eps)
        out = list(values)
        for i, (c, s, rotated) in enumerate(angles):
            a, b = values[2 * i : 2 * i + 2]
            out[2 * i : 2 * i + 2] = self._select(rotated, (a * c - b * s, a * s + b * c), (a, b))
        return self.runs(out)


def _normalized(
    k: Builder, values: Sequence[Value], weight: Sequence[Value] | None, *, count: int, eps: float
) -> list[Value]:
    """Emits the RMSNorm x / sqrt(mean(x^2) + eps) [* weight] of `count` values over a warp."""
    inverse = inverse_rms(k, values, k.warp_sum, count=count, eps=eps)
    if weight is None:
        return [x * inverse for x in values]
    return [x * inverse * factor for x, factor in zip(values, weight, strict=True)]


@kernel
def rope_append(
    k: Builder,
    *,
    tokens: int,
    heads: Heads,
    rope: Rope,
    pages: PageSizes,
    dtype: str = "f32",
    qk_norm: bool = False,
    eps: float = 0.0,
    v_eps: float | None = None,
    keys: bool = False,
    latent: bool = False,
    q_rest: int = 0,
    config: RopeAppendConfig = RopeAppendConfig(),
) -> None:
    """Kernel: q_out = rotate(q); writes rotate(k) and v of each token to its slot of the KV cache.

    pages[slot / page_size, :, slot % page_size] = rotate(k), v. With `keys`, k_out = rotate(k) is a
    result too, for any slot.

    With `qk_norm`, q and k are first normalized per head (RMSNorm), and with `v_eps` also v, by a
    norm without weights. A slot outside the pages is skipped. A warp has one head of q, or one head
    of k and of v.

    Args:
      latent: there is no v, and only the last rope_dim elements of a row of k rotate; `k_norm`
        normalizes those before. Queries are rope_dim wide and not normalized.
      q_rest: elements of each row of q, after the head or for latent pages before it, that are
        copied to the result `q_rest` unchanged.
    """
    num_heads, num_kv_heads, head_dim = heads.num_heads, heads.num_kv_heads, heads.head_dim
    num_pages, page_size = pages.num_pages, pages.page_size
    rope.check(head_dim)
    if latent and keys:
        raise KernelError("keys=True is not available with latent=True")
    q_dim = rope.rope_dim if latent else head_dim
    shape = pages.shape(num_kv_heads, head_dim)
    k_pages, *v_pages = declare_pages(k.inout, dtype, shape, latent=latent)
    q_new = k.input("q", f32, (tokens, num_heads, q_dim + q_rest))
    of_keys = tokens, num_kv_heads, head_dim
    k_new = k.input("k", f32, of_keys)
    v_new = None if latent else k.input("v", f32, of_keys)
    slot_mapping = k.input("slot_mapping", s32, (tokens,))
    cos, sin = rope.input_angles(k, tokens)
    normalized = (
        {"k_norm": head_dim - q_dim} if latent else dict.fromkeys(("q_norm", "k_norm"), head_dim)
    )
    norms = [k.input(name, f32, (n,), constant=True) for name, n in normalized.items() if qk_norm]
    q_out = k.output("q_out", f32, (tokens, num_heads, q_dim))
    rest_out = k.output("q_rest", f32, (tokens, num_heads, q_rest)) if q_rest else None
    k_out = k.output("k_out", f32, of_keys) if keys else None
    units = num_heads + num_kv_heads  # warps per token
    # leaves registers for all of a wide head's loads
    resident = None if head_dim <= 128 else (7 if head_dim <= 256 or latent else 3)
    grid = -(-tokens * units // config.warps)
    k.launch((grid,), WARP * config.warps, resident_blocks=resident)

    warp = k.block_id() * config.warps + k.warp_id
    with k.when(warp < tokens * units):
        token, unit = warp // units, warp % units
        head = _Head(k, q_dim, rope)
        # all loads precede the first use: nothing else hides their latency
        angles = head.load_angles(cos.at(token), sin.at(token))
        rank = head_dim - q_dim  # of the latent vector before a rotated key
        with k.when(unit < num_heads) as query:
            row = q_new.at(token, unit)
            values = head.load(row.at(q_rest) if latent else row)
            weight = head.load(norms[0]) if norms and not latent else None
            rest = _copied(k, row if latent else row.at(head_dim), q_rest)
            store_runs(k, q_out.at(token, unit), head.rotated(values, angles, weight, eps))
            if rest_out is not None:
                store_runs(k, rest_out.at(token, unit), rest)
        with query.otherwise():
            kv_head = unit - num_heads
            slot = slot_mapping.at(token).load().bits(u32)  # a negative slot is a huge u32
            row = k_new.at(token, kv_head)
            values = head.load(row.at(rank))
            weight = head.load(norms[1]) if norms and not latent else None
            value = [] if v_new is None else head.load(v_new.at(token, kv_head))
            spread = Spread.evenly(k, (rank,), RUN)
            vector = spread.load(row)
            of_vector = spread.load(norms[0]) if norms and latent else None

            def key() -> list[Run]:
                turned = head.rotated(values, angles, weight, eps)
                if not latent:
                    return turned
                normal = vector
                if of_vector is not None:
                    normal = _normalized(k, vector, of_vector, count=rank, eps=eps)
                turned = [replace(run, first=run.first + rank) for run in turned]
                return [*spread.runs(normal), *turned]

            turned = None
            if k_out is not None:
                turned = key()
                store_runs(k, k_out.at(token, kv_head), turned)
            with k.when(slot < min(num_pages * page_size, 1 << 31)):
                index = slot // page_size, kv_head, slot % page_size
                k_pages.store(k, index, turned or key(), lanes=WARP)
                if value:
                    if v_eps is not None:
                        value = _normalized(k, value, None, count=head_dim, eps=v_eps)
                    v_pages[0].store(k, index, head.runs(value), lanes=WARP)


def _copied(k: Builder, vector: Pointer, count: int) -> list[Run]:
    """Loads `count` f32 at `vector`, one per lane at a time, as runs for `store_runs`."""
    runs = []
    for start in range(0, count, WARP):
        first = k.lane_id + start
        inside = first < count if start + WARP > count else None
        runs.append(Run(first, [vector.at(first).load(where=inside)], inside))
    return runs


def _case(label: str, dtype: str, head_dim: int, rope_dim: int, **variant: Any) -> Case:
    sizes = dict(tokens=4, num_heads=32, num_kv_heads=8, num_pages=1024, page_size=16, eps=1e-6)
    shape = dict(head_dim=head_dim, rope_dim=rope_dim, dtype=dtype)
    return Case.of(rope_append, label, **sizes | shape | variant)


def _latent_case(dtype: str) -> Case:
    """Returns a case with DeepSeek-V2's rows, with 16 heads of 128 + 64 elements."""
    heads = dict(num_heads=16, num_kv_heads=1, latent=True, q_rest=128)
    return _case(f"{dtype}-latent", dtype, 576, 64, interleaved=True, qk_norm=True, **heads)


_EXAMPLES = (
    _case("llama-f32", "f32", 128, 128, interleaved=True),
    _case("qwen3-bf16", "bf16", 128, 128, interleaved=False, qk_norm=True),
    _case("partial-f16", "f16", 96, 40, interleaved=False),
    _case("qwen3-int8", "int8", 128, 128, interleaved=False, qk_norm=True),
    _case("llama-fp8", "fp8", 128, 128, interleaved=True),
    _case("llama-keys", "bf16", 128, 128, interleaved=True, keys=True),
    _case("gemma3-bf16", "bf16", 256, 256, interleaved=False, qk_norm=True),
    _case("gemma3-int8", "int8", 256, 256, interleaved=False, qk_norm=True),
    _case("gemma4-bf16", "bf16", 512, 512, interleaved=False, qk_norm=True, v_eps=1e-6),
    _case("gemma4-int8", "int8", 512, 512, interleaved=False, qk_norm=True),
    _case("qwen3.5-bf16", "bf16", 256, 64, interleaved=False, qk_norm=True, q_rest=256),
    *(_latent_case(dtype) for dtype in ("bf16", "int8")),
)


ROPE_APPEND = Family(
    rope_append,
    _EXAMPLES,
    touched=touched_slots,
    passes=once,
    operands=PAGE_OPERANDS | SLOT_OPERANDS,
)
