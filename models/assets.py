"""What comes with the package beside its code."""

from __future__ import annotations

import importlib.resources
import os
from pathlib import Path


def demo_path() -> Path:
    """The GGUF file of the small model that the package ships, the only one in `jax_q4k/assets`.

    Raises FileNotFoundError where the package was built without it.
    """
    folder = importlib.resources.files("jax_q4k") / "assets"
    found = (
        [entry for entry in folder.iterdir() if entry.name.endswith(".gguf")]
        if folder.is_dir()
        else []
    )
    if len(found) != 1:
        raise FileNotFoundError(
            f"the demo model is not installed: {folder} holds {len(found)} .gguf files, expected one"
        )
    return Path(os.fspath(found[0]))  # type: ignore[call-overload]  # a file: packages are not run from archives
