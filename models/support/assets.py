"""Names of models that come with the package or can be downloaded."""

from __future__ import annotations

import importlib.resources
import os
from pathlib import Path

#: Name of the model that comes with the package.
DEMO = "demo"
HUB_EXAMPLE = "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M"


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
