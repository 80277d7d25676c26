"""`jax-q4k doctor`."""

import platform
import re

import jax
import numpy as np
import pytest
from support.implementations import needs_native

import jax_q4k as jq
from jax_q4k import environment, native
from jax_q4k.gpu_checks import plugin
from jax_q4k.models import cli
from jax_q4k.models.cli.commands import doctor
from jax_q4k.native import build
from ptx_kernels import driver

pytestmark = pytest.mark.cpu_kernels


@pytest.fixture
def run(capsys):
    """Returns a function that runs the command: (exit code, name -> value, standard error)."""

    def run():
        capsys.readouterr()
        code = cli.main(["doctor"])
        out, err = capsys.readouterr()
        rows = (re.fullmatch(r" *(\S+(?: \S+)*) {2,}(\S.*?) *", line) for line in out.splitlines())
        return code, {row[1]: row[2] for row in rows}, err

    return run


def test_versions_and_devices(run):
    code, found, err = run()
    works = native.available() or not native.library_path().exists()
    assert (code, err) == ((0, "") if works else (1, f"broken: {native.problem()}\n"))
    assert found["jax-q4k"].startswith(f"{jq.__version__} in ")
    assert found["Python"].startswith(platform.python_version())
    assert (found["jax"], found["numpy"]) == (jax.__version__, np.__version__)
    assert found["devices of JAX"].startswith(f"{jax.devices()[0].platform}: ")
    assert found["default on cuda"].startswith("ptx: ")
    assert {"CUDA plugin", "CUDA driver", "ptxas", "C++ compiler", "threads of XLA"} <= set(found)


@needs_native
def test_which_kernels_are_in_use(run):
    _, found, _ = run()
    assert [name for name in build.kernels() if found[name] == "in use"] == [native.kernels()]
    assert found["default on cpu"] == f"native: C++ kernels for {native.kernels()}"
    assert found["CPU kernels"].startswith(str(native.library_path()))


@needs_native
@pytest.mark.parametrize("name", build.kernels())
def test_kernels_run_where_the_processor_has_what_they_need(name):
    before = native.kernels()
    try:
        native.select(name)
        runs = True
    except ValueError:
        runs = False
    finally:
        native.select(before)
    assert runs == (set(doctor.NEEDS[name]) <= doctor.instruction_sets())


def test_instructions_that_the_processor_lacks(run, monkeypatch):
    monkeypatch.setattr(doctor, "instruction_sets", lambda: frozenset({"avx2", "fma"}))
    monkeypatch.setattr(build, "kernels", lambda: dict.fromkeys(("avx2", "portable"), []))
    monkeypatch.setattr(native, "kernels", lambda: "portable")
    _, found, _ = run()
    assert found["instruction sets"] == "avx2, fma"
    assert (
        found["avx2"] == "not in use: this processor lacks f16c" and found["portable"] == "in use"
    )


@pytest.mark.parametrize("there", [False, True])
def test_without_a_library_and_with_a_broken_one(run, monkeypatch, tmp_path, there):
    monkeypatch.delenv(native.VARIABLE, raising=False)
    monkeypatch.setattr(native, "_load", lambda: (None, "libjax_q4k.so is of no use"))
    monkeypatch.setattr(native, "library_path", lambda: tmp_path / build.LIBRARY)
    if there:
        (tmp_path / build.LIBRARY).touch()
    code, found, err = run()
    assert (code, err) == ((1, "broken: libjax_q4k.so is of no use\n") if there else (0, ""))
    assert found["CPU kernels"] == "libjax_q4k.so is of no use"
    assert found["default on cpu"].startswith("xla: plain JAX")
    assert found["portable"] == "not in use: the library is not"


@needs_native
def test_kernels_that_compute_something_else(run, monkeypatch):
    matmul = jq.matmul

    def wrong(*args, **options):
        return matmul(*args, **options) + (jq.current_selection().implementation == "native")

    monkeypatch.setattr(jq, "matmul", wrong)
    code, _, err = run()
    assert code == 1 and re.fullmatch(
        r"broken: libjax_q4k.so computes a product that differs from plain JAX's by 1\.\d*\n", err
    )


