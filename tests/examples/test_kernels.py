"""The example that lists a decode step's kernels."""

from __future__ import annotations

from helpers import GOLDEN

from examples import kernels
from jax_q4k import models


def test_lists_every_family_of_the_decode_step(capsys):
    path = GOLDEN / "llama-gqa.Q4_K_M.gguf"
    kernels.main(str(path))
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if line.startswith("│")]
    launches = {name: 0 for name in ("embedding", "quantize_q8_1", "matvec", "append_kv", "paged_attention")}
    for _, name, _, count, *_ in rows:
        (family,) = (family for family in launches if name.startswith(family))
        launches[family] += int(count)
    layers = models.from_gguf(path).config.num_layers
    assert launches == {
        "embedding": 1,
        "quantize_q8_1": 7 * layers + 1,
        "matvec": 7 * layers + 1,
        "append_kv": layers,
        "paged_attention": layers,
    }
    assert f"{sum(launches.values())} launches" in printed
