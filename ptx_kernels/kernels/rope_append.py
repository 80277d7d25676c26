"""Rotary positions for a step's queries and keys, and its keys and values into the pages of a KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..ptx import WARP, Builder, KernelError, Pointer, Value, f32, kernel, s32, u32
from .pages import declare_pages, store_runs
from .vectors import Run


@dataclass(frozen=True)
class RopeAppendConfig:
    warps: int = 4  # per block; each has one head of one token


class _Head:
    """How a warp's lanes share a head's vector: each has pairs of values, WARP pairs apart.

    Pairs are what the rotation turns: neighbours if interleaved, else half of the rotated dimensions apart. What is
    not rotated goes by neighbours too.
    """

    def __init__(self, k: Builder, head_dim: int, rope_dim: int, interleaved: bool) -> None:
        self._k = k
        self._head_dim, self._half = head_dim, rope_dim // 2
        pairs, half = head_dim // 2, rope_dim // 2
        self.numbers = [k.lane_id + base for base in range(0, pairs, WARP)]
        starts = range(0, pairs, WARP)
        self.inside = [n < pairs if s + WARP > pairs else None for s, n in zip(starts, self.numbers, strict=True)]
        self.rotated = [n < half if s + WARP > half else None for s, n in zip(starts, self.numbers, strict=True)]
        self.dims = [
            (n * 2, n * 2 + 1) if interleaved else self._halves(n, half, rotated)
            for n, rotated in zip(self.numbers, self.rotated, strict=True)
        ]

    def _halves(self, number: Value, half: int, rotated: Value | None) -> tuple[Value, Value]:
        first, second = number, number + half
        if rotated is None:
            return first, second
        return self._k.select(rotated, first, number * 2), self._k.select(rotated, second, number * 2 + 1)

    def load(self, vector: Pointer) -> list[tuple[Value, Value]]:
        """This lane's pairs of the head_dim f32 at `vector`; zeros where it has none."""
        return [
            (vector.at(a).load(where=inside), vector.at(b).load(where=inside))
            for (a, b), inside in zip(self.dims, self.inside, strict=True)
        ]

    def runs(self, pairs: Sequence[tuple[Value, Value]]) -> list[Run]:
        """This lane's pairs, to be stored."""
        return [
            Run(dim, [value], inside)
            for dims, pair, inside in zip(self.dims, pairs, self.inside, strict=True)
            for dim, value in zip(dims, pair, strict=True)
        ]

    def normalize(self, pairs: Sequence[tuple[Value, Value]], weight: Pointer, eps: float) -> list[tuple[Value, Value]]:
        """x / sqrt(mean(x^2) + eps) * weight over the head."""
        k = self._k
        squares = k.const(f32, 0.0)
        for a, b in pairs:
            squares = k.fma(b, b, k.fma(a, a, squares))
        root = k.instruction("sqrt.rn.f32", k.warp_sum(squares) * (1 / self._head_dim) + eps)
        inverse = k.const(f32, 1.0) / root
        return [(a * inverse * wa, b * inverse * wb) for (a, b), (wa, wb) in zip(pairs, self.load(weight), strict=True)]

    def rotate(self, pairs: Sequence[tuple[Value, Value]], cos: Pointer, sin: Pointer) -> list[tuple[Value, Value]]:
        """Turns each rotated pair by the angle of its number, whose cosine and sine lie at `cos` and `sin`."""
        k, turned = self._k, []
        for i, ((a, b), number, rotated) in enumerate(zip(pairs, self.numbers, self.rotated, strict=True)):
            if i * WARP >= self._half:
                turned.append((a, b))
                continue
            c, s = (angles.at(number).load(where=rotated) for angles in (cos, sin))
            both = a * c - b * s, a * s + b * c
            turned.append(both if rotated is None else (k.select(rotated, both[0], a), k.select(rotated, both[1], b)))
        return turned


@kernel
def rope_append(
    k: Builder,
    *,
    tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rope_dim: int,
    num_pages: int,
    page_size: int,
    dtype: str = "f32",
    interleaved: bool,
    qk_norm: bool = False,
    eps: float = 0.0,
    config: RopeAppendConfig = RopeAppendConfig(),
) -> None:
    """q_out = rotate(q); pages[slot / page_size, :, slot % page_size] = rotate(k), v, for every token.

    The first rope_dim dimensions of a head are rotated in pairs: (2i, 2i + 1) if interleaved, else
    (i, i + rope_dim / 2). With `qk_norm` q and k are normalized per head (RMSNorm) before. A slot outside the pages
    is skipped. A warp has one head of q, or one head of k and of v.
    """
    if rope_dim % 2 or not 0 < rope_dim <= head_dim or head_dim % 2:
        raise KernelError(f"rope_dim={rope_dim} must be even and at most head_dim={head_dim}, itself even")
    k_pages, v_pages = declare_pages(k.inout, dtype, (num_pages, num_kv_heads, page_size, head_dim))
    q_new = k.input("q", f32, (tokens, num_heads, head_dim))
    k_new, v_new = (k.input(name, f32, (tokens, num_kv_heads, head_dim)) for name in ("k", "v"))
    slot_mapping = k.input("slot_mapping", s32, (tokens,))
    cos, sin = (k.input(name, f32, (tokens, rope_dim // 2)) for name in ("cos", "sin"))
    norms = [k.input(f"{name}_norm", f32, (head_dim,), constant=True) for name in ("q", "k") if qk_norm]
    q_out = k.output("q_out", f32, (tokens, num_heads, head_dim))
    units = num_heads + num_kv_heads  # warps of a token
    k.launch((-(-tokens * units // config.warps),), WARP * config.warps)

    warp = k.block_id() * config.warps + k.warp_id
    with k.when(warp < tokens * units):
        token, unit = warp // units, warp % units
        head = _Head(k, head_dim, rope_dim, interleaved)

        def turned(vector: Pointer, norm: Pointer | None) -> list[tuple[Value, Value]]:
            pairs = head.load(vector)
            pairs = pairs if norm is None else head.normalize(pairs, norm, eps)
            return head.rotate(pairs, cos.at(token), sin.at(token))

        with k.when(unit < num_heads) as query:
            rotated = turned(q_new.at(token, unit), norms[0] if norms else None)
            store_runs(q_out.at(token, unit), head.runs(rotated))
        with query.otherwise():
            kv_head = unit - num_heads
            slot = slot_mapping.at(token).load().bits(u32)  # a negative slot is a huge u32
            with k.when(slot < min(num_pages * page_size, 1 << 31)):
                place = slot // page_size, kv_head, slot % page_size
                rotated = turned(k_new.at(token, kv_head), norms[1] if norms else None)
                k_pages.store(place, head.runs(rotated), lanes=WARP)
                v_pages.store(place, head.runs(head.load(v_new.at(token, kv_head))), lanes=WARP)
