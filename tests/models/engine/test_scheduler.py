"""Order, admission, preemption and the choice of programs, one behavior a test."""

from __future__ import annotations

import dataclasses

import pytest

from jax_q4k.models.engine import scheduler as module
from jax_q4k.models.engine.scheduler import MOST_PASSED, MOST_PREEMPTIONS, Limits
from jax_q4k.models.engine.sequence import Sequence

from .fake_runner import DETERMINISTIC, LIMITS, FakeRunner, make_runner, prompt_of

#: One program of 16 tokens.
NARROW = Limits(rows=40, shapes=((1, 16),), step_tokens=16)


def pieces_of(runner: FakeRunner, steps: int = 1) -> list[tuple[Sequence, int]]:
    """Runs a step; returns the sequences with pieces, and the pieces' lengths."""
    plan = runner.step(steps)
    assert plan is not None
    return [(piece.sequence, piece.count) for piece in plan.pieces]


def decoding(runner: FakeRunner, length: int, new_tokens: int, seed: int = 0) -> Sequence:
    """Returns a sequence whose prompt is stored."""
    sequence = runner.submit(prompt_of(length, new_tokens, seed), new_tokens)
    while not sequence.is_decoding:
        runner.step()
    return sequence


# Order.


def test_first_come_first_served():
    runner = make_runner(limits=dataclasses.replace(LIMITS, rows=2))
    sequences = [runner.submit(prompt_of(64, 3, seed), 3) for seed in range(5)]
    assert [s.arrival for s in sequences] == [1, 2, 3, 4, 5]
    assert runner.scheduler.waiting == sequences
    runner.finish()
    assert runner.complete == sequences


def test_lower_priorities_are_served_first():
    runner = make_runner(limits=dataclasses.replace(LIMITS, rows=1))
    sequences = [runner.submit(prompt_of(20, 3, n), 3, priority=n) for n in (2, 0, 1, 0)]
    runner.finish()
    assert [sequences.index(sequence) for sequence in runner.complete] == [1, 3, 2, 0]


def test_running_prompts_are_served_in_order():
    """A prompt with a lower priority value gets its pieces first, in whichever slot it is."""
    runner = make_runner(limits=dataclasses.replace(LIMITS, shapes=((1, 16), (2, 16))))
    late, *_ = (runner.submit(prompt_of(64, 1, seed), 1, priority=1) for seed in range(3))
    runner.step()
    early = runner.submit(prompt_of(64, 1, 9), 1)
    assert [sequence for sequence, _ in pieces_of(runner)] == [early, late]


@pytest.mark.parametrize("limits", [LIMITS, DETERMINISTIC], ids=["default", "deterministic"])
@pytest.mark.parametrize("pages", [16, 40])
def test_nobody_starves(pages, limits):
    """First tokens come within twice the time that the prompts so far take one after another."""
    runner = make_runner(pages=pages, limits=limits)
    lengths = [100, 30, 150, 64, 200, 10, 128, 80] * 2
    prompts = [prompt_of(length, 40, seed) for seed, length in enumerate(lengths)]
    alone = []
    for prompt in prompts:
        single = make_runner(pages=pages, limits=limits)
        single.submit(prompt, 40)
        single.finish()
        alone.append(single.step_count)
    sequences = [runner.submit(prompt, 40) for prompt in prompts]
    runner.finish()
    for position, sequence in enumerate(sequences):
        assert runner.first_steps[sequence] <= 2 * sum(alone[: position + 1])
        assert sequence.preemptions <= MOST_PREEMPTIONS
    assert (runner.scheduler.counters.preemptions > 0) == (pages == 16)


# Pieces.


def test_the_last_place_is_the_shortest_prompts():
    runner = make_runner(limits=dataclasses.replace(LIMITS, shapes=((2, 16),)))
    first, _, third = (runner.submit(prompt_of(n, 1, n), 1) for n in (80, 70, 20))
    assert pieces_of(runner) == [(first, 16), (third, 16)]


