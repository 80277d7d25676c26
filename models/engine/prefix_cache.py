"""Defines Prefix, which keeps the pages of a text for calls that continue it."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator

from ..kv_cache.shapes import PAGE_SIZE
from ..runner.model import Model
from .session import Kept, Session, Settings


class Prefix:
    """Prefix cache: KV pages and recurrent states of the last texts, for later prompts.

    Pass one object to successive calls of `generate` or `stream`. Any prompt is allowed; of the
    tokens that it has in common with a cached text, full pages are reused, and the others are
    computed. Models with recurrent layers can continue where a prompt ended and every 64 tokens of
    an answer; models with sliding windows while the tokens of the window are cached. Threads may
    share an object: the first call takes its pages. The object holds their memory until it is
    deleted or `clear` is called.

    Attributes:
      tokens: token ids of the last text, up to the last one that was computed.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.clear()

    def clear(self) -> None:
        with self._lock:
            self.tokens: list[int] = []
            self._kept: Kept | None = None
            self._owner: tuple[weakref.ref[Model], Settings] | None = None

    @property
    def capacity(self) -> int:
        """Tokens that the cached pages hold; 0 if nothing is stored."""
        kept = self._kept
        return 0 if kept is None else kept.sizes.pages[0] * PAGE_SIZE

    @contextlib.contextmanager
    def session(self, model: Model, settings: Settings) -> Iterator[Session]:
        """Returns a session for one request that reuses the cached pages, and keeps its pages.

        Pages of another model, dtype or implementation are dropped. Only one of several threads
        gets the pages.
        """
        with self._lock:
            kept, owner = self._kept, self._owner
            self.clear()
        if owner is None or owner[0]() is not model or owner[1] != settings:
            kept = None
        session = Session(model, settings, reuses=True, kept=kept)
        del kept
        try:
            yield session
        finally:
            kept, tokens = session.keep(), session.loop.last_tokens[:-1]
            session.close()
            if kept.state is not None:  # else a step was interrupted
                with self._lock:
                    self.tokens = tokens
                    self._kept, self._owner = kept, (weakref.ref(model), settings)
