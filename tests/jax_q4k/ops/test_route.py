"""`route` against NumPy, with the rules of MoE models."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import nmse

import jax_q4k as jq

LOGITS = np.random.default_rng(0).standard_normal((2, 5, 12), np.float32) * 2
BIAS = np.random.default_rng(1).standard_normal(12, np.float32)


def routed(logits, top, scores, chosen_by, normalize, scale):
    """Computes ids and weights of one token by a sort, in float64."""
    ids = np.argsort(-chosen_by, kind="stable")[:top]
    weights = scores[ids]
    if normalize:
        weights = weights / max(weights.sum(), 6.103515625e-5)
    return ids, weights * scale


@pytest.mark.grid
@pytest.mark.parametrize("normalize, scale", [(True, 1.0), (False, 2.5)])
@pytest.mark.parametrize("groups, used, best", [(1, 1, 2), (3, 2, 2), (12, 4, 2), (3, 2, 1)])
@pytest.mark.parametrize("bias", [None, BIAS])
@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
def test_is_a_sort_of_the_scores(gating, bias, groups, used, best, normalize, scale):
    ids, weights = jq.route(
        *(LOGITS, 4),
        gating=gating,
        bias=bias,
        groups=groups,
        groups_used=used,
        group_best=best,
        normalize=normalize,
        scale=scale,
    )
    assert ids.shape == weights.shape == (2, 5, 4) and ids.dtype == jnp.int32
    for at in np.ndindex(2, 5):
        x = LOGITS[at].astype(np.float64)
        scores = np.exp(x) / np.exp(x).sum() if gating == "softmax" else 1 / (1 + np.exp(-x))
        by = scores if bias is None else scores + bias
        if groups > 1:
            of_groups = np.sort(by.reshape(groups, -1), axis=1)[:, -best:].sum(axis=1)
            out = np.argsort(-of_groups, kind="stable")[used:]
            by.reshape(groups, -1)[out] = -np.inf
        want_ids, want = routed(x, 4, scores, by, normalize, scale)
        np.testing.assert_array_equal(ids[at], want_ids)
        assert nmse(weights[at], want) <= 1e-12


def test_gpt_oss_takes_the_softmax_over_the_chosen():
    ids, weights = jq.route(LOGITS, 4)
    chosen = np.take_along_axis(LOGITS.astype(np.float64), np.asarray(ids), -1)
    assert nmse(weights, np.exp(chosen) / np.exp(chosen).sum(-1, keepdims=True)) <= 1e-12


def test_equals_come_in_the_order_of_their_ids():
    ids, weights = jq.route(np.zeros((1, 8), np.float32), 3, gating="sigmoid", normalize=False)
    np.testing.assert_array_equal(ids, [[0, 1, 2]])
    np.testing.assert_array_equal(weights, [[0.5, 0.5, 0.5]])


def test_a_small_sum_is_clamped():
    logits = np.full((1, 4), -20, np.float32)
    _, weights = jq.route(logits, 2, gating="sigmoid")
    np.testing.assert_allclose(weights, np.exp(-20) / 6.103515625e-5, rtol=1e-5)


@pytest.mark.grid
@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("groups, used", [(1, 1), (3, 2)])
def test_nan_stays_with_its_token(gating, normalize, groups, used):
    options = {"gating": gating, "normalize": normalize, "groups": groups, "groups_used": used}
    logits = LOGITS[0].copy()
    want = jq.route(logits, 4, **options)
    logits[1, 7], logits[2] = np.nan, np.nan
    ids, weights = (np.asarray(a) for a in jq.route(logits, 4, **options))
    others = [0, 3, 4]
    np.testing.assert_array_equal(ids[others], want[0][np.array(others)])
    np.testing.assert_array_equal(weights[others], want[1][np.array(others)])
    assert (ids >= 0).all() and (ids < 12).all() and (np.diff(np.sort(ids)) > 0).all()
    assert np.isnan(weights[2]).all()
    assert np.isnan(weights[1]).sum() == (1 if gating == "sigmoid" and not normalize else 4)
    if gating == "sigmoid":
        assert ids[1, 0] == 7


@pytest.mark.parametrize(
    "arguments, options, error, message",
    [
        ((LOGITS, 0), {}, ValueError, "top=0 must be 1 to 12"),
        ((LOGITS, 9), {"groups": 3, "groups_used": 2}, ValueError, "top=9 must be 1 to 8"),
        ((LOGITS, 2.5), {}, TypeError, "top is of type float"),
        ((LOGITS, 2), {"gating": "relu"}, ValueError, "gating='relu' must be one of softmax, sig"),
        ((LOGITS, 2), {"groups": 5}, ValueError, "groups=5 must divide the number of experts, 12"),
        ((LOGITS, 2), {"groups_used": 2}, ValueError, "groups_used=2 must be 1 to groups=1"),
        ((LOGITS, 2), {"group_best": 3}, ValueError, "group_best=3 must be 1 or 2"),
        ((LOGITS, 2), {"bias": BIAS[:3]}, ValueError, "bias has shape \\(3,\\)"),
        ((LOGITS.astype(int), 2), {}, TypeError, "logits has dtype int"),
        ((LOGITS[..., :0], 1), {}, ValueError, "its last axis must hold an expert"),
        ((LOGITS, 2), {"scale": "1"}, TypeError, "scale is of type str"),
    ],
)
def test_errors_name_the_argument(arguments, options, error, message):
    with pytest.raises(error, match=message):
        jq.route(*arguments, **options)


def test_no_token_has_no_experts():
    ids, weights = jq.route(LOGITS[:, :0], 2)
    assert ids.shape == weights.shape == (2, 0, 2)