def test_equally_short_prompts_keep_their_order():
    runner = make_runner(limits=NARROW)
    _, second, _ = (runner.submit(prompt_of(n, 1, seed), 1) for seed, n in enumerate((40, 20, 20)))
    assert pieces_of(runner) == [(second, 16)]


@pytest.mark.parametrize("groups", [1, 2])
def test_short_prompts_pass_a_long_one_eight_times(groups):
    """A long prompt of each group waits for eight pieces of others before each of its own."""
    runner = make_runner(pages=200, groups=groups, limits=NARROW)
    long = [runner.submit(prompt_of(80, 1, seed), 1) for seed in range(groups)]
    planned: list[Sequence] = []
    for seed in range(45):
        for _ in range(groups):
            runner.submit(prompt_of(9, 1, 100 + seed), 1)
        planned += [sequence for sequence, _ in pieces_of(runner)]
    per_group = [
        [s for s in planned if s in long[group : group + 1] or s not in long]
        for group in range(groups)
    ]
    for sequence, own in zip(long, per_group, strict=True):
        at = [number for number, each in enumerate(own) if each is sequence]
        assert len(at) == 5, "the long prompt's pieces were planned"
        gaps = [after - before - 1 for before, after in zip([-1, *at], at, strict=False)]
        assert max(gaps) <= MOST_PASSED * groups
        assert groups > 1 or gaps == [MOST_PASSED] * 5


def test_short_ends_do_not_keep_a_boundary_out_of_reach():
    """A deterministic program of 16 tokens a row stores nothing of a long prompt."""
    limits = dataclasses.replace(
        DETERMINISTIC, rows=40, shapes=((1, 64), (32, 16)), step_tokens=512
    )
    runner = make_runner(pages=200, limits=limits)
    long = runner.submit(prompt_of(128, 1), 1)
    for step in range(MOST_PASSED + 1):
        for seed in range(31):
            runner.submit(prompt_of(15, 1, 100 + 31 * step + seed), 1)
        runner.step()
    assert long.stored == 64


def test_deterministic_pieces_end_at_boundaries():
    """Pieces are those of the prompt alone, whatever is cached (`FakeRunner` checks the ends)."""
    runner = make_runner(limits=DETERMINISTIC)
    prompt = prompt_of(150, 3)
    runner.submit(prompt, 3)
    plans = runner.finish()
    assert [piece.count for plan in plans for piece in plan.pieces] == [64, 64, 22]
    follower = runner.submit([*prompt[:100], *prompt_of(50, 3, 1)], 3)
    plans = runner.finish()
    assert follower.reused == 64  # 96 tokens are cached
    assert [piece.count for plan in plans for piece in plan.pieces] == [64, 22]


def test_a_deterministic_engine_needs_a_program_as_long_as_a_boundary():
    with pytest.raises(ValueError, match=r"no prefill shape of \(\(4, 16\),\) has 64 tokens a row"):
        Limits(rows=4, shapes=((4, 16),), step_tokens=64, deterministic=True)
    assert Limits(rows=4, shapes=((4, 16),), step_tokens=64).align == 1


@pytest.mark.parametrize(
    "lengths, shape",
    [([5], (1, 16)), ([32], (1, 16)), ([33], (1, 64)), ([16] * 2, (1, 16)), ([16] * 3, (4, 16))],
)
def test_the_program_saves_the_most_for_its_cost(lengths, shape):
    runner = make_runner()
    for seed, length in enumerate(lengths):
        runner.submit(prompt_of(length, 1, seed), 1)
    plan = runner.step()
    assert plan is not None and plan.shape == shape


