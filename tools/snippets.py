"""Finds the snippets of README.md and docs/: Python blocks, and `jax-q4k` lines of other code.

    python -m tools.snippets README.md docs/cli.md    # the commands that a reader would paste

A comment `<!-- not run: REASON -->` before a block explains why it cannot run here. MODEL.gguf,
FOLDER and similar words are names of files that the user supplies.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]

_NOT_RUN = re.compile(r"^<!-- not run: (.+) -->$")
_PROGRAM = "jax-q4k"


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
      page: path in the repository.
      line: number of its first line of code, from 1.
      section: second-level heading above it; empty before the first.
      language: language of a fenced block; empty for an indented one.
      code: code without fences or indentation.
      not_run: reason why it cannot run here; empty if it can.
    """

    page: str
    line: int
    section: str
    language: str
    code: str
    not_run: str


@dataclasses.dataclass(frozen=True)
class Command:
    """A command line: its location, and its words, starting with `jax-q4k`."""

    page: str
    line: int
    environment: dict[str, str]
    words: tuple[str, ...]

    def __str__(self) -> str:
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, shlex.join(self.words)])


def pages() -> list[str]:
    """Returns README.md and the pages of docs/, as paths in the repository."""
    found = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
    return ["README.md", *found]


def blocks(page: str) -> list[Block]:
    """Returns the code blocks of a page, fenced and indented, in order."""
    lines = (ROOT / page).read_text().splitlines()
    found: list[Block] = []
    section, reason, at = "", "", 0
    while at < len(lines):
        line, start = lines[at], at
        if line.startswith("```"):
            end = lines.index("```", at + 1)
            found.append(_block(page, at + 2, section, line[3:], lines[at + 1 : end], reason))
            at, reason = end + 1, ""
        elif line.startswith("    ") and (at == 0 or not lines[at - 1]):
            while at < len(lines) and (lines[at].startswith("    ") or not lines[at]):
                at += 1
            code = [text[4:] for text in lines[start:at]]
            found.append(_block(page, start + 1, section, "", code, reason))
            reason = ""
        else:
            if match := _NOT_RUN.match(line):
                reason = match[1]
            elif line.startswith("## "):
                section = line[3:]
            elif line:
                reason = ""  # it applied to the next block only
            at += 1
    return found


def _block(
    page: str, line: int, section: str, language: str, code: list[str], reason: str
) -> Block:
    return Block(page, line, section, language, "\n".join(code).rstrip() + "\n", reason)


def commands(block: Block) -> list[Command]:
    """Returns the `jax-q4k` lines of a block, one for each alternative such as `IN.gguf|FOLDER`."""
    found = []
    joined = block.code.replace("\\\n", " ")
    for number, line in enumerate(joined.splitlines()):
        words = shlex.split(line.removeprefix("$ "), comments=True) if _is_command(line) else []
        words = list(itertools.takewhile(lambda word: word != ">", words))  # without redirections
        settings = list(itertools.takewhile(lambda word: re.match(r"\w+=", word), words))
        environment = dict(word.split("=", 1) for word in settings)
        for chosen in itertools.product(*map(_alternatives, words[len(settings) :])):
            if chosen:
                found.append(Command(block.page, block.line + number, environment, chosen))
    return found


def _is_command(line: str) -> bool:
    return re.match(rf"(\$ )?(\w+=\S* )*{_PROGRAM} ", line) is not None


def _alternatives(word: str) -> list[str]:
    return word.split("|") if re.fullmatch(r"[\w.]+(\|[\w.]+)+", word) else [word]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="+", choices=pages(), metavar="PAGE")
    for page in parser.parse_args(arguments).pages:
        for block in blocks(page):
            for command in () if block.not_run or block.language == "python" else commands(block):
                print(command)


if __name__ == "__main__":
    main()
