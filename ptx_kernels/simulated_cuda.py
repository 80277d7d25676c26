"""Simulates the CUDA driver's functions: kernels run in the simulator, times are invented.

    with SimulatedDevice() as gpu:
        values, scales = gpu.run(kernel, x)  # computed by the simulator
        gpu.time(launches).median            # KERNEL_SECONDS, whatever they do

`ptx_kernels.driver` and everything that uses a `Device` therefore run on any machine, and results
can be checked. Nothing is measured.
"""

from __future__ import annotations

import ctypes
import enum
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from . import simulator
from .devices import find_device
from .driver import Device
from .ptx import Kernel
from .simulator.memory.buffers import DeviceBuffer

#: Invented: seconds of every kernel, and the bandwidth of every copy in bytes/s, read plus written.
KERNEL_SECONDS, COPY_RATE = 2e-6, 4e12

#: Those of an H200 except for the L2 cache, so that inputs which rotate past it stay small.
ATTRIBUTES = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "MULTIPROCESSOR_COUNT": 132,
    "L2_CACHE_SIZE": 64 << 10,
    "CLOCK_RATE": 1_980_000,
    "MEMORY_CLOCK_RATE": 3_201_000,
    "GLOBAL_MEMORY_BUS_WIDTH": 6144,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 228 << 10,
}
_STREAM = "stream"
_ALIGNMENT = 256  # bytes, of every address that the driver returns


