"""Measures a command's time, in total since its process started, and per phase."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..engine.outputs import Timings


def since_start() -> float:
    """Returns seconds since the process started, or since this module's import if unknown."""
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # field 22, since boot
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - _IMPORTED


_IMPORTED = time.monotonic()


@dataclass
class Clock:
    """Seconds that each phase of a command took.

    Attributes:
      imports: from the start of the process until the command ran.
      load: loading models.
    """

    imports: float = field(default_factory=since_start)
    load: float = 0.0

    def described(self, timings: Timings) -> dict[str, float]:
        """Returns a command's seconds and token counts by name, for JSON output."""
        seconds = {
            "imports": self.imports,
            "load": self.load,
            "compile": timings.compile,
            "prompt": timings.first_token,
            "decode": timings.decode,
            "from_start": since_start(),
        }
        counts = dataclasses.asdict(timings)
        return {f"{name}_seconds": round(value, 4) for name, value in seconds.items()} | {
            name: value for name, value in counts.items() if name.endswith("_tokens")
        }

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.load += time.monotonic() - began
