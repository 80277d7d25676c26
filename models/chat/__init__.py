"""Chat templates: turn a list of messages into the prompt format that a model was trained on."""

from __future__ import annotations

from .process import ChatTemplateError
from .template import DEFAULT_LIMITS, Limits, encode, render

__all__ = ["DEFAULT_LIMITS", "ChatTemplateError", "Limits", "encode", "render"]
