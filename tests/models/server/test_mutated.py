"""Bodies that are nearly right: an answer or an error of the client, never one of the server."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest

from jax_q4k import models

from .running import Running

TEXTS = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "There."}]
USUAL = {"max_tokens": 2, "temperature": 0.7, "seed": 3, "stop": ["x"], "top_p": 0.9}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [*TEXTS, {"role": "user", "content": [{"type": "text", "text": "And?"}]}],
        "logprobs": True,
        "top_logprobs": 2,
        "logit_bias": {"5": 1.5},
        "chat_template_kwargs": {"a": 1},
        "stream_options": {"include_usage": True},
        "n": 2,
        **USUAL,
    },
    "/v1/completions": {
        "prompt": ["The sea", "A"],
        "logprobs": 1,
        "prompt_logprobs": 1,
        "echo": True,
        "min_p": 0.1,
        **USUAL,
    },
    "/v1/messages": {
        "messages": TEXTS[:1],
        "system": "Be brief.",
        "max_tokens": 2,
        "stop_sequences": ["x"],
    },
    "/v1/messages/count_tokens": {"messages": TEXTS[:1], "system": [{"type": "text", "text": "A"}]},
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Where?"}]}],
        "max_output_tokens": 2,
        "reasoning": {"effort": "low"},
    },
    "/v1/embeddings": {"input": ["The sea"], "encoding_format": "float", "dimensions": 8},
    "/tokenize": {"content": "The sea", "add_special": True},
    "/detokenize": {"tokens": [5, 6]},
    "/apply-template": {"messages": TEXTS, "chat_template_kwargs": {"a": 1}},
}
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 17, 1e308, -1e308, 0.5, 2**31, 2**63, 2**70),
    *("", "A", "x" * 3000, "\ud800", "\x00", "\u2028", "None", "-1", "assistant", "image_url"),
    *([], {}, [[]], [None], [1, "a"], {"type": "text"}, {"": None}, [{}], {"role": []}),
]


def places(body: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the paths of all values in a body."""
    items: Any = body.items() if isinstance(body, dict) else enumerate(body)
    found = []
    for key, value in items:
        found.append((*path, key))
        if isinstance(value, dict | list):
            found += places(value, (*path, key))
    return found


def mutated(body: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Returns a body with one to three values replaced, removed, added or nested."""
    found = copy.deepcopy(body)
    for _ in range(draw.randint(1, 3)):
        if not (known := places(found)):
            return found
        *path, last = draw.choice(known)
        parent: Any = found
        for key in path:
            parent = parent[key]
        match draw.randrange(5):
            case 0:
                del parent[last]
            case 1:
                parent[last] = copy.deepcopy([parent[last]] * draw.choice([1, 3, 70]))
            case 2 if isinstance(parent, dict):
                parent[draw.choice(["stream", "n", "model", "tools", "x", "\ud800", "é"])] = (
                    copy.deepcopy(draw.choice(VALUES))
                )
            case _:
                parent[last] = copy.deepcopy(draw.choice(VALUES))
    return found


def check(server: Running, count: int, seed: int) -> dict[int, int]:
    """Sends `count` mutated bodies to every route; returns the number of answers by status."""
    draw, statuses = random.Random(seed), dict[int, int]()
    headers = {"content-type": "application/json"}
    for path, body in BODIES.items():
        for _ in range(count):
            content = json.dumps(mutated(body, draw))
            found = server.client.post(path, content=content, headers=headers)
            assert found.status_code < 500, f"{path} {content}: {found.text}"
            if found.status_code != 200:
                assert found.json()["error"]["message"], content
            elif found.headers["content-type"].startswith("text/event-stream"):
                assert '"error":{' not in found.text, content
            statuses[found.status_code] = statuses.get(found.status_code, 0) + 1
    return statuses


@pytest.mark.parametrize(
    "count", [15, pytest.param(250, marks=pytest.mark.slow("sends thousands of requests"))]
)
def test_no_body_is_a_fault_of_the_server(
    engine: models.Engine, server: Running, count: int
) -> None:
    statuses = check(server, count, seed=count)
    assert statuses[200] > count and statuses[400] > count
    assert server.service.places.taken == 0
    engine.check()
    assert engine.stats().free_pages == engine.stats().pages
