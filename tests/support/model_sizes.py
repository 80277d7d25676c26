"""Bytes of the tensors of a published model, from its Config and a recipe's types."""

from __future__ import annotations

import math
from typing import NamedTuple

from gguf import GGMLQuantizationType

from jax_q4k import gguf
from jax_q4k.models.config import Config
from jax_q4k.models.config.tensors import expected_tensors
from jax_q4k.models.files.quantizing import recipes
from ptx_kernels import formats


class Tensor(NamedTuple):
    """A tensor of a file."""

    shape: tuple[int, ...]
    type: GGMLQuantizationType

    @property
    def nbytes(self) -> int:
        if self.type.name in gguf.PLAIN:
            return math.prod(self.shape) * gguf.PLAIN[self.type.name].dtype.itemsize
        found = formats.get(self.type.name)
        return math.prod(self.shape) // found.block_size * found.block_bytes


def packed_tensors(config: Config, recipe: str) -> dict[str, Tensor]:
    """Returns the tensors of a model with an output matrix of its own, in the recipe's types.

    Llama 3's files also have the factors of its rope frequencies.
    """
    shapes = {n: e.shape for n, e in expected_tensors(config).items() if e.required}
    shapes["output.weight"] = (config.vocab_size, config.hidden_size)
    if config.architecture == "llama":
        shapes["rope_freqs.weight"] = (config.head_dim // 2,)
    types = recipes.tensor_types(recipes.get(recipe), config, shapes)
    return {name: Tensor(shapes[name], GGMLQuantizationType[kind]) for name, kind in types.items()}
