"""Programs compiled for a T4 without a GPU: ptxas assembles their kernels for sm_75."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from support.paths import GOLDEN

import jax_q4k as jq
from jax_q4k import models
from ptx_kernels.devices import DEVICES
from ptx_kernels.machine_code import ptxas
from tools import aot
from tools.random_model import LLAMA_3_1_8B, random_model

pytestmark = pytest.mark.skipif(aot.unavailable() is not None, reason=str(aot.unavailable()))

SHARED_BYTES = 64 << 10  # of a block on sm_75

#: Model, program, batch, tokens of a prompt, dtype of pages.
CASES = [
    ("llama-gqa", "decode", 1, 8, "bfloat16"),
    ("llama-gqa", "prefill", 1, 8, "bfloat16"),
    ("llama-gqa", "prefill", 3, 32, "float16"),  # decoded weights
    ("llama-gqa", "generate", 8, 8, "float16"),
    ("qwen2-bias", "prefill", 1, 24, "bfloat16"),  # packed weights on tensor cores
    ("qwen2-bias", "generate", 1, 8, "bfloat16"),
    ("qwen3moe", "prefill", 1, 24, "int8"),
    ("qwen3moe", "generate", 1, 8, "int8"),
]


@functools.cache
def _model(name: str) -> models.Model:
    (file,) = GOLDEN.glob(f"{name}.*gguf")
    return models.from_gguf(file)


@pytest.mark.slow(
    "compiles programs for a GPU", quick=["llama-gqa-decode-*", "qwen3moe-generate-*"]
)
@pytest.mark.parametrize(("name", "program", "batch", "time", "dtype"), CASES)
def test_programs(name: str, program: str, batch: int, time: int, dtype: str) -> None:
    function, arguments = models.abstract_programs(
        _model(name),
        batch=batch,
        prompt_length=time,
        capacity=100,
        cache_dtype=jnp.dtype(dtype),
    )[program]
    options = models.CUDA_COMPILER_OPTIONS
    compiled = aot.compile_program(function, *arguments, options=options, target="t4")
    assert len(compiled.ptx_launches) > 10
    assert [t for t in compiled.ptx_launches if not t.is_in("kCommandBuffer")] == []
    targets = {int(sm) for sm in re.findall(r"\.target sm_(\d+)", " ".join(compiled.ptx_texts))}
    assert targets <= {61, 70, 75}
    for (text, _), found in ptxas.assemble_all(compiled.ptx_texts, ["sm_75"]).items():
        entry = re.search(r"\.entry (\w+)", text)
        assert entry and found.spill_store_bytes == found.spill_load_bytes == 0, entry
        assert found.shared_bytes <= 48 << 10
    assert max(t.shared_bytes for t in compiled.ptx_launches) <= SHARED_BYTES
    names = {t.name.partition("_q")[0] for t in compiled.ptx_launches}
    if program == "prefill":
        # bf16 on tensor cores is newer: a prompt's attention is XLA's
        assert "causal_attention" not in names and "split_keys" not in names
        assert ("decode" in names) == (batch * time > 64)
    else:
        assert "paged_attention" in names


@pytest.mark.slow("assembles and simulates every kernel of a step")
def test_a_step_of_an_8b_model(record_property: Callable[[str, str], None]) -> None:
    """No kernel spills, and the predicted time is that of the weights' bytes, nearly."""
    model = random_model(LLAMA_3_1_8B, abstract=True)
    function, arguments = models.abstract_programs(
        model, batch=1, capacity=512, cache_dtype=jnp.dtype(jnp.float16)
    )["decode"]
    found = jq.explain(function, *arguments, platform="cuda", device="Tesla T4", predict=True)
    launches = [
        (call.count, kernel, figures)
        for call in found.calls
        for kernel, figures in zip(call.kernels, call.figures, strict=True)
    ]
    assert {kernel.arguments["oldest"] for _, kernel, _ in launches} == {75}
    assert [kernel.name for _, kernel, figures in launches if figures.spill_bytes] == []
    assert all(figures.seconds is not None for *_, figures in launches)
    seconds = sum(count * figures.seconds for count, _, figures in launches if figures.seconds)
    record_property(
        "figure", f"llama-3.1-8b, predicted for a T4: {1 / seconds:.0f} tokens/s at batch 1"
    )
    nbytes = sum(leaf.size for leaf in jax.tree.leaves(arguments[0]) if leaf.dtype == jnp.uint8)
    device = DEVICES["T4"]
    assert nbytes / device.datasheet_bandwidth <= seconds <= 1.25 * nbytes / device.bandwidth
