"""Kernel that applies RoPE to a step's queries and keys, and appends keys, values to KV pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..ptx import WARP, Builder, Pointer, Value, f32, kernel, s32, u32
from .family import Case, Family, once
from .heads import Heads, Rope
from .pages import (
    PAGE_OPERANDS,
    SLOT_OPERANDS,
    PageSizes,
    declare_pages,
    store_runs,
    touched_slots,
)
from .rms_norm import inverse_rms
from .vectors import Run


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

    def normalize(self, values: Sequence[Value], weight: Pointer, eps: float) -> list[Value]:
        """Emits the RMSNorm x / sqrt(mean(x^2) + eps) * weight over the head."""
        inverse = inverse_rms(self._k, values, self._k.warp_sum, count=self._head_dim, eps=eps)
        return [x * inverse * factor for x, factor in zip(values, self.load(weight), strict=True)]

    def rotate(self, values: Sequence[Value], cos: Pointer, sin: Pointer) -> list[Value]:
        """Emits the rotation of each pair by its angle.

        `cos` and `sin`: of pair i's angle at index i.
        """
        out = list(values)
        for i, (number, rotated) in enumerate(self._pairs[: -(-self._half // WARP)]):
            a, b = values[2 * i : 2 * i + 2]
            c, s = (angles.at(number).load(where=rotated) for angles in (cos, sin))
            out[2 * i : 2 * i + 2] = self._select(rotated, (a * c - b * s, a * s + b * c), (a, b))
        return out


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
    keys: bool = False,
    config: RopeAppendConfig = RopeAppendConfig(),
) -> None:
    """Kernel: q_out = rotate(q); writes rotate(k) and v of each token to its slot of the KV cache.

    pages[slot / page_size, :, slot % page_size] = rotate(k), v. With `keys`, k_out = rotate(k) is a
    result too, for any slot.

    With `qk_norm`, q and k are first normalized per head (RMSNorm). A slot outside the pages is
    skipped. A warp has one head of q, or one head of k and of v.
    """
    num_heads, num_kv_heads, head_dim = heads.num_heads, heads.num_kv_heads, heads.head_dim
    num_pages, page_size = pages.num_pages, pages.page_size
    rope.check(head_dim)
    k_pages, v_pages = declare_pages(k.inout, dtype, pages.shape(num_kv_heads, head_dim))
    q_new = k.input("q", f32, (tokens, num_heads, head_dim))
    k_new, v_new = (k.input(name, f32, (tokens, num_kv_heads, head_dim)) for name in ("k", "v"))
    slot_mapping = k.input("slot_mapping", s32, (tokens,))
    cos, sin = rope.input_angles(k, tokens)
    norms = [
        k.input(f"{name}_norm", f32, (head_dim,), constant=True) for name in ("q", "k") if qk_norm
    ]
    q_out = k.output("q_out", f32, (tokens, num_heads, head_dim))
    shape = tokens, num_kv_heads, head_dim
    k_out = k.output("k_out", f32, shape) if keys else None
    units = num_heads + num_kv_heads  # warps per token
    k.launch((-(-tokens * units // config.warps),), WARP * config.warps)

    warp = k.block_id() * config.warps + k.warp_id
    with k.when(warp < tokens * units):
        token, unit = warp // units, warp % units
        head = _Head(k, head_dim, rope)

        def rotated(vector: Pointer, norm: list[Pointer]) -> list[Run]:
            values = head.load(vector)
            values = head.normalize(values, norm[0], eps) if norm else values
            return head.runs(head.rotate(values, cos.at(token), sin.at(token)))

        with k.when(unit < num_heads) as query:
            store_runs(k, q_out.at(token, unit), rotated(q_new.at(token, unit), norms[:1]))
        with query.otherwise():
            kv_head = unit - num_heads
            turned = None
            if k_out is not None:
                turned = rotated(k_new.at(token, kv_head), norms[1:])
                store_runs(k, k_out.at(token, kv_head), turned)
            slot = slot_mapping.at(token).load().bits(u32)  # a negative slot is a huge u32
            with k.when(slot < min(num_pages * page_size, 1 << 31)):
                index = slot // page_size, kv_head, slot % page_size
                turned = turned or rotated(k_new.at(token, kv_head), norms[1:])
                k_pages.store(k, index, turned, lanes=WARP)
                v_pages.store(k, index, head.runs(head.load(v_new.at(token, kv_head))), lanes=WARP)


def _case(label: str, dtype: str, head_dim: int, rope_dim: int, **variant: Any) -> Case:
    sizes = dict(tokens=4, num_heads=32, num_kv_heads=8, num_pages=1024, page_size=16, eps=1e-6)
    shape = dict(head_dim=head_dim, rope_dim=rope_dim, dtype=dtype)
    return Case.of(rope_append, label, **sizes, **shape, **variant)


_EXAMPLES = (
    _case("llama-f32", "f32", 128, 128, interleaved=True),
    _case("qwen3-bf16", "bf16", 128, 128, interleaved=False, qk_norm=True),
    _case("partial-f16", "f16", 96, 40, interleaved=False),
    _case("qwen3-int8", "int8", 128, 128, interleaved=False, qk_norm=True),
    _case("llama-fp8", "fp8", 128, 128, interleaved=True),
    _case("llama-keys", "bf16", 128, 128, interleaved=True, keys=True),
    _case("gemma4-bf16", "bf16", 512, 512, interleaved=False, qk_norm=True),
    _case("gemma4-int8", "int8", 512, 512, interleaved=False, qk_norm=True),
)


ROPE_APPEND = Family(
    rope_append,
    _EXAMPLES,
    touched=touched_slots,
    passes=once,
    operands=PAGE_OPERANDS | SLOT_OPERANDS,
)
