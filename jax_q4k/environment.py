"""The CUDA driver, its cache and ptxas of this machine, as `jax-q4k doctor` reports them.

Their modules are imported where they are asked for: programs need neither.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class JitCache:
    """Where the CUDA driver keeps the machine code that it makes of PTX.

    Attributes:
      folder: that it writes to.
      problem: why it keeps nothing there; None: it does.
    """

    folder: Path
    problem: str | None = None


def jit_cache() -> JitCache:
    """The CUDA driver's cache, by the environment and the file system; no driver is asked.

    $CUDA_CACHE_DISABLE and $CUDA_CACHE_PATH are those of CUDA's programming guide; without the
    latter the folder is ~/.nv/ComputeCache.
    """
    named = os.environ.get("CUDA_CACHE_PATH")
    folder = Path(named or os.path.expanduser("~/.nv/ComputeCache"))
    if os.environ.get("CUDA_CACHE_DISABLE", "0") not in ("", "0"):
        return JitCache(folder, "$CUDA_CACHE_DISABLE turns it off")
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return JitCache(folder)
    whose = ", as $CUDA_CACHE_PATH says" if named else ""
    return JitCache(folder, f"{folder}{whose}, cannot be written")


def cuda_devices() -> int:
    """The number of devices that the CUDA driver has; 0 where it cannot be asked."""
    from ptx_kernels import driver

    try:
        return driver.count_devices()
    except driver.DriverError:
        return 0


def cuda_driver() -> str:
    """The number of devices that the CUDA driver has, or why it cannot be asked."""
    from ptx_kernels import driver

    try:
        return f"{driver.count_devices()} devices"
    except driver.DriverError as error:
        return str(error)


def ptxas() -> str:
    """The version of ptxas and where it is, or why it cannot be used."""
    from ptx_kernels.machine_code.ptxas import ToolNotFoundError, find_tool, tool_version

    try:
        return f"{tool_version('ptxas')}, {find_tool('ptxas')}"
    except (ToolNotFoundError, OSError) as error:
        return f"{error} (reports and tests need it; programs do not)"
