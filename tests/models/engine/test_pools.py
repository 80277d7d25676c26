"""Page keys, reference counts, eviction, and the pages of each kind of layers."""

from __future__ import annotations

import pytest

from jax_q4k.models.engine import pages
from jax_q4k.models.engine.pages import OutOfPagesError, PagePool, page_keys
from jax_q4k.models.engine.pools import Hit, Pools
from jax_q4k.models.engine.sequence import NO_PAGE, Sequence


def keys_of(tokens, salt=b""):
    return page_keys(tokens, [], salt)


# Keys.


def test_full_pages_have_keys():
    tokens = list(range(40))
    assert [len(keys_of(tokens[:n])) for n in (0, 15, 16, 31, 32, 40)] == [0, 0, 1, 1, 2, 2]
    assert keys_of(tokens[:16]) == keys_of(tokens)[:1]
    assert [len(key) for key in keys_of(tokens)] == [16, 16]  # bytes


def test_a_key_names_all_tokens_before():
    """Equal pages after different ones, or with another salt, have other keys."""
    page, other = list(range(16)), list(range(16, 32))
    chains = [page + page, other + page, page + other]
    keys = [key for chain in chains for key in keys_of(chain)]
    keys += keys_of(page + page, b"salt")
    assert len(set(keys)) == 7  # the first and third chains share their first page
    assert keys[0] == keys[4]


@pytest.mark.parametrize("token", [0, 5, 15])
def test_a_key_names_every_token(token):
    changed = list(range(16))
    changed[token] += 1 << 20
    assert keys_of(changed) != keys_of(range(16))


@pytest.mark.parametrize("known", [0, 1, 2, 3])
def test_keys_continue_from_earlier_ones(known):
    tokens = list(range(50))
    keys = keys_of(tokens, b"salt")
    before = keys[:known]
    assert page_keys(tokens, before, b"salt") == keys
    assert len(before) == known, "the caller's list is unchanged"


@pytest.mark.parametrize("known", [0, 1])
def test_keys_differ_between_processes(known, monkeypatch):
    """Whoever knows the code cannot construct two texts with the same key."""
    before = keys_of(range(16))[:known]
    here = page_keys(range(32), before, b"")[known]
    monkeypatch.setattr(pages, "_SECRET", b"another process")
    assert page_keys(range(32), before, b"")[known] != here


# A pool.


def cached_pool(count: int, cached: int | None = None) -> PagePool:
    """Returns a pool with cached pages 0, 1, ..., of which 0 was used least recently."""
    pool = PagePool(count)
    taken = [pool.allocate() for _ in range(count if cached is None else cached)]
    for page in taken:
        pool.register(page, b"%d" % page)
    for page in taken:
        pool.release(page)
    return pool


def test_empty_pages_are_allocated_before_cached_ones():
    pool = cached_pool(4, cached=2)
    assert (pool.free, pool.cached) == (4, 2)
    assert [pool.allocate(), pool.allocate()] == [2, 3]
    assert pool.evictions == 0 and pool.find(b"0") == 0
    assert pool.allocate() == 0
    assert pool.evictions == 1 and pool.find(b"0") is None and pool.find(b"1") == 1
    pool.check([0, 2, 3])


def test_the_least_recently_used_page_is_evicted():
    pool = cached_pool(3)
    pool.release(pool.share(0))
    assert [pool.allocate() for _ in range(3)] == [1, 2, 0]


def test_pages_can_be_released_to_be_evicted_first():
    pool = cached_pool(3)
    pool.release(pool.share(2), evict_first=True)
    assert [pool.allocate() for _ in range(3)] == [2, 0, 1]


def test_no_page_is_free():
    pool = PagePool(2)
    pool.allocate(), pool.allocate()
    with pytest.raises(OutOfPagesError, match="all 2 pages are in use"):
        pool.allocate()


def test_shared_pages_are_free_after_the_last_reference():
    pool = cached_pool(2)
    assert pool.share(0) == pool.share(0) == 0
    assert (pool.free, pool.cached, pool.is_referenced(0)) == (1, 1, True)
    pool.check([0, 0])
    pool.release(0)
    assert pool.is_referenced(0) and pool.free == 1
    pool.release(0)
    assert not pool.is_referenced(0) and (pool.free, pool.cached) == (2, 2)


