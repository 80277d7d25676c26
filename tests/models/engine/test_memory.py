"""More prompts than fit in memory at once."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.engine import memory, sizing
from jax_q4k.models.engine.stepper import Stepper
from jax_q4k.models.sampling import Sampling

from ..golden_files import model, path

GIB = 2**30


@pytest.mark.slow("compiles several programs", quick=["native"])
@pytest.mark.parametrize("implementation", ["native", "xla"])
def test_batches_one_after_another(monkeypatch, implementation):
    """Rows get the same tokens as in one batch; timings cover all batches."""
    loaded = model("llama-gqa")
    prompts = [[1 + i, 2, 3 + i][: 1 + i % 3] for i in range(7)]
    samplings = [Sampling(max_new_tokens=1 + i, temperature=i % 2, seed=i) for i in range(7)]
    with jq.implementation(implementation, activations="f32"):
        want = models.generate(loaded, prompts, samplings)
        monkeypatch.setattr(memory, "MAX_ROWS", 3)
        got = models.generate(loaded, prompts, samplings)
    assert [out.tokens for out in got] == [out.tokens for out in want]
    timings = got[0].timings
    assert all(out.timings is timings for out in got)
    assert timings.new_tokens == sum(range(1, 8)) == want[0].timings.new_tokens
    assert timings.prompt_tokens == sum(map(len, prompts))
    assert timings.decoded_tokens == want[0].timings.decoded_tokens


def test_prompts_that_wait_for_rows_take_the_programs_of_the_first(monkeypatch):
    loaded = model("llama-gqa")
    monkeypatch.setattr(memory, "MAX_ROWS", 4)
    fields = {"max_new_tokens": 2, "cache_dtype": "float16"}  # no other test uses it
    models.generate(loaded, [[1, 2]] * 9, **fields)
    out = models.generate(loaded, [[1, 2]] * 14, **fields)
    assert out[0].timings.compile == 0


V2 = "0::/a.slice/b\n", "1 1 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1 = "3:memory:/box\n", "1 1 0:1 /box /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
STAT = "anon 5\ninactive_file 30\nactive_file 20\ntotal_inactive_file 3\ntotal_active_file 2\n"
LIMITS = {
    "2": (*V2, {"a.slice/b/memory.max": "100", "a.slice/b/memory.current": "60"}, 40),
    "2, a parent's": (
        *V2,
        {
            "a.slice/b/memory.max": "max",
            "a.slice/b/memory.current": "60",
            "a.slice/memory.max": "100\n",
            "a.slice/memory.current": "90\n",
            "a.slice/memory.stat": STAT,
        },
        60,
    ),
    "2, none": (*V2, {"a.slice/b/memory.max": "max", "a.slice/b/memory.current": "60"}, None),
    "1": (
        *V1,
        {
            "memory/memory.limit_in_bytes": "100",
            "memory/memory.usage_in_bytes": "60",
            "memory/memory.stat": STAT,
        },
        45,
    ),
    "1, exceeded": (
        *V1,
        {"memory/memory.limit_in_bytes": "100", "memory/memory.usage_in_bytes": "101"},
        0,
    ),
}


@pytest.mark.parametrize("case", LIMITS)
def test_memory_limits_of_containers(case, monkeypatch, tmp_path):
    """Cached files count as free; groups of version 1 and nested ones have limits, too."""
    groups, mounts, files, want = LIMITS[case]
    found = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in (found | {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    of_groups = list(memory._groups(tmp_path))
    monkeypatch.setattr(memory, "_groups", lambda: of_groups)
    monkeypatch.setattr(memory, "_available", lambda: None)
    assert memory.free_bytes_of([]) == want


def test_memory_bounds_a_batch(monkeypatch):
    loaded = model("llama-gqa")

    def rows(free, prompts=100_000, longest=100, capacity=1024):
        monkeypatch.setattr(memory, "free_bytes", lambda _: free)
        return memory.rows_at_once(loaded, prompts, longest, capacity, "float32")

    assert rows(1024 * GIB) == rows(None) == 256
    assert rows(1024 * GIB, prompts=5) == 5
    assert rows(0) == rows(0, prompts=1) == 1
    some = rows(GIB // 4)
    assert 1 < some < 256
    assert rows(GIB // 4, capacity=4096) < some
    assert rows(GIB // 4, longest=1000) < some
    sizes = dataclasses.replace(loaded.config, inner_sizes=(64, 4096))
    loaded = types.SimpleNamespace(
        config=sizes, spans_processes=False, padded_length=loaded.padded_length
    )
    uneven = rows(GIB // 4)
    loaded.config = dataclasses.replace(sizes, inner_sizes=None, intermediate_size=4096)
    assert 1 < rows(GIB // 4) == uneven < some


def test_the_longest_prompt_bounds_a_batch(monkeypatch):
    seen = []

    def rows_at_once(*given):
        seen.extend(given[1:4])
        raise MemoryError

    monkeypatch.setattr(memory, "rows_at_once", rows_at_once)
    with pytest.raises(MemoryError):
        models.generate(model("llama-gqa"), [[1], [1] * 5, [1, 2]], max_new_tokens=3)
    assert seen[:2] == [3, 5] and seen[2] >= 8


def test_free_memory(monkeypatch, tmp_path):
    loaded = model("llama-gqa")
    machine = memory.free_bytes(loaded)
    assert machine is not None and 0 < machine < 2**50
    monkeypatch.setattr(memory, "_groups", lambda: [tmp_path])
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert memory.free_bytes(loaded) == 2000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_bytes(loaded) > 2000


def test_pages_of_several_devices(monkeypatch):
    """Counts the shards that one memory holds: a GPU's own, or all that share a CPU's."""
    mesh = jax.make_mesh((2,), ("tp",), devices=jax.devices()[:2])
    several = models.load(path("llama-gqa"), mesh=mesh)
    monkeypatch.setattr(memory, "free_bytes", lambda _: 10 << 20)

    def pages(loaded, *, on_gpu):
        loaded.network = dataclasses.replace(loaded.network, on_gpu=on_gpu)
        limits = sizing.engine_limits(loaded, 16, deterministic=False)
        return sizing.engine_sizes(loaded, limits, None, None, jnp.float32).pages[0]

    one = models.load(path("llama-gqa"))
    # More of a GPU's memory is used, and each stores half of the heads.
    assert pages(several, on_gpu=True) == pytest.approx(2 * pages(one, on_gpu=True), rel=0.05)
    assert pages(several, on_gpu=False) == pytest.approx(pages(one, on_gpu=False), rel=0.1)


def test_a_wrong_row_is_found_before_any_work(monkeypatch):
    loaded = model("llama-gqa")
    monkeypatch.setattr(memory, "MAX_ROWS", 1)
    monkeypatch.setattr(Stepper, "dispatch", None)
    with pytest.raises(ValueError, match="exceed the context length"):
        models.generate(loaded, [[1]] * 3, [*[Sampling()] * 2, Sampling(max_new_tokens=10**6)])
