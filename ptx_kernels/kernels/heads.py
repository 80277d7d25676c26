"""Sizes of attention heads and their rotary embedding, as arguments of kernels."""

from __future__ import annotations

from dataclasses import dataclass

from ..ptx import Builder, Group, KernelError, Pointer, f32


@dataclass(frozen=True, kw_only=True)
class Heads(Group):
    """Sizes of attention heads; `group` adjacent query heads share a KV head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise KernelError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, kw_only=True)
class Rope(Group):
    """Rotary position embedding (RoPE) of the first `rope_dim` dimensions of a head.

    They are rotated in pairs: (2i, 2i + 1) if `interleaved`, else (i, i + rope_dim / 2).
    """

    rope_dim: int
    interleaved: bool

    def check(self, head_dim: int) -> None:
        """Raises KernelError unless pairs fit into a head."""
        if self.rope_dim % 2 or self.rope_dim > head_dim or head_dim % 2:
            raise KernelError(
                f"rope_dim={self.rope_dim} must be even and at most head_dim={head_dim}, "
                "itself even"
            )

    def input_angles(self, k: Builder, tokens: int) -> tuple[Pointer, Pointer]:
        """Declares the operands `cos` and `sin` of the angles, f32 (tokens, rope_dim / 2)."""
        cos, sin = (k.input(name, f32, (tokens, self.rope_dim // 2)) for name in ("cos", "sin"))
        return cos, sin
