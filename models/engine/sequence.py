"""Defines Sequence: one text as the scheduler sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as SequenceOf
from typing import Any

#: Kind of layers that share pages: None for full attention, or the window.
Kind = int | None

#: Page id of a logical page that a windowed layer no longer needs.
NO_PAGE = -1


@dataclasses.dataclass(eq=False)
class Sequence:
    """Tokens of one request, the pages that hold their keys and values, and its progress.

    Attributes:
      tokens: the prompt and all new tokens that the host knows.
      limit: maximum length of prompt and new tokens together.
      priority: lower values are served first.
      salt: separates the prefix cache of sequences whose keys and values differ for equal tokens.
      owner: the Request that the tokens belong to.
      steps_before: tokens that the request sampled before this sequence's prompt.
      constrained: whether each token depends on the last one by a constraint.
      uncounted: first tokens that presence and frequency penalties do not count.
      adapter: place of its adapter, from 1; 0 means none.
      drafts: whether it takes part in speculative decoding.
      reads_prompt: whether results of every token of its prompt are wanted.
      prompt_length: tokens of the prompt.
      arrival: order of arrival, for equal priorities.
      stored: tokens whose keys and values the dispatched steps store.
      prefill_end: the sequence prefills its known tokens up to this length, then decodes.
      cached: tokens that the prefix cache held when the sequence last got its slot.
      slot: row of the device's state; None while the sequence waits.
      pages: page id of each logical page, for each kind of layers.
      keys: keys of the first full pages of `tokens`, all that were computed so far.
      registered: number of its first pages that were made findable.
      epoch: number of times the sequence left its slot; results of earlier epochs are dropped.
      preemptions: number of times its pages were taken away.
      passed: pieces of other prompts that were planned although this one came first.
      reused: prompt tokens that the prefix cache held when the sequence was first admitted.
      snapshots: lengths at which prefill stores the recurrent state, in ascending order.
      unnamed: (length, place) of a snapshot whose key is unknown until its tokens are.
      rolling: place of the last snapshot that decoding stored; the next one replaces it.
    """

    tokens: list[int]
    limit: int
    priority: int = 0
    salt: bytes = b""
    owner: Any = None
    steps_before: int = 0
    constrained: bool = False
    uncounted: int = 0
    adapter: int = 0
    drafts: bool = True
    reads_prompt: bool = False
    prompt_length: int = 0
    arrival: int = 0
    stored: int = 0
    prefill_end: int = 0
    cached: int = 0
    slot: int | None = None
    pages: dict[Kind, list[int]] = dataclasses.field(default_factory=dict)
    keys: list[bytes] = dataclasses.field(default_factory=list)
    registered: int = 0
    epoch: int = 0
    preemptions: int = 0
    passed: int = 0
    reused: int | None = None
    snapshots: list[int] = dataclasses.field(default_factory=list)
    unnamed: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    rolling: int | None = None

    def __post_init__(self) -> None:
        self.prompt_length = self.prefill_end = len(self.tokens)

    @property
    def is_prefilling(self) -> bool:
        """Whether the sequence has a slot and known tokens that are not stored yet."""
        return self.slot is not None and self.stored < self.prefill_end

    @property
    def is_decoding(self) -> bool:
        """Whether the next step may sample a further token."""
        return (
            self.slot is not None
            and self.stored >= self.prefill_end
            and self.stored + 1 < self.limit
        )

    @property
    def can_reuse(self) -> bool:
        """Whether it may take pages of the prefix cache.

        Pages have no results of tokens. Once a new token is known, those of the prompt are, too.
        """
        return not self.reads_prompt or len(self.tokens) > self.prompt_length

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: sequences with lower values are served first."""
        return self.priority, self.arrival

    def step_of(self, length: int) -> int:
        """Returns how many tokens the request sampled before the one at index `length`."""
        return self.steps_before + length - self.prompt_length

    def page_list(self, kind: Kind) -> SequenceOf[int]:
        """Returns the ids of the pages that the sequence holds for a kind of layers."""
        return [page for page in self.pages.get(kind, ()) if page != NO_PAGE]
