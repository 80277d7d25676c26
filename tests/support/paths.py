"""Folders that tests read from."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
DATA = TESTS / "data"
#: Small models with llama.cpp's logits and tokens.
GOLDEN = DATA / "golden"
EXAMPLES = ROOT / "examples"
