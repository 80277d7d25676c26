"""Draws the charts of docs/performance.md, docs/charts/*.svg, from benchmarks/results/.

    python -m tools.charts    # needs matplotlib

A chart's file contains its numbers as a description. tests/tools/test_charts.py compares them with
the results, so that no chart is out of date.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, CHARTS = ROOT / "benchmarks" / "results", ROOT / "docs" / "charts"

OURS, THEIRS, XLA, FORK = "#00796b", "#b0bec5", "#ef9a3c", "#78909c"
#: Programs measured on a CPU, by their name in results -> color.
PROGRAMS = {"ours": OURS, "llama.cpp": THEIRS, "ik_llama.cpp": FORK}
#: Series of the 8B chart for GPUs.
_H100, _H200 = "gpu-nvidia-h100-80gb-hbm3-20261128", "gpu-nvidia-h200-20261126"
GPU_SERIES = {"H100": XLA, "H200": OURS, "H200, predicted": THEIRS}
#: Width of one column on a phone, at which text is still readable: inches.
WIDTH = 4.2

#: Results of benchmarks/cpu.py -> the model's name in the chart.
MODELS = {
    "cpu": "Llama 1B",
    "cpu_gemma3_1b": "Gemma 3 1B",
    "cpu_qwen35_800m": "Qwen 3.5 0.8B",
    "cpu_moe_3b": "MoE 3B",
}
DECODING = {"decode_0": "Decoding, no context", "decode_2048": "Decoding after 2048 tokens"}
PROMPTS = {"prefill_128": "Prompt of 128 tokens", "prefill_512": "Prompt of 512 tokens"}
#: Measures of Llama 1B that are compared with both peers.
PEERS_MEASURES = {
    "prefill_512": "Prompt of 512 tokens",
    **DECODING,
    "batch_16": "Decoding, 16 sequences",
    "decode_shared": "Decoding, another program on each core",
}
#: Launches of one layer in a step of Llama 3.1 8B: kernel -> (what it does, its products in
#: step_times.json, one per layer).
LLAMA_LAYER = {
    "qkv_append_matvec": ("norm, queries, keys, values; rotation; pages", r"qkv_append_matvec_.*"),
    "paged_attention": ("attention to 512 tokens", r"paged_attention"),
    "matvec": ("output, residual", r"matvec_\S+ 4096x4096"),
    "gated_matvec": ("norm, gate, up", r"gated_matvec_.*"),
    "matvec ": ("down, residual", r"matvec_\S+ 4096x14336"),
}

_LLAMA_LAYERS = 32

Figures = dict[str, Any]


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def cpu(measures: dict[str, str]) -> Figures:
    """Returns tokens per second on two cores, ours and llama.cpp's: measure -> model -> pair."""
    pairs: Figures = {text: {} for text in measures.values()}
    for file, model in MODELS.items():
        found = next(r for r in _read(file)["results"] if r["threads"] == 2)
        for key, text in measures.items():
            pairs[text][model] = [round(found[who][key]) for who in ("ours", "llama.cpp")]
    return pairs


def cpu_peers() -> Figures:
    """Returns tokens per second of Llama 1B: measure -> cores -> rates of PROGRAMS."""
    return {
        text: {
            f"{row['threads']} core{'s' * (row['threads'] > 1)}": [
                round(row[who][key]) for who in PROGRAMS
            ]
            for row in _read("cpu")["results"]
        }
        for key, text in PEERS_MEASURES.items()
    }


def llama_step() -> Figures:
    """Returns the launches of a layer of Llama 3.1 8B in order: kernel -> (text, predicted us)."""
    programs = _read("step_times")["programs"]
    step = next(p for p in programs if p["shape"] == "llama-3.1-8b" and not p["prompt"])
    found: Figures = {}
    for kernel, (text, pattern) in LLAMA_LAYER.items():
        matching = [k for k in step["kernels"] if re.fullmatch(pattern, k["name"])]
        layers = sum(k["count"] for k in matching)
        if layers != _LLAMA_LAYERS:
            raise ValueError(f"{layers} launches are {pattern}: LLAMA_LAYER is out of date")
        mean = sum(k["count"] * k["seconds"] for k in matching) / layers
        found[kernel] = [text, round(mean * 1e6, 1)]
    return found


