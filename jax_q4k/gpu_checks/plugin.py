"""Finds out why JAX does not use the GPUs that the CUDA driver has.

Functions import JAX when they run.
"""

from __future__ import annotations

import importlib.metadata
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ptx_kernels.driver import Installed

#: CUDA version -> package of JAX's plugin for it. Its driver is for that CUDA version or a newer.
PLUGINS = {13: "jax-cuda13-plugin", 12: "jax-cuda12-plugin"}


def installed_plugins() -> dict[int, str]:
    """Returns the versions of the installed plugins by their CUDA version."""
    found = {}
    for cuda, package in PLUGINS.items():
        try:
            found[cuda] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def advice(driver: Installed | None) -> str:
    """Returns how to install the plugin that a driver can run; without a driver, the newest."""
    newest = max(PLUGINS) if driver is None else driver.cuda[0]
    fitting = [cuda for cuda in PLUGINS if cuda <= newest]
    if not fitting:
        return f"install a driver for CUDA {min(PLUGINS)} or newer"
    return f"pip install '.[cuda{max(fitting)}]' in a clone"


def platforms_without_gpu() -> str | None:
    """Returns the platforms that JAX is told to use, if no GPU is among them."""
    import jax

    named = jax.config.jax_platforms  # type: ignore[attr-defined]
    return named if named and not {"cuda", "gpu"} & set(named.split(",")) else None


def problem(driver: Installed | None) -> str | None:
    """Returns why JAX uses none of a driver's GPUs, and a remedy; None if it does.

    Also None if there are none, or JAX is told to use other platforms.
    """
    if driver is None or not driver.capabilities or platforms_without_gpu():
        return None
    platforms, said = _started()
    if "gpu" in platforms:
        return None
    plugins = installed_plugins()
    if not plugins:
        return f"JAX does not use the GPU, because its CUDA plugin is missing: {advice(driver)}"
    if min(plugins) > driver.cuda[0]:
        version = ".".join(map(str, driver.cuda))
        return (
            f"JAX does not use the GPU: {PLUGINS[min(plugins)]} needs a driver for CUDA "
            f"{min(plugins)}, and this one is for CUDA {version}: {advice(driver)}, after "
            f"pip uninstall {PLUGINS[min(plugins)]}"
        )
    names = " and ".join(PLUGINS[cuda] for cuda in plugins)
    return f"JAX does not use the GPU: {names} does not start: {said or 'JAX gives no reason'}"


def _started() -> tuple[set[str], str]:
    """Starts JAX; returns the platforms of its devices and the first error that it reports.

    JAX logs the failure of a plugin and continues without. If it has started before, it reports
    nothing.
    """
    import jax

    said: list[str] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            error = record.exc_info[1] if record.exc_info else None
            said.append(" ".join(str(error or record.getMessage()).split()))

    logger, listening = logging.getLogger("jax"), Listening(logging.WARNING)
    logger.addHandler(listening)
    try:
        platforms = {device.platform for device in jax.devices()}
    except (RuntimeError, AssertionError) as error:  # JAX raises both for a missing platform
        said.append(" ".join(str(error).split()))
        platforms = set()
    finally:
        logger.removeHandler(listening)
    return platforms, said[0] if said else ""
