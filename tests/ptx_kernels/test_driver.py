"""The driver layer, with simulated driver functions that run kernels in Python."""

from __future__ import annotations

import itertools
import pickle
import re
from dataclasses import replace

import numpy as np
import pytest
from support.subjects import SUBJECTS, subject

from ptx_kernels import driver
from ptx_kernels.limits import PTX_VERSIONS
from ptx_kernels.ptx import Buffer, Kernel, f32
from ptx_kernels.simulated_cuda import Result, SimulatedCuda


class FakeCuda(SimulatedCuda):
    """Simulated driver whose kernels are Python functions and whose graphs run at each launch.

    `meanings` maps a kernel's name to its Python function, which gets the launch's addresses. All
    launches are recorded, and every graph takes 3 ms.
    """

    name = "NVIDIA H200"

    def __init__(self, meanings) -> None:
        super().__init__(refuse=lambda text: "ptxas: line 1, bad" if "bad" in text else None)
        self.meanings = meanings
        self.launches: list[tuple] = []

    def parameters(self, function):
        return self.meanings[function[1]].__code__.co_argcount

    def run(self, node):
        name = node.function[1]
        self.launches.append((name, (*node.grid, *node.block), node.shared, node.arguments))
        self.meanings[name](*(self.memory[address].view(np.float32) for address in node.arguments))

    def replay(self, graph):
        for node in graph.nodes:
            self._carry_out(node)

    def cuEventElapsedTime(self, start, end):
        return Result.CUDA_SUCCESS, 3.0  # ms


def kernel(name: str, *buffers: Buffer, shared: int = 0, text: str = "") -> Kernel:
    return Kernel(
        name,
        f".visible .entry {name}(...) {{ ret; }} {text}",
        buffers,
        (2, 1, 1),
        (64, 1, 1),
        shared,
    )


SCALE = kernel("scale", Buffer("x", f32, (2, 3), "in"), Buffer("y", f32, (2, 3), "out"))
ADD = kernel(
    "add", Buffer("total", f32, (4,), "inout"), Buffer("x", f32, (4,), "in"), shared=100 << 10
)


def scale(x, y):
    y[:5] = 2 * x[:5]  # the last one stays unwritten


def add(total, x, total_out):
    total_out += x


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda({"scale": scale, "add": add})
    monkeypatch.setattr(driver, "_bindings", lambda: fake)
    return fake


def test_facts(cuda):
    with driver.Device() as gpu:
        facts = gpu.facts
    assert (facts.name, facts.arch, facts.multiprocessors, facts.driver_cuda_version) == (
        "NVIDIA H200",
        "sm_90",
        132,
        "13.0",
    )
    assert facts.bandwidth == pytest.approx(4.917e12, rel=1e-3)


def test_run_gives_results_and_shows_what_was_not_written(cuda):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    with driver.Device() as gpu:
        (y,) = gpu.run(SCALE, x)
        assert not cuda.memory  # freed
    assert y.shape == (2, 3) and y.dtype == np.float32
    np.testing.assert_array_equal(y.ravel()[:5], 2 * x.ravel()[:5])
    assert np.isnan(y[1, 2])
    ((_, geometry, shared, _),) = cuda.launches
    assert geometry == (2, 1, 1, 64, 1, 1) and shared == 0
    assert not cuda.limits and not cuda.preferences


def test_inout_buffer_is_shared_and_the_operand_kept(cuda):
    total, x = np.ones(4, np.float32), np.arange(4, dtype=np.float32)
    with driver.Device() as gpu:
        (result,) = gpu.run(ADD, total, x)
    np.testing.assert_array_equal(result, 1 + x)
    np.testing.assert_array_equal(total, 1)
    ((_, _, shared, addresses),) = cuda.launches
    assert addresses[0] == addresses[2] != addresses[1]
    assert shared == cuda.limits[(ADD.text, "add")] == 100 << 10
    assert cuda.preferences == {(ADD.text, "add"): cuda.CUfunc_cache.CU_FUNC_CACHE_PREFER_SHARED}


def test_operands_are_checked(cuda):
    with driver.Device() as gpu:
        with pytest.raises(
            TypeError, match=r"kernel scale: operand x is f32 \(2, 3\), got float64 \(2, 3\)"
        ):
            gpu.run(SCALE, np.zeros((2, 3)))
        with pytest.raises(TypeError, match="kernel add takes 2 operands, got 1"):
            gpu.run(ADD, np.zeros(4, np.float32))
        with pytest.raises(ValueError, match="kernel scale takes 2 addresses, got 1"):
            gpu.launch(SCALE, [1])


