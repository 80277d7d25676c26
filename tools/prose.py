"""Checks docstrings, comments and Markdown for hard-to-read sentences and private vocabulary.

`python -m tools.prose [PATH ...]` lists what it finds as `file:line: problem` and fails if there is
anything. `make lint` runs it on all files.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

#: First words of a docstring that make a sentence without a subject or a verb.
FIRST_WORDS = frozenset(
    "Of As That Those These What Which Where Whose Whom How When With By In At To If Such".split()
)
FIRST_PHRASES = ("True of", "True where", "There is", "There are", "It is", "Whether or")

#: Private vocabulary, as regular expressions, and the field's term.
WORDS = {
    r"\bways? of sampling\b": "sampling parameters, or sampling stages",
    r"\bon (?:its|their|the) way\b": "in flight, or in progress",
    r"\bunder way\b": "in progress",
    r"\basks? (?:for )?ahead\b|\basked (?:for )?ahead\b": "prefetch",
    r"\bused lately\b": "recently used",
    r"\bas far as\b": "up to",
    r"\bby itself\b": "alone, or separately",
    r"\bthe way (?:down|in|up)\b": "down, gate or up projection",
    r"\b[Aa] mixture\b(?! of)": "mixture of experts, or MoE",
    r"\bhave fared\b": "acceptance statistics",
    r"\bmeans nothing\b|\bmean nothing\b": "is unspecified, or is ignored",
    r"\bwhat is there\b": "name it",
    r"\bone (?:behind|after) the other\b": "in sequence, or concatenated",
    r"\bput together anew\b": "rebuilt",
    r"\blikeliest\b": "most likely",
}

#: File types that are checked, and folders with foreign or generated text.
SUFFIXES = (".py", ".md", ".h", ".cpp")
LEFT_OUT = ("tests/data/", "benchmarks/results/", "docs/data/")


class Text(NamedTuple):
    """A docstring, comment or line of Markdown, and the line where it begins."""

    line: int
    text: str
    is_docstring: bool = False


def problems(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, problem) for one file."""
    source = path.read_text()
    if path.suffix == ".py":
        texts = python_texts(source)
    elif path.suffix == ".md":
        texts = markdown_texts(source)
    else:
        texts = cpp_texts(source)
    for text in texts:
        if text.is_docstring:
            first = text.text.split(maxsplit=1)[0] if text.text.strip() else ""
            if first in FIRST_WORDS or text.text.startswith(FIRST_PHRASES):
                yield text.line, f"docstring begins with {first!r}; begin with a verb or a noun"
        for pattern, instead in WORDS.items():
            for match in re.finditer(pattern, text.text):
                line = text.line + text.text.count("\n", 0, match.start())
                yield line, f"{match.group()!r}: say {instead}"


def python_texts(source: str) -> Iterator[Text]:
    """Yields the docstrings and comments of a Python file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield Text(node.body[0].lineno, text, is_docstring=True)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(token.start[0], token.string)


def markdown_texts(source: str) -> Iterator[Text]:
    """Yields the lines of a Markdown file outside of code blocks."""
    in_code = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield Text(number, line)


def cpp_texts(source: str) -> Iterator[Text]:
    """Yields the comments of a C++ file."""
    for number, line in enumerate(source.splitlines(), 1):
        _, found, comment = line.partition("//")
        if found:
            yield Text(number, comment)


def files(paths: list[str]) -> list[Path]:
    """Returns the tracked files below the paths, or all of the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *paths],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    names = [name for name in listed.stdout.split("\0") if name.endswith(SUFFIXES)]
    found = [ROOT / name for name in names if not name.startswith(LEFT_OUT)]
    return [file for file in found if file.is_file() and not file.is_symlink()]


def main(paths: list[str]) -> int:
    count = 0
    for file in files(paths):
        for line, problem in sorted(problems(file)):
            print(f"{file.relative_to(ROOT)}:{line}: {problem}")
            count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
