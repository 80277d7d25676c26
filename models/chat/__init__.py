"""Renders a list of chat messages in a model's prompt format, by its chat template."""

from __future__ import annotations

from .process import ChatTemplateError
from .template import DEFAULT_LIMITS, Limits, encode, render

__all__ = ["DEFAULT_LIMITS", "ChatTemplateError", "Limits", "encode", "render"]
