"""Predictions of the cost model for the kernels that `benchmarks.gpu` times, made beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ptx_kernels.devices import find_device
from ptx_kernels.machine_code.model import Prediction, predict
from ptx_kernels.machine_code.ptxas import ToolNotFoundError
from ptx_kernels.machine_code.report import codes, launch
from ptx_kernels.ptx import Kernel

from .common import part_of

_BATCH = 8  # kernels per run of ptxas and nvdisasm


class Predictions:
    """Predictions for a device, by its name; none for a device that the model does not know."""

    def __init__(self, device: str) -> None:
        self._device = find_device(device)
        self._found: dict[Kernel, Prediction] = {}

    def prepare(self, kernels: Iterable[Kernel], has_time: Callable[[], bool]) -> str:
        """Predicts kernels while `has_time()`; returns why some were skipped, or an empty string.

        Raises AssemblyError for a kernel that ptxas rejects.
        """
        if self._device is None:
            return "the cost model does not know the device"
        device, left = self._device, [k for k in dict.fromkeys(kernels) if k not in self._found]
        while left:
            if not has_time():
                return f"out of time: {len(left)} kernels are not predicted"
            batch, left = left[:_BATCH], left[_BATCH:]
            try:
                machines = codes(batch, device.arch)
            except ToolNotFoundError as error:
                return str(error)
            for kernel, machine in zip(batch, machines, strict=True):
                asked = launch(kernel, machine)
                if asked and asked.resident_blocks:
                    self._found[kernel] = predict(asked, device)
        return ""

    def of(self, kernel: Kernel) -> Prediction | None:
        """Returns the prediction of a kernel; None if it was not prepared or is not predictable."""
        return self._found.get(kernel)


if __name__ == "__main__":
    part_of("gpu", __doc__)