def test_pages_without_keys_become_empty():
    pool = PagePool(2)
    pool.release(pool.allocate())
    assert (pool.free, pool.cached) == (2, 0)


def test_a_key_names_one_page_and_a_page_has_one_key():
    pool = PagePool(2)
    first, second = pool.allocate(), pool.allocate()
    pool.register(first, b"a")
    pool.register(second, b"a")
    pool.register(first, b"b")
    assert (pool.find(b"a"), pool.find(b"b")) == (first, None)
    pool.register(second, b"b")
    assert pool.find(b"b") == second
    pool.check([first, second])


def test_forgotten_pages_are_not_found():
    pool = cached_pool(3)
    pool.share(1)
    pool.forget()
    assert (pool.free, pool.cached) == (2, 0)
    assert [pool.find(b"%d" % page) for page in range(3)] == [None] * 3
    pool.check([1])
    pool.release(1)
    pool.check([])
    assert sorted(pool.allocate() for _ in range(3)) == [0, 1, 2] and pool.evictions == 0


def test_pools_grow():
    pool = cached_pool(2)
    pool.allocate()
    pool.grow(4)
    assert (pool.count, pool.free) == (4, 3)
    pool.check([0])
    assert [pool.allocate() for _ in range(3)] == [2, 3, 1]
    pool.check(range(4))