def predicted() -> Figures:
    """Returns predicted H200 times of layers in us: (limit, ours beyond it, XLA's part)."""
    found: Figures = {}
    for layer in _read("static")["layers"]:
        total, xla, limit = (1e6 * layer[key] for key in ("seconds", "xla_seconds", "limit"))
        parts = [limit, total - xla - limit, xla]
        found[f"{layer['model']}, {layer['kind']}"] = [round(part, 1) for part in parts]
    return found


def gpu() -> Figures:
    """Returns tokens per second of Llama 3.1 8B on GPUs.

    They are measured on an H100 and an H200, and predicted for an H200 before that.
    """
    predicted = _read(_H200)["predicted_before"]
    found: Figures = {"Decoding": {}, "Prompt": {}}
    for batch, prompt in ((1, 0), (8, 0), (32, 0), (1, 4096)):
        rates = [_measured(name, batch, prompt) for name in (_H100, _H200)]
        rates.append(predicted[f"prompt of {prompt}" if prompt else f"batch {batch}"])
        group, name = ("Prompt", f"{prompt} tokens") if prompt else ("Decoding", f"batch {batch}")
        found[group][name] = [round(rate) for rate in rates]
    return found


def _measured(file: str, batch: int, prompt: int) -> float:
    """Returns tokens per second of the 8B on a GPU, measured by `python -m benchmarks.gpu`."""
    (rate,) = (
        m["tokens_per_second"]
        for m in _read(file)["models"]
        if "8B" in m["name"]
        and (m["tokens"] if "ms" in m else 0, m.get("batch", 1)) == (prompt, batch)
    )
    return float(rate)


def _new(height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def _legend(figure: Any, axes: Any, title: str) -> None:
    """Puts the title and the legend on top."""
    figure.legend(
        *axes.get_legend_handles_labels(),
        title=title,
        title_fontproperties={"size": 12, "weight": "bold"},
        alignment="left",
        loc="outside upper left",
        ncols=3,
        columnspacing=1.2,
        handlelength=1.2,
        frameon=False,
    )


def _plain(axes: Any) -> None:
    """Removes the axis: bars start at the left, with row names before and values after them."""
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0, labelsize=10)
    axes.invert_yaxis()


def _grouped(figures: Figures, heading: str, series: dict[str, str] = PROGRAMS) -> Any:
    """Draws axes for each title, with a group of bars for each name, one bar per series."""
    sizes = [len(groups) for groups in figures.values()]
    bars = len(next(iter(next(iter(figures.values())).values())))
    programs = [(who.replace("ours", "jax-q4k"), color) for who, color in series.items()][:bars]
    figure = _new(0.55 + 0.3 * len(sizes) + 0.18 * sum(sizes) * (bars + 0.5))
    all_axes = figure.subplots(len(figures), 1, height_ratios=sizes, squeeze=False)[:, 0]
    for axes, (title, groups) in zip(all_axes, figures.items(), strict=True):
        for row, (who, color) in enumerate(programs):
            at = [i + 0.82 / bars * (row - (bars - 1) / 2) for i in range(len(groups))]
            values = [group[row] for group in groups.values()]
            drawn = axes.barh(at, values, 0.78 / bars, color=color, label=who)
            axes.bar_label(drawn, fmt="%.0f", padding=3, fontsize=10)
        axes.set_yticks(range(len(groups)), groups)
        axes.set_title(title, loc="left", fontsize=10.5)
        axes.margins(x=0.12)
        _plain(axes)
    _legend(figure, all_axes[0], heading)
    return figure


def draw_cpu(figures: Figures) -> Any:
    return _grouped(figures, "Tokens per second on two cores")


