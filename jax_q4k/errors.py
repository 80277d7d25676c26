"""The errors that callers may want to tell apart."""

from __future__ import annotations

_LONGEST = 1000  # characters of a field or problem in a message; values of a file may have millions


class _FileError(ValueError):
    """`file` and `field` say where, `problem` what was found and what was expected."""

    def __init__(self, file: str, field: str, problem: str) -> None:
        # the arguments as they are: the error can be pickled
        super().__init__(file, field, problem)
        self.file = file
        self.field = field
        self.problem = problem

    def __str__(self) -> str:
        field, problem = (
            text
            if len(text) <= _LONGEST
            else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
            for text in (self.field, self.problem)
        )
        return f"{self.file}: {field}: {problem}"


class GGUFError(_FileError):
    """A GGUF file that is malformed, or that holds what this package does not run.

    `file` and `field` say where, `problem` what was found and what was expected.
    """


class CheckpointError(_FileError):
    """A Hugging Face checkpoint (config, tokenizer, weights) that is malformed or not supported.

    `file` and `field` say where, `problem` what was found and what was expected.
    """


class CompiledFileError(_FileError):
    """A file of a compiled program that is malformed, or that is for something else.

    `file` and `field` say where, `problem` what was found and what was expected.
    """


class UnavailableError(RuntimeError):
    """An implementation that was asked for by name and cannot run on this platform."""


class NativeUnavailableWarning(UserWarning):
    """Operations on a CPU run in plain JAX because their C++ kernels are not there.

    The message says why. It is given once in a process, when the first such operation is lowered.
    `jax-q4k doctor` says more.
    """