@pytest.mark.parametrize(
    "shapes, lengths", [(((1, 56), (1, 16)), [32]), (((4, 18), (1, 24)), [18, 10])]
)
def test_the_smaller_of_two_equally_good_programs_is_chosen(shapes, lengths):
    runner = make_runner(limits=dataclasses.replace(LIMITS, shapes=shapes))
    first, *_ = (runner.submit(prompt_of(n, 1, seed), 1) for seed, n in enumerate(lengths))
    first.passed = MOST_PASSED  # now a program of one row is not for the shortest
    plan = runner.step()
    assert plan is not None and plan.shape == shapes[1]


def test_steps_that_decode_have_smaller_programs():
    limits = Limits(rows=4, shapes=((1, 16), (1, 64), (2, 64)), step_tokens=40)
    runner = make_runner(limits=limits)
    decoding(runner, 10, 50)
    waiting = runner.submit(prompt_of(64, 1, 1), 1)
    plan = runner.step()
    assert plan is not None and plan.shape == (1, 16) and len(plan.rows) == 1
    assert waiting.stored == 16


def test_steps_that_decode_have_the_smallest_program_that_reaches_a_boundary():
    """Otherwise prompts would wait until nobody decodes."""
    limits = dataclasses.replace(DETERMINISTIC, step_tokens=16)
    runner = make_runner(limits=limits)
    decoding(runner, 10, 50)
    runner.submit(prompt_of(100, 1, 1), 1)
    plan = runner.scheduler.plan()
    assert plan is not None and plan.shape == (1, 64) and plan.rows


# Decoding.


def test_rows_sample_several_tokens_if_no_prompt_waits():
    runner = make_runner(limits=dataclasses.replace(LIMITS, rows=2))
    first = decoding(runner, 10, 60)
    assert runner.step(8).steps == 8  # type: ignore[union-attr]
    runner.submit(prompt_of(40, 60, 1), 60)
    assert runner.step(8).steps == 1  # type: ignore[union-attr]
    runner.submit(prompt_of(40, 60, 2), 60)  # waits for a slot
    assert {runner.step(8).steps for _ in range(9)} == {1}  # type: ignore[union-attr]
    assert first.stored == 10 + 8 + 10


@pytest.mark.parametrize("kind", [None, 100])
@pytest.mark.parametrize(("pages", "steps"), [(10, 64), (9, 32), (5, 16)])
def test_rows_sample_fewer_tokens_instead_of_a_preemption(kind, pages, steps):
    runner = make_runner((kind,), pages=pages)
    rows = [decoding(runner, 10, 70, seed) for seed in range(2)]
    plan = runner.step(64)
    assert plan is not None and plan.steps == steps and len(plan.rows) == 2
    assert not any(row.preemptions for row in rows)


def test_rows_end_at_the_limit():
    runner = make_runner()
    sequence = decoding(runner, 10, 7)
    plan = runner.step(16)
    assert plan is not None and [row.count for row in plan.rows] == [6]
    assert not sequence.is_decoding and runner.step(16) is None
    assert len(sequence.tokens) == sequence.limit == 17


def test_rows_tell_their_new_page():
    """A page is new once: where the last of a row's tokens is the first on it, or passes it."""
    runner = make_runner()
    sequence = decoding(runner, 14, 60)
    told = []
    for steps in (1, 1, 1, 15, 16, 2):
        [row] = runner.step(steps).rows  # type: ignore[union-attr]
        told += row.new_pages
    pages = sequence.pages[None]
    assert told == [(), (), (pages[1],), (), (pages[2],), (pages[3],)]


# Preemption.


def test_the_newest_is_preempted_and_goes_on_to_the_same_tokens():
    runner = make_runner(pages=8)
    old, new = (runner.submit(prompt_of(16, 100, seed), 100) for seed in range(2))
    runner.finish()  # compares the tokens
    assert (old.preemptions, new.preemptions) == (0, 1)
    assert runner.scheduler.counters.preemptions == 1
    assert runner.complete == [old, new]


def test_a_low_priority_is_preempted_before_a_newer_sequence():
    runner = make_runner(pages=8)
    low = decoding(runner, 16, 100)
    low.priority = 1
    high = runner.submit(prompt_of(16, 100, 1), 100)
    runner.finish()
    assert low.preemptions and not high.preemptions


