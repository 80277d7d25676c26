"""Folders that tests read."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
DATA = TESTS / "data"
#: Small models, with logits and tokens from llama.cpp.
GOLDEN = DATA / "golden"
EXAMPLES = ROOT / "examples"


def cache_folder() -> Path:
    """Folder of the tests' caches, below `$XDG_CACHE_HOME` or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jax-q4k-tests"
