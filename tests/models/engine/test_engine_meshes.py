"""An engine over meshes of devices: the outputs of one device's, without later compilations."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax.sharding import AxisType

from jax_q4k import models
from jax_q4k.models.sampling import Constraint

from .engine_runs import exactly, is_idle, prompts_of, wait_until

#: Sampling of each prompt; together they use all stages.
FIELDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "top_k": 20, "min_p": 0.02},
    {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.3, "logprobs": 2},
    {"logprobs": 3},
    {"constraint": Constraint.regex("[1-9][0-9]{30,50}"), "temperature": 1.0, "ignore_end": False},
    {"logit_bias": {5: 4.0, 7: -100.0}, "penalize_new_only": True, "presence_penalty": 0.5},
    {"temperature": 1.2, "top_p": 0.9, "min_new_tokens": 12, "ignore_end": False},
    {"constraint": Constraint.choice(["This is all that may be said."]), "ignore_end": False},
)

SAMPLINGS = [
    models.Sampling(**({"max_new_tokens": 24, "ignore_end": True, "seed": i} | fields))
    for i, fields in enumerate(FIELDS)
]


def engine(model: models.Model, groups: int = 1) -> models.Engine:
    """Returns an engine of two rows a group, whose texts need four pages each."""
    options = {"max_rows": 2 * groups, "pages": 6 * groups, "warm_up": True, "constraints": True}
    return exactly(model, few_programs=True, usual_stages=True, **options)


@functools.cache
def of_one_device() -> tuple[list[list[int]], list[models.Output]]:
    """Returns prompts, and the outputs that an engine on one device gives for them."""
    demo = models.load("demo")
    prompts = prompts_of(demo)
    with engine(demo) as one:
        return prompts, one.generate(prompts, SAMPLINGS)


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Lists what XLA compiles within the context, whichever cache was missed."""
    found: list[str] = []

    def listen(event: str, _: float, **more: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(str(more))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow("compiles six programs a mesh", quick=["2x2"])
@pytest.mark.parametrize("shape", ["1x2", "1x4", "1x8", "2x1", "2x2", "2x4", "2x2 automatic"])
def test_outputs_are_those_of_one_device(shape: str) -> None:
    """Covers all stages of sampling, preemptions, cached prefixes of each group, cancellation."""
    prompts, want = of_one_device()
    groups, parts = int(shape[0]), int(shape[2])
    devices = jax.devices()[: groups * parts]
    kind = AxisType.Auto if shape.endswith("automatic") else AxisType.Explicit
    mesh = jax.make_mesh((groups, parts), ("dp", "tp"), (kind,) * 2, devices=devices)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names replicated tensors
        model = models.load("demo", mesh=mesh)
    with engine(model, groups) as several:
        with compilations() as compiled:
            rounds = [several.generate(prompts, SAMPLINGS) for _ in range(2)]
            cancelled = several.submit(prompts[1], SAMPLINGS[1])
            first = next(iter(cancelled)).token
            assert cancelled.cancel()
            wait_until(lambda: is_idle(several))
        several.check()
        stats = several.stats()
        cached = [group.pages[None].cached for group in several._loop.scheduler.pools]
    for outputs in rounds:
        for got, one in zip(outputs, want, strict=True):
            assert got.tokens == one.tokens and got.finish_reason == one.finish_reason
            assert len(got.logprobs or ()) == len(one.logprobs or ())
            for a, b in zip(got.logprobs or (), one.logprobs or (), strict=True):
                assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
                assert [token for token, _ in a.top] == [token for token, _ in b.top]
    assert first == want[1].tokens[0]
    assert stats.compilations == 0 and compiled == []
    assert stats.preemptions > 0 and stats.reused_tokens > 0
    assert len(cached) == groups and all(cached)
