"""Model configuration, read from and written to GGUF metadata."""

from .config import Config

__all__ = ["Config"]