def crowded(*preemptions: int) -> tuple[FakeRunner, list[Sequence]]:
    """Returns a runner without free pages; all sequences were preempted so often before."""
    runner = make_runner(pages=3 * len(preemptions))
    sequences = [runner.submit(prompt_of(16, 30, seed), 30) for seed in range(len(preemptions))]
    while not all(sequence.is_decoding for sequence in sequences):
        runner.step()
    pool = runner.scheduler.pools[0].pages[None]
    while pool.free:  # a sequence of another engine
        pool.allocate()
    for sequence, count in zip(sequences, preemptions, strict=True):
        sequence.preemptions = count
    return runner, sequences


@pytest.mark.parametrize(
    "preemptions, victim",
    [
        ((0, 0, 0), 2),
        ((0, 2, 2), 2),
        ((0, 0, MOST_PREEMPTIONS), 1),
        ((0, MOST_PREEMPTIONS, MOST_PREEMPTIONS), 0),
        ((MOST_PREEMPTIONS,) * 3, 2),
        ((MOST_PREEMPTIONS + 1, MOST_PREEMPTIONS, MOST_PREEMPTIONS), 2),
    ],
)
def test_a_sequence_is_preempted_three_times_while_another_can_be(preemptions, victim):
    runner, sequences = crowded(*preemptions)
    while all(sequence.slot is not None for sequence in sequences):
        runner.scheduler.plan()
    assert sequences[victim].slot is None
    assert sequences[victim].preemptions == preemptions[victim] + 1


def test_a_preempted_sequence_keeps_its_place_in_the_queue():
    runner = make_runner(pages=12)
    sequences = [runner.submit(prompt_of(16, 60, seed), 60) for seed in range(6)]
    while not (victims := [s for s in sequences if s.preemptions]):
        runner.step()
    assert victims[0] is runner.scheduler.waiting[0] and len(runner.scheduler.waiting) > 1
    runner.finish()


def test_a_sequence_never_preempts_an_earlier_one():
    runner = make_runner(pages=8)
    old, new = (runner.submit(prompt_of(16, n, seed), n) for seed, n in enumerate((40, 100)))
    runner.finish()
    assert not old.preemptions
    assert new.preemptions <= 1


# Admission.


def test_a_sequence_that_cannot_fit_alone_is_refused():
    runner = make_runner(pages=5)
    with pytest.raises(ValueError, match="81 tokens of prompt and new tokens need more pages"):
        runner.submit([1] * 61, 20)
    assert not runner.scheduler.waiting
    runner.submit([1] * 60, 20)
    runner.finish()


def test_windows_of_any_length_fit():
    """Seven pages hold a window of 20 tokens and a piece of 64, wherever it begins."""
    runner = make_runner((20,), pages=7)
    assert runner.scheduler.fits(10**6)
    runner.submit(prompt_of(300, 20), 20)
    runner.finish()
    runner = make_runner((20,), pages=6)
    assert runner.scheduler.fits(6 * 16) and not runner.scheduler.fits(6 * 16 + 1)


@pytest.mark.parametrize("pages, is_admitted", [(6, False), (7, True)])
def test_admission_keeps_a_page_for_each_running_sequence(pages, is_admitted):
    """The first holds three of the pages, the second needs three, and one is kept."""
    runner = make_runner(pages=pages)
    decoding(runner, 40, 40)
    second = runner.submit(prompt_of(48, 2, 1), 2)
    runner.scheduler.plan()
    assert (second.slot is not None) == is_admitted


def test_admission_reserves_pages_of_prompts_in_progress():
    runner = make_runner(pages=10)
    runner.submit(prompt_of(100, 2), 2)  # takes 7 pages, and one is kept
    second, third = (runner.submit(prompt_of(n, 2, n), 2) for n in (40, 20))
    runner.step()
    assert second.slot is None, "its three pages are not free"
    assert third.slot is None, "it does not overtake the second"
    runner.finish()


