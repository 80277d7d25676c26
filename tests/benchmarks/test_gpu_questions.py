"""The questions of the first hour on a GPU: their kernels, arithmetic and failures."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import gpu_questions, module_loads
from benchmarks.gpu_predictions import Predictions
from benchmarks.gpu_questions import QUESTIONS, Bench, empty
from benchmarks.gpu_sizes import FULL, SMALL
from benchmarks.module_loads import Loads, measure_loads
from ptx_kernels.driver import Timing
from ptx_kernels.kernels import KERNELS
from ptx_kernels.kernels.matvec import PRESETS
from ptx_kernels.machine_code.ptxas import assemble_all
from ptx_kernels.probes import cluster_barriers, cluster_ring
from ptx_kernels.simulated_cuda import SimulatedDevice


class Clocked(SimulatedDevice):
    """A device whose graphs take `overhead` seconds plus `seconds(kernel)` for each launch."""

    def __init__(self, overhead, seconds):
        super().__init__()
        self.overhead, self.seconds = overhead, seconds

    def time(self, launches, *, replays=30):
        whole = self.overhead + sum(self.seconds(kernel) for kernel, _ in launches)
        return Timing(whole / len(launches), 0.0, 0.0, replays)


def bench(gpu) -> Bench:
    return Bench(gpu, SMALL, 4e12, Predictions(gpu.facts.name), dry_run=True)


def answer(name: str, gpu) -> gpu_questions.Answer:
    return next(q for q in QUESTIONS if q.name == name).answer(bench(gpu))


def test_full_sized_kernels_assemble():
    """Assembles the texts that the driver will get, for the device of the questions."""
    kernels = gpu_questions.timed_kernels(FULL)
    assert len(kernels) == 17
    texts = [built.text for built in kernels] + [
        empty(blocks=132).text,
        *(cluster_ring(blocks=132, cluster=size, turns=3).text for size in (2, 4)),
        cluster_barriers(blocks=128, cluster=8, turns=FULL.barriers).text,
    ]
    for assembly in assemble_all(texts, ("sm_90",)).values():
        assert not assembly.spill_store_bytes


def test_names_are_unique():
    assert len({question.name for question in QUESTIONS}) == len(QUESTIONS)


def test_a_nodes_time_is_without_the_graphs():
    with Clocked(overhead=50e-6, seconds=lambda kernel: 1.3e-6) as gpu:
        found = answer("launch", gpu)
    assert set(found.measured["seconds_per_node"]) == {"1", "132"}
    assert [*found.measured["seconds_per_node"].values()] == pytest.approx([1.3e-6] * 2)
    assert found.line.startswith("a node of a graph: 1.30 us with a grid of 1, ")


def test_a_barriers_time_is_without_the_kernels():
    def seconds(kernel):
        return 4e-6 + 0.25e-6 * kernel.arguments["turns"]

    with Clocked(overhead=50e-6, seconds=seconds) as gpu:
        found = answer("clusters", gpu)
    assert [*found.measured["seconds_per_barrier"]] == ["2", "4", "8"]
    assert [*found.measured["seconds_per_barrier"].values()] == pytest.approx([0.25e-6] * 3)
    assert "take" in found.line and "0.25 us of 8 blocks (model: 0.20 us)" in found.line


def test_a_cluster_that_reads_wrong_numbers_is_no_answer(monkeypatch):
    class Wrong(SimulatedDevice):
        def run(self, kernel, *operands):
            return tuple(result + 1 for result in super().run(kernel, *operands))

    with Wrong() as gpu, pytest.raises(RuntimeError, match="cluster of 2 read wrong numbers"):
        answer("clusters", gpu)


def test_kernels_that_differ_in_their_results_are_no_answer():
    def product(format):
        config = PRESETS["quarter_warp_dp4a"]
        return KERNELS["matvec"](format=format, n=64, columns=512, m=1, config=config)

    def gated(activation):
        return KERNELS["gated_matvec"](
            formats=("Q4_K", "Q4_K"),
            n=64,
            columns=512,
            m=1,
            activation=activation,
            config=PRESETS["quarter_warp_dp4a"],
        )

    with SimulatedDevice() as gpu:
        assert gpu_questions._agreeing(gpu, [product("Q4_K"), product("Q4_K")]) == 0
        with pytest.raises(RuntimeError, match="computes something else: NMSE"):
            gpu_questions._agreeing(gpu, [gated("silu"), gated("swiglu_oai")])


def test_nan_is_another_result(monkeypatch):
    """A NaN in the second result counts as a difference; a maximum of floats would not see it."""
    kernel = KERNELS["quantize_q8_1"](rows=1, columns=64)

    class Spoiled(SimulatedDevice):
        runs = 0

        def run(self, kernel, *operands):
            values, scales = super().run(kernel, *operands)
            self.runs += 1
            return values, scales if self.runs == 1 else np.full_like(scales, np.nan)

    with Spoiled() as gpu, pytest.raises(RuntimeError, match="something else: NMSE nan"):
        gpu_questions._agreeing(gpu, [kernel, kernel])


def test_each_case_of_loading_has_a_process_with_its_own_cache(monkeypatch):
    asked = []

    def process(arguments, changes):
        asked.append((arguments[0], "--simulated" in arguments, changes))
        if arguments[0] == "texts":
            return {"texts": 2, "launches": 100}
        return {"0": [0.5, 1.0], "1": [1.0, 2.0]}[changes["CUDA_CACHE_DISABLE"]]

    monkeypatch.setattr(module_loads, "_process", process)
    found = measure_loads("NVIDIA H200", simulated=False)
    assert found == Loads(texts=2, launches=100, cold=1.5, warm=1.5, without=3.0)
    assert found.of_program(found.without) == 150
    texts, cold, warm, without = asked
    assert texts == ("texts", False, {"JAX_PLATFORMS": "cpu"})
    assert cold == warm and cold[2]["CUDA_CACHE_PATH"] and cold[2]["CUDA_CACHE_DISABLE"] == "0"
    assert without == ("load", False, {"CUDA_CACHE_DISABLE": "1"})


def test_a_process_that_fails_says_why():
    with pytest.raises(RuntimeError, match="module_loads load failed: .*no/such/file"):
        module_loads._process(["load", "/no/such/file", "--simulated"], {})


def test_loads_are_those_of_the_texts(tmp_path, capsys):
    file = tmp_path / "texts.json"
    file.write_text(json.dumps([empty(blocks=1).text, empty(blocks=2).text]))
    assert module_loads.main(["load", str(file), "--simulated"]) == 0
    seconds = json.loads(capsys.readouterr().out)
    assert len(seconds) == 2 and all(0 <= each < 1 for each in seconds)


def test_pairs_of_launches_ask_for_the_next_ones_planes():
    """On this device, prefetching costs 0.1 us and saves the next launch a microsecond."""
    launched = []

    class Asked(Clocked):
        def time(self, launches, *, replays=30):
            launched.append(launches)
            return super().time(launches, replays=replays)

    def seconds(kernel):
        return 5.1e-6 if kernel.ahead_bytes else 5e-6

    with Asked(overhead=0.0, seconds=seconds) as gpu:
        found = answer("prefetch", gpu)
        asking, reader = launched[1][:2]
        assert [asking[0].operands[-1].name, reader[0].operands[0].name] == ["ahead0_0", "block"]
        # the first launch prefetches a plane of the second
        assert asking[1][len(asking[0].operands) - 1] == reader[1][0]
        assert not any(kernel.ahead_bytes for kernel, _ in (*launched[0], *launched[2]))
    times = found.measured["seconds"]
    assert [times[name] for name in ("pair", "asking pair")] == pytest.approx([10e-6, 10.1e-6])
    assert "take 10.00 us, or 10.10 us if the first prefetches" in found.line
