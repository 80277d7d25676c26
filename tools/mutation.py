"""Mutation testing of kernels: measures whether our checks find bugs. `python -m tools.mutation`.

Options: `--subjects PATTERN ...`, `--mutants 300`, `--json FILE`.

Plants small bugs (tools/mutants.py) in the PTX of the kernels of tests/support/subjects, one at a
time, and runs the tests' checks: the simulator with all its checks against the exact results, again
under perturbations of what hardware leaves open, and the rule that every float instruction states
its rounding. A mutant that no check finds survives. Equivalent mutants do not count: index
arithmetic that gives every thread of the launch the same numbers (found by running it), and those
that tests/data/mutation/equivalent.toml lists with a reason. That file also explains survivors that
are real bugs.

Deterministic for a seed: a subject's mutants depend only on its label, its text and the seed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import fnmatch
import importlib
import random
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ptx_kernels import simulator
from ptx_kernels.ptx import Kernel
from ptx_kernels.ptx.oldest import COMMON
from ptx_kernels.simulator import SimulationError, Trap

from .mutants import Mutant, mutants, probe
from .results import write_results

ROOT = Path(__file__).resolve().parents[1]
KNOWN = ROOT / "tests" / "data" / "mutation" / "equivalent.toml"
SEEDS = (1, 2, 3)  # of the perturbations
#: Limit of basic blocks per run, 10 times what the longest subject needs: mutants may loop forever.
STEP_LIMIT = 4000
BAR = 0.95

#: float instructions that leave their rounding to ptxas; tests/ptx_kernels/ptx/test_rows.py allows
#: none in a kernel
_UNROUNDED = re.compile(r"\b(?:add|sub|mul|fma|div|sqrt|rcp)(?:\.ftz|\.sat)*\.f(?:16|32)\b")


@dataclass(frozen=True)
class Outcome:
    """Outcome of one mutant.

    Attributes:
      killed_by: the error's name, `result`, `perturbed ...` or `rounding`; empty for a survivor.
      equivalent: no check found it, and the file of known mutants explains why none can; it does
        not count.
    """

    subject: str
    mutant: Mutant
    killed_by: str
    explanation: str = ""
    equivalent: bool = False


@dataclass(frozen=True)
class Known:
    """A mutant that is equivalent, or known to survive.

    `subject` is a file name pattern, or several separated by spaces; `before` and `after` are lines
    without their registers' numbers.
    """

    subject: str
    operator: str
    before: str
    after: str
    reason: str
    equivalent: bool

    def matches(self, subject: str, mutant: Mutant) -> bool:
        return (
            any(fnmatch.fnmatchcase(subject, pattern) for pattern in self.subject.split())
            and mutant.operator == self.operator
            and fnmatch.fnmatchcase(plain(mutant.before), self.before)
            and fnmatch.fnmatchcase(plain(mutant.after), self.after)
        )


def plain(line: str) -> str:
    """Returns a line with %r12 as %r.

    It does not depend on how a kernel's registers are numbered.
    """
    return (
        re.sub(r"(%[a-z]+)\d+", r"\1", " ".join(line.split())).replace("[", "(").replace("]", ")")
    )


def read_known(path: Path = KNOWN) -> list[Known]:
    tables = tomllib.loads(path.read_text())
    return [
        Known(**table, equivalent=kind == "equivalent")
        for kind in ("equivalent", "survivor")
        for table in tables.get(kind, [])
    ]


def _known(known: Sequence[Known], subject: str, mutant: Mutant, equivalent: bool) -> str:
    return next(
        (k.reason for k in known if k.equivalent == equivalent and k.matches(subject, mutant)), ""
    )


# --- one subject ---


def _subjects() -> ModuleType:
    """Imports tests/support/subjects; the tests folder is not a package."""
    if str(ROOT / "tests") not in sys.path:
        sys.path.insert(0, str(ROOT / "tests"))
    return importlib.import_module("support.subjects")


def load_subject(label: str, oldest: int = COMMON):  # type: ignore[no-untyped-def]
    """Builds a subject of the tests for architecture `oldest` and newer ones."""
    return _subjects().subject(label, oldest)


def labels() -> list[str]:
    return list(_subjects().SUBJECTS)


def changes_no_index(kernel: Kernel, mutant: Mutant) -> bool:
    """Returns whether the mutated index arithmetic computes the same numbers as before.

    It must do so in every thread of the kernel's launch. Such a mutant is equivalent, because the
    launch is part of the kernel.
    """
    text = probe(kernel.text, mutant)
    if text is None:
        return False
    try:
        simulator.launch(text, [], kernel.grid, kernel.block, kernel.dynamic_shared_bytes)
    except Trap:
        return False
    return True


def draw(label: str, kernel: Kernel, seed: int) -> Iterator[Mutant]:
    """Yields the mutants of a kernel that change anything, shuffled, alternating operators."""
    rng = random.Random(f"{label} {seed}")
    by_operator = {name: found for name, found in mutants(kernel.text).items() if found}
    for found in by_operator.values():
        rng.shuffle(found)
    names = list(by_operator)
    rng.shuffle(names)
    while any(by_operator.values()):
        for name in names:
            while by_operator[name]:
                mutant = by_operator[name].pop()
                if not changes_no_index(kernel, mutant):
                    yield mutant
                    break


def verdict(subject, mutant: Mutant) -> str:  # type: ignore[no-untyped-def]
    """Returns the name of the check that finds the mutant; empty if none does."""
    text = mutant.apply(subject.kernel.text)
    if _UNROUNDED.search(text):
        return "rounding"

    def fails(prefix: str) -> str:
        try:
            results = subject.run(text, step_limit=STEP_LIMIT)
        except SimulationError as error:
            return prefix + type(error).__name__
        return "" if subject.holds(results) else prefix + "result"

    if found := fails(""):
        return found
    for seed in SEEDS:
        with simulator.perturbation(seed):
            if found := fails("perturbed "):
                return found
    return ""


def run_subject(label: str, count: int, seed: int) -> list[Outcome]:
    """Returns outcomes of `count` mutants, or fewer if there are no more.

    Equivalent mutants encountered before are included.
    """
    subject, known = load_subject(label), read_known()
    outcomes: list[Outcome] = []
    for mutant in draw(label, subject.kernel, seed):
        if sum(not o.equivalent for o in outcomes) == count:
            break
        killed_by, why, equivalent = verdict(subject, mutant), "", False
        if not killed_by:
            why = _known(known, label, mutant, equivalent=True)
            equivalent = bool(why)
            why = why or _known(known, label, mutant, equivalent=False)
        outcomes.append(Outcome(label, mutant, killed_by, why, equivalent))
    return outcomes


# --- all subjects ---


def shares(chosen: Sequence[str], total: int) -> dict[str, int]:
    """Returns each subject's number of mutants: equal for families, and within a family."""
    families: dict[str, list[str]] = {}
    for label in chosen:
        families.setdefault(family(label), []).append(label)
    counts = dict.fromkeys(chosen, 0)
    left, turn = total, 0
    while left > 0:
        for members in families.values():
            if left > 0:
                counts[members[turn % len(members)]] += 1
                left -= 1
        turn += 1
    return counts


