"""Reports this machine's CUDA driver, its JIT cache and ptxas, for `jax-q4k doctor`.

Functions import the modules that they need: running a program needs none of them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class JitCache:
    """The CUDA driver's on-disk cache of machine code that it compiles from PTX.

    Attributes:
      folder: folder that the driver writes to.
      problem: why the driver stores nothing; None if it stores code.
    """

    folder: Path
    problem: str | None = None


def jit_cache() -> JitCache:
    """Locates the CUDA driver's cache by environment variables and files, without the driver.

    CUDA's programming guide documents $CUDA_CACHE_DISABLE and $CUDA_CACHE_PATH; the default folder
    is ~/.nv/ComputeCache.
    """
    named = os.environ.get("CUDA_CACHE_PATH")
    folder = Path(named or os.path.expanduser("~/.nv/ComputeCache"))
    if os.environ.get("CUDA_CACHE_DISABLE", "0") not in ("", "0"):
        return JitCache(folder, "$CUDA_CACHE_DISABLE disables it")
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return JitCache(folder)
    whose = " (from $CUDA_CACHE_PATH)" if named else ""
    return JitCache(folder, f"{folder}{whose} cannot be written")


def cuda_devices() -> int:
    """Returns the number of CUDA devices, or 0 if the driver cannot be queried."""
    from ptx_kernels import driver

    try:
        return driver.count_devices()
    except driver.DriverError:
        return 0


def cuda_driver() -> str:
    """Describes the CUDA driver: the number of its devices, or why it cannot be queried."""
    from ptx_kernels import driver

    try:
        return f"{driver.count_devices()} devices"
    except driver.DriverError as error:
        return str(error)


def ptxas() -> str:
    """Describes ptxas: its version and path, or why it cannot be used."""
    from ptx_kernels.machine_code.ptxas import ToolNotFoundError, find_tool, tool_version

    try:
        return f"{tool_version('ptxas')}, {find_tool('ptxas')}"
    except (ToolNotFoundError, OSError) as error:
        return f"{error} (reports and tests need it; programs do not)"
