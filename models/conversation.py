"""A conversation with a model: its messages, and prompts of them that fit the model's context."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from . import chat
from .model import Model

#: For files without a template, which are seldom trained for chats: a transcript.
TRANSCRIPT = (
    "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n{% endfor %}Assistant:"
)
TRANSCRIPT_STOP = "\nUser:"  # where a model goes on with the user's part

_FINAL, _ANALYSIS = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"


class TooLongError(ValueError):
    """A message that leaves no token of the context to answer it."""


@dataclass(frozen=True)
class Prompt:
    """What a model is to continue.

    Attributes:
      tokens: ids.
      max_new_tokens: as many as asked for, or as the context has left.
      dropped: messages that were left out, the oldest ones.
    """

    tokens: list[int]
    max_new_tokens: int
    dropped: int


@dataclass
class Conversation:
    """Messages of a user and a model that has a tokenizer.

    Attributes:
      system: the system message; None: none.
      turns: dicts with "role" and "content", without the system message.
    """

    model: Model
    system: str | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All messages, the system's first."""
        return self._with_system(self.turns)

    @property
    def has_template(self) -> bool:
        """False: prompts are transcripts."""
        return bool(self.model.tokenizer and self.model.tokenizer.chat_templates)

    def prompt(self, max_new_tokens: int) -> Prompt:
        """The prompt for an answer to the last turn, the user's.

        Where the context, less room for the answer (`max_new_tokens`, half of the context at most),
        is shorter than the conversation, its oldest turns are dropped for good.

        Raises:
          TooLongError: the system message and the last turn alone leave no room at all.
          chat.ChatTemplateError: as `chat.encode` does.
        """
        context = self.model.config.context_length
        room = min(max_new_tokens, context // 2)
        dropped = 0
        while len(tokens := self._encoded(self.turns[dropped:])) + room > context:
            later = range(dropped + 1, len(self.turns))
            start = next((i for i in later if self.turns[i]["role"] == "user"), None)
            if start is None:
                break
            dropped = start
        if len(tokens) >= context:
            prompt = f"the message makes a prompt of {len(tokens)} tokens"
            raise TooLongError(f"{prompt}; the context length is {context}")
        del self.turns[:dropped]
        return Prompt(tokens, min(max_new_tokens, context - len(tokens)), dropped)

    def add_answer(self, text: str) -> None:
        """Appends a model's answer.

        Templates take gpt-oss' channels apart from each other, not as the model wrote them.
        """
        answer = {"role": "assistant", "content": text}
        analysis, final, content = text.rpartition(_FINAL)
        if final:
            answer["content"] = content
            thinking = analysis.partition(_ANALYSIS)[2].partition("<|end|>")[0]
            answer |= {"thinking": thinking} if thinking else {}
        elif text.startswith(_ANALYSIS):  # stopped before it came to an answer
            answer |= {"content": "", "thinking": text.removeprefix(_ANALYSIS)}
        self.turns.append(answer)

    def _with_system(self, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *turns]

    def _encoded(self, turns: list[dict[str, Any]]) -> list[int]:
        tokenizer, messages = self.model.tokenizer, self._with_system(turns)
        assert tokenizer is not None
        if self.has_template:
            return chat.encode(tokenizer, messages)
        return tokenizer.encode(chat.render(TRANSCRIPT, messages))
