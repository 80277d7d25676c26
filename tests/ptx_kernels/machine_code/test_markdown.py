"""Every strategy and family has a paragraph in docs/kernels.md and a table in kernel-tables.md.

The tables have the rows they should.
"""

from __future__ import annotations

import re

import pytest
from support.paths import ROOT

from ptx_kernels.kernels import KERNELS
from ptx_kernels.kernels.matvec import PRESETS
from ptx_kernels.machine_code import markdown

PROSE, TABLES = ROOT / "docs" / "kernels.md", ROOT / "docs" / "kernel-tables.md"
ADVICE = (
    "python -m ptx_kernels report --markdown docs/kernel-tables.md [--family F] writes the tables"
)


def test_tables_are_up_to_date():
    """Their rows: figures differ between versions of ptxas."""
    found = markdown.labels(TABLES.read_text())
    assert found == {name: table.labels for name, table in markdown.tables().items()}, ADVICE


@pytest.mark.parametrize("name", [*PRESETS, *(family for family in KERNELS if family != "matvec")])
def test_a_paragraph_says_idea_advantage_and_source(name):
    section = re.search(
        rf"^### {name}\n\n(.+?)(?=^##|\Z)", PROSE.read_text(), re.MULTILINE | re.DOTALL
    )
    assert section, f"docs/kernels.md has no section {name}"
    headed = rf"^### {name} table\n\n<!-- table: \w+ {name} -->$"
    assert re.search(headed, TABLES.read_text(), re.MULTILINE), f"no table under heading {name}"
    idea, wins, source = re.split(r"\*Wins\*: |\*Source\*: ", section.group(1))
    assert min(map(len, (idea, wins, source))) > 20


def test_rewriting_fills_in_what_is_marked(tmp_path, monkeypatch):
    made = markdown.Table(("a", "b"), lambda: markdown._lines(("x", "y"), [("a", "1"), ("b", "2")]))
    monkeypatch.setattr(markdown, "tables", lambda: {"t": made})
    path = tmp_path / "docs.md"
    path.write_text("Before, ptxas 0.0.0\n<!-- table: t -->\nold\n<!-- end -->\nafter\n")
    markdown.rewrite(path)
    text = path.read_text()
    assert (
        "\n| x | y |\n| --- | ---: |\n| a | 1 |\n| b | 2 |\n" in text
        and "old" not in text
        and "0.0.0" not in text
    )
    assert markdown.labels(text) == {"t": made.labels}
    markdown.rewrite(path)
    assert path.read_text() == text
    path.write_text(
        "<!-- table: t -->\nold\n<!-- end -->\n<!-- table: u -->\nolder\n<!-- end -->\n"
    )
    monkeypatch.setattr(markdown, "tables", lambda: {"t": made, "u": made})
    markdown.rewrite(path, only="u")
    assert "old\n" in path.read_text() and "older" not in path.read_text()
    with pytest.raises(markdown.MarkdownError, match=r"docs\.md: no marks of a table 'v'"):
        markdown.rewrite(path, only="v")
    monkeypatch.setattr(markdown, "tables", lambda: {"t": made})
    path.write_text("<!-- table: none -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match="table 'none' must be one of t"):
        markdown.rewrite(path)
