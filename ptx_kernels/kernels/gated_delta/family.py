"""Gated delta net kernel families: the recurrence over a prompt, and a decode step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...devices import target
from ...ptx import WARP, Buffer
from ..family import Arguments, Case, Family, once
from .gated_delta_rule import gated_delta_rule
from .gated_delta_step import gated_delta_step
from .rules import gated_delta_rule_rule, gated_delta_step_rule

#: Sizes of Qwen3.6-35B-A3B.
_QWEN: dict[str, Any] = dict(num_k_heads=16, num_v_heads=32, key_dim=128, value_dim=128, tiled=True)


def _rule(label: str, *, batch: int = 1, time: int = 512, **changes: Any) -> Case:
    sizes = _QWEN | changes
    config = gated_delta_rule_rule(
        target(), batch, *(sizes[name] for name in ("num_v_heads", "key_dim", "value_dim"))
    )
    sizes |= {"batch": batch, "time": time, "scale": 128**-0.5}
    return Case.of(gated_delta_rule, label, **sizes, config=config)


def _step(label: str, *, batch: int = 1, **changes: Any) -> Case:
    sizes = _QWEN | changes
    config = gated_delta_step_rule(target(), sizes["key_dim"], sizes["value_dim"])
    sizes |= {"batch": batch, "width": 4, "scale": 128**-0.5, "eps": 1e-6}
    return Case.of(gated_delta_step, label, **sizes, config=config)


def _tokens_stored(arguments: Arguments) -> int:
    """Returns the warps' output stores in the token loop, including padding tokens of a round."""
    config = arguments["config"]
    tokens = -(-arguments["time"] // config.tokens) * config.tokens
    columns = arguments["batch"] * arguments["num_v_heads"] * arguments["value_dim"]
    return tokens * columns * config.lanes // (config.columns * WARP)


def _negative(buffer: Buffer, buffers: Mapping[str, Buffer], rng: Any) -> np.ndarray:
    """Returns random logarithms of a decay, or decay rates (negative)."""
    return -rng.exponential(0.5, buffer.shape)


def _unit(buffer: Buffer, buffers: Mapping[str, Buffer], rng: Any) -> np.ndarray:
    """Returns random vectors of length 1."""
    vectors = rng.standard_normal(buffer.shape)
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def _between(buffer: Buffer, buffers: Mapping[str, Buffer], rng: Any) -> np.ndarray:
    """Returns random values between 0 and 1."""
    return rng.uniform(0, 1, buffer.shape)


def _positions(buffer: Buffer, buffers: Mapping[str, Buffer], rng: Any) -> np.ndarray:
    """Returns random token positions of long sequences, one of them 0, and one -1 for padding."""
    positions = rng.integers(0, 1 << 20, buffer.shape)
    positions[1:3] = [0, -1][: max(0, len(positions) - 1)]
    return positions


GATED_DELTA_RULE = Family(
    gated_delta_rule,
    (
        _rule("512"),
        _rule("512-b4", batch=4),
        _rule("100-16-heads", time=100, num_v_heads=16),
        _rule("64-d256", time=64, num_k_heads=4, num_v_heads=4, key_dim=256, value_dim=256),
        _rule("64-d48x80", time=64, num_v_heads=32, key_dim=48, value_dim=80),
    ),
    rules=(gated_delta_rule_rule,),
    rewritten=("state",),
    stores=_tokens_stored,
    operands={"keys": _unit, "g": _negative, "beta": _between},
)
GATED_DELTA_STEP = Family(
    gated_delta_step,
    (
        _step("b1"),
        _step("b32", batch=32),
        _step("grouped", tiled=False),
        _step("d256", key_dim=256, value_dim=256),
        _step("d48x80", batch=3, num_k_heads=4, num_v_heads=4, key_dim=48, value_dim=80),
    ),
    rules=(gated_delta_step_rule,),
    rewritten=("state",),
    passes=once,
    operands={"decay": _negative, "positions": _positions},
)
