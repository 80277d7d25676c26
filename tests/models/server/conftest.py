"""A server of the demo model that the tests of a module share.

Imports JAX in the fixtures alone: pytest loads this file before tests/conftest.py configures JAX.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from jax_q4k import models

    from .running import Running


@pytest.fixture(scope="module")
def engine() -> Iterator[models.Engine]:
    from jax_q4k import models

    with models.Engine(models.load("demo"), max_rows=4, warm_up=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: models.Engine) -> Iterator[Running]:
    from ..engine.engine_runs import is_idle, wait_until
    from .running import serving

    with serving(engine, queue=4) as server:
        yield server
        assert server.service.places.taken == 0
        wait_until(lambda: is_idle(engine))  # after a cancelled request, the engine ends two steps
