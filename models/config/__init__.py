"""Model configuration, read from and written to GGUF metadata."""

from typing import TYPE_CHECKING

from jax_q4k import lazy_imports

if TYPE_CHECKING:
    from .config import Config
else:
    __getattr__, __dir__ = lazy_imports.attach(__name__)

__all__ = ["Config"]
