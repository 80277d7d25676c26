"""HTTP server for an engine: an ASGI application with OpenAI's API, and what serves it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jax_q4k import lazy_imports

if TYPE_CHECKING:
    from .app import app
    from .settings import Settings

__all__ = ["Settings", "app"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_imports.attach(__name__)
