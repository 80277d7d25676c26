"""Tuning tables, chosen by the model among some Configs, and measured on a simulated device."""

from __future__ import annotations

import functools
import itertools
import json

import pytest

from ptx_kernels import tuning
from ptx_kernels.devices import REFERENCE
from ptx_kernels.driver import DriverError, Timing
from ptx_kernels.kernels import KERNELS
from ptx_kernels.kernels.gemm import gemm_rule
from ptx_kernels.kernels.matvec import PRESETS, MatvecConfig, fused_matvec_rule, matvec_rule
from ptx_kernels.machine_code.model import Prediction
from ptx_kernels.machine_code.work import Work
from ptx_kernels.simulated_cuda import SimulatedCuda, SimulatedDevice
from ptx_kernels.tuning import decide, tables, target
from tools import spaces, tune

DEVICE = SimulatedCuda.name
MATVEC = spaces.SPACES["matvec"]
# the last is compatible with nothing
CONFIGS = (
    PRESETS["dp4a"],
    PRESETS["quarter_warp_dp4a"],
    MatvecConfig(lanes=3),
)
RULE = matvec_rule(target(), "Q4_K", 64, 4096, 1)


Simulated = functools.partial(SimulatedDevice, executes=False)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(spaces, "SHAPES", ((14336, 4096), (64, 4096), (64, 896)))
    monkeypatch.setattr(spaces, "ROWS", (1,))
    monkeypatch.setattr(spaces, "PROMPTS", (64,))
    monkeypatch.setattr(spaces, "matvec_configs", lambda m: CONFIGS)


def test_the_model_writes_a_table(small, tmp_path):
    path = tmp_path / "h200.json"
    assert tune.main(["--model", "--rules", "matvec", "--formats", "Q4_K", "--out", str(path)]) == 0
    table = tables.load(path)
    assert (table.device, table.multiprocessors, table.source) == ("H200", 132, "model")
    assert [r.shape for r in table.rows] == [("Q4_K", 14336, 4096, 1), ("Q4_K", 64, 4096, 1)]
    large = table.nearest(matvec_rule, "Q4_K", 14336, 4096, 1)
    # 14 blocks for a multiprocessor that holds six: each of three rounds begins with a wait
    assert large.config.lanes == 8 and large.why.startswith("latency bound, as the rule")
    assert 14336 * 2304 / REFERENCE.bandwidth < large.seconds < 20e-6
    made = json.loads(path.read_text())["made"]["matvec"]
    assert made["ptxas"] and made["method"] == tune.METHOD and made["commit"]


def test_rules_that_were_not_searched_stay(small, monkeypatch, tmp_path):
    path = tmp_path / "h200.json"
    monkeypatch.setattr(spaces, "LLAMA_8B", spaces.Sizes(256, 64, 512, 1024))
    monkeypatch.setattr(spaces, "LLAMA_1B", spaces.Sizes(256, 64, 512, 1024))
    monkeypatch.setattr(
        tune.Model,
        "best",
        lambda self, space, shape: tune.Pick(space.of_rule(shape, 132), 1e-6, "so"),
    )
    monkeypatch.setattr(tune.Model, "prepare", lambda *_: None)
    command = ["--model", "--formats", "Q8_0", "--out", str(path)]
    assert tune.main(command) == 0
    first = json.loads(path.read_text())
    assert list(first["made"]) == ["matvec", "fused_matvec", "gemm"]
    assert tune.main([*command, "--rules", "gemm"]) == 0
    again = json.loads(path.read_text())
    assert sorted(map(str, again["rows"])) == sorted(map(str, first["rows"]))
    assert again["made"]["matvec"] == first["made"]["matvec"]
    assert tables.load(path).nearest(gemm_rule, "Q8_0", 64, 896, 64).why == "so"


def prediction(seconds: float, slack: float) -> Prediction:
    bounds = {"bandwidth": seconds, "issue": slack, "latency": slack}
    return Prediction(bounds, prologue=0.0, first=0.8e-6, unit="issue", bytes_in_flight=0)


