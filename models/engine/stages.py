"""Chooses the sampling stages of an engine's steps."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from ..runner.engine_steps import ALL, ARGMAX, DRAWS
from ..sampling.stages import USUAL_LOGPROBS, SamplingStages
from ..support.buckets import bucket

#: Biases, log-probabilities, and end tokens of a request's own, that an engine's programs have room
#: for in each row. OpenAI's API allows as many biases.
BIASES, LOGPROBS, STOPS = 300, USUAL_LOGPROBS, 16


def standard_stages(end_ids: SequenceOf[int]) -> SamplingStages:
    """Returns the stages of an engine's programs; requests that need more get their own."""
    return SamplingStages(
        draws=True,
        penalizes=True,
        minimum=True,
        biases=BIASES,
        ends=bucket(len(end_ids) + STOPS),
        logprobs=LOGPROBS,
    )


def way_of(stages: SamplingStages) -> int:
    """Returns which stages a step runs whose rows need `stages`."""
    if stages.is_argmax:
        return ARGMAX
    return DRAWS if stages == SamplingStages(draws=True, ends=stages.ends) else ALL


def joined(all: Iterable[SamplingStages]) -> SamplingStages:
    """Returns the union of sampling stages; a row leaves those unused that it does not need."""
    return functools.reduce(SamplingStages.joined, all)
