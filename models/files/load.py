"""Loads a model by path or name: a GGUF file, a checkpoint, the demo, or a model on the hub."""

from __future__ import annotations

import errno
import glob
import os
import re
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from jax_q4k import CheckpointError

from ..runner.model import Model
from ..sharding.plan import Rules
from ..support.assets import DEMO, HUB_EXAMPLE, demo_path
from . import hub
from .checkpoints.checkpoint import from_pretrained
from .gguf import from_gguf
from .lora import adapters as lora_files
from .sources import is_checkpoint

#: Phrases for errors.
KINDS = (
    "a model is a GGUF file, a checkpoint folder, a name on the Hugging Face hub such as "
    f"{HUB_EXAMPLE}, or demo"
)
CHECKPOINT = "a checkpoint folder holds config.json, *.safetensors and tokenizer.json"
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")


def located(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Resolves "demo" and names on the Hugging Face hub to paths; returns other paths unchanged."""
    if path == DEMO:
        return demo_path()
    named = hub.named(path)
    if named is not None:
        return hub.fetched(named)
    if not os.path.lexists(path):
        raise FileNotFoundError(errno.ENOENT, f"no such file or folder; {KINDS}", os.fsdecode(path))
    if os.path.isdir(path) and not os.path.exists(os.path.join(path, "config.json")):
        return _gguf_file_of(os.fsdecode(path))
    return path


def _gguf_file_of(folder: str) -> str:
    """Returns the path of a folder's only GGUF model."""
    files = sorted(glob.glob("*.gguf", root_dir=folder))
    models = [name for name in files if not hub.NO_MODELS.search(name)]
    models = [name for name in models if not _LATER_PART.search(name)]
    if len(models) == 1:
        return os.path.join(folder, models[0])
    if models:
        named = ", ".join(models[:4]) + (", ..." if len(models) > 4 else "")
        raise CheckpointError(folder, "folder", f"holds {len(models)} models; name one: {named}")
    if os.path.exists(os.path.join(folder, "adapter_config.json")):
        raise CheckpointError(
            folder, "folder", "is a LoRA adapter; load its base model with this as lora= or --lora"
        )
    raise FileNotFoundError(errno.ENOENT, f"no model in this folder; {CHECKPOINT}", folder)


def load(
    path: str | os.PathLike[str],
    *,
    progress: Callable[[int, int], object] | None = None,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
    lora: Any = None,
) -> Model:
    """Loads a model with `from_gguf` or `from_pretrained`.

    Args:
      path: a GGUF file, or the first of several, NAME-00001-of-00003.gguf; the folder of a Hugging
        Face checkpoint, or one .safetensors file in it; or "demo", the small model that comes with
        this package. If no such file exists, a name on the Hugging Face hub, ORG/NAME,
        ORG/NAME:Q4_K_M or ORG/NAME/FILE.gguf, which is downloaded.
      progress: called with (bytes done, total bytes) while tensors are read.
      mesh: devices to shard the model over, along the mesh's only axis, or the axis named `tp`,
        `model` or `tensor`. Along an axis named `dp`, `data` or `batch`, batches are split and the
        model is replicated. Shards are sent to their devices while tensors are read; a process
        reads only the shards of its own devices.
      rules: GGUF tensor name without `blk.N.` and `.weight` -> partition of its axes,
        {"attn_q": P("tp"), "attn_output": P(None, "tp")}; tensors without a rule are replicated.
        None means Megatron's rules, which split the first projections of attention and MLP by rows
        and the last by columns, or by rows if columns cannot be split between quantization blocks.
        A warning names tensors that are replicated.
      lora: LoRA adapters: a path, (path, scale), or a list of these; see `with_lora`.

    Raises:
      jax_q4k.GGUFError, jax_q4k.CheckpointError: a file is malformed or not supported. OSError: it
        cannot be read. ValueError: a rule names an unknown tensor or mesh axis, or splits within a
        row or quantization block. TypeError: not a Mesh, or not a PartitionSpec.
    """
    path = located(path)
    read = from_pretrained if is_checkpoint(path) else from_gguf
    adapters = [] if lora is None else list(lora_files.adapter_specs(lora))
    model = read(path, progress=progress, mesh=mesh, rules=rules)
    for adapter, scale in adapters:
        model = lora_files.with_lora(model, adapter, scale=scale)
    return model