@pytest.fixture
def model(monkeypatch) -> tune.Model:
    """A model of three Configs and the rule's prediction.

    `against` and `spilling` list what is wrong with them.
    """
    made = tune.Model(REFERENCE)
    slow, tight, roomy = CONFIGS[2], *CONFIGS[:2]
    made.found = {
        slow: (prediction(9e-6, 1e-6), ""),
        tight: (prediction(5e-6, 4e-6), ""),
        roomy: (prediction(5.05e-6, 2e-6), ""),
        RULE: (prediction(7e-6, 2e-6), ""),
    }
    made.spilling = ()
    monkeypatch.setattr(made, "predictions", lambda *_: dict(made.found))
    monkeypatch.setattr(made, "spills", lambda space, shape, config: config in made.spilling)
    return made


def best(model: tune.Model) -> tune.Pick:
    return model.best(MATVEC, ("Q4_K", 64, 4096, 1))


def test_of_equals_the_rule_wins_and_else_the_one_with_slack(model):
    assert best(model) == tune.Pick(CONFIGS[1], pytest.approx(7.15e-6), "bandwidth bound")
    model.found[RULE] = prediction(5.06e-6, 5e-6), ""
    assert best(model) == tune.Pick(RULE, pytest.approx(7.16e-6), "bandwidth bound, as the rule")


def test_skipped_candidates_are_counted(model):
    model.spilling = (CONFIGS[1],)
    model.found[CONFIGS[0]] = prediction(5e-6, 4e-6), "over 3.5 instructions a byte"
    assert best(model) == tune.Pick(
        RULE,
        pytest.approx(9.1e-6),
        "bandwidth bound, as the rule; passed over: 1 spilling, 1 over 3.5 instructions a byte",
    )


def test_without_any_in_the_budget_the_rule_stays(model):
    model.found = {
        config: (p, "over 3.5 instructions a byte") for config, (p, _) in model.found.items()
    }
    assert (
        best(model).why
        == "bandwidth bound, as the rule; passed over: 4 over 3.5 instructions a byte"
    )
    model.spilling = tuple(model.found)
    assert best(model) is None


def test_the_rule_stays_if_the_model_cannot_predict_it(model, monkeypatch, small, tmp_path, capsys):
    """An example is a product loop that is unrolled completely while another loop remains."""
    del model.found[RULE]
    assert best(model) is None
    monkeypatch.setattr(tune, "Model", lambda device: model)
    monkeypatch.setattr(model, "prepare", lambda *_: None)
    path = tmp_path / "h200.json"
    assert tune.main(["--model", "--rules", "matvec", "--formats", "Q4_K", "--out", str(path)]) == 0
    # another rule's choice, which the model can predict
    assert [r.shape[1] for r in tables.load(path).rows] == [14336]
    assert capsys.readouterr().out.count("matvec('Q4_K', 64, 4096, 1): left to the rule\n") == 1


def test_budgets_hold_for_every_product(monkeypatch):
    q4 = KERNELS["matvec"](
        format="Q4_K", n=1056, columns=4096, m=1, config=PRESETS["quarter_warp_dp4a"]
    )
    mixed = dict(
        formats=("Q4_K", "Q6_K"),
        rows=(1000, 56),
        columns=4096,
        m=1,
        config=PRESETS["quarter_warp_dp4a"],
    )
    for kernel, limit in ((q4, 3.5), (KERNELS["qkv_matvec"](**mixed), 4.0)):
        machine = tune.codes([kernel], "sm_90")[0]
        assert tune.over_budget(kernel, machine, 132) == ""
        fewer = Work(0, 1.0, 0.99 * machine.body.issued() / limit)
        monkeypatch.setattr(tune, "work_of_loops", lambda *_, few=fewer: iter([few]))
        assert tune.over_budget(kernel, machine, 133) == ""  # these rows do not fill it
        assert tune.over_budget(kernel, machine, 132) == f"over {limit} instructions a byte"
        monkeypatch.undo()


@pytest.mark.slow("builds hundreds of kernels")
@pytest.mark.parametrize("rule", spaces.SPACES)
def test_candidates_are_different_and_build(rule):
    """Candidates for every shape; the rule's choice comes first.

    Each becomes a kernel and a row that a table can store.
    """
    space, seen = spaces.SPACES[rule], set()
    for shape in space.shapes(("Q4_K", "Q6_K", "Q5_0")):
        key = (space.code_shape(shape)[:1], shape[3])
        if key in seen:
            continue
        seen.add(key)
        found = space.candidates(shape, 132)
        assert found[0] == space.of_rule(shape, 132) and len(set(found)) == len(found) > 1
        for config in found:
            assert space.build(shape, config)
            row = space.row(shape, config, 1e-6)
            text = json.dumps({"device": "H200", "source": "model", "rows": [row]})
            (read,) = tables.parse(text, "t.json").rows
            assert (read.shape, read.config) == (shape, config)


