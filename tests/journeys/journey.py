"""Runs calls in sequence with one program cache, and compares each with the same call alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jax_q4k import models
from jax_q4k.cache.program_cache import ProgramCache

from .calls import Call, Result, alone, difference

MAX_BYTES = 1 << 27


class Journey:
    """A user's sequence of calls. Models stay loaded until `restart`; programs stay in the folder.

    Attributes:
      folder: the folder of the program cache.
      kept: the program cache that models get.
    """

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES) -> None:
        self.folder = folder
        self.kept = ProgramCache(folder, max_bytes)
        self._models: dict[tuple[str, Any], models.Model] = {}
        self._said: list[str] = []

    def model(self, call: Call) -> models.Model:
        """Returns the call's model; loads it if it is not loaded yet."""
        key = call.model, call.lora
        if key not in self._models:
            self._models[key] = call.load()
            self._models[key].program_cache = self.kept
        return self._models[key]

    def restart(self) -> None:
        """Reloads models from now on, like a new process."""
        self._models.clear()
        self.say("restart")

    def say(self, what: object) -> None:
        """Adds a line to the story that a failure shows."""
        self._said.append(str(what))

    def take(
        self, call: Call, prefix: models.Prefix | None = None, *, streamed: bool = False
    ) -> tuple[Result, ...]:
        """Runs a call and returns its outputs; they must equal those of `alone`."""
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
        """Raises AssertionError with the story so far if outputs differ."""
        if (problem := difference(got, want)) is not None:
            raise AssertionError(f"{problem}\n{self.story}")

    @property
    def story(self) -> str:
        return "\n".join(["the journey:", *self._said])
