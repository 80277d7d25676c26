"""Rule of choice of clusters: whose splits merge themselves, and how many these are."""

from __future__ import annotations

from dataclasses import replace

from ...devices import Target
from ...ptx import MAX_CLUSTER
from .config import PagedAttentionConfig

#: Seconds, by the cost model: what a launch of `merge_attention` takes beyond a cluster's merge,
#: and a round of a block's tokens, where the latency of memory binds.
_MERGE_LAUNCH = 1.6e-6
_ROUND = {True: 0.75e-6, False: 1.05e-6}  # of tensor cores, of lanes


def clustered(
    device: Target,
    config: PagedAttentionConfig,
    *,
    blocks: int,
    capacity: int,
    step: int,
    nbytes: int,
) -> PagedAttentionConfig:
    """The config with its splits as a cluster, where the device has clusters and none is slower.

    A cluster has eight blocks at most. Where the config has more splits, they are fewer than the
    device has room for: where each has a multiprocessor to itself, it has twice as many warps. That
    draws the memory as well, but takes more rounds, which count where few heads have long contexts.

    Args:
      config: with as many splits as fill the device.
      blocks: of a split.
      capacity: tokens of a context.
      step: tokens of a block in a round.
      nbytes: of all pages.
    """
    facts = device.facts
    if config.splits == 1 or facts is None or not facts.clusters:
        return config
    splits = min(config.splits, MAX_CLUSTER)
    tokens, chosen = capacity / splits, replace(config, splits=splits, cluster=True)
    alone = blocks * splits <= device.multiprocessors and config.resident_blocks > 1
    if splits < config.splits and alone and tokens > step:
        chosen = replace(chosen, warps=2 * config.warps, resident_blocks=1)
    bandwidth, once = nbytes / facts.bandwidth, _ROUND[config.tensor_cores]
    apart = max(bandwidth, once * -(-capacity // (config.splits * step)))
    together = max(bandwidth, once * -(-capacity // (splits * step * chosen.warps // config.warps)))
    return chosen if together <= apart + _MERGE_LAUNCH else config
