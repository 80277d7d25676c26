"""A server of the demo model that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jax_q4k import models

from ..engine.engine_runs import is_idle, wait_until
from .running import Running, serving


@pytest.fixture(scope="module")
def engine() -> Iterator[models.Engine]:
    with models.Engine(models.load("demo"), max_rows=4, warm_up=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: models.Engine) -> Iterator[Running]:
    with serving(engine, queue=4) as server:
        yield server
        assert server.service.places.taken == 0
        wait_until(lambda: is_idle(engine))  # after a cancelled request, the engine ends two steps
