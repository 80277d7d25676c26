"""Messages quoted in docs/troubleshooting.md match those in the code."""

from __future__ import annotations

import ast
import functools
import re

import pytest
from support.paths import ROOT

from tools import snippets

PAGE = "docs/troubleshooting.md"
#: Minimum characters of a message's longest constant part; shorter ones are not specific.
SHORTEST = 7


@functools.cache
def texts() -> str:
    """String constants of the packages; placeholders of f-strings become `...`."""
    found = []
    for package in ("jax_q4k", "models", "ptx_kernels"):
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
                elif isinstance(node, ast.JoinedStr):
                    parts = [
                        str(part.value) if isinstance(part, ast.Constant) else "..."
                        for part in node.values
                    ]
                    found.append("".join(parts))
    return "\n".join(found)


def pieces(message: str) -> list[str]:
    """Constant parts of a message, between the variable parts and without file and field names."""
    differs = r"'?\.\.\.'?|: |; ?$|libjax_q4k\.so|\$JAX_Q4K_KERNELS|'native'|'ptx'|\b(prompt|x|w)\b"
    parts = re.split(differs, message)
    return [part.strip(" ;") for part in parts if part and re.search(r"\w", part)]


def messages() -> list[str]:
    blocks = snippets.blocks(PAGE)
    return [line for b in blocks if b.language == "text" for line in b.code.splitlines()]


@pytest.mark.parametrize("message", messages())
def test_message_is_in_the_code(message):
    found = pieces(message)
    longest = max(found, key=len, default="")
    assert len(longest) >= SHORTEST, f"{message!r} has nothing to look for"
    for piece in found:
        assert piece in texts(), piece


def test_messages_that_no_code_has_are_detected():
    assert "already exists" in texts() and "already exists, alas" not in texts()
    assert pieces("... already exists, alas; --force replaces it")[0] not in texts()
