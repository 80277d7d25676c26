"""Models by path: a GGUF file, a checkpoint, or the demo."""

from __future__ import annotations

import os
from collections.abc import Callable

from ..assets import demo_path
from ..model import Model
from .checkpoint import from_pretrained
from .gguf import from_gguf
from .sources import is_checkpoint

DEMO = "demo"


def located(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The path itself, or that of the model that comes with this package for "demo"."""
    return demo_path() if path == DEMO else path


def load(
    path: str | os.PathLike[str], *, progress: Callable[[int, int], object] | None = None
) -> Model:
    """Loads a model, as `from_gguf` or `from_pretrained` does.

    Args:
      path: a GGUF file; a Hugging Face checkpoint's folder, or one .safetensors file in it; or
        "demo", the small model that comes with this package.
      progress: called with (bytes done, bytes in all) while tensors are read.

    Raises:
      jax_q4k.GGUFError, jax_q4k.CheckpointError: a file is malformed, or holds what is not
        supported. OSError: it cannot be read.
    """
    path = located(path)
    return (from_pretrained if is_checkpoint(path) else from_gguf)(path, progress=progress)
