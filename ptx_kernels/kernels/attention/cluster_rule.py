"""Selection rules: when decode attention's splits form a thread block cluster that merges them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...devices import Target
from ...ptx import MAX_CLUSTER
from .config import PagedAttentionConfig

#: Seconds by the cost model: of a `merge_attention` launch beyond the merge in a cluster, and of a
#: round of a block's tokens when memory latency binds.
_MERGE_LAUNCH = 1.6e-6
_ROUND = {True: 0.75e-6, False: 1.05e-6}  # on tensor cores (True), on lanes
#: Seconds of a round of lanes by the cost model, and of each query head in it.
_LANES_ROUND, _QUERY = 0.6e-6, 0.1e-6


def clustered(
    device: Target,
    config: PagedAttentionConfig,
    *,
    blocks: int,
    capacity: int,
    step: int,
    nbytes: int,
) -> PagedAttentionConfig:
    """Returns the Config, its splits as a cluster if the device has clusters and this is no slower.

    A cluster has at most eight thread blocks, and so few that all clusters run at once. If the
    Config has more splits, the cluster has fewer thread blocks than the device can hold. If each
    thread block then has its own multiprocessor, it gets twice as many warps. That uses the memory
    as well, but takes more rounds, which matters when few heads have long contexts.

    Args:
      config: has as many splits as fill the device.
      blocks: thread blocks per split.
      capacity: tokens of a context.
      step: tokens of a thread block in a round.
      nbytes: bytes of all pages.
    """
    facts = device.facts
    if config.splits == 1 or facts is None or not device.clusters:
        return config
    splits = min(config.splits, MAX_CLUSTER)
    while splits > 1 and device.busiest(blocks * splits, splits) > device.busiest(blocks * splits):
        splits -= 1
    if splits == 1:  # a device of few multiprocessors
        return config
    tokens, chosen = capacity / splits, replace(config, splits=splits, cluster=True)
    single = device.busiest(blocks * splits, splits) == 1 and config.resident_blocks > 1
    if splits < config.splits and single and tokens > step:
        chosen = replace(chosen, warps=2 * config.warps, resident_blocks=1)
    bandwidth, once = nbytes / facts.bandwidth, _ROUND[config.tensor_cores]
    separate = max(bandwidth, once * -(-capacity // (config.splits * step)))
    together = max(bandwidth, once * -(-capacity // (splits * step * chosen.warps // config.warps)))
    return chosen if together <= separate + _MERGE_LAUNCH else config


def divided(
    device: Target,
    config: PagedAttentionConfig,
    few: Sequence[PagedAttentionConfig],
    *,
    contexts: int,
    group: int,
    capacity: int,
    streams: int,
    nbytes: int,
) -> PagedAttentionConfig:
    """Returns `config`, or the first Config of `few` that is faster and whose clusters run at once.

    The Configs of `few` divide a group's query heads over more thread blocks, each of which reads
    all keys and values, from the L2 cache after the first. A warp then has fewer query heads, and
    its rounds are shorter. That is faster for short contexts of few KV heads, which leave most
    multiprocessors idle. Longer contexts are faster with more splits.

    Args:
      few: Configs for lanes, clusters without teams, in the order of preference.
      contexts: sequences times KV heads; `group`: query heads of each.
      capacity: tokens of a context.
      streams: tokens of a warp at once.
      nbytes: bytes of all pages.
    """
    facts = device.facts
    if facts is None or not device.clusters:
        return config

    def seconds(config: PagedAttentionConfig, passes: int) -> float:
        step = streams * config.warps // config.teams * config.unroll
        rounds = -(-capacity // (config.splits * step))
        merge = 0.0 if config.cluster or config.splits == 1 else _MERGE_LAUNCH
        reading = max(nbytes / facts.bandwidth, passes * nbytes / facts.l2_bandwidth)
        return max(reading, rounds * (_LANES_ROUND + config.queries * _QUERY)) + merge

    before = seconds(config, -(-group // (config.queries * config.teams)))
    for each in few:
        passes = -(-group // each.queries)
        blocks = contexts * passes * each.splits
        if device.busiest(blocks, each.splits) == 1 and seconds(each, passes) < before:
            return each
    return config
