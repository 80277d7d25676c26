"""The CUDA driver and ptxas of this machine, as `jax-q4k doctor` reports them.

Their modules are imported where they are asked for: programs need neither.
"""

from __future__ import annotations


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
