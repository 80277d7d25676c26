"""A server of the demo model that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jax_q4k import models

from ..engine.engine_runs import is_idle
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
        assert is_idle(engine)
