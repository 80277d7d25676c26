"""The example that lists the kernels of a decode step."""

from __future__ import annotations

from support.paths import GOLDEN

from examples import kernels
from jax_q4k import models


def test_lists_every_family_of_the_decode_step(capsys):
    path = GOLDEN / "llama-gqa.Q4_K_M.gguf"
    kernels.main(str(path))
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if line.startswith("│")]
    families = (
        "embedding",
        "qkv_append_matvec",
        "paged_attention",
        "merge_attention",
        "gated_matvec",
        "matvec",
    )
    launches = dict.fromkeys(families, 0)
    for _, name, _, count, *_ in rows:
        launches[next(family for family in families if name.startswith(family))] += int(count)
    layers = models.from_gguf(path).config.num_layers
    in_each_layer = {"qkv_append_matvec", "paged_attention", "gated_matvec"}
    assert {name: launches.pop(name) for name in in_each_layer} == dict.fromkeys(
        in_each_layer, layers
    )
    assert launches == {"embedding": 1, "merge_attention": 0, "matvec": 2 * layers + 1}
    assert f"{3 * layers + 2 * layers + 2} launches" in printed
