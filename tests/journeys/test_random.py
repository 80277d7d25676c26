"""Random journeys: alternates between a few kinds of calls with different lengths."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.implementations import needs_native

from .amount import JOURNEYS
from .calls import Call, changed
from .journey import Journey

pytestmark = needs_native
KINDS, CALLS = 3, 6


@pytest.mark.slow("compiles a program for each call of a journey", quick=["seed=0"])
@pytest.mark.parametrize("seed", range(JOURNEYS or 4))
def test_a_journey(seed: int, tmp_path: Path) -> None:
    """Each kind differs from the previous one in at most two fields.

    A call differs from its kind in one field. So programs whose keys must differ in one field meet
    in the folder.
    """
    choose = random.Random(seed).choice
    journey, kinds = Journey(tmp_path), [Call()]
    for _ in range(KINDS):
        kinds.append(changed(changed(kinds[-1], choose), choose))
    for _ in range(CALLS):
        call = changed(choose(kinds[1:]), choose, ("new_tokens", "seed"))
        journey.take(call, streamed=len(call.prompts) == 1 and choose((True, False)))
        if choose((True, True, False)):
            journey.restart()
