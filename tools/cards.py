"""Predicts a decode step of Llama 3.1 8B for GPUs, beside rates of llama.cpp that others published.

python -m tools.cards [--cards NAME ...] [--out FILE]

Nothing is measured here. A step is one sequence of up to 512 tokens in Q4_K_M, with the kernels
that are chosen for the card. Its time is the sum of the cost model's
(`ptx_kernels.machine_code.model`); XLA's launches, 8 us on an H200, are left out.
Ranges are those of `tools.step_ranges` for an H200, relative to the prediction.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jax_q4k as jq
from jax_q4k import models
from ptx_kernels.devices import DEVICES

from .random_model import LLAMA_3_1_8B, random_model
from .results import write_results
from .step_ranges import relative_range

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "cards.json"
CONTEXT = 512  # tokens

#: Names in `ptx_kernels.devices` -> tokens per second of Llama 3 8B in Q4_K_M, 512 tokens without a
#: prompt (tg 512), by llama.cpp of May 2024 on rented GPUs.
PUBLISHED: dict[str, float] = {
    "RTX 3070": 72.79,
    "RTX 3080": 109.57,
    "RTX 3090": 115.42,
    "RTX 4090": 130.58,
    "RTX 6000 Ada": 133.44,
    "L40S": 115.55,
    "A100 80GB PCIe": 140.62,
    "A100": 135.04,  # SXM, 80 GB
    "H100 PCIe": 145.55,
}
SOURCE = "https://github.com/XiongjieDai/GPU-Benchmarks-on-LLM-Inference"
#: Cards without a published rate there.
OTHERS = ("T4", "A10", "L4", "RTX 5090", "RTX PRO 6000 Blackwell Workstation", "GH200", "B200")


@dataclass(frozen=True)
class Card:
    """A step on one GPU.

    Attributes:
      predicted: tokens per second by the cost model.
      published: tokens per second of llama.cpp; None if unknown.
    """

    name: str
    predicted: float
    published: float | None

    @property
    def range(self) -> str:
        """Range of the prediction, as uncertain as an H200's: `81 to 110`."""
        return " to ".join(f"{self.predicted * end:.0f}" for end in relative_range())


def card(name: str) -> Card:
    """Predicts the step on a card of `ptx_kernels.devices.DEVICES`.

    Raises KeyError for another name, RuntimeError if a kernel has no prediction.
    """
    dtype = jnp.float16 if DEVICES[name].sm < 80 else jnp.bfloat16
    function, arguments = models.abstract_programs(
        random_model(LLAMA_3_1_8B, abstract=True), capacity=CONTEXT, cache_dtype=dtype
    )["decode"]
    seconds = 0.0
    for call in jq.explain(
        function, *arguments, platform="cuda", device=f"NVIDIA {name}", predict=True
    ).calls:
        for figures in call.figures:
            if figures.seconds is None:
                raise RuntimeError(f"{name}: a kernel of {call.name} has no prediction")
            seconds += call.count * figures.seconds
    return Card(name, 1 / seconds, PUBLISHED.get(name))


def results(cards: Sequence[Card]) -> dict[str, Any]:
    """Returns the contents of the results file, in tokens per second."""
    return {
        "predicted": "by the cost model; nothing is measured",
        "published": f"llama.cpp, May 2024, by {SOURCE}",
        "cards": [asdict(each) for each in cards],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.cards", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--cards", nargs="+", default=[*OTHERS, *PUBLISHED], choices=DEVICES)
    parser.add_argument("--out", type=Path, default=RESULTS, help="the results' file")
    options = parser.parse_args(argv)
    found = list[Card]()
    for name in options.cards:
        found.append(one := card(name))
        beside = "none published" if one.published is None else f"published {one.published:.0f}"
        print(f"{name}: PREDICTED {one.predicted:.0f} tokens/s ({one.range}), {beside}", flush=True)
        write_results(options.out, results(found))
    return 0


if __name__ == "__main__":
    # nothing runs on a GPU; without its libraries, looking for one warns
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
