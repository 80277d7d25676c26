"""ggml's block formats, one module each: byte layout, planes, decoders, readers for kernels.

A format is a module of this package that has a `FORMAT`; there is no other list. `get("Q4_K")`
looks one up by ggml's name. F32, F16 and BF16 tensors have no blocks and are not listed here.
"""

from __future__ import annotations

import importlib
import pkgutil

from .base import BlockFormat, Plane


def _found() -> dict[str, BlockFormat]:
    """The formats of this package by name, those of short blocks first."""
    names = (module.name for module in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    found = [module.FORMAT for module in modules if hasattr(module, "FORMAT")]
    return {f.name: f for f in sorted(found, key=lambda f: (f.block_size, f.name))}


_FORMATS = _found()

__all__ = ["BlockFormat", "Plane", "get", "names"]


def names() -> tuple[str, ...]:
    """The names of all block formats: ("Q4_0", ...)."""
    return tuple(_FORMATS)


def get(name: str) -> BlockFormat:
    """The block format of that name; ValueError listing the known ones otherwise."""
    try:
        return _FORMATS[name]
    except (KeyError, TypeError):
        raise ValueError(f"format={name!r} must be one of {', '.join(_FORMATS)}") from None
