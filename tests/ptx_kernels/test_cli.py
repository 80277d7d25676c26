"""`python -m ptx_kernels`, and the modules that importing the package loads."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
from support.paths import ROOT

from ptx_kernels import __main__ as cli
from ptx_kernels.kernels import CASES, KERNELS
from ptx_kernels.kernels.matvec import preset_cases

ONE_OF_EACH_FAMILY = list({case.family: case.label for case in CASES}.values())


def python(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)


def options(case) -> list[str]:
    """The command line that builds `case`, with its Config's fields as options."""
    found: list[str] = []
    for name, (_, default, owner) in cli._options(KERNELS[case.family]).items():
        if owner is None:
            value = case.arguments.get(name, default)
        else:
            value = getattr(case.arguments[owner], name) if owner in case.arguments else default
        if value is not None:
            if dataclasses.is_dataclass(value):
                value = tuple(f"{k}={v}" for k, v in dataclasses.asdict(value).items())
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            found += [f"--{name.replace('_', '-')}", text]
    return found


@pytest.mark.slow("makes every kernel twice", quick=ONE_OF_EACH_FAMILY)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_emit_writes_the_text_of_any_case(case, capsys):
    assert cli.main(["emit", case.family, *options(case)]) == 0
    assert capsys.readouterr().out == KERNELS[case.family](**case.arguments).text


