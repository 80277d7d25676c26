"""The CPU's kernels: XLA FFI handlers in a shared library that is built when the package is installed."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from . import build

#: Name of each handler, without the prefix of its symbol and XLA target.
HANDLERS = ("products", "embedding", "paged_attention", "causal_attention", "rope_append", "rotate")
_PREFIX = "jax_q4k_"


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library, its handlers registered, and "", or None and why there is none."""
    path = Path(__file__).with_name(build.LIBRARY)
    if not path.exists():
        return None, f"{build.LIBRARY} was not built; {build.HOW_TO}"
    try:
        library = ctypes.CDLL(str(path))
        for name in HANDLERS:
            symbol = getattr(library, _PREFIX + name)
            jax.ffi.register_ffi_target(_PREFIX + name, jax.ffi.pycapsule(symbol), platform="cpu")
    except (OSError, AttributeError, RuntimeError, ValueError) as error:
        return None, f"{build.LIBRARY} cannot be used ({error}); {build.HOW_TO}"
    library.jax_q4k_kernels.restype = ctypes.c_char_p
    library.jax_q4k_select.restype = ctypes.c_bool
    library.jax_q4k_select.argtypes = [ctypes.c_char_p]
    return library, ""


def available() -> bool:
    """Whether the library is there and its handlers are registered."""
    return _load()[0] is not None


def problem() -> str:
    """Why the library is not available, and what to do; empty if it is."""
    return _load()[1]


def kernels() -> str | None:
    """The instruction set whose kernels are in use: `avx512`, `avx2`, `neon` or `portable`; None without a library."""
    library, _ = _load()
    return None if library is None else library.jax_q4k_kernels().decode()


def select(name: str) -> None:
    """Uses the kernels of that name from now on, in the whole process: for tests and measurements.

    Raises ValueError if there are none, or the processor cannot run them.
    """
    library, why = _load()
    if library is None or not library.jax_q4k_select(name.encode()):
        raise ValueError(f"name={name!r}: this processor has no such kernels{why and f'; {why}'}")


def call(
    name: str,
    results: Sequence[jax.ShapeDtypeStruct],
    *operands: jax.Array,
    aliases: Mapping[int, int] | None = None,
    **attributes: Any,
) -> list[jax.Array]:
    """One call of a handler; `aliases`: operand -> the result that takes its place."""
    _load()
    typed = {key: np.float32(value) if isinstance(value, float) else value for key, value in attributes.items()}
    typed = {key: np.int64(v) if isinstance(v, int) and not isinstance(v, bool) else v for key, v in typed.items()}
    ffi_call = jax.ffi.ffi_call(_PREFIX + name, results, input_output_aliases=dict(aliases or {}))
    return list(ffi_call(*operands, **typed))
