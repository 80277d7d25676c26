"""Times the kernels that decoding spends its time in, launched without JAX inside CUDA graphs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ptx_kernels.devices import find_device
from ptx_kernels.driver import Device, rotated
from ptx_kernels.kernels import KERNELS
from ptx_kernels.kernels.attention import paged_attention_rule
from ptx_kernels.kernels.gemm import gemm_rule
from ptx_kernels.kernels.matvec import PRESETS, SHAPES, fused_matvec_rule, matvec_rule
from ptx_kernels.kernels.operands import random_operands
from ptx_kernels.machine_code.ptxas import ToolNotFoundError
from ptx_kernels.machine_code.report import figures, plain_table
from ptx_kernels.ptx import Kernel
from ptx_kernels.tuning import choose
from tools.spaces import FORMATS

from .common import part_of

ROWS = (1, 2, 4, 8)
CONTEXTS = (1024, 8192, 32768)
PRESET = "preset"  # in front of the names of strategies


@dataclass(frozen=True)
class Measurement:
    """Kernel's time inside a CUDA graph, inputs rotated through more memory than the L2 holds.

    Attributes:
      bytes: what must move at least: packed weights, or pages, or all operands and results.
      seconds, best, worst: per launch; median, least and most over the replays.
      copy_fraction: bytes / seconds over the bandwidth of a copy (read plus written) in the same
        run.
      predicted: seconds by the cost model, where ptxas and nvdisasm are at hand and it knows the
        device.
    """

    name: str
    config: str
    bytes: int
    seconds: float
    best: float
    worst: float
    copy_fraction: float
    predicted: float | None = None

    @property
    def gigabytes_per_second(self) -> float:
        return self.bytes / self.seconds / 1e9

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"gigabytes_per_second": self.gigabytes_per_second}


def _predicted(kernel: Kernel, device_name: str) -> float | None:
    device = find_device(device_name)
    if device is None:
        return None
    try:
        return figures(kernel, device.arch, device=device).seconds
    except ToolNotFoundError:
        return None


def measure(
    gpu: Device, name: str, kernel: Kernel, nbytes: int, copy_bandwidth: float, config: object = ""
) -> Measurement:
    """Times one kernel on random data."""
    with gpu.scope():
        timing = gpu.time(rotated(gpu, kernel, random_operands(kernel), gpu.facts.l2_bytes))
    return Measurement(
        name=name,
        config=str(config),
        bytes=nbytes,
        seconds=timing.median,
        best=timing.best,
        worst=timing.worst,
        copy_fraction=nbytes / timing.median / copy_bandwidth,
        predicted=_predicted(kernel, gpu.facts.name),
    )


def matvecs() -> Iterator[tuple[str, Kernel, int, object]]:
    """(name, kernel, packed bytes, config) of every mat-vec that is timed: what tuning chooses."""
    for format in FORMATS:
        for n, k in SHAPES if format in ("Q4_K", "Q6_K") else SHAPES[:1]:
            for m in ROWS if format in ("Q4_K", "Q6_K") else ROWS[:1]:
                config = choose(matvec_rule, format, n, k, m)
                kernel = KERNELS["matvec"](format=format, n=n, columns=k, m=m, config=config)
                yield f"matvec {format} {n}x{k} m={m}", kernel, packed_bytes(kernel), config


def packed_bytes(kernel: Kernel) -> int:
    return sum(b.nbytes for b in kernel.operands if b.type.name == "u8")


def presets() -> Iterator[tuple[str, Kernel, int, object]]:
    """The same of every strategy of the mat-vec, Q4_K, one row of activations (`batched`: four)."""
    for n, k in SHAPES:
        for preset, config in PRESETS.items():
            kernel = KERNELS["matvec"](
                format="Q4_K", n=n, columns=k, m=4 if preset == "batched" else 1, config=config
            )
            yield f"{PRESET} {preset} {n}x{k}", kernel, packed_bytes(kernel), config


def products() -> Iterator[tuple[str, Kernel, int, object]]:
    """The same of Llama-3.1-8B's joined projections, gated feed-forward and prompts' products."""
    qkv: dict[str, Any] = dict(
        formats=("Q4_K", "Q4_K", "Q6_K"), rows=(4096, 1024, 1024), columns=4096, m=1
    )
    config = choose(fused_matvec_rule, **qkv)
    kernel = KERNELS["qkv_matvec"](**qkv, config=config)
    yield "qkv_matvec Q4_K Q4_K Q6_K", kernel, packed_bytes(kernel), config
    pair: dict[str, Any] = dict(formats=("Q4_K", "Q4_K"), columns=4096, m=1)
    config = choose(fused_matvec_rule, rows=(14336,), **pair)
    kernel = KERNELS["gated_matvec"](n=14336, **pair, config=config)
    yield "gated_matvec Q4_K 14336x4096", kernel, packed_bytes(kernel), config
    for m in (16, 64, 512):
        tile = choose(gemm_rule, "Q4_K", 14336, 4096, m)
        kernel = KERNELS["gemm"](format="Q4_K", n=14336, columns=4096, m=m, config=tile)
        yield f"gemm Q4_K 14336x4096 m={m}", kernel, packed_bytes(kernel), tile


def others() -> Iterator[tuple[str, Kernel, int, object]]:
    """The same for quantization, decoding to floats, and attention over bf16 pages.

    Attention has Llama-3.1-8B's heads.
    """
    for k in (4096, 14336):
        kernel = KERNELS["quantize_q8_1"](rows=1, columns=k)
        yield f"quantize_q8_1 1x{k}", kernel, sum(b.nbytes for b in kernel.buffers), ""
    for format in ("Q4_K", "Q6_K"):
        kernel = KERNELS["decode"](format=format, n=14336, blocks=16, dtype="bf16")
        yield (
            f"decode {format} 14336x4096 to bf16",
            kernel,
            sum(b.nbytes for b in kernel.buffers),
            "",
        )
    for context in CONTEXTS:
        config = choose(paged_attention_rule, 1, 32, 8, 128, context, "bf16")
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
            f"{r.predicted * 1e6:.2f}" if r.predicted else "-",
        )
        for r in rows
    ]
    return plain_table(
        ("kernel", "MB", "us", "us, best-worst", "GB/s", "of copy", "us predicted"), cells
    )


def by_preset(rows: list[Measurement]) -> dict[str, dict[str, Measurement]]:
    """Strategy -> shape -> what was measured."""
    found: dict[str, dict[str, Measurement]] = {}
    for measurement in rows:
        kind, preset, shape = (measurement.name.split() + ["", ""])[:3]
        if kind == PRESET:
            found.setdefault(preset, {})[shape] = measurement
    return found


def preset_table(rows: list[Measurement]) -> str:
    """GB/s of packed weights by strategy and shape."""
    found = by_preset(rows)
    shapes = list(dict.fromkeys(shape for of_preset in found.values() for shape in of_preset))
    cells = [
        (
            preset,
            *(f"{of[shape].gigabytes_per_second:.0f}" if shape in of else "-" for shape in shapes),
        )
        for preset, of in found.items()
    ]
    return plain_table(("GB/s", *shapes), cells)


def chart(rows: list[Measurement], path: Path, title: str) -> Path | None:
    """Draws the same as bars; None, and no file, without matplotlib or strategies."""
    found = by_preset(rows)
    if not found or importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure

    shapes = list(dict.fromkeys(shape for of_preset in found.values() for shape in of_preset))
    figure = Figure(figsize=(12, 5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(shapes)
    for i, shape in enumerate(shapes):
        measured = [(x, of[shape]) for x, of in enumerate(found.values()) if shape in of]
        places = [x + (i + 0.5) * width - 0.4 for x, _ in measured]
        axes.bar(places, [m.gigabytes_per_second for _, m in measured], width, label=shape)
    copy = next(
        m.gigabytes_per_second / m.copy_fraction for of in found.values() for m in of.values()
    )
    axes.axhline(copy, color="black", linewidth=1, linestyle="--", label="copy")
    axes.set_xticks(range(len(found)), list(found), rotation=30, ha="right")
    axes.set_ylabel("GB/s of packed Q4_K weights")
    axes.set_title(title)
    axes.legend()
    figure.savefig(path, dpi=120)
    return path


if __name__ == "__main__":
    part_of("gpu", __doc__)
