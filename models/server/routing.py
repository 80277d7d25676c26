"""Chooses replicas of a server for requests, by the beginnings of their prompts.

A replica that has computed the beginning of a prompt has it in its prefix cache.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

#: Bytes of JSON after which a beginning ends: some pages of 16 tokens.
PIECE = 256
#: Beginnings of a prompt that count; further ones are rarely shared.
MOST_BEGINNINGS = 256
#: Beginnings whose replica is remembered.
MOST_REMEMBERED = 1 << 17

#: Fields that decide what precedes the conversation, or which requests share a prefix cache.
_HEAD = ("model", "cache_salt", "system", "instructions", "tools")
#: Fields of a prompt in the APIs of the server.
_PROMPTS = ("messages", "input", "prompt")
#: Roles of messages that many conversations begin with.
_SHARED_ROLES = ("system", "developer")


def prompt_beginnings(body: bytes) -> list[bytes]:
    """Returns hashes of the beginnings of a request's prompt, the shortest first.

    A beginning ends after each message of a conversation but system messages, and after each
    `PIECE` bytes in between. Prompts with a common beginning have its hash in common, so a
    conversation has the hashes of its earlier turns.

    body: of a request of any API of the server. Returns an empty list if it has no prompt, or is
    not JSON.
    """
    try:
        fields = msgspec.json.decode(body)
        prompt = _prompt(fields)
        if not prompt:
            return []
        parts = [(_encoded([fields.get(name) for name in _HEAD]), False)]
        parts += [(_encoded(part), _ends(part)) for part in prompt]
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return []
    found, hashed = list[bytes](), hashlib.blake2b(digest_size=8)
    for part, ends in parts:
        for at in range(0, len(part), PIECE):
            piece = part[at : at + PIECE]
            hashed.update(piece)
            if len(piece) == PIECE or ends:
                found.append(hashed.digest())
            if len(found) == MOST_BEGINNINGS:
                return found
    return found


class PrefixRoutes:
    """Remembers which replica was sent which beginnings of prompts, and ranks replicas by it."""

    def __init__(self, slack: int) -> None:
        """Begins without any memory.

        slack: requests that a replica may have more than the least busy one, and still gets those
        whose beginning it was sent.
        """
        self._slack, self._replicas = slack, OrderedDict[bytes, str]()

    def ranked(self, loads: Mapping[str, int], found: Sequence[bytes]) -> list[str]:
        """Returns the replicas' ids, the best for a request first.

        The replica that was sent the longest beginning is first, unless it has over `slack`
        requests more than the least busy one. The others are in the order of their loads; which of
        equally busy ones is first depends on the first beginning alone, so that routers agree.

        loads: replica's id -> number of its requests. found: result of `prompt_beginnings`.
        """
        if not loads:
            return []
        key = found[0] if found else b""

        def rank(replica: str) -> tuple[int, bytes]:
            return loads[replica], hashlib.blake2b(replica.encode(), key=key).digest()

        order = sorted(loads, key=rank)
        remembered = (self._replicas.get(beginning) for beginning in reversed(found))
        known = next((replica for replica in remembered if replica in loads), None)
        if known is not None and loads[known] <= loads[order[0]] + self._slack:
            order.remove(known)
            order.insert(0, known)
        return order

    def sent(self, found: Sequence[bytes], replica: str) -> None:
        """Remembers that a replica was sent a request with these beginnings."""
        for beginning in found:
            self._replicas[beginning] = replica
            self._replicas.move_to_end(beginning)
        while len(self._replicas) > MOST_REMEMBERED:
            self._replicas.popitem(last=False)


def _prompt(fields: Any) -> list[Any]:
    """Returns the messages of a body, or a list of its text or token ids alone."""
    if not isinstance(fields, dict):
        return []
    prompt = next((fields[name] for name in _PROMPTS if fields.get(name)), None)
    if isinstance(prompt, list) and isinstance(prompt[0], dict):
        return prompt
    return [] if prompt is None else [prompt]


def _ends(part: Any) -> bool:
    return not isinstance(part, dict) or part.get("role") not in _SHARED_ROLES


def _encoded(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic")
