"""A corpus of 200 JSON schemas: every finished answer is valid, or the schema is refused."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from support.paths import ROOT

from jax_q4k import models
from jax_q4k.models.sampling import Constraint, ConstraintError

from .engine_runs import wait_until

CORPUS = json.loads((ROOT / "tests" / "data" / "schemas.json").read_text())

#: Schemas that llguidance refuses and that are written differently: any JSON, and no constraint.
ACCEPTED = ("boolean schema true", "uniqueItems false")


def constraint_of(entry: dict[str, Any]) -> Constraint:
    return Constraint.json_schema(entry["schema"])


def test_what_is_refused() -> None:
    """Refuses what llguidance refuses, and what it would not enforce."""
    grammars = models.load("demo").grammars
    assert grammars is not None and len(CORPUS) == 200
    refused = set()
    for entry in CORPUS:
        try:
            grammars.matcher(constraint_of(entry))
        except ConstraintError:
            refused.add(entry["name"])
    named = {entry["name"] for entry in CORPUS if entry["refused"]} - {*ACCEPTED}
    assert named <= refused
    others = [entry for entry in CORPUS if entry["name"] in refused - named]
    assert all("unsound" in entry or "fails" in entry for entry in others)
    # The rest of these is enforced otherwise, but for days of February and leap seconds.
    assert {entry.get("unsound") for entry in others} >= {
        "const",
        "enum",
        "minimum",
        "minProperties",
    }


@pytest.mark.slow("generates several hundred answers")
def test_every_finished_answer_is_valid(record_property: Any) -> None:
    """Compares with another library; formats are annotations in the standard, and not checked."""
    compared = finished = 0
    with models.Engine(models.load("demo"), max_rows=16, max_context=256) as engine:
        requests = []
        for entry in CORPUS:
            for seed in (1, 2):
                try:
                    request = engine.submit(
                        entry["name"],
                        constraint=constraint_of(entry),
                        max_new_tokens=200,
                        temperature=1.0,
                        seed=seed,
                    )
                except ConstraintError:
                    continue
                requests.append((entry, request))
        for entry, request in requests:
            try:
                output = request.result()
            except ConstraintError:
                assert "fails" in entry, entry["name"]
                continue
            finished += output.finish_reason == "end"
            if output.finish_reason != "end" or "disputed" in entry:
                continue
            compared += 1
            kind = jsonschema.validators.validator_for(
                entry["schema"], jsonschema.Draft202012Validator
            )
            found = json.loads(output.text or "")
            error = next(kind(entry["schema"]).iter_errors(found), None)
            assert error is None, f"{entry['name']}: {output.text}: {error}"
        wait_until(lambda: not engine.stats().running)
        engine.check()
    assert compared > 200
    record_property(
        "figure", f"schemas: {finished} finished answers, {compared} compared, all valid"
    )
