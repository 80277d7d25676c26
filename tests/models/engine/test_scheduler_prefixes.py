"""Reuse of cached pages and recurrent states by sequences of the scheduler."""

from __future__ import annotations

import dataclasses

import pytest

from jax_q4k.models.engine.plan import Plan
from jax_q4k.models.engine.pools import Hit
from jax_q4k.models.engine.scheduler import Limits
from jax_q4k.models.engine.sequence import NO_PAGE, Sequence
from jax_q4k.models.kv_cache.shapes import window_pages

from .fake_runner import DETERMINISTIC, LIMITS, FakeRunner, make_runner, prompt_of


def served(runner: FakeRunner, prompt: list[int], new_tokens: int = 1, **fields) -> Sequence:
    """Returns the sequence of a prompt that the runner has completed."""
    sequence = runner.submit(prompt, new_tokens, **fields)
    runner.finish(16)
    return sequence


def computed(plans: list[Plan]) -> int:
    return sum(piece.count for plan in plans for piece in plan.pieces)


@pytest.mark.parametrize("length, reused", [(16, 0), (17, 16), (32, 16), (33, 32), (47, 32)])
def test_the_last_token_of_a_prompt_is_computed(length, reused):
    runner = make_runner()
    prompt = prompt_of(length, 1)
    assert served(runner, prompt).reused == 0
    assert served(runner, prompt).reused == reused


@pytest.mark.parametrize(
    "shared, rest, reused", [(16, 64, 16), (16, 65, 0), (32, 65, 32), (32, 129, 0), (48, 129, 48)]
)
def test_a_cached_prefix_must_be_worth_more_programs(shared, rest, reused):
    """A whole prompt takes one program, which costs as much as 24 tokens; pieces have 64 tokens."""
    pieces = {"shapes": ((1, 64),), "fit": lambda lengths, whole: (1, 64), "program_cost": 24}
    runner = make_runner(limits=dataclasses.replace(LIMITS, **pieces))
    first = prompt_of(shared + 1, 1)
    served(runner, first)
    assert served(runner, first[:shared] + prompt_of(rest, 1, 1)).reused == reused


def test_pages_of_an_answer_are_reused():
    """An answer's last token is never stored."""
    runner = make_runner()
    tokens = served(runner, prompt_of(20, 45), 45).tokens
    assert served(runner, [*tokens, 1]).reused == 64
    tokens = served(runner, prompt_of(20, 44, 1), 44).tokens
    assert served(runner, [*tokens, 1]).reused == 48


@pytest.mark.parametrize("snapshots, reused", [(None, 48), (4, 0)])
def test_pages_of_a_prompt_in_progress_are_reused(snapshots, reused):
    """Another prompt parts from it in the part that is stored, so it does not wait."""
    limits = Limits(rows=4, shapes=((1, 16), (2, 16)), step_tokens=32)
    runner = make_runner(snapshots=snapshots, limits=limits)
    prompt = prompt_of(160, 1)
    runner.submit(prompt, 1)
    for _ in range(4):
        runner.step()
    follower = runner.submit([*prompt[:50], *prompt_of(20, 1, 1)], 1)
    runner.step()
    assert follower.slot is not None and follower.reused == reused


def test_salts_separate():
    runner = make_runner(snapshots=8)
    prompt = prompt_of(65, 1)
    assert served(runner, prompt).reused == 0
    assert served(runner, prompt, salt=b"a").reused == 0
    assert served(runner, prompt, salt=b"b").reused == 0
    assert served(runner, prompt, salt=b"a").reused == 64
    assert served(runner, prompt).reused == 64


def test_salts_do_not_wait_for_each_other():
    runner = make_runner()
    prompt = prompt_of(100, 1)
    sequences = [runner.submit(prompt, 1, salt=salt) for salt in (b"", b"a", b"b")]
    runner.step()
    assert all(sequence.slot is not None for sequence in sequences)


@pytest.mark.parametrize("snapshots", [None, 4], ids=["attention", "recurrent"])
def test_equal_prompts_are_computed_once(snapshots):
    """Others wait, share all pages but the last, and compute the remaining four tokens."""
    runner = make_runner(snapshots=snapshots)
    prompt = prompt_of(100, 2)
    sequences = [runner.submit(prompt, 2) for _ in range(4)]
    plans = [runner.step()]
    assert [sequence.slot is not None for sequence in sequences] == [True, False, False, False]
    while not all(sequence.slot is not None for sequence in sequences):
        plans.append(runner.step())
    pool = runner.scheduler.pools[0].pages[None]
    assert pool.count - pool.free - pool.cached <= 6 + 4
    assert [sequence.reused for sequence in sequences] == [0, 96, 96, 96]
    assert computed([*plans, *runner.finish()]) == 100 + 3 * 4


