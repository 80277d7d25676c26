"""Explains failures of XLA to load a kernel."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from .errors import KernelLoadError

#: XLA's text, or the driver's error, if a module does not load.
_MODULE = re.compile(
    r"Failed to load (PTX|in-memory CUBIN)|CUDA_ERROR_(INVALID_PTX|UNSUPPORTED_PTX_VERSION"
    r"|NO_BINARY_FOR_GPU|INVALID_IMAGE|JIT_COMPILER_NOT_FOUND)"
)


@contextlib.contextmanager
def explaining_loads() -> Iterator[None]:
    """Context in which a failure of XLA to load a kernel raises a KernelLoadError."""
    import jax

    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not _MODULE.search(str(error)):
            raise
        if (refused := _refused()) is not None:
            raise KernelLoadError(
                f"the CUDA driver did not load a kernel of this program: {refused}"
            ) from error
        raise KernelLoadError(
            "the CUDA driver did not load a kernel of this program; jax-q4k doctor --gpu shows "
            f"which kernels load, and the driver's log: {str(error).strip()}"
        ) from error


def _refused() -> str | None:
    """Returns the driver's error of the first kernel that it does not load, from the newest on.

    None if it loads all, if none is known, or without the driver's bindings.
    """
    from ptx_kernels import driver

    from .custom_call import launched_texts

    try:
        with driver.Device() as device:
            for text in dict.fromkeys(reversed(list(launched_texts))):
                device.time_load(text)
    except driver.ModuleLoadError as error:
        return str(error)
    except driver.DriverError:
        return None
    return None
