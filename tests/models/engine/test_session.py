"""Sessions: calls of several threads on one model run as one batch, if they may."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import jax
import pytest

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.engine import session

from ..golden_files import model

PROMPT = [3, 5, 7, 9]
#: What a call is made under, or made with -> whether it joins a plain call.
OTHERS: dict[str, tuple[Callable[[], Any], dict[str, Any], bool]] = {
    "the same": (contextlib.nullcontext, {}, True),
    "another sampling": (contextlib.nullcontext, {"temperature": 0.5, "logprobs": 2}, True),
    "another length": (contextlib.nullcontext, {"max_new_tokens": 200}, True),
    "another dtype": (contextlib.nullcontext, {"cache_dtype": "bfloat16"}, False),
    "drafts": (contextlib.nullcontext, {"draft": "lookup"}, False),
    "another implementation": (lambda: jq.implementation("xla", activations="f32"), {}, False),
    "another setting of JAX": (lambda: jax.default_matmul_precision("highest"), {}, False),
}


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow("compiles programs of its own"))
        if name in ("another dtype", "drafts", "another implementation", "another length")
        else name
        for name in OTHERS
    ],
)
def test_which_calls_join(name: str) -> None:
    """A call in another thread joins the session of a stream; both give what they give alone."""
    context, fields, joins = OTHERS[name]
    loaded = model("llama-gqa")
    want = models.generate(loaded, PROMPT, max_new_tokens=24).tokens
    fields = {"max_new_tokens": 12} | fields
    with context():
        other = models.generate(loaded, PROMPT[:3], **fields).tokens
    pieces = models.stream(loaded, PROMPT, max_new_tokens=24)
    tokens = [next(pieces).token for _ in range(3)]
    (first,) = session._RUNNING[loaded].values()
    found: dict[str, Any] = {}

    def call() -> None:
        with jq.implementation(activations="f32"), context():
            stream = models.stream(loaded, PROMPT[:3], **fields)
            head = next(stream)
            found["sessions"] = list(session._RUNNING[loaded].values())
            found["tokens"] = [piece.token for piece in (head, *stream)][: len(other)]

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    tokens += [piece.token for piece in pieces if piece.token is not None]
    assert tokens == want and found["tokens"] == other
    assert first in found["sessions"] and len(found["sessions"]) == (1 if joins else 2)
    assert not session._RUNNING[loaded]
