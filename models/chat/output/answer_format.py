"""Defines AnswerFormat: how answers to a model's chat template mark thoughts and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...tokenizer import Tokenizer
from .detection import family_of
from .families import NONE, Family

#: Last tokens of a prompt, among which are the marks of a thought that it begins.
_LAST_TOKENS = 16


@dataclass(frozen=True)
class AnswerFormat:
    """Format of a model's answers.

    Attributes:
      family: family of the chat template.
      control_tokens: names of the control tokens in the family's marks. Parsers need them in the
        text: they belong into `Sampling.spelled_tokens`.
    """

    family: Family = NONE
    control_tokens: tuple[str, ...] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> AnswerFormat:
        """Returns the format for a tokenizer's chat template.

        Raises ChatTemplateError: the template takes longer than its limit.
        """
        family = family_of(tokenizer)
        parts = [part for mark in family.marks for part in tokenizer.cut_at_controls(mark)]
        names = {tokenizer.token(part) for part in parts if isinstance(part, int)}
        return cls(family, tuple(sorted(names)))

    def opens_thought(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
        """Returns whether a prompt of token ids ends inside a thought."""
        end = tokenizer.decode(prompt[-_LAST_TOKENS:], skip_special=False)
        return self.family.opens_thought(end)
