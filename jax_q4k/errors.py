"""The errors that callers may want to tell apart."""

from __future__ import annotations


class GGUFError(ValueError):
    """A GGUF file that is malformed, or that holds what this package does not run.

    `file` and `field` say where, `problem` what was found and what was expected.
    """

    def __init__(self, file: str, field: str, problem: str) -> None:
        super().__init__(file, field, problem)  # the arguments as they are: the error can be pickled
        self.file = file
        self.field = field
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.file}: {self.field}: {self.problem}"


class UnavailableError(RuntimeError):
    """An implementation that was asked for by name and cannot run on this platform."""
