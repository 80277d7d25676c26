"""Driver layer against a stand-in for cuda-python.

It keeps memory on the host and runs kernels in Python.
"""

from __future__ import annotations

import ctypes
import enum
import types

import numpy as np
import pytest

from ptx_kernels import driver
from ptx_kernels.ptx import Buffer, Kernel, f32

Result = enum.IntEnum(
    "Result", {"CUDA_SUCCESS": 0, "CUDA_ERROR_OUT_OF_MEMORY": 2, "CUDA_ERROR_INVALID_PTX": 218}
)
ATTRIBUTES = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "MULTIPROCESSOR_COUNT": 132,
    "L2_CACHE_SIZE": 60 << 20,
    "CLOCK_RATE": 1_980_000,
    "MEMORY_CLOCK_RATE": 3_201_000,
    "GLOBAL_MEMORY_BUS_WIDTH": 6144,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 228 << 10,
}


class FakeCuda(types.ModuleType):
    """`cuda.bindings.driver` as far as it is used.

    `meanings` maps a kernel's name to its Python form.

    A meaning takes the addresses that the kernel got. Copies are carried out at once; while a
    stream is captured, launches are recorded and run when the graph is launched.
    """

    CUresult = Result
    CUdeviceptr = int
    CUstream_flags = types.SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUdevice_attribute = types.SimpleNamespace(
        **{f"CU_DEVICE_ATTRIBUTE_{name}": name for name in ATTRIBUTES}
    )
    CUfunction_attribute = types.SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)
    CUstreamCaptureMode = types.SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)

    def __init__(self, meanings, memory_limit: int = 1 << 30) -> None:
        super().__init__("fake_cuda")
        self.meanings, self.memory_limit = meanings, memory_limit
        self.memory: dict[int, np.ndarray] = {}
        self.calls: list[str] = []
        self.capture: list | None = None
        self.launches: list[tuple] = []
        self.limits: dict[str, int] = {}

    def __getattr__(self, name: str):
        if name not in (
            "cuDevicePrimaryCtxRetain",
            "cuCtxSetCurrent",
            "cuDevicePrimaryCtxRelease",
            "cuModuleUnload",
            "cuStreamDestroy",
            "cuStreamSynchronize",
            "cuEventDestroy",
            "cuGraphDestroy",
            "cuGraphExecDestroy",
            "cuInit",
            "cuEventRecord",
            "cuEventSynchronize",
        ):
            raise AttributeError(name)
        has_value = name == "cuDevicePrimaryCtxRetain"
        return lambda *_: (
            self.calls.append(name) or ((Result(0), "context") if has_value else (Result(0),))
        )

    def cuDeviceGetCount(self):
        return Result(0), 1

    def cuDeviceGet(self, ordinal):
        return Result(0), ordinal

    def cuStreamCreate(self, flags):
        return Result(0), "stream"

    def cuEventCreate(self, flags):
        return Result(0), object()

    def cuDriverGetVersion(self):
        return Result(0), 13000

    def cuDeviceGetName(self, length, device):
        return Result(0), b"NVIDIA H200".ljust(length, b"\0")

    def cuDeviceTotalMem(self, device):
        return Result(0), 141 << 30

    def cuDeviceGetAttribute(self, name, device):
        return Result(0), ATTRIBUTES[name]

    def cuGetErrorName(self, error):
        return Result(0), error.name.encode()

    def cuGetErrorString(self, error):
        return Result(0), b"told by the driver"

    def cuMemAlloc(self, nbytes):
        if nbytes > self.memory_limit:
            return Result.CUDA_ERROR_OUT_OF_MEMORY, None
        array = np.zeros(nbytes, np.uint8)
        self.memory[array.ctypes.data] = array
        return Result(0), array.ctypes.data

    def cuMemFree(self, address):
        del self.memory[address]
        return (Result(0),)

    def cuMemsetD8Async(self, address, value, nbytes, stream):
        self.memory[address][:nbytes] = value
        return (Result(0),)

    def _copy(self, target, source, nbytes, stream):
        assert stream == "stream"
        if self.capture is None:
            ctypes.memmove(target, source, nbytes)
        else:
            self.capture.append(("copy", (), 0, (target, source, nbytes)))
        return (Result(0),)

    cuMemcpyHtoDAsync = cuMemcpyDtoHAsync = cuMemcpyDtoDAsync = _copy

    def cuModuleLoadData(self, image):
        assert self.capture is None, "loading while capturing"
        text = ctypes.string_at(image).decode()
        return (Result.CUDA_ERROR_INVALID_PTX, None) if "bad" in text else (Result(0), text)

    def cuModuleGetFunction(self, module, name):
        assert f".entry {name.decode()}(" in module
        return Result(0), name.decode()

    def cuFuncSetAttribute(self, function, attribute, value):
        self.limits[function] = value
        return (Result(0),)

    def cuLaunchKernel(self, function, *arguments):
        *geometry, shared, stream, pointers, extra = arguments
        assert stream == "stream" and extra == 0 and len(geometry) == 6
        count = self.meanings[function].__code__.co_argcount
        slots = (ctypes.c_uint64 * count).from_address(pointers)
        addresses = [ctypes.c_uint64.from_address(slot).value for slot in slots]
        if self.capture is None:
            self._run(function, tuple(geometry), shared, addresses)
        else:
            self.capture.append((function, tuple(geometry), shared, addresses))
        return (Result(0),)

    def _run(self, function, geometry, shared, addresses):
        self.launches.append((function, geometry, shared, tuple(addresses)))
        if function != "copy":
            self.meanings[function](
                *(self.memory[address].view(np.float32) for address in addresses)
            )

    def cuStreamBeginCapture(self, stream, mode):
        self.capture = []
        return (Result(0),)

    def cuStreamEndCapture(self, stream):
        graph, self.capture = self.capture, None
        return Result(0), graph

    def cuGraphInstantiate(self, graph, flags):
        return Result(0), graph

    def cuGraphLaunch(self, graph, stream):
        for node in graph:
            self._run(*node)
        return (Result(0),)

    def cuEventElapsedTime(self, start, end):
        return Result(0), 3.0  # ms


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
    y[:5] = 2 * x[:5]  # leaves the last one unwritten


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
    assert geometry == (2, 1, 1, 64, 1, 1) and shared == 0 and not cuda.limits


