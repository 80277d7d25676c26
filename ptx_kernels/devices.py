"""Devices: each model's facts, from datasheets unless noted, and the one that choices are for."""

from __future__ import annotations

import functools
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One GPU model.

    Attributes:
      name: as the driver reports it, without `NVIDIA` and the form factor: the key of tuning
        tables.
      arch: the ptxas target whose machine code runs on it.
      clock_hz: boost clock of the multiprocessors.
      datasheet_bandwidth: of the memory, bytes/s.
      bandwidth: bytes/s that a kernel can hope for: a device-to-device copy, read plus written,
        where one was measured, else 0.9 of the datasheet.
      fp32_lanes, integer_lanes: results per clock and multiprocessor of 32-bit float multiply-adds,
        and of 32-bit integer adds, logic and shifts (CUDA programming guide, throughput of native
        arithmetic instructions).
      mma_int8_ops: int8 operations (a multiply-add is two) per clock and multiprocessor through
        `mma.sync`.
      mma_float_ops: the same of f16 and bf16, added up in f32.
      tensor_clock_hz: of the multiprocessors while tensor cores work; None: the boost clock.
      dot_float_ops: f16 operations/s of XLA's product of large matrices, by cuBLAS; None: not
        known.
      block_shared_bytes: shared memory that a block can have (CUDA programming guide).
    """

    name: str
    arch: str
    multiprocessors: int
    clock_hz: float
    datasheet_bandwidth: float
    bandwidth: float
    l2_bytes: int
    fp32_lanes: int = 128
    integer_lanes: int = 64
    mma_int8_ops: int = 4096
    mma_float_ops: int = 2048
    tensor_clock_hz: float | None = None
    dot_float_ops: float | None = None
    block_shared_bytes: int = 227 << 10

    @property
    def l2_bandwidth(self) -> float:
        """Bytes/s from the L2 cache to the multiprocessors: 5.5 TB/s of an H100 at 1.98 GHz.

        Others measured it; devices of other generations are taken to have as many bytes a clock
        and multiprocessor.
        """
        return _L2_BYTES * self.multiprocessors * self.clock_hz

    @property
    def clusters(self) -> bool:
        """Whether blocks can be clusters, which reach each other's shared memory: from sm_90 on."""
        return self._generation >= 90

    @property
    def bulk_copies(self) -> bool:
        """Whether one instruction moves many bytes, to shared memory or the L2: from sm_90 on."""
        return self._generation >= 90

    @property
    def _generation(self) -> int:
        """The number in `arch`."""
        return int(self.arch.removeprefix("sm_"))

    @property
    def slug(self) -> str:
        """The name in a file's name."""
        return self.name.lower().replace(" ", "-")


_MB = 1 << 20
_L2_BYTES = 5.5e12 / (132 * 1.98e9)  # per clock and multiprocessor

#: Shared memory that a block can have on any device from sm_80 on.
LEAST_BLOCK_SHARED_BYTES = 99 << 10

#: GeForce cards add f16 up in f32 at half the rate of sums in f16.
_geforce = functools.partial(
    Device, mma_int8_ops=2048, mma_float_ops=512, block_shared_bytes=LEAST_BLOCK_SHARED_BYTES
)

#: f16 operations/s of a product by cuBLAS on an H100 or H200 of 700 W. Others measured 788e12 on an
#: H200 for 8192 x 8192 x 8192, with a clock that sinks with the power; layers' shapes have less.
_HOPPER_DOT = 700e12

