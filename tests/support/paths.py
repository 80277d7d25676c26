"""Folders that tests read from."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
DATA = TESTS / "data"
#: Small models with llama.cpp's logits and tokens.
GOLDEN = DATA / "golden"
EXAMPLES = ROOT / "examples"


def cache_folder() -> Path:
    """Folder of what tests keep from one run to the next, below `$XDG_CACHE_HOME` or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jax-q4k-tests"
