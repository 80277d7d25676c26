"""Replicas are chosen by the beginnings of prompts, and by how busy they are."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from jax_q4k.models.server import PrefixRoutes, prompt_beginnings, routing

LONG = "It is a truth universally acknowledged. " * 20


def hashes(**fields: Any) -> list[bytes]:
    return prompt_beginnings(json.dumps(fields).encode())


def conversation(*texts: str, system: str = "Be brief.") -> list[dict[str, str]]:
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *turns]


def common(one: list[bytes], other: list[bytes]) -> int:
    """Number of equal hashes at the beginning; all later ones differ."""
    count = sum(a == b for a, b in zip(one, other, strict=False))
    assert one[:count] == other[:count] and not set(one[count:]) & set(other[count:])
    return count


@pytest.mark.parametrize("field", ["messages", "input"])
def test_a_conversation_has_the_hashes_of_its_earlier_turns(field):
    first = hashes(**{field: conversation("Where is the sea?")})
    later = hashes(**{field: conversation("Where is the sea?", "There.", "How deep is it?")})
    assert len(first) == 1 and common(first, later) == 1 and len(later) == 3
    assert common(first, hashes(**{field: conversation("Where is the moon?")})) == 0


@pytest.mark.parametrize("field", ["prompt", "input"])
def test_long_texts_share_their_beginnings(field):
    one, other = hashes(**{field: LONG + "Why?"}), hashes(**{field: LONG + "Who?"})
    assert common(one, other) == len(one) - 1 == len(LONG) // routing.PIECE
    ids = list(range(400))
    one, other = hashes(**{field: [*ids, 7]}), hashes(**{field: [*ids, 8]})
    assert common(one, other) == len(one) - 1 >= 5


def test_system_prompts_count_if_they_are_long():
    assert common(hashes(messages=conversation("A")), hashes(messages=conversation("B"))) == 0
    one, other = (hashes(messages=conversation(text, system=LONG)) for text in "AB")
    assert common(one, other) == len(one) - 1 >= 3
    one, other = (hashes(system=LONG, messages=[{"role": "user", "content": c}]) for c in "AB")
    assert common(one, other) == len(one) - 1 >= 3


@pytest.mark.parametrize("field", ["model", "cache_salt", "tools"])
def test_requests_that_share_no_pages_share_no_hash(field):
    one, other = (hashes(prompt=LONG, **{field: value}) for value in ("a", "b"))
    assert common(one, other) == 0


def test_bodies_without_a_prompt_have_no_hash():
    bodies = [b"", b"[1]", b"{", b"{}", b'{"prompt": ""}', b'"\xff"', b'{"messages": []}']
    bodies.append(b"[" * 100_000)
    for body in bodies:
        assert prompt_beginnings(body) == []
    assert len(hashes(prompt=LONG * 200)) == routing.MOST_BEGINNINGS


def test_the_replica_with_the_longest_beginning_comes_first():
    routes = PrefixRoutes(slack=2)
    routes.sent([b"1", b"2"], "a")
    routes.sent([b"1", b"3"], "b")
    idle = {"a": 0, "b": 0, "c": 0}
    assert routes.ranked(idle, [b"1", b"2", b"4"])[0] == "a"
    assert routes.ranked(idle, [b"1", b"5"])[0] == "b"  # the last to have it
    assert sorted(routes.ranked(idle, [b"6"])) == ["a", "b", "c"]
    gone = {"b": 0, "c": 0}
    assert routes.ranked(gone, [b"1", b"2"])[0] == "b"
    assert routes.ranked({}, [b"1"]) == []


def test_a_busy_replica_gets_no_more():
    routes = PrefixRoutes(slack=2)
    routes.sent([b"1"], "a")
    assert routes.ranked({"a": 3, "b": 1}, [b"1"]) == ["a", "b"]
    assert routes.ranked({"a": 4, "b": 1}, [b"1"]) == ["b", "a"]
    assert routes.ranked({"a": 4, "b": 1, "c": 2}, []) == ["b", "c", "a"]


def test_new_conversations_spread_alike_in_all_routers():
    loads = dict.fromkeys("abcd", 0)
    firsts = Counter(
        PrefixRoutes(slack=2).ranked(loads, hashes(prompt=f"Question {i}"))[0] for i in range(200)
    )
    assert firsts.keys() == loads.keys() and min(firsts.values()) > 25
    routes = [PrefixRoutes(slack=2).ranked(loads, [b"1"]) for _ in range(2)]
    assert routes[0] == routes[1]


def test_the_oldest_beginnings_are_forgotten(monkeypatch):
    monkeypatch.setattr(routing, "MOST_REMEMBERED", 2)
    routes, idle = PrefixRoutes(slack=0), {"a": 0, "b": 0}
    for replica in idle:
        other = {"a": "b", "b": "a"}[replica]
        routes.sent([b"1"], replica)
        routes.sent([b"2"], other)
        assert routes.ranked(idle, [b"1"])[0] == replica
    routes.sent([b"1"], "a")
    routes.sent([b"3"], "a")  # 2 goes, 1 was used since
    assert list(routes._replicas) == [b"1", b"3"]