def draw_cpu_peers(figures: Figures) -> Any:
    return _grouped(figures, "Tokens per second, Llama 1B")


def draw_gpu(figures: Figures) -> Any:
    """Draws the rates on GPUs, measured ones in color."""
    return _grouped(figures, "Tokens per second, Llama 3.1 8B", GPU_SERIES)


def draw_predicted(figures: Figures) -> Any:
    """Draws a stacked bar for each kind of layer, its name above it."""
    parts = [("bytes at 4.3 TB/s", THEIRS), ("rest of our kernels", OURS), ("XLA's", XLA)]
    figure = _new(0.6 + 0.5 * len(figures))
    axes = figure.subplots()
    for row, (name, values) in enumerate(figures.items()):
        left = 0.0
        for value, (label, color) in zip(values, parts, strict=True):
            axes.barh(row + 0.14, value, 0.4, left=left, color=color, label="" if row else label)
            left += value
        axes.text(left, row + 0.14, f" {left:.0f}", va="center", fontsize=10)
        axes.text(0, row - 0.16, name, fontsize=10)
    axes.set_yticks([])
    axes.margins(x=0.1)
    _plain(axes)
    axes.spines["left"].set_visible(False)
    _legend(figure, axes, "Predicted us per layer, H200")
    return figure


def draw_llama_step(figures: Figures) -> Any:
    """Draws boxes from top to bottom, in the order of the launches."""
    figure = _new(0.4 + 0.55 * len(figures))
    _legend(figure, axes := figure.subplots(), f"A layer of Llama 3.1 8B: {len(figures)} launches")
    for row, (kernel, (text, time)) in enumerate(figures.items()):
        axes.barh(row, 1, 0.66, color="#e0f2f1", edgecolor=OURS)
        axes.text(0.03, row - 0.12, kernel.strip(), va="center", fontsize=10, family="monospace")
        axes.text(0.03, row + 0.17, text, va="center", fontsize=9.5, color="#37474f")
        axes.text(
            0.97,
            row,
            f"{time:.1f} us,\npredicted",
            va="center",
            ha="right",
            fontsize=9.5,
            color="#37474f",
        )
        if row:
            arrow = {"xytext": (0.5, row - 0.67), "arrowprops": {"arrowstyle": "->"}}
            axes.annotate("", (0.5, row - 0.33), **arrow)
    axes.set_xlim(0, 1.01)
    axes.set_yticks([])
    _plain(axes)
    axes.spines["left"].set_visible(False)
    return figure


#: File name -> (its numbers, its drawing function).
ALL: dict[str, tuple[Callable[[], Figures], Callable[[Figures], Any]]] = {
    "cpu-decode": (lambda: cpu(DECODING), draw_cpu),
    "cpu-prompt": (lambda: cpu(PROMPTS), draw_cpu),
    "cpu-peers": (cpu_peers, draw_cpu_peers),
    "gpu": (gpu, draw_gpu),
    "llama-step": (llama_step, draw_llama_step),
    "predicted": (predicted, draw_predicted),
}


def shown(name: str) -> Figures:
    """Returns the numbers that a chart was drawn from."""
    text = (CHARTS / f"{name}.svg").read_text()
    match = re.search(r"<dc:description>(.*?)</dc:description>", text, re.DOTALL)
    if match is None:
        raise ValueError(f"{name}.svg holds no numbers")
    found: Figures = json.loads(match[1].replace("&quot;", '"').replace("&amp;", "&"))
    return found


def main() -> None:
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "jax-q4k"  # reproducible ids
    matplotlib.rcParams["svg.fonttype"] = "none"  # keeps text as text, in the reader's font
    matplotlib.rcParams["font.family"] = "sans-serif"
    CHARTS.mkdir(exist_ok=True)
    for name, (numbers, draw) in ALL.items():
        figures = numbers()
        about = {"Date": None, "Description": json.dumps(figures), "Title": name}
        draw(figures).savefig(CHARTS / f"{name}.svg", metadata=about)


if __name__ == "__main__":
    main()
