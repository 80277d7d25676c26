"""`jq.implementation(clusters=False)`: kernels without thread block clusters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import nmse

import jax_q4k as jq

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


@pytest.mark.parametrize("name", ["clusters", "prefetch", "graphs"])
def test_a_switch_is_a_truth_value(name):
    with pytest.raises(ValueError, match=f"{name}=1 must be True or False"):
        jq.implementation(**{name: 1})(lambda: None)()
