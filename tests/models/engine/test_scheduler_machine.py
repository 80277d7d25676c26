"""Random calls of the scheduler; every text gets the tokens that it gets alone.

The quick tier takes the same few thousand steps each time. More, in another order each time:

    JAX_Q4K_SCHEDULER_STEPS=1000000 pytest -s tests/models/engine/test_scheduler_machine.py
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jax_q4k.models.engine.pools import Hit
from jax_q4k.models.engine.scheduler import MOST_STEPS
from jax_q4k.models.engine.sequence import Sequence

from .fake_runner import DETERMINISTIC, LIMITS, VOCAB, FakeRunner, make_runner

#: Steps of a long run; 0 takes the quick tier's.
STEPS = int(os.environ.get("JAX_Q4K_SCHEDULER_STEPS", "0"))

#: Kinds of layers, and whether some layers are recurrent.
MODELS = (
    ((None,), False),
    ((None, 20), False),
    ((20, None, 50), False),
    ((20,), False),
    ((None,), True),
    ((None, 20), True),
)

#: Pages of every kind. A lone sequence of 200 tokens needs 13, and 8 of a window of 50.
PAGES = (14, 18, 60)

#: A text that prompts share beginnings of.
SHARED = random.Random(0).choices(range(VOCAB), k=120)


class Users(RuleBasedStateMachine):
    """Submits and cancels prompts that share prefixes, and runs steps."""

    steps_taken = 0

    @initialize(
        model=st.sampled_from(MODELS),
        groups=st.integers(1, 2),
        limits=st.sampled_from((LIMITS, DETERMINISTIC)),
        pages=st.sampled_from(PAGES),
        snapshots=st.sampled_from((0, 1, 3, 20)),
    )
    def begins(self, model, groups, limits, pages, snapshots):
        kinds, is_recurrent = model
        places = snapshots if is_recurrent else None
        self.runner: FakeRunner = make_runner(
            kinds, pages=pages, snapshots=places, groups=groups, limits=limits
        )
        self.seen: list[list[int]] = [SHARED]

    @rule(
        lengths=st.lists(
            st.tuples(st.integers(1, 40), st.integers(1, 120)), min_size=1, max_size=4
        ),
        earlier=st.integers(0),
        shared=st.sampled_from((0, 30, 64, 100, 150)),
        priority=st.sampled_from((0, 0, 0, 1)),
        salt=st.sampled_from((b"", b"", b"other")),
        constrained=st.sampled_from((False, False, True)),
        reads=st.sampled_from(("", "", "", "prompt", "prompt alone")),
    )
    def submits(self, lengths, earlier, shared, priority, salt, constrained, reads):
        """Submits prompts that begin as an earlier text; lengths: (own, new) tokens of each."""
        begin = self.seen[earlier % len(self.seen)][:shared]
        for own, new_tokens in lengths:
            prompt = [*begin, *_tokens(own, len(self.seen))]
            new_tokens = 0 if reads == "prompt alone" else new_tokens
            if not self.runner.scheduler.fits(len(prompt) + new_tokens):
                with pytest.raises(ValueError, match="need more pages"):
                    self.runner.submit(prompt, new_tokens)
                continue
            self.seen.append(prompt)
            fields = {"priority": priority, "salt": salt, "constrained": constrained}
            fields["reads_prompt"] = bool(reads)
            self.runner.submit(prompt, new_tokens, **fields)

    @rule(prompt=st.integers(0), count=st.integers(2, 4))
    def submits_equal_prompts(self, prompt, count):
        chosen = self.seen[prompt % len(self.seen)]
        if self.runner.scheduler.fits(len(chosen) + 30):
            for _ in range(count):
                self.runner.submit(chosen, 30)

    @precondition(lambda self: self.runner.alive)
    @rule(counts=st.lists(st.integers(1, MOST_STEPS), min_size=1, max_size=12))
    def runs(self, counts):
        for count in counts:
            self.runner.step(count)

    @precondition(lambda self: self.runner.alive)
    @rule(count=st.integers(5, 40))
    def runs_for_long(self, count):
        self.runs([1] * count)

    @precondition(lambda self: self.runner.alive)
    @rule(which=st.integers(0))
    def cancels(self, which):
        sequence = self.runner.alive[which % len(self.runner.alive)]
        self.runner.cancel(sequence)
        self.seen.append(sequence.tokens[: sequence.limit])

    @precondition(lambda self: self.runner.complete)
    @rule(which=st.integers(0))
    def continues_an_answer(self, which):
        sequence = self.runner.complete[which % len(self.runner.complete)]
        self.seen.append([*sequence.tokens])

    @precondition(lambda self: self.runner.alive)
    @rule()
    def forgets(self):
        for pools in self.runner.scheduler.pools:
            for pool in (*pools.pages.values(), pools.snapshots):
                if pool is not None:
                    pool.forget()

    @precondition(lambda self: self.runner.step_count)
    @rule(which=st.integers(0), more=st.integers(0, 20), salt=st.sampled_from((b"", b"other")))
    def looks_up(self, which, more, salt):
        """Compares the length of a cached prefix with a search of the whole memory."""
        tokens = [*self.seen[which % len(self.seen)], *_tokens(more, 0)]
        for group, pools in enumerate(self.runner.scheduler.pools):
            hit: Hit = pools.hit(Sequence(tokens, len(tokens) + 1, salt=salt))
            assert hit.length == self.runner.cached_length(group, tokens, salt)

    @invariant()
    def books_agree(self):
        if runner := getattr(self, "runner", None):
            runner.scheduler.check()

    def teardown(self):
        runner = getattr(self, "runner", None)
        if runner is not None and not runner.has_failed:
            runner.finish(MOST_STEPS)
            type(self).steps_taken += runner.step_count
            assert not runner.scheduler.waiting and not runner.scheduler.running
            for pools in runner.scheduler.pools:
                for pool in (*pools.pages.values(), pools.snapshots):
                    assert pool is None or pool.free == pool.count


def _tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


def _runs(examples: int, rules: int) -> Iterator[int]:
    """Runs the machine again and again with new seeds; yields the steps taken so far."""
    taken, seed = 0, random.randrange(2**32) if STEPS else 0
    while True:
        if STEPS:
            print(f"{taken:,} steps, seed {seed}", flush=True)
        machine = type("Users", (Users,), {"steps_taken": 0})
        settings = hypothesis.settings(
            max_examples=examples,
            stateful_step_count=rules,
            database=None,
            deadline=None,
            # a failure shows its calls; shrinking takes minutes
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        run_state_machine_as_test(hypothesis.seed(seed)(machine), settings=settings)
        taken, seed = taken + machine.steps_taken, seed + 1
        yield taken


@pytest.mark.slow("takes 40,000 steps", quick=["quick"])
@pytest.mark.parametrize("steps", [pytest.param(STEPS or 8_000, id="quick"), 40_000])
def test_random_calls(steps, record_property):
    for taken in _runs(examples=20, rules=30):
        if taken >= steps:
            break
    more = "JAX_Q4K_SCHEDULER_STEPS=1000000 takes more"
    record_property("figure", f"scheduler: {taken:,} random steps; {more}")
