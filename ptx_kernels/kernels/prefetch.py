"""Selection rule: how many bytes of the next launch's weights a launch prefetches into L2."""

from __future__ import annotations

from ..devices import Target
from .family import Rule

_PART_OF_L2 = 6  # two launches may prefetch for one product, and other reads also use L2


def _prefetch(device: Target) -> int:
    """Returns the bytes that a launch prefetches; 0 for devices without bulk copies, or unknown.

    The limit is a sixth of the L2 cache: 10 MB on an H200, which its memory delivers in 2.3 us.
    That is about the time from a launch's last load to the first use by the next one.
    """
    facts = device.facts
    if facts is None or not facts.bulk_copies:
        return 0
    return facts.l2_bytes // _PART_OF_L2


prefetch_rule: Rule[int] = Rule("prefetch", _prefetch)
