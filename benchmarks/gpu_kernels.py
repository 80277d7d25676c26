"""Times the kernels that decoding spends its time in, launched without JAX inside CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ptx_kernels import tuning
from ptx_kernels.driver import Device, Launch, Timing, rotations
from ptx_kernels.kernels import KERNELS
from ptx_kernels.kernels.matvec import FORMATS
from ptx_kernels.operands import random_operands
from ptx_kernels.ptx import Kernel
from ptx_kernels.report import plain_table

#: (n, k) of Llama-3.1-8B's matrices: attention query and output, gate and up, down, output head.
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096))
ROWS = (1, 2, 4, 8)
CONTEXTS = (1024, 8192, 32768)
_MIN_LAUNCHES = 16  # per replay, so that the replay's own cost is small beside them


@dataclass(frozen=True)
class Measurement:
    """A kernel's time inside a CUDA graph, with inputs rotated through more memory than the L2 holds.

    Attributes:
      bytes: what must move at least: packed weights, or pages, or all operands and results.
      seconds, best, worst: per launch; median, least and most over the replays.
      copy_fraction: bytes / seconds over the bandwidth of a copy (read plus written) in the same run.
    """

    name: str
    config: str
    bytes: int
    seconds: float
    best: float
    worst: float
    copy_fraction: float

    @property
    def gigabytes_per_second(self) -> float:
        return self.bytes / self.seconds / 1e9

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"gigabytes_per_second": self.gigabytes_per_second}


def rotated(gpu: Device, kernel: Kernel, l2_bytes: int) -> list[Launch]:
    """Launches of `kernel` over as many copies of its buffers as the L2 cache cannot hold."""
    addresses = gpu.place(kernel, random_operands(kernel))
    nbytes = [b.nbytes for b in (*kernel.operands, *kernel.results)]
    operands = len(kernel.operands)
    aliases = {operands + result: operand for operand, result in kernel.aliases.items()}
    sets: list[Launch] = [(kernel, addresses)]
    for _ in range(rotations(sum(nbytes), l2_bytes) - 1):
        copy = [gpu.clone(address, size) for address, size in zip(addresses, nbytes, strict=True)]
        for result, operand in aliases.items():
            copy[result] = copy[operand]
        sets.append((kernel, copy))
    return sets * -(-_MIN_LAUNCHES // len(sets))


def _timed(gpu: Device, kernel: Kernel) -> Timing:
    with gpu.scope():
        return gpu.time(rotated(gpu, kernel, gpu.facts.l2_bytes))


def seconds_per_launch(gpu: Device, kernel: Kernel) -> float:
    """Median over replays, on random data."""
    return _timed(gpu, kernel).median


def measure(
    gpu: Device, name: str, kernel: Kernel, nbytes: int, copy_bandwidth: float, config: object = ""
) -> Measurement:
    """Times one kernel on random data."""
    timing = _timed(gpu, kernel)
    return Measurement(
        name=name,
        config=str(config),
        bytes=nbytes,
        seconds=timing.median,
        best=timing.best,
        worst=timing.worst,
        copy_fraction=nbytes / timing.median / copy_bandwidth,
    )


def matvecs() -> Iterator[tuple[str, Kernel, int, object]]:
    """(name, kernel, packed bytes, config) of every mat-vec that is timed."""
    for format in FORMATS:
        for n, k in SHAPES:
            for m in ROWS:
                config = tuning.matvec(format, n, k, m)
                kernel = KERNELS["matvec"](format=format, n=n, columns=k, m=m, config=config)
                packed = sum(b.nbytes for b in kernel.operands if b.type.name == "u8")
                yield f"matvec {format} {n}x{k} m={m}", kernel, packed, config


def others() -> Iterator[tuple[str, Kernel, int, object]]:
    """The same for quantization, decoding to floats, and attention over bf16 pages (Llama-3.1-8B's heads)."""
    for k in (4096, 14336):
        kernel = KERNELS["quantize_q8_1"](rows=1, columns=k)
        yield f"quantize_q8_1 1x{k}", kernel, sum(b.nbytes for b in kernel.buffers), ""
    for format in ("Q4_K", "Q6_K"):
        kernel = KERNELS["decode"](format=format, n=14336, blocks=16, dtype="bf16")
        yield f"decode {format} 14336x4096 to bf16", kernel, sum(b.nbytes for b in kernel.buffers), ""
    for context in CONTEXTS:
        config = tuning.paged_attention(1, 32, 8, context, "bf16")
        kernel = KERNELS["paged_attention"](
            batch=1,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            num_pages=context // 16,
            page_size=16,
            pages_per_sequence=context // 16,
            scale=128**-0.5,
            dtype="bf16",
            config=config,
        )
        pages = sum(b.nbytes for b in kernel.operands if b.name in ("k_pages", "v_pages"))
        yield f"paged_attention bf16 32:8x128, {context} tokens", kernel, pages, config


def table(rows: list[Measurement]) -> str:
    cells = [
        (
            r.name,
            f"{r.bytes / 1e6:.1f}",
            f"{r.seconds * 1e6:.2f}",
            f"{r.best * 1e6:.2f}-{r.worst * 1e6:.2f}",
            f"{r.gigabytes_per_second:.0f}",
            f"{r.copy_fraction:.0%}",
        )
        for r in rows
    ]
    return plain_table(("kernel", "MB", "us", "us, best-worst", "GB/s", "of copy"), cells)
