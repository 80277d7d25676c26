"""GPU models with their specifications, from datasheets unless noted, and the tuning target."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Device:
    """One GPU model and its specifications.

    Attributes:
      name: name that the driver reports, without `NVIDIA` and the form factor; the key of tuning
        tables.
      arch: ptxas target whose machine code runs on it.
      clock_hz: boost clock of the multiprocessors.
      datasheet_bandwidth: memory bandwidth by the datasheet, bytes/s.
      bandwidth: bytes/s that a kernel can reach: a measured device-to-device copy, read plus
        written, else 0.9 of the datasheet.
      fp32_lanes, integer_lanes: results per clock and multiprocessor of 32-bit float multiply-adds,
        and of 32-bit integer adds, logic and shifts (CUDA programming guide, throughput of native
        arithmetic instructions).
      mma_int8_ops: int8 operations (a multiply-add is two) per clock and multiprocessor through
        `mma.sync`.
      mma_float_ops: like `mma_int8_ops`, for f16 and bf16, accumulated in f32.
      tensor_clock_hz: clock of the multiprocessors under tensor core load; None means the boost
        clock.
      dot_float_ops: f16 operations/s of XLA's matmul of large matrices, by cuBLAS; None if unknown.
      block_shared_bytes: shared memory available to a thread block (CUDA programming guide).
      groups: multiprocessors of each GPC. A cluster's thread blocks are in one GPC.
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
    groups: tuple[int, ...] = ()

    def places(self, cluster: int = 1, resident: int = 1) -> int:
        """Returns the thread blocks that run at once, in clusters of `cluster`.

        resident: thread blocks that fit on a multiprocessor.
        """
        if cluster == 1:
            return self.multiprocessors * resident
        return sum(size * resident // cluster * cluster for size in self._groups)

    def busiest(self, blocks: int, cluster: int = 1, resident: int = 1) -> int:
        """Returns the thread blocks of the busiest multiprocessor, for a grid of `blocks`.

        cluster, resident: see `places`. Where clusters leave multiprocessors idle, others get more.
        """
        # no place: too few multiprocessors for a cluster
        full, rest = divmod(blocks, self.places(cluster, resident) or 1)
        fit = (n for n in range(resident + 1) if self.places(cluster, n) >= rest)
        return full * resident + next(fit)

    @property
    def _groups(self) -> tuple[int, ...]:
        full, rest = divmod(self.multiprocessors, _GROUP)
        return self.groups or (_GROUP,) * full + (rest,)

    @property
    def l2_bandwidth(self) -> float:
        """Bytes/s from the L2 cache to the multiprocessors: 5.5 TB/s on an H100 at 1.98 GHz.

        The H100's figure was measured by others. Devices of other generations are assumed to have
        the same bytes per clock and multiprocessor.
        """
        return _L2_BYTES * self.multiprocessors * self.clock_hz

    @property
    def clusters(self) -> bool:
        """Whether thread blocks can share memory in clusters (sm_90 and later)."""
        return self.sm >= 90

    @property
    def bulk_copies(self) -> bool:
        """Whether one instruction can copy many bytes to shared memory or L2 (sm_90 and later)."""
        return self.sm >= 90

    @property
    def sm(self) -> int:
        """Number in `arch`, such as 90."""
        return int(self.arch.removeprefix("sm_"))

    @property
    def slug(self) -> str:
        """Name used in file names."""
        return self.name.lower().replace(" ", "-")


#: Number of the oldest architecture that kernels can be built for: Turing, sm_75.
LEAST = 75

_MB = 1 << 20
_L2_BYTES = 5.5e12 / (132 * 1.98e9)  # per clock and multiprocessor

#: Multiprocessors of a GPC, if unknown; and of each GPC of an H100 or H200. On an H100 that others
#: traced (accel-sim/gpu-app-collection), clusters of eight ran on 120 of 132 multiprocessors, which
#: these sizes give. Which multiprocessors are disabled differs from one chip to the next.
_GROUP = 16
_HOPPER_GROUPS = (18, 18, 18, 16, 16, 16, 16, 14)

#: Shared memory available to a block on every device since sm_80, and on Turing.
LEAST_BLOCK_SHARED_BYTES = 99 << 10
TURING_BLOCK_SHARED_BYTES = 64 << 10

#: GeForce cards accumulate f16 in f32 at half the rate of f16 sums.
_geforce = functools.partial(
    Device, mma_int8_ops=2048, mma_float_ops=512, block_shared_bytes=LEAST_BLOCK_SHARED_BYTES
)

#: Cards for workstations and servers with the GeForce cards' chips; these add up in f32 at the full
#: rate.
_professional = functools.partial(
    Device, mma_int8_ops=2048, mma_float_ops=1024, block_shared_bytes=LEAST_BLOCK_SHARED_BYTES
)

#: Turing; the GeForce cards accumulate f16 in f32 at half the rate.
_turing = functools.partial(
    Device,
    arch="sm_75",
    fp32_lanes=64,
    mma_int8_ops=2048,
    mma_float_ops=1024,
    block_shared_bytes=TURING_BLOCK_SHARED_BYTES,
)

#: f16 operations/s of a cuBLAS product on an H100 or H200 of 700 W. Others measured 788e12 on an
#: H200 for 8192 x 8192 x 8192, at a clock that drops with power; the shapes of layers reach less.
_HOPPER_DOT = 700e12

#: Multiprocessors, boost clocks, L2 and bandwidth are from NVIDIA's datasheets and architecture
#: papers of each model; the H200's L2 is what it reports. The H200's 4.3 TB/s was measured. The
#: clock under tensor load is derived from the measured rate of large matrix products. Hopper's
#: `mma.sync` reaches about 0.62 of what `wgmma` does (Luo et al., 2024).
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
            groups=_HOPPER_GROUPS,
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
            groups=_HOPPER_GROUPS,
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
            "H100 NVL",
            "sm_90",
            132,
            1.785e9,
            3.938e12,
            3.54e12,
            50 * _MB,
            mma_int8_ops=5080,
            mma_float_ops=2540,
            groups=_HOPPER_GROUPS,
        ),
        Device(
            "GH200",
            "sm_90",
            132,
            1.98e9,
            4.0e12,
            3.6e12,
            60 * _MB,
            mma_int8_ops=5080,
            mma_float_ops=2540,
            tensor_clock_hz=1.7e9,
            dot_float_ops=_HOPPER_DOT,
            groups=_HOPPER_GROUPS,
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
        *(
            Device(
                name,
                "sm_80",
                108,
                1.41e9,
                datasheet,
                0.9 * datasheet,
                40 * _MB,
                fp32_lanes=64,
                block_shared_bytes=163 << 10,
            )
            for name, datasheet in (
                ("A100 SXM4 40GB", 1.555e12),
                ("A100 PCIE 40GB", 1.555e12),
                ("A100 80GB PCIe", 1.935e12),
            )
        ),
        Device("B200", "sm_100", 148, 1.965e9, 8.0e12, 7.2e12, 126 * _MB),
        _geforce(
            "RTX 5090", "sm_120", 170, 2.407e9, 1.792e12, 1.61e12, 96 * _MB, integer_lanes=128
        ),
        _geforce("RTX 4090", "sm_89", 128, 2.52e9, 1.008e12, 0.907e12, 72 * _MB),
        _geforce("RTX 3060", "sm_86", 28, 1.777e9, 0.36e12, 0.324e12, 3 * _MB),
        _geforce("RTX 3070", "sm_86", 46, 1.725e9, 0.448e12, 0.403e12, 4 * _MB),
        _geforce("RTX 3080", "sm_86", 68, 1.71e9, 0.76e12, 0.684e12, 5 * _MB),
        _geforce("RTX 3090", "sm_86", 82, 1.695e9, 0.936e12, 0.842e12, 6 * _MB),
        _professional("A10", "sm_86", 72, 1.695e9, 0.6e12, 0.54e12, 6 * _MB),
        _professional("A10G", "sm_86", 80, 1.71e9, 0.6e12, 0.54e12, 6 * _MB),
        _professional("L4", "sm_89", 58, 2.04e9, 0.3e12, 0.27e12, 48 * _MB),
        _professional("L40S", "sm_89", 142, 2.52e9, 0.864e12, 0.778e12, 96 * _MB),
        _professional("RTX 6000 Ada", "sm_89", 142, 2.505e9, 0.96e12, 0.864e12, 96 * _MB),
        _professional(
            "RTX PRO 6000 Blackwell Workstation",
            "sm_120",
            188,
            2.617e9,
            1.792e12,
            1.61e12,
            128 * _MB,
            integer_lanes=128,
        ),
        _professional(
            "RTX PRO 6000 Blackwell Server",
            "sm_120",
            188,
            2.617e9,
            1.597e12,
            1.44e12,
            128 * _MB,
            integer_lanes=128,
        ),
        # 70 W rarely allow the boost clock: the base clock, 0.585 GHz, is the other end
        _turing(
            "T4",
            multiprocessors=40,
            clock_hz=1.59e9,
            datasheet_bandwidth=320e9,
            bandwidth=288e9,
            l2_bytes=4 * _MB,
        ),
        _turing(
            "RTX 2080 Ti",
            multiprocessors=68,
            clock_hz=1.545e9,
            datasheet_bandwidth=616e9,
            bandwidth=554e9,
            l2_bytes=11 * _MB // 2,
            mma_float_ops=512,
        ),
    )
}

