"""Exceptions and warnings that this package raises."""

from __future__ import annotations

_LONGEST = 1000  # characters of a field or problem in a message; values in a file may have millions


class _FileError(ValueError):
    """A problem in a file: `file` and `field` locate it, `problem` says what was expected."""

    def __init__(self, file: str, field: str, problem: str) -> None:
        # all arguments, so that the error can be pickled
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
    """A GGUF file that is malformed, or that needs features this package lacks.

    `file` and `field` locate the problem; `problem` says what was found and what was expected.
    """


class CheckpointError(_FileError):
    """A Hugging Face checkpoint (config, tokenizer, weights) that is malformed or not supported.

    `file` and `field` locate the problem; `problem` says what was found and what was expected.
    """


class CompiledFileError(_FileError):
    """A compiled-program file that is malformed, or made for another program, model or device.

    `file` and `field` locate the problem; `problem` says what was found and what was expected.
    """


class UnavailableError(RuntimeError):
    """The implementation that was selected by name cannot run on this platform."""


class KernelLoadError(UnavailableError):
    """The CUDA driver did not load a kernel of a program.

    XLA's error, its cause, names no kernel. The message has the kernel and the driver's log if the
    program was compiled in this process and cuda-python is installed. Otherwise `jax-q4k doctor
    --gpu` loads each kernel alone, and shows which one fails.
    """


class NativeUnavailableWarning(UserWarning):
    """CPU operations run in plain JAX because their C++ kernels are not available.

    The message gives the reason. It is shown once per process, when the first such operation is
    lowered. `jax-q4k doctor` reports details.
    """


class GpuUnavailableWarning(UserWarning):
    """GPU operations run in plain JAX because the PTX kernels do not run on this GPU.

    The message gives the reason. It is shown once per process, when the first such operation is
    lowered.
    """
