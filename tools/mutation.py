"""Mutation testing, whether our checks find bugs: `python -m tools.mutation`.

Options: `--subjects PATTERN ...`, `--mutants 300`, `--json FILE`.

Plants small bugs (tools/mutants.py) in the PTX of the kernels of tests/support/subjects, one at a
time, and runs what the tests run: the simulator with all its checks against the exact results, then
again under perturbations of what hardware leaves open; and the rule that every float instruction
states its rounding. A mutant that nothing notices survives. Those that compute the same as the
kernel do not count: index arithmetic that gives every thread of the launch the same numbers (found
by running it), and what tests/data/mutation/equivalent.toml lists with a reason. Survivors that are
real bugs are explained there too.

Deterministic for a seed: a subject's mutants depend on its label, its text and the seed alone.
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
from ptx_kernels.simulator import SimulationError, Trap

from .mutants import Mutant, mutants, probe
from .results import write_results

ROOT = Path(__file__).resolve().parents[1]
KNOWN = ROOT / "tests" / "data" / "mutation" / "equivalent.toml"
SEEDS = (1, 2, 3)  # of the perturbations
#: Basic blocks of a run, 10 times what the longest subject needs: mutants may loop forever.
STEP_LIMIT = 4000
BAR = 0.95

#: float instructions that leave their rounding to ptxas: tests/ptx_kernels/ptx/test_rows.py allows
#: none in a kernel
_UNROUNDED = re.compile(r"\b(?:add|sub|mul|fma|div|sqrt|rcp)(?:\.ftz|\.sat)*\.f(?:16|32)\b")


@dataclass(frozen=True)
class Outcome:
    """`killed_by`: the error's name, `result`, `perturbed ...` or `rounding`; empty for a survivor.

    `equivalent`: nothing found it, and the file of known mutants says why nothing can: it does not
    count.
    """

    subject: str
    mutant: Mutant
    killed_by: str
    explanation: str = ""
    equivalent: bool = False


@dataclass(frozen=True)
class Known:
    """Mutants that need no finding, or are known not to be found.

    `subject` is a pattern as of file names, or several with spaces between them; `before` and
    `after` are lines with their registers' numbers left out.
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
    """A line with %r12 as %r.

    It stays the same when a kernel's registers are counted differently.
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
    """Imports tests/support/subjects; the tests' folder is no package of its own."""
    if str(ROOT / "tests") not in sys.path:
        sys.path.insert(0, str(ROOT / "tests"))
    return importlib.import_module("support.subjects")


def load_subject(label: str):  # type: ignore[no-untyped-def]
    return _subjects().subject(label)


def labels() -> list[str]:
    return list(_subjects().SUBJECTS)


def changes_no_index(kernel: Kernel, mutant: Mutant) -> bool:
    """True where the mutated instruction, from the thread's place alone, computes as before.

    That holds in every thread of the kernel's launch. Such a mutant is equivalent, as the launch is
    a part of the kernel.
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
    """The mutants of a kernel that change anything, in random order, the operators in turn."""
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
    """The check that finds the mutant; empty if none does."""
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
    """Outcomes of `count` mutants, fewer if there are no more.

    Those of the equivalent mutants met on the way are among them.
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


# --- all of them ---


def shares(chosen: Sequence[str], total: int) -> dict[str, int]:
    """Numbers of mutants of each subject: the families alike, the subjects of a family alike."""
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
    """The outcomes of one subject after the other, as they come."""
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
    """The printed report: the outcomes by operator and by family, and the survivors."""
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
    """The same for the JSON file."""

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
