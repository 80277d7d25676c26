"""`jq.implementation(clusters=False)`: kernels without thread block clusters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import nmse

import jax_q4k as jq
from ptx_kernels import tuning
from ptx_kernels.devices import target
from ptx_kernels.kernels.gemm import GemmConfig, gemm_rule
from ptx_kernels.tuning import tables

KEY = jax.random.key(0)
TOKENS, PAGE = 512, 16
PAGES = TOKENS // PAGE


def operands(batch=1):
    """A step of attention over `TOKENS` tokens: long enough for splits."""
    keys = jax.random.split(KEY, 3)
    q = jax.random.normal(keys[0], (batch, 8, 64))
    k, v = (jax.random.normal(key, (PAGES, 2, PAGE, 64), jnp.bfloat16) for key in keys[1:])
    tables = jnp.tile(jnp.arange(PAGES, dtype=jnp.int32), (batch, 1))
    return q, k, v, tables, jnp.full(batch, TOKENS, jnp.int32)


def kernels(clusters, call=jq.paged_attention, *arguments):
    with jq.implementation(clusters=clusters):
        (found,) = jq.explain(call, *(arguments or operands()), platform="cuda").calls
    return found.kernels


def test_splits_are_merged_by_a_launch_instead_of_a_cluster():
    assert [(k.name, max(k.cluster) > 1) for k in kernels(True)] == [("paged_attention", True)]
    assert [(k.name, max(k.cluster)) for k in kernels(False)] == [
        ("paged_attention", 1),
        ("merge_attention", 1),
    ]


def test_the_simulated_results_are_those_of_plain_jax():
    got = jq.implementation("sim", clusters=False)(jq.paged_attention)(*operands())
    want = jq.implementation("xla")(jq.paged_attention)(*operands())
    assert nmse(np.asarray(got), np.asarray(want)) <= 1e-6


def test_a_jitted_function_is_traced_again():
    step = jax.jit(jq.paged_attention)
    texts = {}
    for clusters in (True, False, True):
        with jq.implementation(clusters=clusters):
            text = step.trace(*operands()).lower(lowering_platforms=("cuda",)).as_text()
        assert texts.setdefault(clusters, text) == text
    assert "reqnctapercluster" in texts[True] and "reqnctapercluster" not in texts[False]


def test_mapped_calls_keep_the_choice():
    q, k, v, tables, lengths = operands()
    step = jax.jit(jax.vmap(lambda q: jq.paged_attention(q, k, v, tables, lengths)))
    with jq.implementation(clusters=False):
        text = step.trace(q[None]).lower(lowering_platforms=("cuda",)).as_text()
    assert "merge_attention" in text and "reqnctapercluster" not in text


def test_products_do_not_split_over_clusters():
    w = jq.QuantizedArray.zeros("Q4_K", (4096, 4096))
    x = jax.ShapeDtypeStruct((32, 4096), jnp.float32)
    with_clusters, without = (kernels(clusters, jq.matmul, x, w) for clusters in (True, False))
    assert max(max(k.cluster) for k in with_clusters) > 1
    assert max(max(k.cluster) for k in without) == 1
    assert all(kernels[-1].name.startswith("gemm_q4_k_f16") for kernels in (with_clusters, without))


def test_activations_of_an_mlp_stay_f16():
    """Without clusters the gated product stores floats, which the next launch converts."""
    wide, down = (jq.QuantizedArray.zeros("Q4_K", s) for s in ((2048, 1024), (1024, 2048)))
    x = jax.ShapeDtypeStruct((32, 1024), jnp.float32)
    names = [[k.name for k in kernels(c, jq.mlp, x, wide, wide, down)] for c in (True, False)]
    assert [name[:8] for name in names[0]] == ["quantize", "gated_ge", "gemm_q4_"]
    assert names[1] == [*names[0][:2], "quantize_f16", names[0][2]]


@pytest.mark.parametrize("splits", [1, 2])
def test_rows_of_tables_decide_unless_they_are_clusters(splits, monkeypatch):
    shape = gemm_rule.shape(format="Q4_K", n=4096, columns=4096, m=8)
    config = GemmConfig(4, 1, 1, 8, splits=splits)
    row = tables.Row("gemm", shape, config, seconds=1e-6)
    table = tables.Table("mine.json", "H200", "measured", (row,))
    monkeypatch.setattr(tables, "packaged", lambda: (table,))
    with tuning.on_device(target("H200")):
        assert tuning.decide(gemm_rule, *shape).config == config
    with tuning.on_device(target("H200").switched(clusters=False)):
        choice = tuning.decide(gemm_rule, *shape)
    assert ("the tables' Config is a cluster" in choice.why) == (splits > 1)
    assert (choice.config == config) == (splits == 1)


@pytest.mark.parametrize("name", ["clusters", "prefetch", "graphs"])
def test_a_switch_is_a_truth_value(name):
    with pytest.raises(ValueError, match=f"{name}=1 must be True or False"):
        jq.implementation(**{name: 1})(lambda: None)()
