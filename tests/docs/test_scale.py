"""The tables of docs/scale.md are what the engine, the recipes and the sharding plan compute."""

from __future__ import annotations

import dataclasses
import math
import re
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from support.model_sizes import Tensor, packed_tensors
from support.statements import ROOT, Statements, table

import jax_q4k as jq
from jax_q4k.models.config import Config
from jax_q4k.models.engine import memory
from jax_q4k.models.engine.sizing import GPU_SHARE, engine_limits, engine_sizes
from jax_q4k.models.kv_cache.shapes import PAGE_SIZE
from jax_q4k.models.sharding.plan import plan_sharding
from tools.random_model import LLAMA_3_1_8B, QWEN_3_30B_A3B

PAGE = "docs/scale.md"
statements = Statements()
says = statements.says

LLAMA_3_70B = dataclasses.replace(
    LLAMA_3_1_8B, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64
)
MODELS = {
    "Llama 3.1 8B": LLAMA_3_1_8B,
    "Qwen 3 30B-A3B": QWEN_3_30B_A3B,
    "Llama 3.3 70B": LLAMA_3_70B,
}
#: Bytes of GPUs, and the part of them that "XLA_CLIENT_MEM_FRACTION" leaves to JAX.
CARDS, FRACTION = (24e9, 48e9, 80e9, 141e9), 0.9
DTYPES = ("float32", "bfloat16", "int8")


def weights(config: Config, devices: int = 1) -> float:
    """Bytes of a model in Q4_K_M, or of a device's part of it."""
    tensors = packed_tensors(config, "Q4_K_M")
    if devices == 1:
        return sum(one.nbytes for one in tensors.values())
    mesh = jax.make_mesh((devices,), ("tp",), devices=jax.devices()[:devices])
    plan = plan_sharding(config, tensors, mesh).tensors

    def part(name: str, one: Tensor) -> float:
        return one.nbytes * math.prod(plan[name].shard_shape(one.shape)) / math.prod(one.shape)

    return sum(part(name, one) for name, one in tensors.items())


def bytes_of_page(config: Config, dtype: str) -> int:
    empty = memory.cache_bytes(config, PAGE_SIZE, np.dtype(jq.page_dtype(dtype)))
    tables = 8  # a page id and a length
    return empty - tables


def pages(config: Config, card: float, dtype: str, devices: int = 1) -> int:
    """Pages that an engine with one GPU, or the devices of a mesh together, has room for."""
    free = GPU_SHARE * (FRACTION * card - weights(config, devices))
    return int(free * devices / bytes_of_page(config, dtype))


def requests(config: Config, card: float, dtype: str, devices: int = 1) -> str:
    """Requests of 2048 and of 8192 tokens; a dash if not even the weights fit."""
    if weights(config, devices) >= FRACTION * card:
        return "-"
    found = pages(config, card, dtype, devices)
    return " / ".join(str(found // (tokens // PAGE_SIZE)) for tokens in (2048, 8192))


def with_digits(number: float) -> str:
    return f"{number:,.0f}"


def sizes() -> list[list[str]]:
    rows = []
    for name, config in MODELS.items():
        of_token = [bytes_of_page(config, dtype) // PAGE_SIZE for dtype in DTYPES]
        shape = f"{config.num_layers}, {config.num_kv_heads}, {config.head_dim}"
        gigabytes = f"{weights(config) / 1e9:.1f}"
        rows.append([name, gigabytes, shape, *map(with_digits, of_token)])
        rows[-1].append(with_digits(bytes_of_page(config, "bfloat16")))
    return rows


def fitting() -> list[list[str]]:
    return [
        [name, f"{card / 1e9:.0f} GB", *(requests(config, card, dtype) for dtype in DTYPES)]
        for name, config in MODELS.items()
        for card in CARDS
    ]


def second() -> list[list[str]]:
    """One GPU, two replicas, and one model over two GPUs, with bfloat16 pages."""
    rows = []
    for name, config in MODELS.items():
        for card in CARDS:
            one, over_two = (requests(config, card, "bfloat16", n) for n in (1, 2))
            twice = re.sub(r"\d+", lambda number: str(2 * int(number[0])), one)
            part = f"{weights(config, 2) / 1e9:.1f}"
            rows.append([name, f"{card / 1e9:.0f} GB", one, twice, over_two, part])
    return rows


@says(PAGE, "`layers * kv_heads * head_dim * 2 * bytes`")
def bytes_of_tokens():
    assert table(PAGE, "| model | Q4_K_M, GB") == sizes()
    for config in MODELS.values():
        values = config.num_layers * config.num_kv_heads * config.head_dim * 2
        for dtype, size in {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}.items():
            assert bytes_of_page(config, dtype) == PAGE_SIZE * values * size
        scales = config.num_layers * config.num_kv_heads * 2 * 4
        assert bytes_of_page(config, "int8") == PAGE_SIZE * (values + scales)


@says(PAGE, "0.9 of the memory that the weights leave", "`XLA_CLIENT_MEM_FRACTION=0.9`")
def requests_at_a_time():
    assert (GPU_SHARE, FRACTION) == (0.9, 0.9)
    assert table(PAGE, "| model | GPU | float32") == fitting()


@says(PAGE, "Two replicas have twice the pages of one")
def two_gpus():
    assert table(PAGE, "| model | GPUs | one") == second()


@says(PAGE, "The engine's own choice differs from the table by 3 % at most")
def pages_of_an_engine():
    """The engine also stores tokens and counts of each row."""
    for config in MODELS.values():
        free = FRACTION * 80e9 - weights(config)
        network = SimpleNamespace(on_gpu=True)
        model: Any = SimpleNamespace(config=config, placement=None, network=network)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "free_bytes", lambda _, free=free: free)
            limits = engine_limits(model, 64, deterministic=False)
            (found,) = engine_sizes(model, limits, None, None, np.dtype("float32")).pages
        assert 0.97 <= found / pages(config, 80e9, "float32") <= 1


@says(
    PAGE,
    "256 requests wait in each front",
    "for `--drain` seconds at most, which is longer than `--timeout`",
)
def limits_of_the_example():
    source = (ROOT / "examples" / "ray_serve.py").read_text()  # Ray need not be installed
    (waiting,) = re.findall(r"^WAITING = (\d+)$", source, re.MULTILINE)
    defaults = dict(re.findall(r'"--(timeout|drain)",\s+type=float,\s+default=(\d+)', source))
    assert waiting == "256" and float(defaults["drain"]) > float(defaults["timeout"])


@pytest.mark.parametrize("statement", statements.parameters())
def test_statement(statement):
    statement.test()
