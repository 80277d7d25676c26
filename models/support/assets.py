"""Locates the package's data files: the demo model."""

from __future__ import annotations

import importlib.resources
import os
from pathlib import Path


def demo_path() -> Path:
    """Returns the path of the demo model, the only GGUF file in `jax_q4k/assets`.

    Raises FileNotFoundError if the package was built without it.
    """
    folder = importlib.resources.files("jax_q4k") / "assets"
    entries = folder.iterdir() if folder.is_dir() else ()
    found = [entry for entry in entries if entry.name.endswith(".gguf")]
    if len(found) != 1:
        problem = f"{folder} holds {len(found)} .gguf files, expected one"
        raise FileNotFoundError(f"the demo model is not installed: {problem}")
    # A real path, because the package is not run from an archive.
    return Path(os.fspath(found[0]))  # type: ignore[call-overload]
