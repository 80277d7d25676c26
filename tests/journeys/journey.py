"""Calls one after another on one folder of programs, each compared with the same call alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jax_q4k import models
from jax_q4k.cache.program_cache import ProgramCache

from .calls import Call, Result, alone, difference

MAX_BYTES = 1 << 27


class Journey:
    """A user's calls; models stay loaded until `restart`, programs stay in the folder.

    Attributes:
      folder: the programs'.
      kept: that models get.
    """

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES) -> None:
        self.folder = folder
        self.kept = ProgramCache(folder, max_bytes)
        self._models: dict[tuple[str, Any], models.Model] = {}
        self._said: list[str] = []

    def model(self, call: Call) -> models.Model:
        """The call's model, loaded before or now."""
        key = call.model, call.lora
        if key not in self._models:
            self._models[key] = call.load()
            self._models[key].program_cache = self.kept
        return self._models[key]

    def restart(self) -> None:
        """Loads models anew from now on, as another process does."""
        self._models.clear()
        self.say("restart")

    def say(self, what: object) -> None:
        """Adds to what a failure shows."""
        self._said.append(str(what))

    def take(
        self, call: Call, prefix: models.Prefix | None = None, *, streamed: bool = False
    ) -> tuple[Result, ...]:
        """Runs a call; returns its outputs, which are those of the call alone."""
        self.say(call)
        run = call.run_stream if streamed else call.run
        try:
            got = run(self.model(call), prefix)
        except Exception as error:
            error.add_note(self.story)
            raise
        self.compare(got, alone(call))
        return got

    def compare(self, got: tuple[Result, ...], want: tuple[Result, ...]) -> None:
        """Raises AssertionError, with the journey so far, where outputs differ."""
        if (problem := difference(got, want)) is not None:
            raise AssertionError(f"{problem}\n{self.story}")

    @property
    def story(self) -> str:
        return "\n".join(["the journey:", *self._said])
