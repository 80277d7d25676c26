"""LRU cache: each value is made once per key, and threads that need the same one wait."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from jax_q4k.models.support.lru_cache import LRUCache


def test_values_used_last_stay() -> None:
    recent = LRUCache(2)
    for key in "abac":
        recent.get(key, lambda key=key: key.upper())
    assert "a" in recent and "c" in recent and "b" not in recent and len(recent) == 2


def test_one_thread_makes_and_the_others_wait() -> None:
    recent, made, waiting = LRUCache(4), [], threading.Barrier(4)

    def make() -> str:
        made.append(1)
        threading.Event().wait(0.05)
        return "value"

    def ask(_: int) -> str:
        waiting.wait()
        return recent.get("key", make)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == ["value"] * 4
    assert len(made) == 1


def test_after_a_failure_the_next_thread_tries() -> None:
    recent, tries, waiting = LRUCache(4), [], threading.Barrier(3)

    def make() -> str:
        tries.append(1)
        threading.Event().wait(0.02)
        if len(tries) == 1:
            raise MemoryError("the first")
        return "value"

    def ask(_: int) -> str:
        waiting.wait()
        try:
            return recent.get("key", make)
        except MemoryError:
            return "failed"

    with ThreadPoolExecutor(3) as pool:
        assert sorted(pool.map(ask, range(3))) == ["failed", "value", "value"]
    assert len(tries) == 2


def test_a_function_may_get_its_own_key() -> None:
    recent = LRUCache(4)
    assert recent.get("key", lambda: recent.get("key", lambda: 1) + 1) == 2


def test_an_error_leaves_nothing() -> None:
    recent = LRUCache(4)
    with pytest.raises(ZeroDivisionError):
        recent.get("key", lambda: 1 // 0)
    assert "key" not in recent and recent.get("key", lambda: 3) == 3