def test_other_prompts_do_not_wait_for_equal_ones():
    runner = make_runner()
    prompt = prompt_of(100, 1)
    _, equal, other = (runner.submit(p, 1) for p in (prompt, prompt, prompt_of(30, 1, 1)))
    runner.step()
    assert equal.slot is None and other.slot is not None


@pytest.mark.parametrize("shared, waits", [(15, False), (16, True), (33, True), (48, True)])
def test_prompts_wait_only_for_full_pages(shared, waits):
    runner = make_runner()
    prompt = prompt_of(48, 1)
    runner.submit(prompt, 1)
    runner.scheduler.plan()  # stores 48 tokens
    assert not runner.scheduler.waiting
    runner = make_runner()
    runner.submit(prompt, 1)
    second = runner.submit([*prompt[:shared], *prompt_of(60, 1, 1)], 1)
    runner.step()
    assert (second.slot is None) == waits


def test_a_prompt_does_not_wait_for_its_own_last_token():
    """The two prompts share a page, but the second must compute that page's last token itself."""
    runner = make_runner()
    prompt = prompt_of(100, 1)
    runner.submit(prompt, 1)
    second = runner.submit(prompt[:16], 1)
    runner.step()
    assert second.slot is not None


# Windows.


def test_windows_give_pages_back():
    """After a step a sequence holds the pages that the step read."""
    runner = make_runner((None, 20))
    sequence = runner.submit(prompt_of(300, 40), 40)
    most = 0
    while plan := runner.step():
        first = plan.pieces[0].first if plan.pieces else plan.rows[0].position
        if sequence.slot is not None:
            begin, held = max(first - 19, 0) // 16, sequence.pages[20]
            assert [page == NO_PAGE for page in held] == [at < begin for at in range(len(held))]
            assert NO_PAGE not in sequence.pages[None]
            most = max(most, len(sequence.page_list(20)))
    assert most == 6 <= window_pages(20, 16, 64)


def test_prompts_rewind_into_windows():
    """A prompt that parts from an earlier text finds the window's pages while they are cached."""
    runner = make_runner((None, 20))
    prompt = prompt_of(300, 1)
    served(runner, prompt)
    for length in (96, 208, 32):
        assert served(runner, [*prompt[:length], 1]).reused == length


def test_windows_without_cached_pages_limit_the_hit():
    """Full attention has the whole prompt, a window only the pages that were used last."""
    runner = make_runner((None, 20), pages={None: 64, 20: 9})
    prompt = prompt_of(300, 1)
    served(runner, prompt)
    assert served(runner, [*prompt[:64], 1]).reused == 0
    assert runner.scheduler.counters.lost == {"window": 64}
    runner = make_runner((None, 20), pages={None: 64, 20: 9})
    served(runner, prompt)
    assert served(runner, [*prompt, 1]).reused == 288


@pytest.mark.parametrize("kinds, lost", [((20,), {}), ((20, None), {"window": 64})])
def test_only_what_full_attention_has_is_lost(kinds, lost):
    runner = make_runner(kinds, pages=dict.fromkeys(kinds, 9) | {None: 64} if None in kinds else 9)
    prompt = prompt_of(300, 1)
    served(runner, prompt)
    served(runner, [*prompt[:64], 1])
    assert runner.scheduler.counters.lost == lost


# Recurrent states.


def test_the_third_prompt_with_a_shared_prefix_reuses_a_state():
    """The second finds pages without a state, and saves the state where they end."""
    runner = make_runner(snapshots=8)
    system = prompt_of(100, 1)
    reused = [served(runner, [*system, *prompt_of(30, 1, seed)]).reused for seed in range(1, 5)]
    assert reused == [0, 0, 96, 96]
    assert runner.scheduler.counters.lost == {"no_snapshot": 96}


def test_a_prompt_saves_the_state_at_its_last_boundary():
    runner = make_runner(snapshots=8)
    prompt = prompt_of(100, 1)
    served(runner, prompt)
    assert served(runner, [*prompt, 1]).reused == 96
    assert served(runner, prompt[:97]).reused == 96
    assert served(runner, prompt[:96]).reused == 0
    assert served(runner, prompt[:96]).reused == 80


def test_long_prompts_save_states_at_intervals():
    limits = Limits(rows=1, shapes=((1, 2048),), step_tokens=2048)
    runner = make_runner(pages=200, snapshots=8, limits=limits)
    sequence = runner.submit(prompt_of(2500, 1), 1)
    runner.step()
    assert sequence.stored == 1024, "the piece ends where a state is saved"
    assert sequence.snapshots == [2048, 2496]
    runner.finish()
    for length in (1024, 2048):
        assert served(runner, [*sequence.tokens[: length + 40], 1]).reused == length
        assert runner.scheduler.counters.lost["no_snapshot"] == (32 if length == 1024 else 64)


