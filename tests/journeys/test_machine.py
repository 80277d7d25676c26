"""A user's steps in any order; each output equals that of the same call without a cache."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.implementations import needs_native

from jax_q4k import models

from .amount import JOURNEYS
from .calls import CHOICES, Call, alone, changed, difference
from .damage import DAMAGES, programs
from .files import SHORT
from .journey import Journey

EXAMPLES, STEPS = JOURNEYS or 3, 30 if JOURNEYS else 12

#: Maximum tokens of a text that is continued.
LONGEST = 400


class User(RuleBasedStateMachine):
    """Holds loaded models, one program cache, a text that is continued, and a conversation."""

    def __init__(self) -> None:
        super().__init__()
        self.journey = Journey(Path(tempfile.mkdtemp(prefix="jax-q4k-user-")))
        self.call, self.prefix = Call(), models.Prefix()
        self.turns: list[dict[str, Any]] = []
        self.talk: models.Conversation | None = None

    def teardown(self) -> None:
        shutil.rmtree(self.journey.folder)

    @initialize(data=st.data())
    def begins(self, data: st.DataObject) -> None:
        for _ in range(2):
            self.call = changed(self.call, self.choosing(data))

    @staticmethod
    def choosing(data: st.DataObject) -> Any:
        return lambda options: data.draw(st.sampled_from(options))

    @rule(data=st.data(), streamed=st.booleans())
    def generates(self, data: st.DataObject, streamed: bool) -> None:
        """Generates with a changed number of new tokens, mostly, or a changed prompt."""
        fields = ("new_tokens", "new_tokens", "new_tokens", "prompts", "seed")
        self.call = changed(self.call, self.choosing(data), fields)
        self.journey.take(self.call, streamed=streamed and len(self.call.prompts) == 1)

    @rule(data=st.data())
    def wants_otherwise(self, data: st.DataObject) -> None:
        """Changes the model, adapter, draft, dtype, sampling parameters or implementation."""
        self.call = changed(self.call, self.choosing(data), tuple(CHOICES))
        self.journey.take(self.call)

    @rule(count=st.integers(1, 20))
    def leaves_a_stream(self, count: int) -> None:
        call = self.single(self.call)
        self.journey.say(f"{count} tokens of {call}")
        want = alone(call)[0].tokens
        pieces = call.pieces(self.journey.model(call))
        got = [next(pieces).token for _ in range(min(count, len(want)))]
        pieces.close()
        assert got == list(want[:count]), self.journey.story

    @staticmethod
    def single(call: Call) -> Call:
        return dataclasses.replace(call, prompts=call.prompts[:1])

    def with_prefix(self, prompt: Sequence[int], new_tokens: int) -> None:
        """Runs a prompt that reuses the prefix.

        With float32 pages and activations, a reused prefix rounds like a fresh prefill.
        """
        call = dataclasses.replace(
            self.single(self.call),
            prompts=(tuple(prompt),),
            new_tokens=new_tokens,
            cache_dtype="float32",
            activations="f32",
        )
        if call.model != "short" or len(prompt) < SHORT:
            self.journey.take(call, self.prefix)

    @rule(more=st.lists(st.integers(3, 90), min_size=1, max_size=3), new=st.sampled_from((8, 60)))
    def goes_on(self, more: list[int], new: int) -> None:
        text = self.prefix.tokens
        self.with_prefix([*(text if len(text) < LONGEST else []), *more], new)

    @precondition(lambda self: len(self.prefix.tokens) > 4)
    @rule(share=st.sampled_from((0.3, 0.9)), token=st.integers(3, 90))
    def goes_back(self, share: float, token: int) -> None:
        text = self.prefix.tokens[:LONGEST]
        self.with_prefix([*text[: int(len(text) * share)], token, token + 1], 8)

    @rule(message=st.sampled_from(("How are you?", "And then?")), size=st.sampled_from((12, 50)))
    def talks(self, message: str, size: int) -> None:
        """Chats with the demo; a conversation that recomputes every prompt must agree."""
        call, options = Call(model="demo"), {"max_new_tokens": size, "temperature": 0.5, "seed": 3}
        if self.talk is None or len(self.turns) > 6:
            model = self.journey.model(call)
            self.talk = models.Conversation(model)
            self.turns = self.talk.turns
        anew = models.Conversation(call.load(), turns=list(self.turns))
        self.journey.say(f"{message!r} after {self.turns}, {size} tokens")
        with call.selected():
            want, got = (talk.answer(message, **options) for talk in (anew, self.talk))
        sampling = models.Sampling(max_new_tokens=size)
        problem = difference([call.result(got, sampling)], [call.result(want, sampling)])
        assert problem is None and self.turns == anew.turns, f"{problem}\n{self.journey.story}"

    @rule()
    def begins_a_process(self) -> None:
        self.journey.restart()
        self.talk = None

    @rule(what=st.sampled_from(sorted(DAMAGES)))
    def loses_programs(self, what: str) -> None:
        """Damages a program file and reloads models."""
        found = [file for file in programs(self.journey.folder) if file.is_file()]
        if len(found) > 1:
            DAMAGES[what](found[len(found) // 2])
            self.journey.say(f"{what}: {found[len(found) // 2].name}")
        self.begins_a_process()

    @rule()
    def clears_the_folder(self) -> None:
        shutil.rmtree(self.journey.folder)
        self.journey.folder.mkdir()
        self.journey.say("the folder is cleared")


User.TestCase.settings = hypothesis.settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    derandomize=not JOURNEYS,
    database=None,
    deadline=None,
    # a failure shows its journey; shrinking takes minutes
    phases=[
        phase for phase in hypothesis.Phase if JOURNEYS or phase is not hypothesis.Phase.shrink
    ],
    suppress_health_check=list(hypothesis.HealthCheck),
)
TestUser = pytest.mark.slow("takes random steps")(needs_native(User.TestCase))