def test_errors_name_the_call_and_the_driver_says_why(cuda):
    with driver.Device() as gpu:
        with pytest.raises(
            driver.DriverError, match="cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY: said the"
        ):
            gpu.empty(2 << 30)
    with pytest.raises(driver.DriverError, match="device 3 does not exist: the driver counts 1"):
        driver.Device(3)


HEADER = ".version 8.0\n.target sm_90\n"


def test_a_module_that_does_not_load_is_an_error_with_the_drivers_log(cuda):
    broken = kernel("broken", Buffer("y", f32, (1,), "out"), text="bad")
    with driver.Device() as gpu:
        with pytest.raises(driver.ModuleLoadError) as raised:
            gpu.launch(replace(broken, text=HEADER + broken.text), [0])
        with pytest.raises(
            driver.ModuleLoadError, match=r"kernel broken \(PTX unknown for unknown"
        ):
            gpu.time_load(broken.text)
    assert str(raised.value) == (
        "kernel broken (PTX 8.0 for sm_90) does not load on NVIDIA H200 (compute capability 9.0, "
        "driver for CUDA 13.0): cuModuleLoadDataEx failed: CUDA_ERROR_INVALID_PTX: said the "
        "simulated driver; the driver's log: ptxas: line 1, bad"
    )
    assert (raised.value.kernel, raised.value.log) == ("broken", "ptxas: line 1, bad")
    copied = pickle.loads(pickle.dumps(raised.value))
    assert (str(copied), copied.log) == (str(raised.value), raised.value.log)


def test_a_long_log_is_cut_and_an_empty_one_named(cuda):
    with driver.Device() as gpu:
        cuda.refuse = lambda text: "x" * 100_000
        with pytest.raises(driver.ModuleLoadError) as raised:
            gpu.time_load(SCALE.text)
        assert 10_000 < len(raised.value.log) < 20_000
        cuda.refuse = lambda text: ""
        with pytest.raises(driver.ModuleLoadError, match="the driver's log: empty$"):
            gpu.time_load(SCALE.text)


def test_free_memory(cuda):
    with driver.Device() as gpu:
        assert gpu.free_memory() == 100 << 30 < gpu.facts.memory_bytes


def test_time_is_per_launch_over_rotated_inputs(cuda):
    with driver.Device() as gpu, gpu.scope():
        sets = [(SCALE, gpu.place(SCALE, [np.full((2, 3), i, np.float32)])) for i in range(3)]
        timing = gpu.time(sets, replays=5)
    # 3 ms for three launches
    assert timing.median == timing.best == timing.worst == pytest.approx(1e-3)
    assert timing.replays == 5
    used = [addresses for _, _, _, addresses in cuda.launches]
    assert len(used) == 3 * (3 + 5) and len(set(used)) == 3 and len(set(used[:3])) == 3


def test_copy_bandwidth_counts_both_ways(cuda):
    with driver.Device() as gpu:
        assert gpu.copy_bandwidth(1 << 20) == pytest.approx(2 * (1 << 20) / 3e-3)