#: Multiprocessors, boost clocks, L2 and bandwidth: NVIDIA's datasheets and architecture papers of
#: each model; the H200's L2 as it reports it. The H200's 4.3 TB/s was measured; the clock under
#: tensor load follows from what its products of large matrices reach. Hopper's `mma.sync` reaches
#: about 0.62 of what `wgmma` does (Luo et al., 2024).
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device(
            "H200",
            "sm_90",
            132,
            1.98e9,
            4.8e12,
            4.3e12,
            60 * _MB,
            mma_int8_ops=5080,
            mma_float_ops=2540,
            tensor_clock_hz=1.7e9,
            dot_float_ops=_HOPPER_DOT,
        ),
        Device(
            "H100",
            "sm_90",
            132,
            1.98e9,
            3.35e12,
            3.0e12,
            50 * _MB,
            mma_int8_ops=5080,
            mma_float_ops=2540,
            tensor_clock_hz=1.7e9,
            dot_float_ops=_HOPPER_DOT,
        ),
        Device(
            "H100 PCIe",
            "sm_90",
            114,
            1.755e9,
            2.039e12,
            1.83e12,
            50 * _MB,
            mma_int8_ops=5080,
            mma_float_ops=2540,
        ),
        Device(
            "A100",
            "sm_80",
            108,
            1.41e9,
            2.039e12,
            1.83e12,
            40 * _MB,
            fp32_lanes=64,
            block_shared_bytes=163 << 10,
        ),
        Device("B200", "sm_100", 148, 1.965e9, 8.0e12, 7.2e12, 126 * _MB),
        _geforce(
            "RTX 5090", "sm_120", 170, 2.407e9, 1.792e12, 1.61e12, 96 * _MB, integer_lanes=128
        ),
        _geforce("RTX 4090", "sm_89", 128, 2.52e9, 1.008e12, 0.907e12, 72 * _MB),
    )
}

#: What is assumed where no device is at hand: compiling ahead of time, simulating, reporting.
REFERENCE = DEVICES["H200"]

#: Behind a model's name: another chip, or a part of this one (D: fewer multiprocessors or slower
#: tensor cores).
_OTHERS = {"D", "Laptop", "MIG"}


def find_device(reported: str) -> Device | None:
    """Device that a driver or JAX calls `reported`; None if unknown.

    Names are `NVIDIA H200` and `NVIDIA A100-SXM4-80GB`, for instance.
    """
    words = reported.replace("-", " ").split()
    if words[:2] == ["NVIDIA", "GeForce"]:
        words = words[2:]
    words = words[1:] if words[:1] == ["NVIDIA"] else words
    found = [d for name, d in DEVICES.items() if words[: len(name.split())] == name.split()]
    return None if _OTHERS & set(words) else max(found, key=lambda d: len(d.name), default=None)


@dataclass(frozen=True)
class Target:
    """A device that choices are for: its name and its number of multiprocessors.

    Attributes:
      name: as the driver calls it.
      multiprocessors: that it has.
      assumed: whether nobody knows how many it has: as many as the reference.
    """

    name: str
    multiprocessors: int
    assumed: bool = False

    @property
    def facts(self) -> Device | None:
        """Those of its model; None if unknown."""
        return find_device(self.name)

    def __str__(self) -> str:
        """`108 multiprocessors`, and whose they are where they are not known to be the device's."""
        whose = f" of an {REFERENCE.name}, {self.name} being unknown" if self.assumed else ""
        return f"{self.multiprocessors} multiprocessors{whose}"


def target(name: str = REFERENCE.name, multiprocessors: int | None = None) -> Target:
    """The device that the driver calls `name`; without one, the reference.

    Args:
      multiprocessors: as the device itself reports; None: as `devices` knows them of the name, or
        else the reference's (`assumed`).

    Raises:
      TypeError: a name that is no text, a number that is no integer. ValueError: `multiprocessors`
        is not positive.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"device={name!r} must be a name as the driver reports it, such as {REFERENCE.name!r}"
        )
    if multiprocessors is None:
        known = find_device(name)
        return Target(name, (known or REFERENCE).multiprocessors, assumed=known is None)
    if not isinstance(multiprocessors, int) or isinstance(multiprocessors, bool):
        raise TypeError(f"multiprocessors={multiprocessors!r} must be an integer")
    if multiprocessors < 1:
        raise ValueError(f"multiprocessors={multiprocessors} must be at least 1")
    return Target(name, multiprocessors)
