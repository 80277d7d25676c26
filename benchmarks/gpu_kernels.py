"""Times the kernels that dominate decoding, launched without JAX inside CUDA graphs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ptx_kernels.driver import Device, rotated
from ptx_kernels.kernels import KERNELS
from ptx_kernels.kernels.attention import paged_attention_rule
from ptx_kernels.kernels.gemm import gemm_rule
from ptx_kernels.kernels.matvec import PRESETS, fused_matvec_rule, matvec_rule
from ptx_kernels.kernels.operands import random_operands
from ptx_kernels.machine_code.model import Prediction
from ptx_kernels.machine_code.report import plain_table
from ptx_kernels.ptx import Kernel
from ptx_kernels.tuning import choose

from .common import part_of
from .gpu_sizes import Sizes

PRESET = "preset"  # prefix of presets' names

#: name, kernel, minimum bytes to move, and its Config
Timed = tuple[str, Kernel, int, object]


@dataclass(frozen=True)
class Measurement:
    """Time of a kernel in a CUDA graph, with inputs rotated through more memory than L2 holds.

    Attributes:
      bytes: minimum bytes to move: packed weights, or pages, or all operands and results.
      seconds, best, worst: per launch: median, minimum and maximum over the replays.
      copy_fraction: bytes / seconds over the bandwidth of a copy (read plus written) in the same
        run.
      predicted, bound: seconds by the cost model, and the bound it names; None without a
        prediction.
    """

    name: str
    config: str
    bytes: int
    seconds: float
    best: float
    worst: float
    copy_fraction: float
    predicted: float | None = None
    bound: str | None = None

    @property
    def gigabytes_per_second(self) -> float:
        return self.bytes / self.seconds / 1e9

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"gigabytes_per_second": self.gigabytes_per_second}


def measure(
    gpu: Device,
    timed: Timed,
    copy_bandwidth: float,
    prediction: Prediction | None = None,
) -> Measurement:
    """Times one kernel on random data; `copy_bandwidth` in bytes/s."""
    name, kernel, nbytes, config = timed
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
        predicted=prediction.seconds if prediction else None,
        bound=prediction.bound if prediction else None,
    )


def matvecs(sizes: Sizes) -> Iterator[Timed]:
    """Yields (name, kernel, packed bytes, config) of every mat-vec to time, as tuning chooses.

    The most common formats are timed with all shapes and rows of activations.
    """
    for format in sizes.formats:
        often = format in ("Q4_K", "Q6_K")
        for n, k in sizes.matrices if often else sizes.matrices[:1]:
            for m in sizes.rows if often else sizes.rows[:1]:
                config = choose(matvec_rule, format, n, k, m)
                kernel = KERNELS["matvec"](format=format, n=n, columns=k, m=m, config=config)
                yield f"matvec {format} {n}x{k} m={m}", kernel, packed_bytes(kernel), config


def packed_bytes(kernel: Kernel) -> int:
    """Returns the bytes of the packed weights among a kernel's operands."""
    return sum(b.nbytes for b in kernel.operands if b.type.name == "u8")


def presets(sizes: Sizes) -> Iterator[Timed]:
    """Yields every mat-vec preset, for Q4_K and one row of activations (`batched`: four)."""
    for n, k in sizes.matrices:
        for preset, config in PRESETS.items():
            kernel = KERNELS["matvec"](
                format="Q4_K", n=n, columns=k, m=4 if preset == "batched" else 1, config=config
            )
            yield f"{PRESET} {preset} {n}x{k}", kernel, packed_bytes(kernel), config


def products(sizes: Sizes) -> Iterator[Timed]:
    """Yields a layer's joined projections, gated feed-forward and prompts' products."""
    inner, hidden = sizes.inner, sizes.hidden
    rows = (hidden, sizes.kv, sizes.kv)
    qkv: dict[str, Any] = dict(formats=("Q4_K", "Q4_K", "Q6_K"), rows=rows, columns=hidden, m=1)
    config = choose(fused_matvec_rule, **qkv)
    kernel = KERNELS["qkv_matvec"](**qkv, config=config)
    yield "qkv_matvec Q4_K Q4_K Q6_K", kernel, packed_bytes(kernel), config
    pair: dict[str, Any] = dict(formats=("Q4_K", "Q4_K"), columns=hidden, m=1)
    config = choose(fused_matvec_rule, rows=(inner,), **pair)
    kernel = KERNELS["gated_matvec"](n=inner, **pair, config=config)
    yield f"gated_matvec Q4_K {inner}x{hidden}", kernel, packed_bytes(kernel), config
    for m in sizes.prompts:
        tile = choose(gemm_rule, "Q4_K", inner, hidden, m)
        kernel = KERNELS["gemm"](format="Q4_K", n=inner, columns=hidden, m=m, config=tile)
        yield f"gemm Q4_K {inner}x{hidden} m={m}", kernel, packed_bytes(kernel), tile


