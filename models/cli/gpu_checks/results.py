"""Result of a check, which travels between processes as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal


@dataclass(frozen=True)
class Result:
    """A check's finding.

    Attributes:
      line: the finding.
      details: further lines.
    """

    status: Literal["ok", "failed", "not run"]
    line: str
    details: tuple[str, ...] = ()

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Result:
        """Raises ValueError for anything that `as_json` does not write."""
        try:
            found = json.loads(text)
            return cls(found["status"], found["line"], tuple(found["details"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{text!r} is not a check's result") from error


def ok(line: str, *details: str) -> Result:
    return Result("ok", line, details)


def failed(line: str, *details: str) -> Result:
    return Result("failed", line, details)


def not_run(line: str) -> Result:
    return Result("not run", line)