def test_loading_is_timed_and_leaves_no_module(cuda, monkeypatch):
    unloaded = []
    clock = itertools.count(10.0, 0.25)
    monkeypatch.setattr(driver.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(
        FakeCuda, "cuModuleUnload", lambda self, m: unloaded.append(m) or (Result(0),)
    )
    with driver.Device() as gpu:
        assert gpu.time_load(SCALE.text) == 0.25
        assert unloaded == [SCALE.text]
        with pytest.raises(driver.DriverError, match="cuModuleLoadDataEx failed: .*INVALID_PTX"):
            gpu.time_load("no kernel")


def test_rotations_exceed_the_cache():
    assert driver.rotations(10 << 20, 50 << 20) == 20
    assert driver.rotations(300 << 20, 50 << 20) == 1
    assert driver.rotations(1, 50 << 20) == 64


@pytest.mark.parametrize(
    "cuda, fitting", [((12, 4), ">=12.8,<13"), ((13, 1), ">=13,<14"), (None, ">=13,<14")]
)
def test_without_bindings_says_what_to_install(monkeypatch, cuda, fitting):
    def installed():
        if cuda is None:
            raise driver.DriverError("there is no driver")
        return driver.Installed(cuda, (90,))

    monkeypatch.setattr(driver, "installed", installed)

    def missing(name):
        raise ModuleNotFoundError(f"No module named '{name}'")

    monkeypatch.setattr(driver.importlib, "import_module", missing)
    with pytest.raises(
        driver.DriverError, match=f"bindings are not installed.*pip install 'cuda-python{fitting}'"
    ):
        driver.Device()


def test_without_a_driver_says_so(monkeypatch):
    fake = FakeCuda({})
    fake.cuInit = lambda flags: (_ for _ in ()).throw(RuntimeError("libcuda.so.1 was not found"))
    monkeypatch.setattr(driver, "_bindings", lambda: fake)
    with pytest.raises(driver.DriverError, match="could not be loaded: libcuda.so.1 was not found"):
        driver.Device()


def test_bindings_have_what_is_called():
    """Compares names and parameter counts with the real cuda-python, if it is installed."""
    real = pytest.importorskip("cuda.bindings.driver", reason="cuda-python is not installed")
    for name in [name for name in vars(SimulatedCuda) if name.startswith("cu")]:
        signature = getattr(real, name).__doc__.splitlines()[0]
        ours = getattr(SimulatedCuda, name)
        if name not in ("cuLaunchKernel",):
            parameters = signature[signature.index("(") + 1 : signature.rindex(")")]
            assert (
                len([p for p in parameters.split(",") if p.strip()])
                == ours.__code__.co_argcount - 1
            ), signature
    for holder in (
        "CUdevice_attribute",
        "CUfunc_cache",
        "CUfunction_attribute",
        "CUjit_option",
        "CUstreamCaptureMode",
        "CUstream_flags",
    ):
        ours = getattr(SimulatedCuda, holder)
        for member in getattr(ours, "__members__", None) or vars(ours):
            assert hasattr(getattr(real, holder), member), f"{holder}.{member}"
    for member in SimulatedCuda.CUlaunchConfig.__slots__:
        assert hasattr(real.CUlaunchConfig, member), member
    launch = real.cuLaunchKernel.__doc__.splitlines()[0]
    assert launch.count(",") == 10, launch


class Library:
    """A driver library with an RTX 3090 and an H200; its functions return `codes`, by name."""

    def __init__(self, version=12040, **codes):
        self.version, self.codes = version, codes

    def cuInit(self, flags):
        return self.codes.get("cuInit", 0)

    def _give(self, name, pointer, value):
        pointer._obj.value = value
        return self.codes.get(name, 0)

    def cuDriverGetVersion(self, version):
        return self._give("cuDriverGetVersion", version, self.version)

    def cuDeviceGetCount(self, count):
        return self._give("cuDeviceGetCount", count, 2)

    def cuDeviceGetAttribute(self, value, attribute, device):
        part = {75: "COMPUTE_CAPABILITY_MAJOR", 76: "COMPUTE_CAPABILITY_MINOR"}[attribute]
        capability = {"COMPUTE_CAPABILITY_MAJOR": (8, 9), "COMPUTE_CAPABILITY_MINOR": (6, 0)}
        return self._give("cuDeviceGetAttribute", value, capability[part][device])


@pytest.mark.parametrize(
    "version, cuda, ptx",
    [
        (11080, (11, 8), (7, 8)),
        (12040, (12, 4), (8, 4)),
        (12060, (12, 6), (8, 5)),
        (13000, (13, 0), (9, 0)),
        (99010, (99, 1), (9, 2)),
        (10020, (10, 2), (6, 5)),
        (9020, (9, 2), (0, 0)),
    ],
)
def test_the_driver_is_asked_without_bindings(monkeypatch, version, cuda, ptx):
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: Library(version))
    found = driver.installed()
    assert (found.cuda, found.capabilities, found.newest_ptx) == (cuda, (86, 90), ptx)
    assert driver.count_devices() == 2


@pytest.mark.parametrize(
    "name", ["cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGetAttribute"]
)
def test_a_driver_that_fails_is_an_error_that_names_the_call(monkeypatch, name):
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda _: Library(**{name: 100}))
    with pytest.raises(driver.DriverError, match=f"{name} returned error 100"):
        driver.installed()


def test_no_driver_library_is_an_error_that_names_it(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(driver.ctypes, "CDLL", missing)
    with pytest.raises(driver.DriverError, match=r"libcuda\.so\.1 is not installed"):
        driver.count_devices()


def test_no_kernel_needs_newer_ptx_than_is_asked_of_its_driver():
    for label in SUBJECTS:
        text = subject(label).kernel.text
        found = re.match(r"\.version (\d+)\.(\d+)\n\.target sm_(\d+)\n", text)
        major, minor, sm = map(int, found.groups())
        asked = max(v for least, v in PTX_VERSIONS.items() if least <= max(sm, min(PTX_VERSIONS)))
        assert (major, minor) <= asked, label