def test_the_group_with_the_cached_prefix_is_chosen():
    runner = make_runner(groups=2)
    prompt = prompt_of(64, 2)
    runner.submit(prompt, 2)
    runner.finish()
    busy = [runner.submit(prompt_of(20, 40, seed), 40) for seed in (1, 2, 3)]
    runner.step()
    assert [sequence.slot for sequence in busy] == [0, 4, 1]  # the emptiest group
    follower = runner.submit([*prompt, 1], 2)
    runner.step()
    assert follower.slot == 2 and follower.reused == 64
    other = runner.submit(prompt_of(20, 40, 4), 40)
    runner.step()
    assert other.slot == 5


def test_prompts_that_wait_for_others_go_to_another_group():
    """A cached beginning counts as much as the tokens that are prefilled before the prompt."""
    runner = make_runner(groups=2, pages=40)
    prompt = prompt_of(64, 2)
    runner.submit(prompt, 2)
    runner.finish()
    rests = prompt_of(100, 2, 5), [1, 2], [3]
    all = [runner.submit([*prompt, *rest], 2) for rest in rests]
    runner.step()
    # The second would wait for 100 tokens instead of computing 64, the third for 66.
    assert [sequence.slot for sequence in all] == [0, 4, 1]
    runner.finish()


# Ends.


@pytest.mark.parametrize("steps", range(8), ids=str)
def test_a_cancelled_sequence_leaves_nothing(steps):
    """Cancels while the sequence waits, prefills, decodes, and after that."""
    runner = make_runner((None, 20), snapshots=4)
    sequence = runner.submit(prompt_of(150, 20), 20)
    for _ in range(steps):
        runner.step()
    runner.cancel(sequence)
    epoch = sequence.epoch
    runner.scheduler.remove(sequence)  # does nothing
    assert sequence.slot is None and not runner.scheduler.running and not runner.scheduler.waiting
    assert sequence.epoch > epoch > 0
    for _ in range(2):
        runner.step()  # drops the results of the step in flight
    pools = runner.scheduler.pools[0]
    assert all(pool.free == pool.count for pool in (*pools.pages.values(), pools.snapshots))


def test_nothing_to_do():
    runner = make_runner()
    assert runner.step() is None
    assert runner.scheduler.counters == module.Counters()


def test_counters():
    runner = make_runner((None, 20), snapshots=4)
    prompt = prompt_of(100, 3)
    runner.submit(prompt, 3)
    plans = runner.finish()
    runner.submit([*prompt[:64], *prompt_of(20, 3, 1)], 3)  # no state at 64
    plans += runner.finish()
    counters = runner.scheduler.counters
    assert (counters.prompt_tokens, counters.reused_tokens) == (184, 0)
    assert counters.lost == {"no_snapshot": 64}
    runner.submit([*prompt[:80], *prompt_of(20, 3, 2)], 3)  # has a state at 64, but not at 80
    runner.submit([*prompt, 1], 3)
    plans += runner.finish()
    assert (counters.prompt_tokens, counters.reused_tokens) == (184 + 100 + 101, 64 + 96)
    assert counters.lost == {"no_snapshot": 64 + 16}
    assert counters.steps == len(plans)


def test_check_finds_damage():
    runner = make_runner()
    sequence = decoding(runner, 40, 40)
    waiting = Sequence([1], 2, pages={None: [3]})
    sequence.slot = 2
    with pytest.raises(AssertionError, match="another slot"):
        runner.scheduler.check()
    sequence.slot = 0
    runner.scheduler.waiting.append(waiting)
    with pytest.raises(AssertionError, match="waits with pages"):
        runner.scheduler.check()
    waiting.pages.clear()
    runner.scheduler.check()
    page = sequence.pages[None].pop()
    with pytest.raises(AssertionError, match=f"page {page} has 1 references; sequences hold 0"):
        runner.scheduler.check()
