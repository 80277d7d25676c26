"""Loads the native CPU kernels, XLA FFI handlers in a shared library, and calls them.

The library is built when the package is installed.
"""

from __future__ import annotations

import ctypes
import functools
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ptx_kernels.formats.unpack import codebooks

from .. import cpus, float_types
from ..errors import NativeUnavailableWarning
from . import build

#: Names of the handlers, without the prefix of symbols and XLA targets.
HANDLERS = (
    "linear",
    "mlp",
    "expert_mlp",
    "expert_matmul",
    "route",
    "embedding",
    "paged_attention",
    "causal_attention",
    "rope_append",
    "rotate",
    "gated_delta_rule",
    "gated_delta_step",
    "argmax",
    "top_k",
    "draw",
    "codebook_search",
)
#: XLA's names of the handlers.
TARGETS = tuple(f"jax_q4k_{name}" for name in HANDLERS)

#: Dtypes of values to quantize, in the order of `FloatType` in quantizers.h.
_FLOAT_TYPES = [of.dtype for of in (float_types.F32, float_types.F16, float_types.BF16)]

#: Environment variable that names the kernel set to use, instead of the processor's best.
VARIABLE = "JAX_Q4K_KERNELS"


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    """Loads the library and registers its handlers.

    Returns (library, ""), or (None, reason) if it cannot be loaded.
    """
    path = library_path()
    if not path.exists():
        return None, f"{build.LIBRARY} was not built; {build.HOW_TO}"
    try:
        if not build.is_sealed(path.read_bytes()):
            return None, f"{path} is damaged: its checksum differs or is missing; {build.HOW_TO}"
        library = ctypes.CDLL(str(path))
        library.jax_q4k_fingerprint.restype = ctypes.c_char_p
        built, now = library.jax_q4k_fingerprint().decode(), build.fingerprint()
        # an editable installation is not rebuilt when its sources change
        if now and built != now:
            return (
                None,
                f"{build.LIBRARY} was built from other sources than those next to it; "
                f"{build.HOW_TO}",
            )
        library.jax_q4k_kernels.restype = library.jax_q4k_compiled.restype = ctypes.c_char_p
        library.jax_q4k_select.restype = ctypes.c_bool
        library.jax_q4k_select.argtypes = [ctypes.c_char_p]
        library.jax_q4k_code_books.restype = ctypes.c_void_p
        library.jax_q4k_code_books_size.restype = ctypes.c_uint64
        library.jax_q4k_quantize.argtypes = [
            ctypes.c_char_p,
            ctypes.c_void_p,
            ctypes.c_int32,
            ctypes.c_int64,
            ctypes.c_void_p,
            *[ctypes.c_int64] * 3,
            ctypes.c_float,
            ctypes.c_void_p,
            ctypes.c_int64,
        ]
        name = named()
        if name and not library.jax_q4k_select(name.encode()):
            return None, _refusal(name, library.jax_q4k_compiled().decode().split())
        for target in TARGETS:
            jax.ffi.register_ffi_target(
                target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu"
            )
    except (OSError, AttributeError, RuntimeError, ValueError) as error:
        return None, f"{build.LIBRARY} cannot be used ({error}); {build.HOW_TO}"
    return library, ""


def prepare(format: str) -> None:
    """Passes ggml's codebooks to the library, if the format's weights are codebook entries.

    Imports the package that has the codebooks.
    """
    if format.startswith(("IQ1_", "IQ2_", "IQ3_")):
        _hand_over_code_books()


@functools.cache
def _hand_over_code_books() -> None:
    """Copies the codebooks, in the order of `CodeBooks` in kernels.h."""
    library, _ = _load()
    if library is None:
        return
    books = [
        ("IQ1_S", 8, 8),
        *((f"IQ{name}", 1, 0) for name in ("2_S", "2_XS", "2_XXS", "3_S", "3_XXS")),
    ]
    words = [np.array(codebooks.words(*book), np.uint32) for book in books]
    data = np.concatenate(words).tobytes()
    if len(data) != library.jax_q4k_code_books_size():
        raise RuntimeError(f"its code books have {library.jax_q4k_code_books_size()} bytes")
    ctypes.memmove(library.jax_q4k_code_books(), data, len(data))