def family(label: str) -> str:
    return label.split("-")[0]


def run(chosen: Sequence[str], total: int, seed: int, jobs: int) -> Iterator[list[Outcome]]:
    """Yields the outcomes subject by subject."""
    counts = {label: count for label, count in shares(chosen, total).items() if count}
    if jobs == 1:
        for label, count in counts.items():
            yield run_subject(label, count, seed)
        return
    with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
        futures = [pool.submit(run_subject, label, count, seed) for label, count in counts.items()]
        for future in concurrent.futures.as_completed(futures):
            yield future.result()


def score(outcomes: Sequence[Outcome]) -> float:
    return killed(outcomes) / max(1, len(outcomes))


def table(title: str, groups: dict[str, list[Outcome]]) -> str:
    lines = [f"{title:28}{'mutants':>8}{'killed':>8}   by"]
    for name, outcomes in groups.items():
        reasons = Counter(o.killed_by for o in outcomes if o.killed_by).most_common(4)
        by = ", ".join(f"{reason} {count}" for reason, count in reasons)
        lines.append(f"{name:28}{len(outcomes):8}{killed(outcomes):8}   {by}")
    return "\n".join(lines)


def _grouped(
    outcomes: Sequence[Outcome], key: Callable[[Outcome], str]
) -> dict[str, list[Outcome]]:
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(key(outcome), []).append(outcome)
    return dict(sorted(groups.items()))