@pytest.mark.parametrize("steps", [1, 16])
def test_a_prompt_that_continues_an_answer_reuses_its_state(steps):
    """Decoding saves the state every 64 tokens, in whatever steps it gets there."""
    runner = make_runner(snapshots=8)
    sequence = runner.submit(prompt_of(30, 120), 120)
    runner.finish(steps)
    assert served(runner, [*sequence.tokens, 1]).reused == 128
    assert served(runner, [*sequence.tokens[:100], 1]).reused == 64


def test_decoding_holds_one_state():
    """A sequence holds the last of its states; earlier ones are evicted first."""
    runner = make_runner(snapshots=3, pages=40)
    other = served(runner, prompt_of(17, 1, 1))  # its state is the least recently used
    sequence = runner.submit(prompt_of(10, 200), 200)
    runner.finish(16)
    assert served(runner, [*other.tokens, 1]).reused == 16
    assert served(runner, [*sequence.tokens, 1]).reused == 192


def test_states_of_unknown_tokens_are_not_found():
    """A row may go on after an end token; its pages and state are never found."""
    runner = make_runner(snapshots=8)
    sequence = runner.submit(prompt_of(60, 10), 10)
    while sequence.stored != 64:
        runner.step()
    assert sequence.unnamed and runner.scheduler.pools[0].snapshots.cached == 1
    runner.cancel(sequence)
    assert runner.scheduler.pools[0].snapshots.cached == 1


def test_no_places_for_states():
    runner = make_runner(snapshots=0)
    prompt = prompt_of(60, 100)
    served(runner, prompt, 100)
    assert served(runner, [*prompt, 1]).reused == 0


def test_one_place_gets_the_last_state_of_a_step():
    """Two prompts end in one step, and the second state evicts the first."""
    runner = make_runner(snapshots=1, limits=dataclasses.replace(LIMITS, shapes=((2, 32),)))
    first, second = (prompt_of(20, 1, seed) for seed in range(2))
    for prompt in (first, second):
        runner.submit(prompt, 1)
    plans = runner.finish()
    assert [plan.saves for plan in plans if plan.saves] == [[(1, 0)]]


def test_a_reused_state_is_evicted_last():
    runner = make_runner(snapshots=2)
    prompts = [prompt_of(20, 1, seed) for seed in range(3)]
    served(runner, prompts[0])
    served(runner, prompts[1])
    assert served(runner, prompts[0]).reused == 16
    served(runner, prompts[2])  # evicts the state of the second
    assert [served(runner, prompts[n]).reused for n in (0, 1)] == [16, 0]


def test_deterministic_mode_does_not_reuse_states_of_decoding():
    runner = make_runner(snapshots=8, limits=DETERMINISTIC)
    sequence = runner.submit(prompt_of(70, 120), 120)
    plans = runner.finish(16)
    assert not any(plan.late_saves for plan in plans)
    assert served(runner, [*sequence.tokens, 1]).reused == 64


def test_a_preempted_recurrent_sequence_goes_on_from_its_prompts_state():
    runner = make_runner(pages=12, snapshots=8)
    sequences = [runner.submit(prompt_of(40, 100, seed), 100) for seed in range(2)]
    plans = runner.finish(16)
    assert sum(sequence.preemptions for sequence in sequences)
    assert any(plan.restores for plan in plans)


@pytest.mark.parametrize("kinds", [(None,), (None, 20), (20, None, 50), (20,)], ids=str)
@pytest.mark.parametrize("limits", [LIMITS, DETERMINISTIC], ids=["default", "deterministic"])
@pytest.mark.parametrize("snapshots", [None, 5], ids=["attention", "recurrent"])
def test_hits_are_those_of_a_search(kinds, limits, snapshots):
    """Every length of prompts is looked up after several texts went through few pages."""
    runner = make_runner(kinds, pages=16, snapshots=snapshots, limits=limits)
    texts = []
    for seed in range(6):
        shared = texts[-1][: 40 * (seed % 3)] if texts else []
        texts.append(served(runner, [*shared, *prompt_of(60, 40, seed)], 40).tokens)
    found = set()
    for text in texts:
        for length in range(1, len(text) + 1):
            hit: Hit = runner.scheduler.pools[0].hit(Sequence(text[:length], length + 1))
            assert hit.length == runner.cached_length(0, text[:length])
            assert (hit.place is None) == (snapshots is None or not hit.length)
            found.add(hit.length)
    assert len(found) > 1
