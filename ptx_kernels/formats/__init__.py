"""ggml's quantized block formats, one module each: byte layout, planes, decoders, kernel readers.

A format is a module of this package with a `FORMAT`; there is no other list. `get("Q4_K")` looks
one up by ggml's name. F32, F16 and BF16 tensors have no quantization blocks and are not listed
here.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import BlockFormat, Plane
else:

    def __getattr__(name: str) -> Any:
        """Imports `BlockFormat` and `Plane` on first use; `base` imports the kernel language."""
        if name not in ("BlockFormat", "Plane"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(".base", __name__), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


@functools.cache
def _found() -> dict[str, BlockFormat]:
    """Returns the formats of this package by name, those with shorter blocks first."""
    names = (module.name for module in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    found = [module.FORMAT for module in modules if hasattr(module, "FORMAT")]
    return {f.name: f for f in sorted(found, key=lambda f: (f.block_size, f.name))}


__all__ = ["BlockFormat", "Plane", "get", "names"]


def names() -> tuple[str, ...]:
    """Returns the names of all block formats: ("Q4_0", ...)."""
    return tuple(_found())


def get(name: str) -> BlockFormat:
    """Returns the block format of that name; raises ValueError with the known names otherwise."""
    try:
        return _found()[name]
    except (KeyError, TypeError):
        raise ValueError(unknown(name, names())) from None


def unknown(name: Any, known: Sequence[str]) -> str:
    """Returns the message about a format that is not `known`, with the name that it resembles.

    Another case, other separators, and llama.cpp's names of mixed files (Q4_K_M) are recognized.
    """
    message = f"format={name!r} must be one of {', '.join(known)}"
    letters = re.sub("[^A-Z0-9]", "", str(name).upper())
    begins = [n for n in known if letters.startswith(n.replace("_", ""))]
    return f"{message}; did you mean {max(begins, key=len)!r}?" if begins else message
