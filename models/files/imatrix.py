"""llama.cpp's importance matrices: weights of the squared errors of a matrix's columns."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from jax_q4k import GGUFError, QuantizedArray, gguf

_SUMS, _COUNTS = ".in_sum2", ".counts"


def read_imatrix(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """GGUF tensor name -> float32 (k,): the mean square of the activations that met each column.

    The layout is that of llama.cpp's `llama-imatrix`: per tensor NAME.in_sum2 (k,), sums of squares
    over rows of activations, and NAME.counts (1,), the number of rows. A tensor that met none has
    weights of 1.

    Raises:
      jax_q4k.GGUFError: no such file, or sums of experts, which no model here has.
    """
    file = os.fsdecode(path)
    read = gguf.read(path)
    found = read.metadata.get("general.type")
    if found != "imatrix":
        problem = f"must be 'imatrix', not {found!r} (the older .dat format is not read)"
        raise GGUFError(file, "general.type", problem)
    sums, counts = (
        {
            name.removesuffix(end): _numbers(file, name, tensor)
            for name, tensor in read.tensors.items()
            if name.endswith(end)
        }
        for end in (_SUMS, _COUNTS)
    )
    importance = {}
    for name, total in sums.items():
        count = counts.get(name, np.zeros(0))
        if count.size != 1:
            problem = f"must hold one number, not {count.size}"
            raise GGUFError(file, f"tensor {name + _COUNTS!r}", problem)
        importance[name] = total / count if count[0] > 0 else np.ones_like(total)
    return importance


def _numbers(file: str, name: str, tensor: Any) -> np.ndarray:
    packed = isinstance(tensor, QuantizedArray)
    if packed or tensor.dtype != np.float32 or (values := np.asarray(tensor)).min() < 0:
        raise GGUFError(file, f"tensor {name!r}", "must hold non-negative float32 numbers")
    return values.reshape(-1)
