"""Runs kernels through the CUDA driver without JAX: launches, timing, device facts.

The driver's Python bindings are a separate package: `pip install cuda-python`.

    with driver.Device() as gpu:
        values, scales = gpu.run(kernel, x)
        print(gpu.facts.name, gpu.time([(kernel, addresses)]).median)

`cuda-python` is imported when a `Device` is created, not before.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from .ptx import Kernel

_LOG_BYTES = 16 << 10  # of the driver's compiler
_POISON = 0xFF  # a NaN in every float type, -1 in every integer type

#: Errors after which every call of the process fails (CUDA driver API, CUresult).
_FAULTS = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        *("ILLEGAL_ADDRESS", "LAUNCH_TIMEOUT", "ASSERT", "HARDWARE_STACK_ERROR"),
        *("ILLEGAL_INSTRUCTION", "MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE", "INVALID_PC"),
        *("LAUNCH_FAILED", "ECC_UNCORRECTABLE"),
    )
)

_MIN_LAUNCHES = 16  # per graph, so that the cost of a replay is small per launch

Launch = tuple[Kernel, Sequence[int]]


class DriverError(RuntimeError):
    """No usable CUDA device, or a failed CUDA call; the message names the call and its error."""


class ModuleLoadError(DriverError):
    """A PTX module that the CUDA driver does not load.

    The message names the kernel, its PTX version and target, the device, its compute capability and
    the driver, and ends with the driver's log.

    Attributes:
      kernel: name of the module's entry.
      log: what the driver's compiler says about the text; empty if it says nothing.
    """

    def __init__(self, message: str, kernel: str, log: str) -> None:
        super().__init__(message, kernel, log)  # all arguments, so that it can be pickled
        self.kernel, self.log = kernel, log

    def __str__(self) -> str:
        return str(self.args[0])


#: CUDA version -> PTX version that its driver compiles (PTX ISA, release notes).
_NEWEST_PTX = {
    **{(10, minor): (6, 3 + minor) for minor in range(3)},
    **{(11, minor): (7, minor) for minor in range(9)},
    **{(12, minor): (8, minor) for minor in range(6)},
    **{(12, 6): (8, 5), (12, 7): (8, 6), (12, 8): (8, 7), (12, 9): (8, 8)},
    **{(13, minor): (9, minor) for minor in range(3)},
}


@dataclass(frozen=True)
class Installed:
    """The CUDA driver of this machine.

    Attributes:
      cuda: newest CUDA version that it supports, such as (12, 4).
      capabilities: compute capability of each device, such as 90.
    """

    cuda: tuple[int, int]
    capabilities: tuple[int, ...]

    @property
    def newest_ptx(self) -> tuple[int, int]:
        """PTX version that the driver compiles; of an unknown CUDA version the last known one's."""
        known = [version for version in _NEWEST_PTX if version <= self.cuda]
        return _NEWEST_PTX[max(known)] if known else (0, 0)