@needs_native
def test_kernels_that_the_compiler_did_not_know(run, monkeypatch):
    other = next(name for name in build.kernels() if name != native.kernels())
    monkeypatch.setattr(native, "compiled", lambda: [native.kernels()])
    monkeypatch.setattr(
        doctor, "instruction_sets", lambda: frozenset().union(*doctor.NEEDS.values())
    )
    assert run()[1][other] == "not in the library: its compiler does not support them"


@pytest.mark.parametrize("missing, code", [((), 1), (("cpu",), 0)])
def test_a_backend_that_does_not_start(run, monkeypatch, missing, code):
    devices = jax.devices

    def failing(*platform):
        if platform == missing:
            raise RuntimeError("Unable to initialize backend 'tpu'")
        return devices(*platform)

    monkeypatch.setattr(jax, "devices", failing)
    got, found, err = run()
    assert got == code and ("broken: JAX has no device: Unable" in err) == bool(code)
    assert found["devices of JAX"].startswith("none: Unable to") == bool(code)


@pytest.mark.parametrize("variable", ["PJRT_NPROC", "NPROC"])
def test_threads_that_the_environment_asks_for(run, monkeypatch, variable):
    monkeypatch.setenv(variable, "3")
    assert run()[1]["threads of XLA"] == f"3, set by ${variable}"


def test_threads_that_a_quota_pays_for(run, monkeypatch):
    monkeypatch.setattr(jq.cpus, "quota", lambda: 0.5)
    monkeypatch.setattr(jq.cpus, "limited_to", lambda: 0.5)
    assert run()[1]["threads of XLA"] == "1, for a CPU quota of 0.5"


