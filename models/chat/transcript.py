"""Prompts for models without a chat template, which are rarely trained for chat: transcripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..tokenizer import Tokenizer
from .template import encode, render

TRANSCRIPT = (
    "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
#: Stop string of transcripts: the model starts to write the user's next turn.
TRANSCRIPT_STOP = "\nUser:"


def prompt_of(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **options: Any
) -> tuple[list[int], tuple[str, ...]]:
    """Returns a conversation's prompt as token ids, and stop strings that its answer needs.

    Uses the tokenizer's chat template, with the `options` and errors of `encode`; without one, the
    prompt is a transcript.
    """
    if tokenizer.chat_templates:
        return encode(tokenizer, messages, **options), ()
    return tokenizer.encode(text_of(tokenizer, messages, **options), add_end=False), (
        TRANSCRIPT_STOP,
    )


def text_of(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Returns a conversation's prompt as text; arguments and errors as in `prompt_of`."""
    return render(tokenizer if tokenizer.chat_templates else TRANSCRIPT, messages, **options)
