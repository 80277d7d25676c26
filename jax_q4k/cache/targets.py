"""Names the devices that programs can be compiled for ahead of time."""

from __future__ import annotations

__all__ = ["TARGETS"]

#: Target -> (file in `assets` with XLA's GpuTargetConfigProto of the device, device name in
#: `ptx_kernels.devices`); None is this machine's CPU.
TARGETS: dict[str, tuple[str, str] | None] = {
    "cpu": None,
    "h200": ("h200.txtpb", "H200"),
    "t4": ("t4.txtpb", "T4"),
}