def _refusal(name: str, in_library: list[str]) -> str:
    if name not in build.kernels():
        why = f"must be one of {', '.join(build.kernels())}"
    elif name not in in_library:
        why = "not in the library: its compiler does not support them"
    else:
        why = "this processor does not support them"
    return f"${VARIABLE}={name!r}: {why}"


def named() -> str | None:
    """Returns the kernel set that $JAX_Q4K_KERNELS names, None if it is not set."""
    return os.environ.get(VARIABLE) or None


def library_path() -> Path:
    """Returns the path of the shared library."""
    return Path(__file__).with_name(build.LIBRARY)


def available() -> bool:
    """Returns whether the library is loaded and its handlers are registered."""
    return _load()[0] is not None


def problem() -> str:
    """Returns why the library is not available, with a remedy; empty if it is available."""
    return _load()[1]


@functools.cache
def warn_if_unavailable() -> None:
    """Warns once per process that plain JAX replaces the native kernels.

    The message says what is missing.
    """
    if not available():
        message = f"plain JAX, which is slow, replaces the CPU kernels: {problem()}"
        warnings.warn(message, NativeUnavailableWarning, stacklevel=2)


def kernels() -> str | None:
    """Returns the name of the kernel set in use, None if the library is not available.

    The set is `avx512`, `avxvnni`, `avx2`, `neon` or `portable`: the processor's best, or the one
    that $JAX_Q4K_KERNELS names.
    """
    library, _ = _load()
    return None if library is None else library.jax_q4k_kernels().decode()


def compiled() -> list[str]:
    """Returns the names of the kernel sets in the library; an old compiler may omit some."""
    library, _ = _load()
    return [] if library is None else library.jax_q4k_compiled().decode().split()


def select(name: str) -> None:
    """Switches the process to the kernel set of that name, for tests and measurements.

    No program may be running: kernel sets do not read each other's prepared data. Raises ValueError
    if there is no such set, or if the processor cannot run it.
    """
    library, why = _load()
    if library is None or not library.jax_q4k_select(name.encode()):
        raise ValueError(f"name={name!r}: this processor has no such kernels{why and f'; {why}'}")


def quantize(
    format: str,
    x: np.ndarray,
    importance: np.ndarray,
    first: int,
    largest: float,
    packed: np.ndarray,
) -> bool:
    """Quantizes blocks by one call without JAX; the library must be available.

    Args:
      format: name of a block format, or F32, F16 or BF16, whose blocks are single values.
      x: float32, float16 or bfloat16 (blocks, block_size), contiguous; for a single value
        (count, 1).
      importance: float32 (period, block_size), contiguous and positive; block b has row
        (first + b) % period.
      largest: largest magnitude of a value.
      packed: uint8 (blocks, block_bytes), contiguous, which the call fills.

    Returns:
      Whether all values are finite and not too large; if not, `packed` is not complete.
    """
    library, why = _load()
    if library is None:
        raise RuntimeError(why)
    done = library.jax_q4k_quantize(
        format.encode(),
        x.ctypes.data,
        _FLOAT_TYPES.index(x.dtype),
        x.shape[1],
        importance.ctypes.data,
        len(x),
        first,
        len(importance),
        largest,
        packed.ctypes.data,
        packed.shape[1],
    )
    if done < 0:
        raise ValueError(f"format={format!r} has no such quantizer")
    return bool(done)


def call(
    name: str,
    results: Sequence[jax.ShapeDtypeStruct],
    *operands: jax.Array,
    aliases: Mapping[int, int] | None = None,
    **attributes: Any,
) -> list[jax.Array]:
    """Calls an FFI handler by name; returns its results.

    aliases: operand index -> index of the result that reuses the operand's buffer.

    Operands that do not fit raise a JaxRuntimeError when the program runs.
    """
    typed = {
        key: np.float32(value) if isinstance(value, float) else value
        for key, value in attributes.items()
    }
    typed = {
        key: np.int64(v) if isinstance(v, int) and not isinstance(v, bool) else v
        for key, v in typed.items()
    }
    ffi_call = jax.ffi.ffi_call(
        f"jax_q4k_{name}", results, input_output_aliases=dict(aliases or {})
    )
    return list(ffi_call(*operands, **typed))


# At import, since a program exported elsewhere may call the handlers before anything is lowered,
# and since XLA counts its threads once.
cpus.limit_threads()
_load()