class Result(enum.IntEnum):
    """Error codes; a function returns one, followed by its values."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_PTX = 218
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


class JitOption(enum.IntEnum):
    """Options of `cuModuleLoadDataEx`."""

    CU_JIT_ERROR_LOG_BUFFER = 5
    CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES = 6


class LaunchConfig:
    """Fields of `CUlaunchConfig` that the driver sets; others raise AttributeError."""

    __slots__ = (
        *("gridDimX", "gridDimY", "gridDimZ"),
        *("blockDimX", "blockDimY", "blockDimZ", "sharedMemBytes", "hStream"),
    )


@dataclass(frozen=True)
class Node:
    """A launch or a copy that a stream captured.

    Attributes:
      function: (PTX, entry's name); None: a copy.
      arguments: addresses of a launch's operands and results; a copy's target, source and bytes.
    """

    function: tuple[str, str] | None
    arguments: tuple[int, ...]
    grid: tuple[int, ...] = (1, 1, 1)
    block: tuple[int, ...] = (1, 1, 1)
    shared: int = 0

    @property
    def seconds(self) -> float:
        return 2 * self.arguments[2] / COPY_RATE if self.function is None else KERNEL_SECONDS


@dataclass
class Graph:
    """Captured nodes; `ran`: whether the graph was launched before."""

    nodes: list[Node] = field(default_factory=list)
    ran: bool = False


class SimulatedCuda:
    """The part of `cuda.bindings.driver` that `ptx_kernels.driver` uses.

    Memory is the host's. A graph's kernels run when it is launched for the first time, each of them
    once, on the first addresses it was captured with; the others only matter for timing.

    Args:
      executes: whether kernels run at all.
      memory_limit: maximum bytes of one allocation.
      free: bytes of the device's memory that it reports as free.
      version: CUDA version of the driver, 12030 for 12.3.
      attributes: values that replace those of ATTRIBUTES.
      refuse: text of a module -> the driver's log if it does not load; None loads it, unless its
        target is newer than the device.
      faulty: name of a kernel -> whether it reads an illegal address, after which every call fails.
    """

    CUresult = Result
    CUjit_option = JitOption
    CUdeviceptr = int
    CUstream_flags = types.SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUdevice_attribute = types.SimpleNamespace(
        **{f"CU_DEVICE_ATTRIBUTE_{name}": name for name in ATTRIBUTES}
    )
    CUfunction_attribute = types.SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)
    CUlaunchConfig = LaunchConfig
    CUfunc_cache = types.SimpleNamespace(CU_FUNC_CACHE_PREFER_SHARED=1)
    CUstreamCaptureMode = types.SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)

    #: Name that the driver would report; choices and predictions are those of an H200.
    name = "H200 (simulated)"

    def __init__(
        self,
        *,
        executes: bool = True,
        memory_limit: int = 1 << 30,
        free: int = 100 << 30,
        version: int = 13000,
        attributes: Mapping[str, int] = MappingProxyType({}),
        refuse: Callable[[str], str | None] = lambda text: None,
        faulty: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self.fault: Result | None = None
        self.executes, self.memory_limit, self.refuse = executes, memory_limit, refuse
        self.faulty = faulty
        self.free, self.version, self.attributes = free, version, {**ATTRIBUTES, **attributes}
        self.memory: dict[int, np.ndarray] = {}  # by address
        self.capture: Graph | None = None
        self.limits: dict[Any, int] = {}  # of dynamic shared memory, by function
        self.preferences: dict[Any, int] = {}  # of L1 cache or shared memory, by function
        self.kernels: dict[str, Kernel] = {}  # by text: how kernels may use their buffers
        self._elapsed = 0.0  # seconds of the last graph

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        says = name.startswith("cuGetError")
        if name.startswith("cu") and not says and (fault := self.__dict__.get("fault")):
            return lambda *arguments: (fault,)
        return found

    # --- device ---

    def cuInit(self, flags):
        return (Result.CUDA_SUCCESS,)

    def cuDeviceGetCount(self):
        return Result.CUDA_SUCCESS, 1

    def cuDeviceGet(self, ordinal):
        return Result.CUDA_SUCCESS, ordinal

    def cuDriverGetVersion(self):
        return Result.CUDA_SUCCESS, self.version

    def cuDeviceGetName(self, length, device):
        return Result.CUDA_SUCCESS, self.name.encode().ljust(length, b"\0")

    def cuDeviceTotalMem(self, device):
        return Result.CUDA_SUCCESS, 141 << 30

    def cuDeviceGetAttribute(self, name, device):
        return Result.CUDA_SUCCESS, self.attributes[name]

    def cuDevicePrimaryCtxRetain(self, device):
        return Result.CUDA_SUCCESS, "context"

    def cuDevicePrimaryCtxRelease(self, device):
        return (Result.CUDA_SUCCESS,)

    def cuCtxSetCurrent(self, context):
        return (Result.CUDA_SUCCESS,)

    def cuGetErrorName(self, error):
        return Result.CUDA_SUCCESS, error.name.encode()

    def cuGetErrorString(self, error):
        return Result.CUDA_SUCCESS, b"said the simulated driver"

    # --- memory ---

    def cuMemAlloc(self, nbytes):
        if nbytes > self.memory_limit:
            return Result.CUDA_ERROR_OUT_OF_MEMORY, None
        room = np.zeros(nbytes + _ALIGNMENT, np.uint8)
        start = -room.ctypes.data % _ALIGNMENT
        array = room[start : start + nbytes]
        self.memory[array.ctypes.data] = array
        return Result.CUDA_SUCCESS, array.ctypes.data

    def cuMemGetInfo(self):
        return Result.CUDA_SUCCESS, self.free, 141 << 30

    def cuMemFree(self, address):
        del self.memory[address]
        return (Result.CUDA_SUCCESS,)

    def cuMemsetD8Async(self, address, value, nbytes, stream):
        self.memory[address][:nbytes] = value
        return (Result.CUDA_SUCCESS,)

    def cuMemcpyHtoDAsync(self, target, source, nbytes, stream):
        return self._enqueue(stream, Node(None, (int(target), int(source), nbytes)))

    def cuMemcpyDtoHAsync(self, target, source, nbytes, stream):
        return self._enqueue(stream, Node(None, (int(target), int(source), nbytes)))

    def cuMemcpyDtoDAsync(self, target, source, nbytes, stream):
        return self._enqueue(stream, Node(None, (int(target), int(source), nbytes)))

    # --- kernels ---

    def cuModuleLoadDataEx(self, image, count, options, values):
        if self.capture is not None:
            raise RuntimeError("a module was loaded while its stream captured")
        text = ctypes.string_at(image).decode()
        has_entry = re.search(r"\.entry\s+[\w$]+", text)
        log = self._newer(text) or self.refuse(text) if has_entry else "ptxas fatal: no entry"
        if log is None:
            return Result.CUDA_SUCCESS, text
        given = dict(zip(options[:count], values[:count], strict=True))
        size = given[JitOption.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
        written = log.encode()[: size - 1] + b"\0"
        given[JitOption.CU_JIT_ERROR_LOG_BUFFER][: len(written)] = written
        return Result.CUDA_ERROR_INVALID_PTX, None

    def _newer(self, text: str) -> str | None:
        """Returns what the driver says of a text for a newer architecture than the device's."""
        parts = (self.attributes[f"COMPUTE_CAPABILITY_{part}"] for part in ("MAJOR", "MINOR"))
        sm = int("".join(map(str, parts)))
        for target in re.findall(r"[.]target sm_(\d+)", text):
            if int(target) > sm:
                return f"ptxas fatal: SM version sm_{target} is higher than that of this device"
        return None

    def cuModuleUnload(self, module):
        return (Result.CUDA_SUCCESS,)

    def cuModuleGetFunction(self, module, name):
        if not re.search(rf"\.entry\s+{re.escape(name.decode())}\b", module):
            return Result.CUDA_ERROR_INVALID_VALUE, None
        return Result.CUDA_SUCCESS, (module, name.decode())

    def cuFuncSetAttribute(self, function, attribute, value):
        self.limits[function] = value
        return (Result.CUDA_SUCCESS,)

    def cuFuncSetCacheConfig(self, function, config):
        self.preferences[function] = config
        return (Result.CUDA_SUCCESS,)

    def cuOccupancyMaxActiveClusters(self, function, config):
        found = re.search(r"[.]reqnctapercluster (\d+)", function[0])
        if found is None or config.sharedMemBytes > self.limits.get(function, 0):
            return Result.CUDA_ERROR_INVALID_VALUE, None
        device, cluster = find_device("H200"), int(found[1])
        assert device is not None
        resident = self.attributes["MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"] // config.sharedMemBytes
        return Result.CUDA_SUCCESS, device.places(cluster, resident) // cluster

    def cuLaunchKernel(self, function, *arguments):
        *geometry, shared, stream, pointers, extra = arguments
        if len(geometry) != 6 or extra != 0:
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        slots = (ctypes.c_uint64 * self.parameters(function)).from_address(pointers)
        addresses = tuple(ctypes.c_uint64.from_address(slot).value for slot in slots)
        node = Node(function, addresses, tuple(geometry[:3]), tuple(geometry[3:]), shared)
        return self._enqueue(stream, node)

    def parameters(self, function: tuple[str, str]) -> int:
        """Returns the number of parameters of an entry."""
        text, name = function
        found = re.search(rf"\.entry\s+{re.escape(name)}\s*\(([^)]*)\)", text)
        return found[1].count(".param") if found else 0

    def run(self, node: Node) -> None:
        """Runs a kernel in the simulator.

        Raises the simulator's SimulationError, and KeyError for an invalid address.
        """
        if not self.executes or node.function is None:
            return
        text, name = node.function
        if self.faulty(name):
            self.fault = Result.CUDA_ERROR_ILLEGAL_ADDRESS
            return
        kernel = self.kernels.get(text)
        buffers = (*kernel.operands, *kernel.results) if kernel else ()
        roles = [buffer.role for buffer in buffers] or ["inout"] * len(node.arguments)
        known = {
            address: DeviceBuffer(f"{name}'s argument {i}", self.memory[address], role)
            for i, (address, role) in enumerate(zip(node.arguments, roles, strict=True))
        }
        args = [known[address] for address in node.arguments]
        simulator.launch(text, args, node.grid, node.block, node.shared)

    def _enqueue(self, stream: str, node: Node) -> tuple[Result]:
        if stream != _STREAM:
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        if self.capture is not None:
            self.capture.nodes.append(node)
        else:
            self._carry_out(node)
        return (Result.CUDA_SUCCESS,)

    def _carry_out(self, node: Node) -> None:
        if node.function is None:
            ctypes.memmove(*node.arguments)
        else:
            self.run(node)

    # --- streams, graphs, events ---

    def cuStreamCreate(self, flags):
        return Result.CUDA_SUCCESS, _STREAM

    def cuStreamDestroy(self, stream):
        return (Result.CUDA_SUCCESS,)

    def cuStreamSynchronize(self, stream):
        return (Result.CUDA_SUCCESS,)

    def cuStreamBeginCapture(self, stream, mode):
        self.capture = Graph()
        return (Result.CUDA_SUCCESS,)

    def cuStreamEndCapture(self, stream):
        graph, self.capture = self.capture, None
        return Result.CUDA_SUCCESS, graph

    def cuGraphInstantiate(self, graph, flags):
        return Result.CUDA_SUCCESS, graph

    def cuGraphLaunch(self, graph, stream):
        self.replay(graph)
        self._elapsed = sum(node.seconds for node in graph.nodes)
        return (Result.CUDA_SUCCESS,)

    def replay(self, graph: Graph) -> None:
        """Runs the kernels of a graph, if they have not run before."""
        if not graph.ran:
            for node in {node.function or node: node for node in graph.nodes[::-1]}.values():
                self._carry_out(node)
        graph.ran = True

    def cuGraphDestroy(self, graph):
        return (Result.CUDA_SUCCESS,)

    def cuGraphExecDestroy(self, graph):
        return (Result.CUDA_SUCCESS,)

    def cuEventCreate(self, flags):
        return Result.CUDA_SUCCESS, object()

    def cuEventDestroy(self, event):
        return (Result.CUDA_SUCCESS,)

    def cuEventRecord(self, event, stream):
        return (Result.CUDA_SUCCESS,)

    def cuEventSynchronize(self, event):
        return (Result.CUDA_SUCCESS,)

    def cuEventElapsedTime(self, start, end):
        return Result.CUDA_SUCCESS, 1e3 * self._elapsed


class SimulatedDevice(Device):
    """A `Device` on `SimulatedCuda`, with the same options."""

    def __init__(self, **options: Any) -> None:
        self.cuda = SimulatedCuda(**options)
        super().__init__(cuda=self.cuda)

    def launch(self, kernel: Kernel, addresses: Sequence[int]) -> None:
        self.cuda.kernels[kernel.text] = kernel
        super().launch(kernel, addresses)