def installed() -> Installed:
    """Returns the driver's version and devices, from the driver library, without cuda-python.

    Raises DriverError if there is no driver, or it fails.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError("the driver library libcuda.so.1 is not installed") from error

    def call(name: str, *arguments: Any) -> None:
        if code := getattr(library, name)(*arguments):
            raise DriverError(f"{name} returned error {code}")

    def number(name: str, *arguments: Any) -> int:
        value = ctypes.c_int()
        call(name, ctypes.byref(value), *arguments)
        return value.value

    version = number("cuDriverGetVersion")
    call("cuInit", 0)
    capabilities = []
    for device in range(number("cuDeviceGetCount")):
        major, minor = (number("cuDeviceGetAttribute", part, device) for part in _CAPABILITY)
        capabilities.append(10 * major + minor)
    return Installed((version // 1000, version % 1000 // 10), tuple(capabilities))


#: CUdevice_attribute numbers of the compute capability's parts.
_CAPABILITY = 75, 76


def count_devices() -> int:
    """Returns the number of CUDA devices; raises DriverError as `installed` does."""
    return len(installed().capabilities)


def _bindings() -> ModuleType:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DriverError(
            f"the CUDA driver's Python bindings are not installed ({error});"
            f" pip install 'cuda-python{_fitting_bindings()}'"
        ) from error


def _fitting_bindings() -> str:
    """Returns the versions of cuda-python for the driver; without a driver the newest."""
    try:
        newer = installed().cuda >= (13, 0)
    except DriverError:
        newer = True
    return ">=13,<14" if newer else ">=12.8,<13"


@dataclass(frozen=True)
class DeviceFacts:
    """Properties of a device as the driver reports them."""

    name: str
    arch: str
    multiprocessors: int
    l2_bytes: int
    memory_bytes: int
    clock_hz: float
    memory_clock_hz: float
    memory_bus_bits: int
    shared_bytes_per_multiprocessor: int
    driver_cuda_version: str

    @property
    def bandwidth(self) -> float:
        """Datasheet bandwidth of the memory in bytes/s; `Device.copy_bandwidth` measures it."""
        return 2 * self.memory_clock_hz * self.memory_bus_bits / 8  # double data rate


@dataclass(frozen=True)
class Timing:
    """Seconds per launch over all replays of a sequence of launches."""

    median: float
    best: float
    worst: float
    replays: int


class Device:
    """One CUDA device, its primary context (shared with JAX) and its own stream.

    Args:
      cuda: module with the driver's functions; None means cuda-python's `cuda.bindings.driver`.

    Raises:
      DriverError: no bindings, no driver, no device of that number, or a failed CUDA call.
    """

    def __init__(self, ordinal: int = 0, *, cuda: Any = None) -> None:
        self._cuda = _bindings() if cuda is None else cuda
        self._lost = False  # after a fault of the device
        try:
            self._call("cuInit", 0)
        except DriverError:
            raise
        except Exception as error:  # without libcuda.so; the error's type differs by version
            raise DriverError(f"the CUDA driver could not be loaded: {error}") from error
        if not 0 <= ordinal < (count := self._call("cuDeviceGetCount")):
            raise DriverError(f"device {ordinal} does not exist: the driver counts {count}")
        self._device = self._call("cuDeviceGet", ordinal)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self._call("cuCtxSetCurrent", self._context)
        self._stream = self._call(
            "cuStreamCreate", int(self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
        )
        self._functions: dict[Kernel, Any] = {}
        self._modules: list[Any] = []
        self._allocated: list[int] = []

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees all memory and unloads all modules of this device object.

        After a fault of the device nothing remains to be freed: the driver refuses every call.
        """
        self._free(0)
        if self._lost:
            return
        for module in self._modules:
            self._call("cuModuleUnload", module)
        self._modules, self._functions = [], {}
        self._call("cuStreamDestroy", self._stream)
        self._call("cuDevicePrimaryCtxRelease", self._device)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Calls a driver function by name; raises DriverError if it fails.

        Returns the function's results without the error code: None, one value or a tuple.
        """
        error, *values = getattr(self._cuda, name)(*arguments)
        if error != self._cuda.CUresult.CUDA_SUCCESS:
            self._lost |= error.name in _FAULTS
            raise DriverError(f"{name} failed: {self._describe(error)}")
        return values[0] if len(values) == 1 else tuple(values) or None

    def _describe(self, error: Any) -> str:
        parts = [getattr(self._cuda, f)(error)[1] for f in ("cuGetErrorName", "cuGetErrorString")]
        return ": ".join(p.decode() for p in parts if isinstance(p, bytes)) or str(error)

    @functools.cached_property
    def facts(self) -> DeviceFacts:
        attributes = self._cuda.CUdevice_attribute

        def attribute(name: str) -> int:
            value = getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}")
            return int(self._call("cuDeviceGetAttribute", value, self._device))

        version = self._call("cuDriverGetVersion")
        name = self._call("cuDeviceGetName", 256, self._device)
        return DeviceFacts(
            name=name.split(b"\0", 1)[0].decode(),
            arch=f"sm_{attribute('COMPUTE_CAPABILITY_MAJOR')}{attribute('COMPUTE_CAPABILITY_MINOR')}",
            multiprocessors=attribute("MULTIPROCESSOR_COUNT"),
            l2_bytes=attribute("L2_CACHE_SIZE"),
            memory_bytes=int(self._call("cuDeviceTotalMem", self._device)),
            clock_hz=1e3 * attribute("CLOCK_RATE"),
            memory_clock_hz=1e3 * attribute("MEMORY_CLOCK_RATE"),
            memory_bus_bits=attribute("GLOBAL_MEMORY_BUS_WIDTH"),
            shared_bytes_per_multiprocessor=attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
            driver_cuda_version=f"{version // 1000}.{version % 1000 // 10}",
        )

    def free_memory(self) -> int:
        """Returns the bytes of the device's memory that no process has allocated."""
        return int(self._call("cuMemGetInfo")[0])

    # --- memory -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Context that frees, at its end, the memory that was allocated inside."""
        start = len(self._allocated)
        try:
            yield
        finally:
            self._free(start)

    def _free(self, start: int) -> None:
        if self._lost:
            del self._allocated[start:]
            return
        self.synchronize()
        while len(self._allocated) > start:
            self._call("cuMemFree", self._cuda.CUdeviceptr(self._allocated.pop()))

    def empty(self, nbytes: int) -> int:
        """Allocates device memory filled with poison, so that unwritten results show.

        Returns its address.
        """
        address = self._allocate(nbytes)
        self._call(
            "cuMemsetD8Async",
            self._cuda.CUdeviceptr(address),
            _POISON,
            max(nbytes, 1),
            self._stream,
        )
        return address

    def _allocate(self, nbytes: int) -> int:
        address = int(self._call("cuMemAlloc", max(nbytes, 1)))
        self._allocated.append(address)
        return address

    def upload(self, array: np.ndarray) -> int:
        """Copies `array` to new device memory; returns the address."""
        array = np.ascontiguousarray(array)
        address = self._allocate(array.nbytes)
        if array.nbytes:
            self._call(
                "cuMemcpyHtoDAsync",
                self._cuda.CUdeviceptr(address),
                array.ctypes.data,
                array.nbytes,
                self._stream,
            )
            self.synchronize()  # the copy reads `array`, which the caller may drop
        return address

    def clone(self, address: int, nbytes: int) -> int:
        """Copies device memory to new device memory; returns the address of the copy."""
        copy = self._allocate(nbytes)
        pointer = self._cuda.CUdeviceptr
        self._call("cuMemcpyDtoDAsync", pointer(copy), pointer(address), nbytes, self._stream)
        return copy

    def download(self, address: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns the array at a device address, after all work on the stream."""
        array = np.empty(shape, dtype)
        if array.nbytes:
            self._call(
                "cuMemcpyDtoHAsync",
                array.ctypes.data,
                self._cuda.CUdeviceptr(address),
                array.nbytes,
                self._stream,
            )
        self.synchronize()
        return array

    def synchronize(self) -> None:
        self._call("cuStreamSynchronize", self._stream)

    # --- kernels ----------------------------------------------------------------------------------

    def _function(self, kernel: Kernel) -> Any:
        if kernel not in self._functions:
            module = self._load(kernel.text)
            self._modules.append(module)
            function = self._call("cuModuleGetFunction", module, kernel.name.encode())
            if kernel.dynamic_shared_bytes:  # as XLA launches it (`ptx.split`)
                self._allow(function, kernel.dynamic_shared_bytes)
                preference = self._cuda.CUfunc_cache.CU_FUNC_CACHE_PREFER_SHARED
                self._call("cuFuncSetCacheConfig", function, preference)
            self._functions[kernel] = function
        return self._functions[kernel]

    def _allow(self, function: Any, dynamic_shared_bytes: int) -> None:
        limit = self._cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call("cuFuncSetAttribute", function, limit, dynamic_shared_bytes)

    def clusters_at_once(self, kernel: Kernel, dynamic_shared_bytes: int) -> int:
        """Returns how many of a kernel's clusters the driver says the device runs at once.

        dynamic_shared_bytes: of each thread block, instead of the kernel's.
        """
        function, config = self._function(kernel), self._cuda.CUlaunchConfig()
        self._allow(function, dynamic_shared_bytes)
        for axis, blocks, threads in zip("XYZ", kernel.grid, kernel.block, strict=True):
            setattr(config, f"gridDim{axis}", blocks)
            setattr(config, f"blockDim{axis}", threads)
        config.sharedMemBytes, config.hStream = dynamic_shared_bytes, self._stream
        return int(self._call("cuOccupancyMaxActiveClusters", function, config))

    def _load(self, text: str) -> Any:
        """Loads a module; raises ModuleLoadError with the driver's log."""
        image = np.frombuffer(text.encode() + b"\0", np.uint8)
        log, option = bytearray(_LOG_BYTES), self._cuda.CUjit_option
        options = {
            option.CU_JIT_ERROR_LOG_BUFFER: log,
            option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES: len(log),
        }
        try:
            return self._call(
                "cuModuleLoadDataEx",
                image.ctypes.data,
                len(options),
                list(options),
                list(options.values()),
            )
        except DriverError as error:
            said = log.split(b"\0", 1)[0].decode(errors="replace").strip()
            raise self._load_error(text, str(error), said) from error

    def _load_error(self, text: str, error: str, log: str) -> ModuleLoadError:
        def first(pattern: str) -> str:
            found = re.search(pattern, text)
            return found[1] if found else "unknown"

        kernel, facts = first(r"\.entry\s+([\w$]+)"), self.facts
        major, minor = divmod(int(facts.arch.removeprefix("sm_")), 10)
        return ModuleLoadError(
            f"kernel {kernel} (PTX {first(r'[.]version ([0-9.]+)')} for "
            f"{first(r'[.]target (sm_[0-9a-z]+)')}) does not load on {facts.name} (compute "
            f"capability {major}.{minor}, driver for CUDA {facts.driver_cuda_version}): {error}; "
            f"the driver's log: {log or 'empty'}",
            kernel,
            log,
        )

    def time_load(self, text: str) -> float:
        """Returns the seconds that the driver takes to load a PTX module, which is then unloaded.

        XLA loads each kernel this way: the driver compiles the text, or finds it in its cache.
        Raises ModuleLoadError.
        """
        started = time.perf_counter()
        module = self._load(text)
        seconds = time.perf_counter() - started
        self._call("cuModuleUnload", module)
        return seconds

    def launch(self, kernel: Kernel, addresses: Sequence[int]) -> None:
        """Launches `kernel` on the stream; `addresses` are the operands', then the results'."""
        expected = len(kernel.operands) + len(kernel.results)
        if len(addresses) != expected:
            raise ValueError(
                f"kernel {kernel.name} takes {expected} addresses, got {len(addresses)}"
            )
        values = np.array(addresses, np.uint64)
        pointers = values.ctypes.data + values.itemsize * np.arange(len(values), dtype=np.uint64)
        self._call(
            "cuLaunchKernel",
            self._function(kernel),
            *kernel.grid,
            *kernel.block,
            kernel.dynamic_shared_bytes,
            self._stream,
            pointers.ctypes.data,
            0,
        )

    def place(self, kernel: Kernel, operands: Sequence[np.ndarray]) -> list[int]:
        """Uploads operands and allocates results; returns the addresses for `launch`.

        `inout` buffers share one address.

        Raises:
          TypeError: an operand's count, shape or item size does not match the kernel.
        """
        if len(operands) != len(kernel.operands):
            raise TypeError(
                f"kernel {kernel.name} takes {len(kernel.operands)} operands, got {len(operands)}"
            )
        for b, operand in zip(kernel.operands, operands, strict=True):
            if operand.shape != b.shape or operand.dtype.itemsize != b.type.size:
                raise TypeError(
                    f"kernel {kernel.name}: operand {b.name} is {b.type} {b.shape},"
                    f" got {operand.dtype} {operand.shape}"
                )
        given = [self.upload(operand) for operand in operands]
        reused = {result: given[operand] for operand, result in kernel.aliases.items()}
        return given + [reused.get(i) or self.empty(b.nbytes) for i, b in enumerate(kernel.results)]

    def run(
        self, kernel: Kernel, *operands: np.ndarray, graph: bool = False
    ) -> tuple[np.ndarray, ...]:
        """Runs `kernel` on operands like `simulator.run`; returns results (bf16 as uint16 bits).

        graph: whether to launch it as a node of a CUDA graph.
        """
        with self.scope():
            addresses = self.place(kernel, operands)
            if graph:
                self._function(kernel)  # modules cannot be loaded during capture
                with self._graph(lambda: self.launch(kernel, addresses)) as runnable:
                    self._call("cuGraphLaunch", runnable, self._stream)
                    self.synchronize()
            else:
                self.launch(kernel, addresses)
            results = zip(addresses[len(operands) :], kernel.results, strict=True)
            return tuple(self.download(a, b.shape, b.type.dtype) for a, b in results)

    # --- timing -----------------------------------------------------------------------------------

    def time(self, launches: Sequence[Launch], *, replays: int = 30) -> Timing:
        """Times a sequence of launches, captured in a CUDA graph and replayed; seconds per launch.

        Rotate the inputs over more memory than the L2 cache, or this measures the cache.
        """
        for kernel, _ in launches:
            self._function(kernel)  # modules cannot be loaded during capture

        def enqueue() -> None:
            for kernel, addresses in launches:
                self.launch(kernel, addresses)

        return self._time(enqueue, len(launches), replays)

    def copy_bandwidth(self, nbytes: int = 1 << 30, *, replays: int = 20) -> float:
        """Measures a device-to-device copy; returns bytes read plus written per second.

        This is the practical upper limit of a kernel's bandwidth.
        """
        with self.scope():
            source = self.upload(np.random.default_rng(0).integers(0, 256, nbytes, np.uint8))
            target = self.empty(nbytes)

            def enqueue() -> None:
                pointer = self._cuda.CUdeviceptr
                self._call(
                    "cuMemcpyDtoDAsync", pointer(target), pointer(source), nbytes, self._stream
                )

            return 2 * nbytes / self._time(enqueue, 1, replays).median

    @contextlib.contextmanager
    def _graph(self, enqueue: Callable[[], None]) -> Iterator[Any]:
        """Context with an executable CUDA graph of what `enqueue` puts on the stream."""
        self.synchronize()
        mode = self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call("cuStreamBeginCapture", self._stream, mode)
        try:
            enqueue()
        finally:
            graph = self._call("cuStreamEndCapture", self._stream)
        runnable = self._call("cuGraphInstantiate", graph, 0)
        yield runnable
        self._call("cuGraphExecDestroy", runnable)
        self._call("cuGraphDestroy", graph)

    def _time(self, enqueue: Callable[[], None], count: int, replays: int) -> Timing:
        # 0: an event that records its time
        start, end = (self._call("cuEventCreate", 0) for _ in range(2))
        seconds = []
        with self._graph(enqueue) as runnable:
            for replay in range(-3, replays):  # the first three warm up
                self._call("cuEventRecord", start, self._stream)
                self._call("cuGraphLaunch", runnable, self._stream)
                self._call("cuEventRecord", end, self._stream)
                self._call("cuEventSynchronize", end)
                if replay >= 0:
                    seconds.append(1e-3 * self._call("cuEventElapsedTime", start, end) / count)
        for event in (start, end):
            self._call("cuEventDestroy", event)
        return Timing(statistics.median(seconds), min(seconds), max(seconds), replays)


def rotations(bytes_per_set: int, l2_bytes: int) -> int:
    """Returns how many input sets to rotate over, so that no set is still in the L2 cache."""
    return max(1, min(64, math.ceil(4 * l2_bytes / max(bytes_per_set, 1))))


def rotated(
    gpu: Device, kernel: Kernel, operands: Sequence[np.ndarray], l2_bytes: int
) -> list[Launch]:
    """Returns launches of `kernel` over more copies of its buffers than the L2 cache holds."""
    addresses = gpu.place(kernel, operands)
    nbytes = [b.nbytes for b in (*kernel.operands, *kernel.results)]
    count = len(kernel.operands)
    aliases = {count + result: operand for operand, result in kernel.aliases.items()}
    sets: list[Launch] = [(kernel, addresses)]
    for _ in range(rotations(sum(nbytes), l2_bytes) - 1):
        copy = [gpu.clone(address, size) for address, size in zip(addresses, nbytes, strict=True)]
        for result, operand in aliases.items():
            copy[result] = copy[operand]
        sets.append((kernel, copy))
    return sets * -(-_MIN_LAUNCHES // len(sets))