def test_candidates_hold_the_presets_for_int8():
    for m in spaces.ROWS:
        assert {PRESETS["dp4a"], PRESETS["half_warp_dp4a"], PRESETS["quarter_warp_dp4a"]} <= {
            *spaces.matvec_configs(m)
        }
    assert all(config.lanes >= 8 for config in spaces.matvec_configs(1))


def test_a_gpu_writes_what_it_measured(small, monkeypatch, tmp_path):
    monkeypatch.setattr(spaces, "SHAPES", ((512, 4096), (64, 512)))
    monkeypatch.setattr(spaces.Space, "of_rule", lambda *_: CONFIGS[0])
    times = iter((3e-6, 2e-6, 6e-6, 5e-6))

    class Timed(SimulatedDevice):
        def time(self, launches):
            assert len({kernel for kernel, _ in launches}) == 1 and len(launches) >= 16
            return Timing(next(times), 0.0, 0.0, 30)

    monkeypatch.setattr(tune, "Gpu", functools.partial(Timed, executes=False))
    path = tmp_path / "mine.json"
    assert tune.main(["--formats", "Q4_K", "--rules", "matvec", "--out", str(path)]) == 0
    table = tables.load(path)
    assert (table.device, table.multiprocessors, table.source) == (DEVICE, 132, "measured")
    assert table.is_for(DEVICE, 132) and not table.is_for(DEVICE, 66)
    assert [(r.shape[1], r.config, r.seconds) for r in table.rows] == [
        (512, CONFIGS[1], 2e-6),
        (64, CONFIGS[1], 5e-6),
    ]
    assert next(times, None) is None
    made = json.loads(path.read_text())["made"]["matvec"]
    assert made["driver"] == "13.0" and made["commit"] and made["versions"]["numpy"]


def test_candidates_that_fail_or_compute_something_else_do_not_win(
    small, monkeypatch, tmp_path, capsys
):
    """The rule's choice comes first; the fastest candidate does not run, the next is wrong."""
    monkeypatch.setattr(spaces, "SHAPES", ((64, 512),))
    monkeypatch.setattr(spaces.Space, "of_rule", lambda *_: CONFIGS[0])
    configs = (*CONFIGS[:2], PRESETS["half_warp_dp4a"], PRESETS["multi_warp_dp4a"])
    monkeypatch.setattr(spaces, "matvec_configs", lambda m: configs)
    seconds = dict(zip(configs, (4e-6, 3e-6, 2e-6, 1e-6), strict=True))

    class Failing(SimulatedDevice):
        def time(self, launches):
            kernel, addresses = launches[0]
            config = kernel.arguments["config"]
            if config == configs[3]:
                raise DriverError("cuGraphLaunch failed: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")
            super().time(launches)
            if config == configs[2]:
                self.cuda.memory[addresses[-1]][3] ^= 0x80  # a sign
            return Timing(seconds[config], 0.0, 0.0, 30)

    monkeypatch.setattr(tune, "Gpu", Failing)
    path = tmp_path / "mine.json"
    arguments = ["--formats", "Q4_K", "--rules", "matvec", "--out", str(path), "--commit", "abc"]
    assert tune.main(arguments) == 0
    (row,) = tables.load(path).rows
    assert (row.config, row.seconds) == (configs[1], 3e-6)
    assert row.why == "passed over: 1 wrong, 1 not running"
    printed = capsys.readouterr().out
    assert "does not run: cuGraphLaunch failed" in printed and "is wrong: NMSE" in printed
    assert json.loads(path.read_text())["made"]["matvec"]["commit"] == "abc"


