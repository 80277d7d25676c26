"""Chat templates: a list of messages -> the prompt text that a model was trained on."""

from __future__ import annotations

from .template import DEFAULT_LIMITS, ChatTemplateError, Limits, render

__all__ = ["DEFAULT_LIMITS", "ChatTemplateError", "Limits", "render"]
