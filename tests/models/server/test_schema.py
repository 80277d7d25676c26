"""The server against its own /openapi.json: requests of schemathesis, right and wrong ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jax_q4k.models.server import openapi

from .running import Running

#: Rules that schemas cannot say, such as messages that a template accepts, make a right request of
#: the schema a wrong one.
EXCLUDED = "positive_data_acceptance"


@pytest.mark.slow("sends thousands of requests")
def test_requests_of_the_schema(server: Running, tmp_path: Path) -> None:
    """Sends the bounds of each field, and 5 random requests a route, or as many as SCHEMA_REQUESTS.

    Each response must have a status, a content type and a body that the schema names, none of a
    server's fault.
    """
    count = os.environ.get("SCHEMA_REQUESTS", "5")
    command = [Path(sys.executable).with_name("schemathesis"), "run", f"{server.url}/openapi.json"]
    command += ["-n", count, "--phases", "coverage,fuzzing", "--mode", "all", "--checks", "all"]
    command += ["--exclude-checks", EXCLUDED, "--continue-on-failure", "--seed", "1", "--no-color"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    count = len(openapi.POSTS) + len(openapi.GETS) - 1  # without the description itself
    assert f"Tested: {count}" in done.stdout, done.stdout[-2000:]
