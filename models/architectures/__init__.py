"""Supported model architectures; each module describes one as its ARCHITECTURE."""

from __future__ import annotations

import importlib
import pkgutil

from .base import Architecture

_modules = (
    importlib.import_module(f"{__name__}.{module.name}")
    for module in pkgutil.iter_modules(__path__)
)

#: `general.architecture` -> its description.
ARCHITECTURES: dict[str, Architecture] = {
    module.ARCHITECTURE.name: module.ARCHITECTURE
    for module in _modules
    if hasattr(module, "ARCHITECTURE")  # `base` and `tensor_tables` have none
}