def test_added_pages_are_allocated_after_the_empty_ones():
    pool = PagePool(2)
    pool.grow(4)
    assert [pool.allocate() for _ in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda p: p.allocate(), "page 3 has 1 references; sequences hold 0"),
        (lambda p: p.release(0), "page 0 has 0 references; sequences hold 1"),
        (lambda p: p._empty.append(3), "a page is free twice"),
        (lambda p: p._empty.append(1), "a page is free twice"),
        (lambda p: p._empty.append(0), r"pages \{0\} are used and free"),
        (lambda p: p._empty.clear(), "pages are lost"),
        (lambda p: p._cached.update({p._empty.pop(): None}), "a cached page has no key"),
        (lambda p: p._key_of.update({3: b"3"}), "an empty page has a key"),
        (lambda p: p._page_of.update({b"9": 1}), "keys and pages disagree"),
        (lambda p: p._page_of.clear(), "keys and pages disagree"),
    ],
)
def test_check_finds_damage(damage, message):
    pool = cached_pool(4, cached=3)
    pool.share(0)
    pool.check([0])
    damage(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check([0])


# Pools of several kinds.


def stored(pools: Pools, length: int, tokens=None) -> Sequence:
    """Returns a sequence whose tokens were stored one page after another."""
    sequence = Sequence(list(tokens or range(length)), length + 16)
    for first in range(0, length, 16):
        assert pools.extend(sequence, first, min(first + 16, length))
        pools.register(sequence, min(first + 16, length))
    return sequence


def test_extend_holds_the_pages_that_a_step_accesses():
    pools = Pools({None: 8, 20: 8})
    sequence = Sequence(list(range(100)), 200)
    assert pools.extend(sequence, 0, 33)
    assert sequence.pages == {None: [0, 1, 2], 20: [0, 1, 2]}
    assert pools.extend(sequence, 33, 48) and len(sequence.pages[20]) == 3
    assert pools.extend(sequence, 50, 51)  # reads tokens 31 to 50
    assert sequence.pages[20] == [NO_PAGE, 1, 2, 0] and NO_PAGE not in sequence.pages[None]
    assert pools.extend(sequence, 51, 52)  # reads tokens 32 to 51
    assert sequence.pages[20] == [NO_PAGE, NO_PAGE, 2, 0]
    assert sequence.page_list(20) == [2, 0]
    pools.check([sequence])


def test_extend_allocates_all_or_nothing():
    pools = Pools({None: 8, 20: 2})
    sequence = Sequence(list(range(100)), 200)
    assert pools.extend(sequence, 0, 32)
    assert not pools.extend(sequence, 32, 49)  # reads tokens 13 to 48
    assert pools.pages[None].free == 6 and sequence.pages[20] == [0, 1]
    assert not pools.extend(sequence, 35, 49)  # gives a page back, but needs two
    assert pools.pages[None].free == 6 and sequence.pages[20] == [NO_PAGE, 1]
    assert pools.extend(sequence, 35, 48)
    pools.check([sequence])


def test_registered_pages_are_found():
    pools = Pools({None: 8, 20: 8})
    sequence = stored(pools, 40)
    longer = Sequence(list(range(60)), 90)
    hit = pools.hit(longer)
    assert hit == Hit(32, known=32)
    pools.take(longer, hit)
    assert longer.pages == {None: sequence.pages[None][:2], 20: sequence.pages[20][:2]}
    assert longer.registered == 2
    pools.check([sequence, longer])


def test_forgotten_pages_of_a_running_sequence_stay_forgotten():
    pools = Pools({20: 8})
    sequence = stored(pools, 48, range(64))
    pools.pages[20].forget()
    pools.extend(sequence, 48, 64)
    pools.register(sequence, 64)
    found = [pools.pages[20].find(key) is not None for key in sequence.keys]
    assert found == [False, False, False, True]


def test_take_shares_the_windows_pages():
    """The token after 64 reads from 45 on: pages 2 and 3."""
    pools = Pools({None: 8, 20: 8})
    sequence = stored(pools, 80)
    longer = Sequence(list(range(65)), 90)
    pools.take(longer, pools.hit(longer))
    assert longer.pages[20] == [NO_PAGE, NO_PAGE, *sequence.pages[20][2:4]]
    pools.check([sequence, longer])


@pytest.mark.parametrize(
    "window, missing, length",
    [
        (None, 1, 16),
        (1, 3, 80),  # the token after 80 reads itself
        (16, 4, 64),
        (17, 3, 80),
        (17, 4, 64),  # the token after 80 reads token 64
        (18, 4, 64),
        (33, 3, 48),
        (34, 0, 80),
        (34, 2, 32),
    ],
)
def test_windows_need_the_pages_that_the_next_token_reads(window, missing, length):
    pools = Pools({window: 8})
    sequence = Sequence(list(range(81)), 99)
    pool = pools.pages[window]
    for at, key in enumerate(page_keys(sequence.tokens, [], b"")):
        page = pool.allocate()
        if at != missing:
            pool.register(page, key)
    assert pools.hit(sequence).length == length


@pytest.mark.parametrize("align, length", [(16, 48), (32, 32), (64, 0)])
def test_hits_are_aligned(align, length):
    pools = Pools({None: 8}, align=align)
    stored(pools, 50)
    assert pools.hit(Sequence(list(range(60)), 90)).length == length


def test_lost_tells_which_layers_shorten_a_hit():
    """Full attention has 80 tokens; the window, then the states, have less."""
    pools = Pools({20: 3, None: 8}, snapshots=2)
    pools.snapshot(stored(pools, 80), 64)
    tokens = list(range(90))
    assert pools.hit(Sequence(tokens, 99)) == Hit(64, 0, "no_snapshot", 80)
    assert pools.hit(Sequence(tokens[:70], 99)) == Hit(64, 0, None, 64)
    assert pools.hit(Sequence(tokens[:60], 99)) == Hit(0, None, "window", 48)
    assert pools.hit(Sequence([9, *tokens], 99)) == Hit(0, None, None, 0)


def test_known_without_full_attention_is_what_windows_have():
    pools = Pools({20: 3}, snapshots=2)
    stored(pools, 80)
    assert pools.hit(Sequence(list(range(90)), 99)) == Hit(0, None, "no_snapshot", 80)
    assert pools.hit(Sequence(list(range(60)), 99)) == Hit(0, None, None, 0)


def test_room_for_counts_cached_pages_of_the_hit():
    """Pages that others use are free of charge, cached ones are not."""
    pools = Pools({None: 20, 20: 20})
    sequence = stored(pools, 80)
    longer = Sequence(list(range(100)), 120)
    hit = pools.hit(longer)
    assert hit.length == 80
    assert pools.room_for(longer, hit, 16) == {None: 2, 20: 4 - 2}
    pools.release(sequence)
    assert pools.room_for(longer, hit, 16) == {None: 7, 20: 4}
    assert pools.room_for(longer, Hit(), 16) == {None: 7, 20: 4}
    assert pools.room_for(longer, Hit(), 64) == {None: 7, 20: 7}


def test_outstanding_counts_pages_until_the_prompt_is_stored():
    pools = Pools({None: 20, 20: 20})
    sequence = stored(pools, 40, range(100))
    assert pools.outstanding(sequence, None, 16) == 0  # it waits
    sequence.slot, sequence.stored, sequence.prefill_end = 0, 40, 100
    assert [pools.outstanding(sequence, kind, 16) for kind in (None, 20)] == [4, 1]
    assert [pools.outstanding(sequence, kind, 64) for kind in (None, 20)] == [4, 4]
    sequence.stored = 100
    assert pools.outstanding(sequence, None, 16) == 0


def test_fits():
    pools = Pools({None: 5, 20: 4})
    assert pools.fits(80, 16) and not pools.fits(81, 16)
    assert pools.fits(64, 17) and not pools.fits(65, 31)


def test_release_gives_the_last_pages_to_be_evicted_first():
    pools = Pools({None: 3}, snapshots=2)
    pools.release(stored(pools, 48))
    assert [pools.pages[None].allocate() for _ in range(3)] == [2, 1, 0]


def test_a_released_sequence_has_no_pages():
    pools = Pools({None: 3}, snapshots=2)
    sequence = stored(pools, 48)
    for length in (16, 32):
        pools.rolling_snapshot(sequence, length)
    pools.name_snapshots(sequence, 16)
    assert sequence.rolling == 0 and sequence.unnamed == [(32, 1)]
    pools.check([sequence])
    pools.release(sequence)
    assert (sequence.pages, sequence.registered) == ({}, 0)
    assert (sequence.rolling, sequence.unnamed) == (None, [])
    pools.check([])


def test_snapshots_are_saved_once():
    pools = Pools({None: 8}, snapshots=2)
    sequence = stored(pools, 64)
    assert pools.snapshot(sequence, 32) == 0
    assert pools.snapshot(sequence, 32) is None
    assert pools.snapshot(sequence, 48) == 1
    assert pools.snapshot(sequence, 64) == 0, "the least recently used is evicted"
    assert pools.hit(Sequence(list(range(65)), 99)).place == 0
    assert pools.hit(Sequence(list(range(40)), 99)).length == 0


def test_check_covers_pages_of_every_kind_and_snapshots():
    pools = Pools({None: 8, 20: 8}, snapshots=3)
    sequence = stored(pools, 32)
    for length in (16, 32):
        pools.rolling_snapshot(sequence, length)
    pools.name_snapshots(sequence, 16)
    pools.check([sequence])
    for pool in (*pools.pages.values(), pools.snapshots):
        page = pool.allocate()
        with pytest.raises(AssertionError, match=f"page {page} has 1 references"):
            pools.check([sequence])
        pool.release(page)


def test_snapshots_have_no_place():
    """Every place is held by states whose tokens are unknown."""
    pools = Pools({None: 8}, snapshots=2)
    sequence = stored(pools, 64)
    assert [pools.rolling_snapshot(sequence, n) for n in (16, 32, 48)] == [0, 1, None]
    assert pools.snapshot(sequence, 64) is None
    pools = Pools({None: 8})
    assert pools.rolling_snapshot(sequence, 64) is None
    assert pools.snapshot(sequence, 64) is None


def test_snapshots_get_names_when_their_tokens_are_known():
    pools = Pools({None: 8}, snapshots=3)
    sequence = stored(pools, 64)
    first, second = (pools.rolling_snapshot(sequence, length) for length in (16, 48))
    pools.name_snapshots(sequence, 15)
    assert sequence.rolling is None
    pools.name_snapshots(sequence, 47)
    assert sequence.rolling == first and sequence.unnamed == [(48, second)]
    assert pools.hit(Sequence(list(range(65)), 99)).length == 16
    pools.name_snapshots(sequence, 48)
    assert sequence.rolling == second and not sequence.unnamed
    assert pools.hit(Sequence(list(range(65)), 99)).length == 48
    pools.check([sequence])
    [pools.rolling_snapshot(sequence, 64) for _ in range(2)]
    assert pools.snapshots.find(sequence.keys[0]) is None, "the replaced state is evicted first"