def _by_operator(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    return _grouped(outcomes, lambda o: o.mutant.operator)


def _by_family(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    return _grouped(outcomes, lambda o: family(o.subject))


def killed(outcomes: Sequence[Outcome]) -> int:
    return sum(bool(o.killed_by) for o in outcomes)


def report(outcomes: Sequence[Outcome], equivalent: Sequence[Outcome]) -> str:
    """Formats the report: the outcomes by operator and by family, and the survivors."""
    parts = [table("operator", _by_operator(outcomes)), table("family", _by_family(outcomes))]
    for o in outcomes:
        if not o.killed_by:
            parts.append(
                f"survives: {o.subject}, {o.mutant.operator}, line {o.mutant.line + 1}\n"
                f"  - {o.mutant.before.strip()}\n  + {o.mutant.after.strip()}\n"
                f"  {o.explanation or 'UNEXPLAINED'}"
            )
    share = f"{killed(outcomes)} of {len(outcomes)} killed: {score(outcomes):.1%}"
    return "\n\n".join([*parts, f"{share}; {len(equivalent)} more known to be equivalent"])


def results(
    outcomes: Sequence[Outcome], equivalent: Sequence[Outcome], seed: int
) -> dict[str, Any]:
    """Returns the report's figures for the JSON file."""

    def counts(groups: dict[str, list[Outcome]]) -> dict[str, dict[str, int]]:
        return {
            name: {"mutants": len(group), "killed": killed(group)} for name, group in groups.items()
        }

    return {
        "seed": seed,
        "mutants": len(outcomes),
        "killed": killed(outcomes),
        "equivalent": len(equivalent),
        "operators": counts(_by_operator(outcomes)),
        "families": counts(_by_family(outcomes)),
        "killed_by": dict(Counter(o.killed_by for o in outcomes if o.killed_by).most_common()),
        "survivors": [asdict(o) for o in outcomes if not o.killed_by],
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--subjects", nargs="*", default=["*"], help="patterns of labels in tests/support/subjects"
    )
    parser.add_argument("--mutants", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the outcomes here")
    arguments = parser.parse_args(argv)
    chosen = [
        label
        for label in labels()
        if any(fnmatch.fnmatchcase(label, p) for p in arguments.subjects)
    ]
    if not chosen:
        parser.error(f"--subjects {' '.join(arguments.subjects)} are labels of none")
    outcomes: list[Outcome] = []
    equivalent: list[Outcome] = []
    for done in run(chosen, arguments.mutants, arguments.seed, arguments.jobs):
        outcomes += (o for o in done if not o.equivalent)
        equivalent += (o for o in done if o.equivalent)
        print(
            f"{len(outcomes):5} of {arguments.mutants}  {done[0].subject if done else ''}",
            file=sys.stderr,
        )
    outcomes.sort(key=lambda o: (o.subject, o.mutant.line, o.mutant.operator, o.mutant.after))
    print(report(outcomes, equivalent))
    if arguments.json:
        write_results(arguments.json, results(outcomes, equivalent, arguments.seed))
    explained = all(o.killed_by or o.explanation for o in outcomes)
    return 0 if score(outcomes) >= BAR and explained else 1


if __name__ == "__main__":
    sys.exit(main())
