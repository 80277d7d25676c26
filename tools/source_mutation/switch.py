"""Switch of planted bugs, copied into the instrumented packages as `jax_q4k.mutant_switch`."""

from __future__ import annotations

import os

ACTIVE = 0
#: Mutants whose code ran since the running test began.
SEEN: set[int] = set()


def reset() -> None:
    """Forgets the seen mutants, and activates the one that `$MUTANT` names now."""
    global ACTIVE
    ACTIVE = int(os.environ.get("MUTANT") or 0)
    SEEN.clear()


reset()


def on(number: int) -> bool:
    """Returns whether this mutant is active; records that its code ran."""
    if number not in SEEN:
        SEEN.add(number)
        if folder := os.environ.get("MUTANT_HITS"):
            test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
            with open(f"{folder}/{os.getpid()}", "a") as file:
                file.write(f"{number}\t{test}\n")
    return number == ACTIVE
