"""Measures what constraints cost an Engine: `python -m benchmarks.constraints [FILE]`.

Clients submit one request after the other, without a constraint, with a regular expression that
forces no token, and with a JSON schema, in turn; figures are medians over ROUNDS of tokens per
second. All answers have as many tokens. Also seconds of compiling the vocabulary and the schema.

Writes `benchmarks/results/constraints.json`.
"""

from __future__ import annotations

import functools
import sys
import time
from typing import Any

from tools.results import write_results

from .engine import Submit, Work, closed, in_turn, parsed, surroundings

CLIENTS = (1, 4, 8)
#: Requests per client and round.
REQUESTS = 2
#: An array that is longer than any answer.
SCHEMA = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["new", "used", "sold"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}


def measure(model: Any, rounds: int) -> dict[str, Any]:
    """Returns the tokens per second of each kind of request, by number of clients."""
    from jax_q4k import models

    constraints = {
        "plain": None,
        "regex": models.Constraint.regex("[a-z ]{5000}"),
        "json_schema": models.Constraint.json_schema(SCHEMA),
    }
    results: dict[str, Any] = {"seconds": {}, "clients": {}}
    for name, constraint in constraints.items():
        if constraint is not None:  # the first one makes the vocabulary, too
            began = time.perf_counter()
            model.grammars.matcher(constraint)
            results["seconds"][name] = time.perf_counter() - began
    rows, vocab = max(CLIENTS), model.config.vocab_size
    options: dict[str, Any] = {"max_rows": rows, "max_context": 256, "constraints": True}
    with models.Engine(model, **options) as engine:
        targets = {name: _submitter(engine, name, one) for name, one in constraints.items()}
        for submit in targets.values():
            closed(submit, Work(vocab, rows, seed=1), rows)  # warms up
        for count in CLIENTS:
            works = [Work(vocab, count * REQUESTS, 100 * count + seed) for seed in range(rounds)]
            runs = [functools.partial(closed, work=work, clients=count) for work in works]
            found = in_turn(f"{count} clients", targets, runs)
            results["clients"][count] = found
            plain = found["plain"]["tokens_per_second"]
            for name in ("regex", "json_schema"):
                found[name]["loss"] = 1 - found[name]["tokens_per_second"] / plain
                print(f"{count} clients, {name}: loss {100 * found[name]['loss']:.1f} %")
        results["compilations"] = engine.stats().compilations
    return results


def _submitter(engine: Any, name: str, constraint: Any) -> Submit:
    # With a salt, the kinds of requests do not find each other's prompts in the prefix cache.
    fields: dict[str, Any] = {"ignore_end": True, "constraint": constraint, "cache_salt": name}
    return lambda prompt, tokens: (
        piece
        for piece in engine.submit(prompt, max_new_tokens=tokens, **fields)
        if piece.token is not None
    )


def main(arguments: list[str]) -> int:
    options = parsed(arguments, "constraints", __doc__)
    from jax_q4k import models

    model = models.load(options.model)
    settings = surroundings(model)
    print(write_results(options.file, settings | measure(model, options.rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