def test_emit_to_a_file(tmp_path):
    case = CASES[0]
    path = tmp_path / "kernel.ptx"
    done = python("-m", "ptx_kernels", "emit", case.family, *options(case), "-o", str(path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert path.read_text() == KERNELS[case.family](**case.arguments).text


def test_emit_errors_are_clear(capsys):
    case = CASES[0]
    for arguments, message in [
        (["emit", "matmul"], "invalid choice: 'matmul'"),
        (["emit", case.family], "the following arguments are required: --"),
        (
            ["emit", case.family, *options(case), "--depth", "3"],
            "unrecognized arguments: --depth 3",
        ),
        (["report", "--arch", "sm_70"], "invalid choice: 'sm_70'"),
        (
            ["report", "--preset", "tiled", "--family", "gemm"],
            "--preset tiled goes with --family matvec, not gemm",
        ),
        ([], "the following arguments are required: COMMAND"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            cli.main(arguments)
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err


def test_files_that_cannot_be_written(tmp_path, capsys):
    case, plain = CASES[0], tmp_path / "plain.md"
    plain.write_text("no marks\n")
    for arguments, message in [
        (
            ["emit", case.family, *options(case), "-o", str(tmp_path / "none" / "x.ptx")],
            "No such file",
        ),
        (["report", "--family", "argmax", "--markdown", str(tmp_path / "none.md")], "No such file"),
        (
            ["report", "--family", "argmax", "--markdown", str(plain)],
            "plain.md: no marks of a table 'family argmax'",
        ),
    ]:
        with pytest.raises(SystemExit) as stopped:
            cli.main(arguments)
        assert stopped.value.code == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "option, value, message",
    [
        ("--m", "99", "m=99 must be 1 to 8"),
        ("--format", "Q9_K", "format='Q9_K' must be one of "),
    ],
)
def test_emit_reports_what_the_kernel_refuses(option, value, message, capsys):
    arguments = options(next(case for case in CASES if case.family == "matvec"))
    arguments[arguments.index(option) + 1] = value
    with pytest.raises(SystemExit) as stopped:
        cli.main(["emit", "matvec", *arguments])
    assert stopped.value.code == 2
    assert (error := capsys.readouterr().err).startswith("matvec: ") and message in error


def test_report_prints_a_table(capsys):
    family = "quantize_q8_1"
    assert cli.main(["report", "--family", family, "--arch", "sm_80"]) == 0
    lines = capsys.readouterr().out.splitlines()
    labels = [case.label for case in CASES if case.family == family]
    assert lines[0].startswith("ptxas ") and f"sm_80 (A100): {len(labels)} kernels" in lines[0]
    assert lines[1].split()[:4] == ["kernel", "threads", "regs", "spill"]
    assert [line[: len(label)] for line, label in zip(lines[3:], labels, strict=False)] == labels


def test_report_as_json(capsys):
    assert cli.main(["report", "--family", "append_kv", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ptxas"]
    labels = [case.label for case in CASES if case.family == "append_kv"]
    assert [kernel["label"] for kernel in found["kernels"]] == labels
    assert all(kernel["registers"] > 0 for kernel in found["kernels"])


@pytest.mark.parametrize("preset", ["quarter_warp_dp4a", "fused_f32"])
def test_report_of_a_preset(preset, capsys):
    assert cli.main(["report", "--preset", preset, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["kernels"]
    cases = preset_cases(preset)
    assert [kernel["label"] for kernel in found] == [case.label for case in cases]
    for kernel, case in zip(found, cases, strict=True):
        assert ("dp4a" in kernel["mix"]) == (case.arguments["config"].activations != "f32")
        assert kernel["device"] == "H200" and kernel["bound"] in ("bandwidth", "issue", "latency")
        assert 0 < kernel["nbytes"] / 4.8e12 < kernel["seconds"] < 1e-3
        assert sum(kernel["classes"].values()) == pytest.approx(
            kernel["instructions_per_quant_byte"]
        )


def test_needs_numpy_only():
    """Kernels are usable from any framework, so the package imports no JAX and no CUDA package."""
    done = python(
        "-c",
        "import sys, ptx_kernels, ptx_kernels.kernels, ptx_kernels.simulator, ptx_kernels.formats\n"
        "import ptx_kernels.machine_code.ptxas, ptx_kernels.machine_code.sass\n"
        "import ptx_kernels.driver, ptx_kernels.__main__\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & "
        "{'jax', 'jaxlib', 'cuda', 'nvidia', 'flax', 'rich', 'ml_dtypes', 'gguf'}))",
    )
    assert done.stdout == "[]\n", done.stderr


ATTENTION = (
    "simulate paged_attention --batch 2 --num-heads 2 --num-kv-heads 1 --head-dim 32"
    " --num-pages 4 --page-size 16 --pages-per-sequence 2 --scale 0.2"
).split()


def test_simulate_prints_what_ran(capsys):
    assert cli.main([*ATTENTION, "--seeds", "2"]) == 0
    first, second, third, fourth, fifth = capsys.readouterr().out.splitlines()
    assert first == "paged_attention: grid (1, 2, 1), 128 threads a block"
    assert "lane-instructions in" in second
    assert fourth.startswith("shared memory: ") and " wavefronts, 1.00 times the least" in fourth
    assert fifth.startswith("global memory: ") and " sectors, 1.00 times the least" in fifth
    assert third.startswith("out f32 2x2x32: 100.00% finite; NMSE ") and third.endswith(
        " at most under 2 seeds"
    )
    assert cli.main("simulate quantize_q8_1 --rows 2 --columns 64 --seeds 1".split()) == 0
    assert capsys.readouterr().out.splitlines()[2:-1] == [
        "values s8 2x64: 100.00% finite; the same bits under 1 seeds",
        "scale_sum f32 2x2x2: 100.00% finite; the same bits under 1 seeds",
    ]


def test_simulate_prints_the_located_error(capsys, monkeypatch):
    build = cli.build

    def without_barrier(family, values):
        kernel = build(family, values)
        return dataclasses.replace(kernel, text=kernel.text.replace("bar.sync 0;", ""))

    monkeypatch.setattr(cli, "build", without_barrier)
    with pytest.raises(SystemExit) as stopped:
        cli.main(ATTENTION)
    assert stopped.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("SharedRace: kernel paged_attention: shared ")
    assert "barrier between" in error and "written by kernels/" in error


def test_simulate_options_are_checked(capsys):
    for arguments, message in [
        ([*ATTENTION, "--seeds", "-1"], "'-1' must be a number, 0 or more"),
        ([*ATTENTION, "--head-dim", "7"], "paged_attention: "),
    ]:
        with pytest.raises(SystemExit) as stopped:
            cli.main(arguments)
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err
