"""Models by path: a GGUF file, a checkpoint, or the demo."""

from __future__ import annotations

import os
from collections.abc import Callable

from jax.sharding import Mesh

from ..assets import demo_path
from ..model import Model
from ..place import Rules
from .checkpoint import from_pretrained
from .gguf import from_gguf
from .sources import is_checkpoint

DEMO = "demo"


def located(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The path itself, or that of the model that comes with this package for "demo"."""
    return demo_path() if path == DEMO else path


def load(
    path: str | os.PathLike[str],
    *,
    progress: Callable[[int, int], object] | None = None,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
) -> Model:
    """Loads a model, as `from_gguf` or `from_pretrained` does.

    Args:
      path: a GGUF file; a Hugging Face checkpoint's folder, or one .safetensors file in it; or
        "demo", the small model that comes with this package.
      progress: called with (bytes done, bytes in all) while tensors are read.
      mesh: devices that the model is split over: along the mesh's only axis, or that named `tp`,
        `model` or `tensor`. Along one named `dp`, `data` or `batch` batches are split, and each
        part of the model is held by all devices. Each tensor's parts go to their devices as they
        are read; a process reads those of its own devices.
      rules: GGUF's name of a tensor, without `blk.N.` and `.weight`, to where its axes are split,
        {"attn_q": P("tp"), "attn_output": P(None, "tp")}; tensors without a rule are whole on every
        device. None: Megatron's: rows of what comes first in attention and in the network, columns
        of what comes behind; rows, too, where columns do not divide at their blocks; a warning
        names tensors that stay whole.

    Raises:
      jax_q4k.GGUFError, jax_q4k.CheckpointError: a file is malformed, or holds what is not
        supported. OSError: it cannot be read. ValueError: a rule that names no tensor or no axis of
        the mesh, or splits an axis within a row or a block. TypeError: no Mesh, no PartitionSpec.
    """
    path = located(path)
    read = from_pretrained if is_checkpoint(path) else from_gguf
    return read(path, progress=progress, mesh=mesh, rules=rules)