def others(sizes: Sizes) -> Iterator[Timed]:
    """Yields quantization, decoding to floats, and attention over bf16 pages.

    Attention has Llama-3.1-8B's heads.
    """
    inner, hidden = sizes.inner, sizes.hidden
    for k in (hidden, inner):
        kernel = KERNELS["quantize_q8_1"](rows=1, columns=k)
        yield f"quantize_q8_1 1x{k}", kernel, sum(b.nbytes for b in kernel.buffers), ""
    for format in ("Q4_K", "Q6_K"):
        kernel = KERNELS["decode"](format=format, n=inner, blocks=hidden // 256, dtype="bf16")
        nbytes = sum(b.nbytes for b in kernel.buffers)
        yield f"decode {format} {inner}x{hidden} to bf16", kernel, nbytes, ""
    for context in sizes.contexts:
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


def all_timed(sizes: Sizes) -> Iterator[Timed]:
    """Yields all kernels, the most important first, since time may be short."""
    for of in (others, products, matvecs, presets):
        yield from of(sizes)


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
    """Groups measurements: preset -> shape -> measurement."""
    found: dict[str, dict[str, Measurement]] = {}
    for measurement in rows:
        kind, preset, shape = (measurement.name.split() + ["", ""])[:3]
        if kind == PRESET:
            found.setdefault(preset, {})[shape] = measurement
    return found


def preset_table(rows: list[Measurement]) -> str:
    """Formats GB/s of packed weights by preset and shape."""
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
    """Draws presets as bars, and measured against predicted times.

    Returns None, and draws nothing, without matplotlib or if nothing was timed.
    """
    if not rows or importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 10), layout="constrained")
    figure.suptitle(title)
    strategies, times = figure.subplots(2, 1)
    _draw_strategies(strategies, rows)
    _draw_predictions(times, rows)
    figure.savefig(path, dpi=120)
    return path


def _draw_strategies(axes: Any, rows: list[Measurement]) -> None:
    """Draws GB/s of packed weights by preset, a bar for each shape."""
    found = by_preset(rows)
    shapes = list(dict.fromkeys(shape for of_preset in found.values() for shape in of_preset))
    for i, shape in enumerate(shapes):
        width = 0.8 / len(shapes)
        measured = [(x, of[shape]) for x, of in enumerate(found.values()) if shape in of]
        centers = [x + (i + 0.5) * width - 0.4 for x, _ in measured]
        axes.bar(centers, [m.gigabytes_per_second for _, m in measured], width, label=shape)
    copy = rows[0].gigabytes_per_second / rows[0].copy_fraction
    axes.axhline(copy, color="black", linewidth=1, linestyle="--", label="copy")
    axes.set_xticks(range(len(found)), list(found), rotation=30, ha="right")
    axes.set_ylabel("GB/s of packed Q4_K weights")
    axes.set_title("mat-vec strategies")
    axes.legend()


def _draw_predictions(axes: Any, rows: list[Measurement]) -> None:
    """Draws a point for each kernel; on the line the cost model is right."""
    pairs = [(1e6 * r.predicted, 1e6 * r.seconds) for r in rows if r.predicted]
    if pairs:
        ends = [min(map(min, pairs)), max(map(max, pairs))]
        axes.loglog(ends, ends, color="black", linewidth=1, linestyle="--")
        axes.loglog(*zip(*pairs, strict=True), "o", markersize=4)
    axes.set_xlabel("us, predicted")
    axes.set_ylabel("us")
    axes.set_title(f"{len(pairs)} kernels beside the cost model")


if __name__ == "__main__":
    part_of("gpu", __doc__)