#: Device assumed when none is available: for compiling ahead of time, simulating, reporting.
REFERENCE = DEVICES["H200"]

#: Warps that would fill the clocks in which one warp of a tensor-core kernel waits.
_WAITING_WARPS = 7


def tensor_busy(warps: int) -> float:
    """Returns the fraction of clocks in which issue slots and L1 of a multiprocessor can be busy.

    warps: resident warps of a kernel that multiplies packed weights on tensor cores. Its warps wait
    for results, copies and each other. The formula is that of warps that wait and work in turn; its
    constant fits products on an H200, each with 8 warps (docs/cost-model.md).
    """
    return warps / (warps + _WAITING_WARPS)


#: Words after a model's name that leave it the same model. Any other means another chip or a part
#: of one, such as Ti, Laptop, MIG, 24Q of a virtual GPU, or D: fewer multiprocessors.
_SAME = {
    *("80GB", "141GB", "480GB", "HBM3", "HBM3e", "NVL", "PCIE", "PCIe", "SXM", "SXM4", "SXM5"),
    *("Edition", "Generation", "(simulated)"),
}


def find_device(reported: str) -> Device | None:
    """Returns the device that a driver or JAX calls `reported`; None if unknown.

    Examples of names are `NVIDIA H200`, `NVIDIA A100-SXM4-80GB` and `Tesla T4`.
    """
    words = reported.replace("-", " ").split()
    if words[:2] == ["NVIDIA", "GeForce"]:
        words = words[2:]
    words = words[1:] if words[:1] in (["NVIDIA"], ["Tesla"]) else words
    for count in range(len(words), 0, -1):  # the longest name first
        if device := DEVICES.get(" ".join(words[:count])):
            return device if _SAME.issuperset(words[count:]) else None
    return None


