"""Selection rules for the gated delta net kernels."""

from __future__ import annotations

import math

from ...devices import Target
from ...ptx import WARP
from ..family import Rule
from .gated_delta_rule import GatedDeltaRuleConfig
from .gated_delta_step import GatedDeltaStepConfig

_ROWS = 32  # per lane at most: its columns, keys and queries must fit in registers


def _gated_delta_rule(
    device: Target, batch: int, num_v_heads: int, key_dim: int, value_dim: int
) -> GatedDeltaRuleConfig:
    """Returns the Config for a prompt: two columns per lane, as few lanes per column as possible.

    There are enough lanes per column to fill the device. Fewer lanes per column take fewer
    instructions in total, but form a longer dependency chain from one token to the next. The chain
    takes as long as five warps of a multiprocessor take to issue.
    """
    columns = batch * num_v_heads * value_dim
    fitting = [n for n in (4, 8, 16, 32) if key_dim % n == 0 and key_dim <= _ROWS * n]
    warps_at = {lanes: columns * lanes / (2 * WARP) for lanes in fitting}
    filling = (n for n in fitting if warps_at[n] >= 5 * device.multiprocessors)
    lanes = next(filling, fitting[-1])
    warps = math.gcd(value_dim * lanes // (2 * WARP), 8 if lanes >= 16 else 4)
    tokens = 16 if key_dim <= 128 else 8
    return GatedDeltaRuleConfig(warps=warps, lanes=lanes, columns=2, tokens=tokens)


def _gated_delta_step(key_dim: int, value_dim: int) -> GatedDeltaStepConfig:
    """Returns the Config for a head size: four columns per lane, 16-byte loads.

    Heads up to 128 x 128 have four lanes per column, so that each load of a warp has complete lines
    of 128 bytes; registers suffice for two thread blocks. In other heads a lane has at most 16
    rows. If eight warps hold such a head, registers suffice for two thread blocks. A head that
    eight warps cannot hold is processed in several passes.
    """
    small = key_dim <= _ROWS * 4 and value_dim <= 128
    lanes = next(
        n
        for n in (4, 8, 16, 32)
        if key_dim % n == 0
        and (key_dim <= 16 * n or (small and n == 4))
        and value_dim * n % (4 * WARP) == 0
    )
    whole = value_dim * lanes // (4 * WARP)
    warps = max(n for n in range(1, 9) if whole % n == 0)
    twice = whole == 8 or (lanes == 4 and whole == 4)
    return GatedDeltaStepConfig(warps, lanes, columns=4, resident_blocks=2 if twice else 1)


gated_delta_rule_rule: Rule[GatedDeltaRuleConfig] = Rule("gated_delta_rule", _gated_delta_rule)
gated_delta_step_rule: Rule[GatedDeltaStepConfig] = Rule("gated_delta_step", _gated_delta_step)
