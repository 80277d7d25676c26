"""Assembles kernels with ptxas: registers, spills, shared memory, machine code, occupancy.

XLA and the driver compile PTX when they load it on the GPU. Assembling it here finds errors without
one.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from . import disk_cache

#: Architectures that every kernel is assembled for: A100, H100 and H200, B200, RTX 50 series.
TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120")

#: Environment variable with the path of a ptxas to use, such as that of an older driver.
VARIABLE = "JAX_Q4K_PTXAS"

_PACKAGES = {"ptxas": "nvidia-cuda-nvcc", "nvdisasm": "nvidia-cuda-nvdisasm"}


class ToolNotFoundError(FileNotFoundError):
    """A CUDA tool is not installed; the message names its package and the searched places."""


class AssemblyError(ValueError):
    """ptxas rejected the text; the message holds its errors and the lines that they refer to."""


@functools.cache
def find_tool(name: str) -> Path:
    """Returns the path of `ptxas` or `nvdisasm`.

    $JAX_Q4K_PTXAS overrides the path of ptxas. Otherwise the NVIDIA packages of this Python are
    searched first, so that a project's pinned version determines its figures, then PATH, then
    $CUDA_HOME/bin.

    Raises:
      ToolNotFoundError: the tool is in none of these places, or the variable's file is not
        executable.
    """
    named = os.environ.get(VARIABLE)
    if named and name == "ptxas":
        if not os.access(named, os.X_OK) or os.path.isdir(named):
            raise ToolNotFoundError(f"${VARIABLE}={named!r} must name a ptxas that can be run")
        return Path(named)
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    candidates = [
        path for root in roots for path in sorted(Path(root).glob(f"*/bin/{name}"), reverse=True)
    ]
    if on_path := shutil.which(name):
        candidates.append(Path(on_path))
    if home := os.environ.get("CUDA_HOME"):
        candidates.append(Path(home) / "bin" / name)
    for path in candidates:
        if os.access(path, os.X_OK):
            return path
    raise ToolNotFoundError(
        f"{name} was not found in this Python's packages, on PATH or in $CUDA_HOME/bin; "
        f"pip install '{_PACKAGES[name]}>=13,<14'"
    )


def tool_version(name: str) -> str:
    """Returns the release of `ptxas` or `nvdisasm`, for example `13.0.88`."""
    text = subprocess.run(
        [find_tool(name), "--version"], capture_output=True, text=True, check=True
    ).stdout
    match = re.search(r"\bV(\d+\.\d+\.\d+)", text)
    return match.group(1) if match else text.strip().splitlines()[-1]


@dataclass(frozen=True)
class Assembly:
    """Result of assembling one entry point for one architecture: resources and machine code.

    Attributes:
      registers: 32-bit registers per thread.
      spill_store_bytes, spill_load_bytes: local memory traffic per thread due to register spills.
      stack_bytes: local memory per thread; also used by arrays that are indexed at run time.
      shared_bytes: statically declared shared memory per thread block.
    """

    arch: str
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    shared_bytes: int
    cubin: bytes


def _number(pattern: str, text: str, default: int | None = None) -> int:
    match = re.search(pattern, text)
    if match is None and default is None:
        raise AssemblyError(f"ptxas printed no {pattern!r}:\n{text}")
    return int(match.group(1)) if match else default  # type: ignore[return-value]


def _complaint(arch: str, text: str, printed: str) -> AssemblyError:
    lines = text.splitlines()
    cited = sorted({int(n) for n in re.findall(r"line (\d+)", printed)})
    source = "".join(f"\n  line {n}: {lines[n - 1].strip()}" for n in cited if 0 < n <= len(lines))
    return AssemblyError(f"ptxas -arch={arch} refused the kernel:\n{printed.strip()}{source}")


_ENTRY = ".visible .entry "


def _ptxas(text: str, arch: str) -> tuple[dict[str, str], bytes]:
    """Returns ({entry: ptxas's messages}, cubin) for a PTX text, entries in the text's order.

    Raises:
      AssemblyError: ptxas rejected the text. ToolNotFoundError: ptxas is not installed.
    """
    printed, cubin = disk_cache.cached(
        find_tool("ptxas"), arch, text.encode(), lambda: _run_ptxas(text, arch)
    )
    _, *parts = re.split(r"Compiling entry function '([^']+)'", printed)
    return dict(zip(parts[::2], parts[1::2], strict=True)), cubin


def _run_ptxas(text: str, arch: str) -> tuple[str, bytes]:
    with tempfile.TemporaryDirectory(prefix="ptx_kernels-") as folder:
        source, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(text)
        ptxas = subprocess.run(
            [find_tool("ptxas"), "-v", f"-arch={arch}", source.name, "-o", cubin.name],
            cwd=folder,
            capture_output=True,
            text=True,
        )
        printed = ptxas.stdout + ptxas.stderr
        if ptxas.returncode != 0:
            raise _complaint(arch, text, printed)
        return printed, cubin.read_bytes()


def _assembly(arch: str, printed: str, cubin: bytes) -> Assembly:
    return Assembly(
        arch=arch,
        registers=_number(r"Used (\d+) registers", printed),
        spill_store_bytes=_number(r"(\d+) bytes spill stores", printed),
        spill_load_bytes=_number(r"(\d+) bytes spill loads", printed),
        stack_bytes=_number(r"(\d+) bytes stack frame", printed),
        shared_bytes=_number(r"(\d+) bytes smem", printed, default=0),
        cubin=cubin,
    )


@functools.lru_cache(maxsize=512)
def assemble(text: str, arch: str) -> Assembly:
    """Assembles PTX with one entry for an architecture such as `sm_90`.

    Raises:
      AssemblyError: ptxas rejected the text, or it holds more than one entry.
      ToolNotFoundError: ptxas is not installed.
    """
    entries, cubin = _ptxas(text, arch)
    if len(entries) != 1:
        raise AssemblyError(f"expected one entry, found {len(entries)}: {', '.join(entries)}")
    (printed,) = entries.values()
    return _assembly(arch, printed, cubin)


def assemble_together(texts: Sequence[str], arch: str) -> list[tuple[str, Assembly]]:
    """Assembles the kernels of several texts into one cubin; returns (name, Assembly) of each.

    The name is the kernel's in the cubin. This is faster than one at a time, because starting
    nvdisasm takes longest.

    Raises: see `assemble`.
    """
    if not texts:
        return []
    heads, bodies = list[str](), list[str]()
    for number, text in enumerate(texts):
        head, entry, body = text.partition(_ENTRY)
        if not entry or _ENTRY in body:
            raise AssemblyError(f"expected one {_ENTRY!r} in each text")
        heads += head.splitlines()
        bodies.append(f"{entry}k{number}_{body}")
    needs = [line for line in dict.fromkeys(heads) if line.startswith((".version", ".target"))]
    highest = {
        line.split()[0]: line
        for line in sorted(needs, key=lambda line: [int(n) for n in re.findall(r"\d+", line)])
    }
    rest = [line for line in dict.fromkeys(heads) if line not in needs]
    entries, cubin = _ptxas(
        "\n".join([highest[".version"], highest[".target"], *rest, *bodies]), arch
    )
    made = {int(name[1:].split("_")[0]): (name, printed) for name, printed in entries.items()}
    return [
        (name, _assembly(arch, printed, cubin))
        for name, printed in (made[i] for i in range(len(texts)))
    ]


def assemble_all(
    texts: Iterable[str], archs: Iterable[str] = TARGETS
) -> dict[tuple[str, str], Assembly]:
    """Assembles each text for each architecture in parallel; returns {(text, arch): Assembly}."""
    pairs = [(text, arch) for text in dict.fromkeys(texts) for arch in archs]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(pairs, pool.map(lambda pair: assemble(*pair), pairs), strict=True))


@dataclass(frozen=True)
class Multiprocessor:
    """Resource limits of one multiprocessor of a compute capability.

    They are from the CUDA programming guide, specifications per compute capability.

    Attributes:
      shared_splits: sizes in bytes that shared memory can have, ascending; the rest is L1's.
      reserved_bytes: shared memory that the system takes of each block, since sm_80.
    """

    warps: int
    blocks: int
    shared_splits: tuple[int, ...]
    registers: int = 65536
    reserved_bytes: int = 1024

    @property
    def shared_bytes(self) -> int:
        return self.shared_splits[-1]


_SPLITS = tuple(kib << 10 for kib in (0, 8, 16, 32, 64, 100, 132, 164, 196, 228))


MULTIPROCESSORS = {
    "sm_75": Multiprocessor(
        warps=32, blocks=16, shared_splits=(32 << 10, 64 << 10), reserved_bytes=0
    ),
    "sm_80": Multiprocessor(warps=64, blocks=32, shared_splits=_SPLITS[:8]),
    "sm_86": Multiprocessor(warps=48, blocks=16, shared_splits=_SPLITS[:6]),
    "sm_89": Multiprocessor(warps=48, blocks=24, shared_splits=_SPLITS[:6]),
    "sm_90": Multiprocessor(warps=64, blocks=32, shared_splits=_SPLITS),
    "sm_100": Multiprocessor(warps=64, blocks=32, shared_splits=_SPLITS),
    "sm_120": Multiprocessor(warps=48, blocks=24, shared_splits=_SPLITS[:6]),
}

_REGISTER_GRANULE = 256  # registers are allocated to a warp in multiples of this
_SHARED_GRANULE = 128  # bytes


@dataclass(frozen=True)
class Occupancy:
    """Thread blocks and warps that fit on one multiprocessor at once, and the limiting resource."""

    blocks: int
    warps: int
    fraction: float
    limit: str


def occupancy(assembly: Assembly, threads: int, dynamic_shared_bytes: int = 0) -> Occupancy:
    """Returns the occupancy of thread blocks of `threads` threads.

    Raises:
      ValueError: the architecture is not among `MULTIPROCESSORS`, or `threads` is not in 1 to 1024.
    """
    if assembly.arch not in MULTIPROCESSORS:
        raise ValueError(f"arch={assembly.arch!r} must be one of {', '.join(MULTIPROCESSORS)}")
    if not 1 <= threads <= 1024:
        raise ValueError(f"threads={threads} must be in 1 to 1024")
    limits = MULTIPROCESSORS[assembly.arch]
    warps = -(-threads // 32)
    per_warp = -(-assembly.registers * 32 // _REGISTER_GRANULE) * _REGISTER_GRANULE
    shared = _shared_of_block(assembly, dynamic_shared_bytes)
    # each of the four partitions has a quarter of the registers, so only multiples of four warps
    # help
    fits = {
        "warps": limits.warps // warps,
        "registers": limits.registers // per_warp // 4 * 4 // warps,
        "shared memory": limits.shared_bytes // max(shared, 1),
        "blocks": limits.blocks,
    }
    limit = min(fits, key=lambda name: fits[name])
    blocks = fits[limit]
    return Occupancy(blocks, blocks * warps, blocks * warps / limits.warps, limit)


def shared_split(assembly: Assembly, threads: int, dynamic_shared_bytes: int = 0) -> int:
    """Returns the bytes of a multiprocessor's shared memory during a launch; the rest is L1's.

    It is the least size that holds all thread blocks which fit at once, or the largest with dynamic
    shared memory. `ptx_kernels.ptx.split` says what is known of that choice.

    Raises: see `occupancy`.
    """
    if dynamic_shared_bytes:
        return MULTIPROCESSORS[assembly.arch].shared_bytes
    needed = occupancy(assembly, threads).blocks * _shared_of_block(assembly, 0)
    return next(size for size in MULTIPROCESSORS[assembly.arch].shared_splits if size >= needed)


def _shared_of_block(assembly: Assembly, dynamic_shared_bytes: int) -> int:
    """Returns the bytes of shared memory that a thread block occupies."""
    shared = assembly.shared_bytes + dynamic_shared_bytes
    shared += MULTIPROCESSORS[assembly.arch].reserved_bytes
    return -(-shared // _SHARED_GRANULE) * _SHARED_GRANULE