@dataclass(frozen=True)
class Target:
    """Device for which Configs are chosen: its name and its number of multiprocessors.

    Attributes:
      name: name that the driver reports.
      multiprocessors: number of multiprocessors.
      assumed: whether that number is unknown, so that the reference device's is used.
      capability: compute capability that the device reports, 75 for 7.5; None if unknown.
      clusters_allowed: whether kernels may run as clusters, if the device has them.
      decoded_products: whether matmuls of many rows decode their weights; None leaves it to tables
        and the rule.
    """

    name: str
    multiprocessors: int
    assumed: bool = False
    capability: int | None = None
    clusters_allowed: bool = True
    decoded_products: bool | None = None

    @property
    def sm(self) -> int | None:
        """Number of the device's architecture, 75 for sm_75; None if unknown."""
        return self.capability or (self.facts.sm if self.facts else None)

    @property
    def turing(self) -> bool:
        """Whether the device lacks what kernels can use since sm_80.

        That is bf16 on tensor cores, asynchronous copies and more than 64 KB of shared memory.
        """
        return self.sm is not None and self.sm < 80

    @property
    def block_shared_bytes(self) -> int:
        """Shared memory that a thread block can have; if unknown, what every device has."""
        return self.facts.block_shared_bytes if self.facts else self.common_shared_bytes

    @property
    def common_shared_bytes(self) -> int:
        """Shared memory that a thread block has on every device since sm_80, or on Turing."""
        return TURING_BLOCK_SHARED_BYTES if self.turing else LEAST_BLOCK_SHARED_BYTES

    @property
    def facts(self) -> Device | None:
        """Specifications of the device's model; None if unknown."""
        return find_device(self.name)

    @property
    def clusters(self) -> bool:
        """Whether kernels may run as thread block clusters; False for an unknown device."""
        return self.clusters_allowed and self.facts is not None and self.facts.clusters

    def busiest(self, blocks: int, cluster: int = 1) -> int:
        """Returns the thread blocks of the busiest multiprocessor, see `Device.busiest`.

        Multiprocessors are taken to have one thread block at a time.
        """
        facts = self.facts or REFERENCE
        if facts.multiprocessors != self.multiprocessors:
            facts = replace(facts, multiprocessors=self.multiprocessors, groups=())
        return facts.busiest(blocks, cluster)

    def switched(self, *, clusters: bool = True, decoded_products: bool | None = None) -> Target:
        """Returns the same device with switches; the defaults change nothing."""
        return replace(
            self,
            clusters_allowed=clusters and self.clusters_allowed,
            decoded_products=(
                self.decoded_products if decoded_products is None else decoded_products
            ),
        )

    def __str__(self) -> str:
        """Returns text like `108 multiprocessors`; names the reference if its number is assumed."""
        whose = f" of an {REFERENCE.name}, {self.name} being unknown" if self.assumed else ""
        return f"{self.multiprocessors} multiprocessors{whose}"


def target(
    name: str = REFERENCE.name, multiprocessors: int | None = None, capability: int | None = None
) -> Target:
    """Returns the `Target` for the device that the driver calls `name`; the reference by default.

    Args:
      multiprocessors: number that the device reports; None means the number listed in `devices` for
        the name, else the reference's (`assumed`).
      capability: compute capability that the device reports, 75 for 7.5.

    Raises:
      TypeError: a name that is not a string, a number that is not an integer. ValueError:
        `multiprocessors` is not positive.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"device={name!r} must be a name as the driver reports it, such as {REFERENCE.name!r}"
        )
    if multiprocessors is None:
        known = find_device(name)
        number = (known or REFERENCE).multiprocessors
        return Target(name, number, known is None, capability)
    if not isinstance(multiprocessors, int) or isinstance(multiprocessors, bool):
        raise TypeError(f"multiprocessors={multiprocessors!r} must be an integer")
    if multiprocessors < 1:
        raise ValueError(f"multiprocessors={multiprocessors} must be at least 1")
    return Target(name, multiprocessors, capability=capability)
