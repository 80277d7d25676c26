"""The architectures that run: each file here that defines an ARCHITECTURE is one."""

from __future__ import annotations

import importlib
import pkgutil

from .base import Architecture

_modules = (
    importlib.import_module(f"{__name__}.{module.name}")
    for module in pkgutil.iter_modules(__path__)
)

#: `general.architecture` -> what it implies.
ARCHITECTURES: dict[str, Architecture] = {
    module.ARCHITECTURE.name: module.ARCHITECTURE
    for module in _modules
    if hasattr(module, "ARCHITECTURE")  # not so: `base`, `tensor_tables`
}
