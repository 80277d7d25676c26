"""Reports this machine's CUDA driver, its JIT cache and ptxas, for `jax-q4k doctor`.

Functions import the modules that they need: running a program needs none of them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ptx_kernels.driver import Installed


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


def installed() -> Installed | None:
    """Returns the CUDA driver; None if it cannot be queried."""
    from ptx_kernels import driver

    try:
        return driver.installed()
    except driver.DriverError:
        return None


def cuda_devices() -> int:
    """Returns the number of CUDA devices, or 0 if the driver cannot be queried."""
    found = installed()
    return len(found.capabilities) if found else 0


def cuda_driver() -> str:
    """Describes the CUDA driver: its devices and versions, or why it cannot be queried."""
    from ptx_kernels import driver

    try:
        found = driver.installed()
    except driver.DriverError as error:
        return str(error)
    devices = ", ".join(f"sm_{capability}" for capability in found.capabilities) or "none"
    cuda, ptx = (".".join(map(str, version)) for version in (found.cuda, found.newest_ptx))
    return f"CUDA {cuda}, takes PTX up to {ptx}; devices: {devices}"


def kernel_ptx() -> str:
    """Describes the PTX versions of the kernels by the devices that they are for."""
    from ptx_kernels.limits import PTX_VERSIONS

    return ", ".join(
        f"{major}.{minor} from sm_{least}" for least, (major, minor) in PTX_VERSIONS.items()
    )


def driver_problem() -> str | None:
    """Returns why the CUDA driver cannot load the kernels of one of its devices, if so."""
    found = installed()
    return ptx_problem(found) if found else None


def ptx_problem(found: Installed) -> str | None:
    """Returns why a CUDA driver cannot load the kernels of one of its devices, if so."""
    from ptx_kernels.limits import PTX_VERSIONS

    for capability in found.capabilities:
        needed = max((v for least, v in PTX_VERSIONS.items() if least <= capability), default=None)
        if needed is not None and needed > found.newest_ptx:
            ptx, most, cuda = (
                ".".join(map(str, v)) for v in (needed, found.newest_ptx, found.cuda)
            )
            return (
                f"the kernels of this sm_{capability} GPU are PTX {ptx}, and its driver, for CUDA "
                f"{cuda}, takes PTX up to {most}: install a newer driver"
            )
    return None


def gpu_problem() -> str | None:
    """Returns why the first GPU runs plain JAX instead of PTX kernels; None if it runs them.

    It is JAX's, or the driver's if JAX has none.
    """
    import jax

    from ptx_kernels.devices import target

    from .ops import gpu

    found = installed()
    if jax.default_backend() != "gpu" and found and found.capabilities:
        first = found.capabilities[0]
        return gpu.problem(target(f"the sm_{first} GPU", capability=first))
    return gpu.problem(gpu.device())


def ptxas() -> str:
    """Describes ptxas: its version and path, or why it cannot be used."""
    from ptx_kernels.machine_code.ptxas import ToolNotFoundError, find_tool, tool_version

    try:
        return f"{tool_version('ptxas')}, {find_tool('ptxas')}"
    except (ToolNotFoundError, OSError) as error:
        return f"{error} (reports and tests need it; programs do not)"
