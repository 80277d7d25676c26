"""Multi-turn chat: messages, answers, and prompts that fit into the context."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..chat.transcript import TRANSCRIPT_STOP, prompt_of
from ..runner.model import Model
from ..sampling import Sampling
from . import generate
from .answers import ChatAnswer
from .outputs import Output, Piece
from .prefix_cache import Prefix


class TooLongError(ValueError):
    """The message leaves no room in the context for an answer."""


@dataclass(frozen=True)
class Prompt:
    """A conversation's prompt as token ids, shortened to fit into the context.

    Attributes:
      tokens: token ids.
      max_new_tokens: requested number of new tokens, or fewer if the context has less room.
      dropped: number of oldest messages that were dropped.
    """

    tokens: list[int]
    max_new_tokens: int
    dropped: int


@dataclass
class Conversation:
    """A chat between a user and a model that has a tokenizer.

    The KV cache is reused for the next answer. Thoughts are apart from an answer's text, in
    `reasoning` of outputs and pieces; the chat template decides which of them the model sees again.

    Attributes:
      system: the system message; None if absent.
      turns: dicts with "role" and "content", without the system message. Those of answers with
        thoughts also have "reasoning_content".
      prefix: the KV cache of the last prompt and answer.
      variables: passed on to the chat template, such as {"enable_thinking": False}.
    """

    model: Model
    system: str | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)
    prefix: Prefix = field(default_factory=Prefix, repr=False, compare=False)
    variables: dict[str, Any] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.RLock, init=False, repr=False, compare=False)
    _answers: bool = field(default=False, init=False, repr=False, compare=False)

    def answer(self, message: str, sampling: Sampling | None = None, **options: Any) -> Output:
        """Returns the model's answer, and adds message and answer to the turns.

        Takes the arguments of `generate`.
        """
        *_, last = self.stream(message, sampling, **options)
        assert last.output is not None
        return last.output

    def stream(
        self, message: str, sampling: Sampling | None = None, **options: Any
    ) -> Iterator[Piece]:
        """Yields the answer piece by piece; if closed early, keeps the text so far as the answer.

        Drops the oldest turns if the context is full, see `prompt`.

        Raises:
          TooLongError: no room is left for an answer. chat.ChatTemplateError, ValueError,
            TypeError: as in `chat.encode` and `generate`. The turns are then unchanged.
            RuntimeError, here or at the first piece: another answer is in progress, or was added
            since the call.
        """
        with self._lock:
            self._check_turn()
            return self._stream(message, sampling, options)

    def _check_turn(self) -> None:
        if self._answers:
            problem = "another answer of the conversation is in progress"
            raise RuntimeError(f"{problem}: read its stream to the end, or close it")

    def _stream(
        self, message: str, sampling: Sampling | None, options: dict[str, Any]
    ) -> Iterator[Piece]:
        turns = list(self.turns)
        self.turns.append({"role": "user", "content": message})
        try:
            fields = {f.name for f in dataclasses.fields(Sampling)}
            overrides = {name: options.pop(name) for name in [*options] if name in fields}
            sampling = dataclasses.replace(sampling or Sampling(), **overrides)
            if not self.has_template:
                stops = (*sampling.stops, TRANSCRIPT_STOP)
                sampling = dataclasses.replace(sampling, stop=stops)
            prompt = self.prompt(sampling.max_new_tokens)
            sampling = dataclasses.replace(sampling, max_new_tokens=prompt.max_new_tokens)
            options = {"prefix": self.prefix} | options
            assert self.model.tokenizer is not None
            answer = ChatAnswer(self.model.tokenizer, prompt.tokens, sampling)
            pieces = generate.stream(self.model, prompt.tokens, answer.sampling, **options)
        except BaseException:
            self.turns[:] = turns
            raise
        asked = self.turns.pop()
        return self._answering(list(self.turns), asked, pieces, answer)

    def _answering(
        self,
        before: list[dict[str, Any]],
        asked: dict[str, Any],
        pieces: Iterator[Piece],
        answer: ChatAnswer,
    ) -> Iterator[Piece]:
        """Yields the answer's pieces, then adds message and answer to the turns.

        before: turns that precede the message. asked: the message as a turn. answer: splits the
        pieces.
        """
        with self._lock:
            self._check_turn()
            if self.turns != before:
                raise RuntimeError("the conversation has changed since this stream was created")
            self._answers = True
            self.turns.append(asked)
        try:
            for piece in pieces:
                yield answer.split(piece)
        finally:
            pieces.close()  # type: ignore[attr-defined]  # stores the KV cache in the prefix
            with self._lock:
                message = answer.message()
                if message.content.strip() or message.reasoning:
                    self.add_answer(message.content.strip(), message.reasoning)
                else:
                    self.turns.pop()  # templates reject two user messages in a row
                self._answers = False

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All messages, the system message first."""
        return self._with_system(self.turns)

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template; without one, prompts are transcripts."""
        return bool(self.model.tokenizer and self.model.tokenizer.chat_templates)

    def prompt(self, max_new_tokens: int) -> Prompt:
        """Returns the prompt for an answer to the last turn, which must be the user's.

        Reserves `max_new_tokens`, at most half of the context, for the answer. If the conversation
        does not fit into the rest, its oldest turns are dropped permanently.

        Raises:
          TooLongError: the system message and the last turn alone fill the context.
          chat.ChatTemplateError: as in `chat.encode`.
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

    def add_answer(self, text: str, reasoning: str = "") -> None:
        """Appends a model's answer: its text, and its thoughts without their marks."""
        thoughts = {"reasoning_content": reasoning} if reasoning else {}
        self.turns.append({"role": "assistant", "content": text, **thoughts})

    def _with_system(self, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *turns]

    def _encoded(self, turns: list[dict[str, Any]]) -> list[int]:
        tokenizer, messages = self.model.tokenizer, self._with_system(turns)
        assert tokenizer is not None
        return prompt_of(tokenizer, messages, **self.variables)[0]
