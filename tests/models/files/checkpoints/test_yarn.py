"""YaRN in checkpoints: frequencies equal transformers', even if GGUF's keys cannot express them.

The oracle here follows `_compute_yarn_parameters` of transformers 5.24 step by step, in float32.
transformers' logits of llama with `truncate: false` and with other betas, and of gpt-oss, were
compared once: NMSE 6e-13, 5e-13 and 3e-13.
"""

import json
import math
import shutil

import numpy as np
import pytest
from support.helpers import nmse
from support.implementations import needs_native
from support.paths import TESTS

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.config import rope
from jax_q4k.models.files.checkpoints import config_json
from jax_q4k.models.support import json_fields

CHECKPOINTS = TESTS / "data" / "checkpoints"
FAMILIES = json.loads((CHECKPOINTS / "transformers.json").read_text())
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 40}


def llama(**parameters) -> dict:
    config = json.loads((CHECKPOINTS / "llama" / "config.json").read_text())
    for key in ("rope_theta", "rope_scaling"):
        config.pop(key, None)
    return config | {"rope_parameters": YARN | {"factor": 8.0} | parameters}


def family(name: str, outer=None, **parameters) -> dict:
    config = FAMILIES[name]["config"]
    inner = config["rope_parameters"]
    if "full_attention" in inner:
        of_full = inner["full_attention"] | parameters
        return config | {"rope_parameters": inner | {"full_attention": of_full} | (outer or {})}
    return config | {"rope_parameters": inner | parameters}


def frequencies(config: dict, dim: int) -> np.ndarray:
    """Frequencies in radians per token, float32 (dim / 2,)."""
    outer = config["rope_parameters"]
    given = outer.get("full_attention", outer)
    base, factor = given["rope_theta"], given["factor"]
    fast, slow = given.get("beta_fast") or 32, given.get("beta_slow") or 1

    def place(rotations):
        original = given["original_max_position_embeddings"]
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = place(fast), place(slow)
    if outer.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    powers = np.float32(base) ** (np.arange(0, dim, 2, dtype=np.float32) / dim)
    return (1 / (factor * powers) * ramp + 1 / powers * (1 - ramp)).astype(np.float32)


#: (config.json, whether divisors are needed because keys cannot express the frequencies).
CASES = {
    "llama": (llama(), False),
    "between-pairs": (llama(truncate=False), True),
    "null": (llama(truncate=None), True),
    "betas": (llama(beta_fast=16, beta_slow=2.5), True),
    "betas-between-pairs": (llama(beta_fast=16, beta_slow=2.5, truncate=False), True),
    "betas-of-0": (llama(beta_fast=0, beta_slow=None), False),
    "one-pair": (llama(beta_fast=1.0, beta_slow=1.0, truncate=False), True),
    "all-beyond": (llama(original_max_position_embeddings=1), True),
    "few-beyond": (llama(original_max_position_embeddings=5, truncate=False), True),
    "gpt-oss": (family("gpt-oss", truncate=False), True),
    "gpt-oss-whole-pairs": (family("gpt-oss"), False),
    "mistral3": (family("mistral3"), False),
    "mistral3-between-pairs": (family("mistral3", truncate=False), True),
    "olmo3": (family("olmo3", truncate=False), False),  # transformers reads the outer key
    "olmo3-between-pairs": (family("olmo3", {"truncate": False}), True),
}


@pytest.mark.parametrize("case", CASES)
def test_frequencies(case):
    config, needs_divisors = CASES[case]
    described = config_json.describe(json_fields.JSONFields(config, "config.json"))
    assert bool(described.rope_divisors) == needs_divisors
    first, *_ = rope.tables(described.config.ropes, described.rope_divisors)
    want = frequencies(config, described.config.rope_dim)
    np.testing.assert_allclose(first, want, rtol=1e-6)
    if needs_divisors:  # so not nearly 1
        by_keys = rope.frequencies(described.config.ropes[0])
        assert np.abs(by_keys / want - 1).max() > 1e-3


@pytest.mark.parametrize(("original", "warns"), [(40, True), (300, True), (256, False)])
def test_longrope_below_a_whole_context(original, warns, recwarn):
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    config = llama(rope_type="longrope", **factors, original_max_position_embeddings=original)
    config |= {"max_position_embeddings": 1024}
    config_json.describe(json_fields.JSONFields(config, "config.json"))
    assert len(recwarn.list) == warns
    whole = original // 256 * 256
    for warning in recwarn.list:
        assert f"long_factor is used for contexts above {whole} tokens" in str(warning.message)


@needs_native
def test_logits_of_a_folder_and_of_its_file(tmp_path):
    """The divisors are applied, and a saved file has them."""
    tokens = np.arange(5, 45)[None]
    folder = shutil.copytree(CHECKPOINTS / "llama", tmp_path / "model")
    logits = {}
    with jq.implementation("native", activations="f32"):
        for truncate in (True, False):
            (folder / "config.json").write_text(json.dumps(llama(truncate=truncate)))
            given = models.from_pretrained(folder)
            logits[truncate] = given.logits(tokens)
            models.save_gguf(given, tmp_path / "model.gguf")
            saved = models.from_gguf(tmp_path / "model.gguf")
            np.testing.assert_array_equal(saved.logits(tokens), logits[truncate])
            assert ("rope_freqs.weight" in models.named_tensors(saved)) != truncate
    assert nmse(logits[True], logits[False]) > 1e-3
