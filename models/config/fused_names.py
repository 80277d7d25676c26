"""Names of fused tensors of GGUF files, such as attn_qkv, and of their parts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator

from ..architectures.tensor_tables import SCALES
from .config import Config

#: Fused tensor -> tensors whose rows it holds, in this order.
FUSED = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "ffn_up": ("ffn_gate", "ffn_up"),  # in architectures that list it in `fused`
    "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"),  # for each expert
}
_NAME = re.compile(rf"(blk\.\d+\.)(\w+)\.(weight|bias|{'|'.join(SCALES)})")
#: Fused tensors that no file holds in parts.
ALWAYS = ("ffn_up",)


def parts_of(config: Config, name: str) -> tuple[str, ...]:
    """Returns the names of the parts of a fused tensor; () if the tensor is not fused."""
    match = _NAME.fullmatch(name)
    if match is None:
        return ()
    layer, short, suffix = match.groups()
    if short in ALWAYS and short not in config.kind.fused:
        return ()
    return tuple(f"{layer}{part}.{suffix}" for part in FUSED.get(short, ()))


def fused_names(config: Config, names: Collection[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields (fused name, names of its parts) for tensors that the architecture's files fuse."""
    for layer, short, suffix in itertools.product(
        range(config.num_layers), config.kind.fused, ("weight", "bias")
    ):
        fused = f"blk.{layer}.{short}.{suffix}"
        parts = parts_of(config, fused)
        if all(part in names for part in parts):
            yield fused, parts
