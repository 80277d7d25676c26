"""Reads llama.cpp's importance matrices, which weight the squared errors of columns."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from jax_q4k import GGUFError, QuantizedArray, gguf

_SUMS, _COUNTS = ".in_sum2", ".counts"


def read_imatrix(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Returns GGUF tensor name -> mean squared activation per column, float32 (k,) or (experts, k).

    The layout is that of llama.cpp's `llama-imatrix`. Per tensor it has NAME.in_sum2 (k,), the sums
    of squares over rows of activations, and NAME.counts (1,), the number of rows. For experts they
    are (experts, k) and (experts, 1). If each head has a matrix and rows are counted together, sums
    and weights of all heads are one row, (heads * k,). Columns without rows, as for an expert that
    no token used, get weight 1.

    Raises jax_q4k.GGUFError if the file is not an importance matrix.
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
    return {name: _means(file, name, total, counts.get(name)) for name, total in sums.items()}


def _means(file: str, name: str, sums: np.ndarray, counts: np.ndarray | None) -> np.ndarray:
    """Divides sums (k,) or (experts, k) by one count, or by one count per expert."""
    if sums.ndim not in (1, 2):
        problem = f"has shape {sums.shape}, expected (k,) or (experts, k)"
        raise GGUFError(file, f"tensor {name + _SUMS!r}", problem)
    experts = 1 if sums.ndim == 1 else len(sums)
    if counts is None or counts.size not in (1, experts):
        found = "is missing" if counts is None else f"has shape {counts.shape}"
        problem = f"{found}, but sums have shape {sums.shape}"
        raise GGUFError(file, f"tensor {name + _COUNTS!r}", problem)
    rows = counts.reshape(-1, 1).astype(np.float64)
    means = np.where(rows > 0, sums.reshape(len(rows), -1) / np.where(rows > 0, rows, 1), 1)
    if means.max() > np.finfo(np.float32).max:
        problem = "is so small that means are infinite in float32"
        raise GGUFError(file, f"tensor {name + _COUNTS!r}", problem)
    return means.astype(np.float32).reshape(sums.shape)


def _numbers(file: str, name: str, tensor: Any) -> np.ndarray:
    packed = isinstance(tensor, QuantizedArray)
    if packed or tensor.dtype != np.float32 or (values := np.asarray(tensor)).min() < 0:
        raise GGUFError(file, f"tensor {name!r}", "must hold non-negative float32 numbers")
    return values
