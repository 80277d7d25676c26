"""HTTP server for an engine: an ASGI application with OpenAI's API, and what serves it."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from jax_q4k import lazy_imports

if TYPE_CHECKING:
    from .application import app
    from .routing import PrefixRoutes, prompt_beginnings
    from .settings import Settings

__all__ = ["PrefixRoutes", "Settings", "app", "prompt_beginnings"]

_NEEDED = ("starlette", "uvicorn", "msgspec", "prometheus_client")
if _missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
    problem = f"a server needs {', '.join(_missing)}: pip install 'jax-q4k[serve]'"
    raise ModuleNotFoundError(problem)

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_imports.attach(__name__)