def test_inout_buffer_is_shared_and_the_operand_kept(cuda):
    total, x = np.ones(4, np.float32), np.arange(4, dtype=np.float32)
    with driver.Device() as gpu:
        (result,) = gpu.run(ADD, total, x)
    np.testing.assert_array_equal(result, 1 + x)
    np.testing.assert_array_equal(total, 1)
    ((_, _, shared, addresses),) = cuda.launches
    assert addresses[0] == addresses[2] != addresses[1]
    assert shared == cuda.limits["add"] == 100 << 10


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
            driver.DriverError, match="cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY: told by"
        ):
            gpu.empty(2 << 30)
        with pytest.raises(
            driver.DriverError,
            match="kernel broken did not load: .*CUDA_ERROR_INVALID_PTX.*'sm_90'",
        ):
            gpu.launch(kernel("broken", Buffer("y", f32, (1,), "out"), text="bad"), [0])
    with pytest.raises(driver.DriverError, match="device 3 does not exist: the driver counts 1"):
        driver.Device(3)


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


def test_rotations_exceed_the_cache():
    assert driver.rotations(10 << 20, 50 << 20) == 20
    assert driver.rotations(300 << 20, 50 << 20) == 1
    assert driver.rotations(1, 50 << 20) == 64


def test_without_bindings_says_what_to_install(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named '{name}'")

    monkeypatch.setattr(driver.importlib, "import_module", missing)
    with pytest.raises(
        driver.DriverError, match="bindings are not installed.*pip install 'cuda-python"
    ):
        driver.Device()


def test_without_a_driver_says_so(monkeypatch):
    fake = FakeCuda({})
    fake.cuInit = lambda flags: (_ for _ in ()).throw(RuntimeError("libcuda.so.1 was not found"))
    monkeypatch.setattr(driver, "_bindings", lambda: fake)
    with pytest.raises(driver.DriverError, match="could not be loaded: libcuda.so.1 was not found"):
        driver.Device()


def test_bindings_have_what_is_called():
    """Names and parameter counts against the real cuda-python, where it is installed."""
    real = pytest.importorskip("cuda.bindings.driver", reason="cuda-python is not installed")
    for name in [name for name in vars(FakeCuda) if name.startswith("cu")]:
        signature = getattr(real, name).__doc__.splitlines()[0]
        ours = getattr(FakeCuda, name)
        if name not in ("cuLaunchKernel",):
            parameters = signature[signature.index("(") + 1 : signature.rindex(")")]
            assert (
                len([p for p in parameters.split(",") if p.strip()])
                == ours.__code__.co_argcount - 1
            ), signature
    for holder in (
        "CUdevice_attribute",
        "CUfunction_attribute",
        "CUstreamCaptureMode",
        "CUstream_flags",
    ):
        for member in vars(getattr(FakeCuda, holder)):
            assert hasattr(getattr(real, holder), member), f"{holder}.{member}"
    launch = real.cuLaunchKernel.__doc__.splitlines()[0]
    assert launch.count(",") == 10, launch


@pytest.mark.parametrize(
    "init, counting, expected", [(0, 0, 3), (100, 0, "cuInit returned error"), (0, 1, "Count")]
)
def test_devices_are_counted_without_bindings(monkeypatch, init, counting, expected):
    class Library:
        def cuInit(self, flags):
            return init

        def cuDeviceGetCount(self, count):
            count._obj.value = 3
            return counting

    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: Library())
    if isinstance(expected, int):
        assert driver.count_devices() == expected
    else:
        with pytest.raises(driver.DriverError, match=expected):
            driver.count_devices()


def test_no_driver_library_is_an_error_that_names_it(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(driver.ctypes, "CDLL", missing)
    with pytest.raises(driver.DriverError, match=r"libcuda\.so\.1 is not installed"):
        driver.count_devices()
