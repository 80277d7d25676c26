"""The linter of sentences finds what it should, in each kind of file, and nothing in the rest."""

from __future__ import annotations

import pytest

from tools import prose

PYTHON = '''"""As others do."""  # on its way


def f():
    """Returns x, the likeliest."""
    return "Of a string, under way"
'''


def found(path, text):
    path.write_text(text)
    return sorted(prose.problems(path))


def test_docstrings_and_comments(tmp_path):
    comment, first, word = found(tmp_path / "a.py", PYTHON)
    assert first == (1, "docstring begins with 'As'; begin with a verb or a noun")
    assert comment == (1, "'on its way': say in flight, or in progress")
    assert word == (5, "'likeliest': say most likely")


@pytest.mark.parametrize("first", ["True of x.", "What x is.", "Of x, y.", "Those of x."])
def test_first_words(tmp_path, first):
    assert found(tmp_path / "a.py", f'"""{first}"""\n')
    assert not found(tmp_path / "a.py", f'"""Returns {first}"""\n')


def test_markdown_and_cpp(tmp_path):
    text = "A way of sampling.\n```\nunder way\n```\n"
    assert found(tmp_path / "a.md", text) == [
        (1, "'way of sampling': say sampling parameters, or sampling stages")
    ]
    assert found(tmp_path / "a.h", 'int x = 1;  // means nothing\nauto y = "under way";\n') == [
        (1, "'means nothing': say is unspecified, or is ignored")
    ]


def test_the_command_fails_if_there_is_anything(tmp_path, monkeypatch, capsys):
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text('"""Returns x."""\n')
    bad.write_text('"""Of x."""\n')
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose, "files", lambda paths: [tmp_path / path for path in paths])
    assert prose.main(["good.py"]) == 0 and prose.main(["good.py", "bad.py"]) == 1
    assert capsys.readouterr().out == (
        "bad.py:1: docstring begins with 'Of'; begin with a verb or a noun\n"
    )
