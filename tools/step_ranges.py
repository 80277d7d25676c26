"""Predicts ranges of the tokens per second of programs on an H200; nothing is measured.

python -m tools.step_ranges [--batches N ...] [--prompts N ...] [--effects] [--out FILE]

The range of a decode step or a prompt of Llama 3.1 8B is what the event model predicts with all of
`event_model.UNCERTAIN` at their worse and at their better ends. `--effects` also predicts it with
each of them alone at its ends.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax

from ptx_kernels.devices import REFERENCE
from ptx_kernels.machine_code.report import plain_table

from . import aot, step_times
from .event_model import BASE, FAST, SLOW, UNCERTAIN
from .program_kernels import PROMPTS, Asked, program_kernels
from .results import write_results
from .step_times import assumed_seconds

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "step_ranges.json"
SHAPE = "llama-3.1-8b"
BATCHES = (1, 8, 32)


@dataclass(frozen=True)
class StepRange:
    """Range of a program's tokens per second: all assumptions at their worse, better ends."""

    asked: Asked
    slow: float
    fast: float


@dataclass(frozen=True)
class Effect:
    """Tokens per second of a program with one assumption at its ends, the others unchanged."""

    assumption: str
    slow: float
    fast: float
    reason: str


def step_range(asked: Asked) -> StepRange:
    """Predicts the range of one program."""
    found = program_kernels(asked)
    slow, fast = (asked.tokens / assumed_seconds(found, each) for each in (SLOW, FAST))
    return StepRange(asked, slow, fast)


def effects(asked: Asked) -> list[Effect]:
    """Predicts a program with each uncertain assumption alone at its ends."""
    found = program_kernels(asked)
    effects = []
    for each in UNCERTAIN:
        slow, fast = (
            asked.tokens / assumed_seconds(found, replace(BASE, **{each.name: end}))
            for end in (each.slow, each.fast)
        )
        effects.append(Effect(each.name, slow, fast, each.reason))
    return effects


def relative_range() -> tuple[float, float]:
    """Returns the ends of a step of one sequence, relative to the event model, in the results."""
    found = json.loads(RESULTS.read_text())["programs"]
    (one,) = (p for p in found if p["asked"]["batch"] == 1 and not p["asked"]["prompt"])
    (base,) = (
        p["event_tokens_per_second"]
        for p in json.loads(step_times.RESULTS.read_text())["programs"]
        if (p["shape"], p["batch"], p["prompt"]) == (SHAPE, 1, 0)
    )
    return one["slow"] / base, one["fast"] / base


def results(ranges: Sequence[StepRange]) -> dict[str, Any]:
    """Returns the contents of the results file, in tokens per second."""
    return {
        "predicted": "by the event model, for an H200; nothing is measured",
        "device": REFERENCE.name,
        "assumptions": [asdict(each) for each in UNCERTAIN],
        "programs": [asdict(each) for each in ranges],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.step_ranges", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--batches", nargs="*", type=int, default=BATCHES)
    parser.add_argument("--prompts", nargs="*", type=int, default=PROMPTS)
    parser.add_argument("--effects", action="store_true", help="show each assumption alone")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the results' file")
    options = parser.parse_args(argv)
    if reason := aot.unavailable():
        print(reason, file=sys.stderr)
        return 3
    ranges = list[StepRange]()
    asked = [Asked(SHAPE, batch=batch) for batch in options.batches]
    asked += [Asked(SHAPE, prompt=prompt) for prompt in options.prompts]
    for each in asked:
        ranges.append(one := step_range(each))
        print(f"PREDICTED, {one.asked}: {one.slow:.0f} to {one.fast:.0f} tokens/s", flush=True)
        write_results(options.out, results(ranges))
        if options.effects:
            header = ("tokens/s", "slow", "fast", "reason")
            rows = [
                (each.assumption, f"{each.slow:.0f}", f"{each.fast:.0f}", each.reason)
                for each in effects(one.asked)
            ]
            print(plain_table(header, rows), flush=True)
    return 0


if __name__ == "__main__":
    # nothing runs on a GPU; without its libraries, looking for one warns
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
