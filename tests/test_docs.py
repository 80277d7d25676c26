"""The Python snippets of docs/ run as they stand: a section's after those before the first."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
#: What a snippet may need beyond the package's dependencies: module -> where it is used.
OPTIONAL = {"orbax.checkpoint": "import orbax", "flatbuffers": ".serialize()"}


def sections() -> list:
    """(setup, code) of each section that has any, by page and heading."""
    found = []
    for page in sorted(DOCS.glob("*.md")):
        head, *parts = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)
        setup = snippets(head)
        for part in parts:
            if code := snippets(part):
                found.append(pytest.param(setup, code, id=f"{page.stem}-{part.splitlines()[0]}"))
    return found


def snippets(text: str) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


@pytest.mark.parametrize("setup, code", sections())
def test_snippets(setup, code, tmp_path, monkeypatch):
    for module, use in OPTIONAL.items():
        if use in code:
            pytest.importorskip(module, reason=f"{module} is no dependency of jax-q4k")
    monkeypatch.chdir(tmp_path)
    exec(compile(f"{setup}\n{code}", "snippets", "exec"), {"__name__": "snippets"})


def test_links():
    for page in DOCS.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (DOCS / target).exists(), f"{page.name}: {target}"
