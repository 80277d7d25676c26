"""Compiles jitted functions ahead of time for an absent GPU, and reports XLA's result.

JAX's CUDA plugin compiles from a description of the device (jax_q4k/assets/*.txtpb, XLA's
GpuTargetConfigProto). It needs neither a GPU nor the CUDA libraries. XLA does not read the PTX of
custom calls; `ptx_kernels.machine_code.ptxas` does.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

import jax_q4k
from jax_q4k.custom_call import TARGET
from jax_q4k.jax_internals import compile_only_devices

from .thunks import CONTAINERS, Array, Thunk, parse_thunks

TARGETS = Path(jax_q4k.__file__).with_name("assets")


@dataclass(frozen=True)
class Program:
    """A compiled program: thunks in launch order, optimized HLO, and temporary memory."""

    thunks: tuple[Thunk, ...]
    hlo: str
    temp_bytes: int

    @property
    def launches(self) -> list[Thunk]:
        """Thunks that run on the device: kernels, copies, fills; each is one CUDA graph node."""
        return [t for t in self.thunks if t.kind not in CONTAINERS]

    @property
    def ptx_launches(self) -> list[Thunk]:
        """Launches of this package's PTX kernels."""
        return [t for t in self.launches if t.instruction and t.instruction.target == TARGET]

    @property
    def ptx_texts(self) -> set[str]:
        """PTX of our kernels, as XLA would pass it to the driver."""
        return set(self._ptx_by_instruction.values())

    def ptx_text(self, launch: Thunk) -> str:
        """Returns the PTX of one of `ptx_launches`."""
        assert launch.instruction is not None
        return self._ptx_by_instruction[launch.instruction.name]

    @functools.cached_property
    def _ptx_by_instruction(self) -> dict[str, str]:
        found = re.findall(r'%?([\w.-]+) = [^\n]*kernel_data = "([^"]*)"', self.hlo)
        return {
            name: re.sub(r"\\([0-9A-F]{2})", lambda m: chr(int(m[1], 16)), text)
            for name, text in found
        }

    @property
    def loops(self) -> list[Thunk]:
        return [t for t in self.thunks if t.kind == "kWhile"]

    def rewrites(self, array: Array) -> list[Thunk]:
        """Returns launches other than our kernels that write a full array like `array`.

        Such an array has `array`'s type and size, in any shape.

        Copies and copying fusions are among them. Our kernels that update in place write to the
        operand, so they are not.
        """
        ours = set(map(id, self.ptx_launches))
        return [
            t
            for t in self.launches
            if id(t) not in ours
            and t.instruction
            and any(
                (r.dtype, r.elements) == (array.dtype, array.elements)
                for r in t.instruction.results
            )
        ]


def unavailable() -> str | None:
    """Returns the reason that nothing can be compiled for a GPU here, or None."""
    try:
        found = importlib.util.find_spec("jax_plugins.xla_cuda13")
    except ModuleNotFoundError:
        found = None
    return None if found else "JAX's CUDA plugin is not installed: pip install 'jax[cuda13-local]'"


@functools.cache
def gpus(target: str = "h200", count: int = 1) -> list[Any]:
    """Returns GPUs of one host, as described by `jax_q4k/assets/TARGET.txtpb`.

    Raises:
      RuntimeError: JAX's CUDA plugin is not installed.
    """
    if reason := unavailable():
        raise RuntimeError(reason)
    return compile_only_devices((TARGETS / f"{target}.txtpb").read_text(), count)


def compile_program(
    function: Any, *args: Any, options: dict[str, Any] | None = None, target: str = "h200"
) -> Program:
    """Compiles `function`, a jitted function, for arguments like `args`.

    `args` are arrays or ShapeDtypeStructs, in pytrees.

    Args:
      options: XLA options in addition to those that `function` was jitted with.
      target: name of the file in jax_q4k/assets/ that describes the device.

    Raises:
      RuntimeError: JAX's CUDA plugin is not installed, or XLA left no dump.
    """
    sharding = SingleDeviceSharding(gpus(target)[0])
    avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    lowered = function.trace(*avals).lower(lowering_platforms=("cuda",))
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={**(options or {}), "xla_dump_to": folder})
        sequence = _dump(folder, "thunk_sequence_after_thunk_passes", "thunk_sequence")
        metadata = _dump(folder, "thunk_metadata")
    hlo = compiled.as_text()
    return Program(
        parse_thunks(sequence, metadata, hlo), hlo, compiled.memory_analysis().temp_size_in_bytes
    )


def _dump(folder: str, *parts: str) -> str:
    """Returns the first of `parts` that XLA wrote.

    XLA omits the sequence after its passes if they changed nothing.
    """
    for part in parts:
        if files := list(Path(folder).glob(f"*.{part}.txt")):
            return files[0].read_text()
    raise RuntimeError(
        f"XLA dumped no {parts[-1]}; a program taken from JAX's persistent cache leaves no dump"
    )
