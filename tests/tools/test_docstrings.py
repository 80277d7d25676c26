"""Parses this repository's docstrings with griffe, for the API reference."""

from __future__ import annotations

import pytest
from support.paths import ROOT

griffe = pytest.importorskip("griffe", reason="griffe is of the extra docs")

from tools.docstrings import entries_apart  # noqa: E402

DOCSTRING = """Attention.

    Args:
      k, v: of the same shape; what
        is masked: nothing. scale: of the scores.
      scale_of: other.

    Returns:
      out: (b, h).

    Raises:
      ValueError: a size: 0. jq.GGUFError, a ValueError: damaged; see
        read. OSError, MemoryError: no file.
    """


def test_an_entry_for_each_name():
    assert entries_apart(DOCSTRING, ["k", "v", "scale", "scale_of"]).splitlines() == [
        "Attention.",
        "",
        "    Args:",
        "        k: of the same shape; what is masked: nothing.",
        "        v: of the same shape; what is masked: nothing.",
        "        scale: of the scores.",
        "        scale_of: other.",
        "",
        "    Returns:",
        "      out: (b, h).",
        "",
        "    Raises:",
        "        ValueError: a size: 0.",
        "        jq.GGUFError: damaged; see read.",
        "        OSError: no file.",
        "        MemoryError: no file.",
    ]


def test_other_docstrings_stay():
    text = "One.\n\n    Args of a call: none.\n\n    A list:\n      a: b"
    assert entries_apart(text) == text


def test_griffe_reads_every_parameter_of_the_public_operations():
    """`make docs` treats griffe's warning about an argument that the function lacks as an error."""
    extensions = griffe.load_extensions(str(ROOT / "tools" / "docstrings.py"))
    package = griffe.load(
        "jax_q4k", extensions=extensions, docstring_parser="google", search_paths=[ROOT]
    )
    function = package["ops.paged_attention.paged_attention"]
    (described,) = [s for s in function.docstring.parsed if s.kind.value == "parameters"]
    names = [p.name for p in described.value]
    assert {"k_pages", "v_pages", "k_scales", "v_scales"} <= set(names)
    assert set(names) <= {p.name for p in function.parameters}