def test_no_compiler(run, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", f"{tmp_path}/none --std")
    assert run()[1]["C++ compiler"] == f"not found: {tmp_path}/none --std; set $CXX to use another"


@pytest.mark.parametrize(
    "cuda, capabilities, problem",
    [
        ((13, 0), (90,), None),
        ((12, 0), (80, 120), None),
        ((11, 8), (86,), None),
        (
            (11, 8),
            (86, 90),
            "of this sm_90 GPU are PTX 8.0, and its driver, for CUDA 11.8, takes PTX",
        ),
        ((10, 2), (80,), "of this sm_80 GPU are PTX 7.0"),
        ((10, 2), (75,), "for CUDA 10.2, takes PTX up to 6.5: install a newer driver"),
    ],
)
def test_a_driver_too_old_for_the_kernels(run, monkeypatch, cuda, capabilities, problem):
    monkeypatch.setattr(driver, "installed", lambda: driver.Installed(cuda, capabilities))
    code, found, err = run()
    assert (code, "broken: the kernels" in err) == ((1, True) if problem else (0, False))
    assert problem is None or problem in err
    assert found["CUDA driver"].startswith(f"CUDA {cuda[0]}.{cuda[1]}, takes PTX up to ")
    assert found["CUDA driver"].endswith(f"sm_{capabilities[-1]}")
    assert found["PTX of kernels"] == "7.0 from sm_75, 8.0 from sm_90"


def test_a_gpu_that_jax_is_told_not_to_use(run, monkeypatch):
    """A wish of the user, not a fault."""
    monkeypatch.setattr(driver, "installed", lambda: driver.Installed((13, 0), (90,)))
    monkeypatch.setattr(plugin, "platforms_without_gpu", lambda: "cpu")
    code, found, err = run()
    assert (code, "broken" in err) == (0, False)
    assert found["devices of JAX"].endswith("; $JAX_PLATFORMS=cpu leaves out the GPU")
    assert found["default on cuda"] == "ptx: generated PTX kernels"


def test_a_gpu_that_jax_cannot_use(run, monkeypatch):
    monkeypatch.setattr(driver, "installed", lambda: driver.Installed((12, 4), (90,)))
    monkeypatch.setattr(plugin, "platforms_without_gpu", lambda: None)
    monkeypatch.setattr(plugin, "installed_plugins", dict)
    code, found, err = run()
    advice = "pip install '.[cuda12]' in a clone"
    assert (code, err) == (
        1,
        f"broken: JAX does not use the GPU, because its CUDA plugin is missing: {advice}\n",
    )
    assert found["CUDA plugin"] == f"not installed; {advice}"
    assert "leaves out" not in found["devices of JAX"]


def test_a_gpu_of_the_driver_that_is_too_old(run, monkeypatch):
    monkeypatch.setattr(driver, "installed", lambda: driver.Installed((12, 4), (70,)))
    assert run()[1]["default on cuda"] == (
        "xla: the PTX kernels need a GPU of compute capability 7.5 or newer, and the sm_70 GPU has "
        "7.0"
    )


@pytest.fixture
def cuda(monkeypatch, tmp_path):
    """A machine with a GPU and a private home folder."""
    monkeypatch.setattr(environment, "cuda_devices", lambda: 1)
    for name in ("CUDA_CACHE_PATH", "CUDA_CACHE_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


WARNING = (
    "warning: the CUDA driver does not cache machine code, and compiles every kernel again in every"
    " process: "
)


def test_the_drivers_cache_is_in_the_home_or_where_the_environment_says(run, cuda, monkeypatch):
    code, found, err = run()
    assert (code, err) == (0, "")
    assert environment.jit_cache() == environment.JitCache(cuda / ".nv" / "ComputeCache")
    monkeypatch.setenv("CUDA_CACHE_PATH", f"{cuda}/deep/er")
    monkeypatch.setenv("CUDA_CACHE_DISABLE", "0")
    assert environment.jit_cache() == environment.JitCache(cuda / "deep" / "er")
    assert "CUDA driver's cache" in run()[1] and not (cuda / "deep").exists()


def test_a_cache_that_is_turned_off(run, cuda, monkeypatch):
    monkeypatch.setenv("CUDA_CACHE_DISABLE", "1")
    code, found, err = run()
    assert (code, err) == (0, f"{WARNING}$CUDA_CACHE_DISABLE disables it\n")
    assert found["CUDA driver's cache"] == "none: $CUDA_CACHE_DISABLE disables it"


def test_a_cache_that_cannot_be_written(run, cuda, monkeypatch):
    (cuda / "file").touch()
    monkeypatch.setenv("CUDA_CACHE_PATH", f"{cuda}/file/cache")
    code, _, err = run()
    said = f"{cuda}/file/cache (from $CUDA_CACHE_PATH) cannot be written"
    assert (code, err) == (0, f"{WARNING}{said}\n")


def test_a_home_that_cannot_be_written(run, cuda, monkeypatch):
    access = environment.os.access
    monkeypatch.setattr(
        environment.os, "access", lambda path, mode: str(path) != str(cuda) and access(path, mode)
    )
    assert run()[2] == f"{WARNING}{cuda}/.nv/ComputeCache cannot be written\n"


@pytest.mark.parametrize("plugins", [{}, {13: "0.10.2"}])
def test_the_cache_is_a_matter_of_gpus(run, cuda, monkeypatch, plugins):
    """Without a device, the cache matters only if JAX's plugin is installed."""
    monkeypatch.setattr(environment, "cuda_devices", lambda: 0)
    monkeypatch.setattr(plugin, "installed_plugins", lambda: plugins)
    monkeypatch.setenv("CUDA_CACHE_DISABLE", "1")
    _, found, err = run()
    assert ("CUDA driver's cache" in found) == err.startswith(WARNING) == bool(plugins)


def test_a_command_without_a_backend_fails_in_one_line(capsys, monkeypatch):
    def fails(message):
        def command(*_):
            raise RuntimeError(message)

        monkeypatch.setattr(doctor, "_doctor", command)
        return cli.main(["doctor"])

    assert fails("Unable to initialize backend 'tpu': there is none") == cli.FAILURE
    assert capsys.readouterr().err == "error: Unable to initialize backend 'tpu': there is none\n"
    with pytest.raises(RuntimeError, match="a fault of ours"):
        fails("a fault of ours")