def test_a_device_on_which_nothing_runs_gives_no_row(small, monkeypatch, tmp_path):
    class Broken(SimulatedDevice):
        def time(self, launches):
            raise DriverError("cuStreamBeginCapture failed: CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(spaces, "SHAPES", ((64, 512),))
    monkeypatch.setattr(tune, "Gpu", Broken)
    path = tmp_path / "mine.json"
    assert tune.main(["--formats", "Q4_K", "--rules", "matvec", "--out", str(path)]) == 0
    assert tables.load(path).rows == ()


def test_a_table_measured_beside_the_models_decides(small, monkeypatch, tmp_path):
    """The package's two files for an H200: measured rows win everywhere."""
    monkeypatch.setattr(spaces, "SHAPES", ((512, 4096), (64, 4096)))
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    monkeypatch.setattr(SimulatedCuda, "name", "NVIDIA H200")
    monkeypatch.setattr(tune, "Gpu", Simulated)
    command = ["--formats", "Q4_K", "--rules", "matvec"]
    assert tune.main(["--model", *command]) == tune.main(command) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["h200.json", "h200.model.json"]
    measured, predicted = (tables.load(tmp_path / f"h200{s}.json") for s in ("", ".model"))
    assert [r.shape for r in measured.rows] == [r.shape for r in predicted.rows] != []
    tables.packaged.cache_clear()
    try:
        # the last is a neighbor, with the same nearest row in both
        for n, device in ((512, "NVIDIA H200"), (64, "H200"), (400, "NVIDIA H200")):
            with tuning.on_device(tuning.target(device)):
                choice = decide(matvec_rule, "Q4_K", n, 4096, 1)
            assert choice.why.startswith("measured for NVIDIA H200 (h200.json)")
        with tuning.on_device(tuning.target("NVIDIA H100 80GB HBM3")):
            why = decide(matvec_rule, "Q4_K", 512, 4096, 1).why
        assert why.startswith("rule matvec")
    finally:
        tables.packaged.cache_clear()


def test_a_gpu_times_every_rule(small, monkeypatch, tmp_path):
    """A measured table of all rules decides for its device, also for prompts and fused weights."""
    monkeypatch.setattr(tune, "Gpu", Simulated)
    monkeypatch.setattr(spaces, "LLAMA_8B", spaces.Sizes(256, 64, 512, 1024))
    monkeypatch.setattr(spaces, "LLAMA_1B", spaces.Sizes(512, 64, 1024, 1024))
    monkeypatch.setattr(spaces, "SHAPES", ((64, 512),))
    path = tmp_path / "mine.json"
    assert tune.main(["--formats", "Q4_K", "--out", str(path)]) == 0
    assert {r.kernel for r in tables.load(path).rows} == {"matvec", "fused_matvec", "gemm"}
    monkeypatch.setenv(tuning.VARIABLE, str(path))
    with tuning.on_device(tuning.target(DEVICE, 132)):
        for choice in (
            decide(gemm_rule, "Q4_K", 64, 512, 60),
            decide(fused_matvec_rule, ("Q4_K", "Q4_K"), (512,), 256, 1, True, "q8_1"),
        ):
            assert choice.why.startswith(f"measured for {DEVICE} (mine.json)")


def test_out_of_time_leaves_shapes_out(small, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tune, "Gpu", Simulated)
    monkeypatch.setattr(spaces, "SHAPES", ((64, 512),))
    path = tmp_path / "mine.json"
    assert tune.main(["--formats", "Q4_K", "--out", str(path), "--seconds", "1e-9"]) == 0
    assert tables.load(path).rows == ()
    assert "out of time at matvec('Q4_K', 64, 512, 1)" in capsys.readouterr().out


def test_formats_of_most_files_come_first(small, monkeypatch, tmp_path, capsys):
    """Time may run out before the last formats."""
    monkeypatch.setattr(tune, "Gpu", Simulated)
    path = tmp_path / "mine.json"
    assert tune.main(["--out", str(path), "--rules", "matvec", "--seconds", "1e-9"]) == 0
    assert "out of time at matvec('Q4_K', 14336, 4096, 1)" in capsys.readouterr().out
    shapes = spaces.SPACES["matvec"].shapes(spaces.FORMATS)
    assert [shape[0] for shape in itertools.islice(shapes, 4)] == ["Q4_K", "Q5_K", "Q6_K", "IQ4_XS"]


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    def fails():
        raise DriverError("cuInit failed: CUDA_ERROR_NO_DEVICE")

    monkeypatch.setattr(tune, "Gpu", fails)
    assert tune.main([]) == 3
    assert "needs a CUDA GPU, or --model: cuInit failed" in capsys.readouterr().err
