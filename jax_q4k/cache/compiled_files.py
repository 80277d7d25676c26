"""Compiled programs in files: XLA's executable behind a header that is checked before it is used.

A file is, in this order: `MAGIC`; the header's length, four bytes, the lowest first; the SHA-256
of the header; the header, JSON in UTF-8; the body, the executable as XLA serializes it. There is no
pickle in it. The checks find a file that is damaged, or that is for something else; an executable
is machine code all the same, so use files of those alone whose programs you would run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jaxlib
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from ptx_kernels import __version__
from ptx_kernels.devices import find_device

from .. import native
from ..errors import CompiledFileError, UnavailableError
from ..jax_internals import (
    LoadedProgram,
    compile_only_devices,
    load_program,
    serialized_program,
    topology_fingerprint,
)
from ..process_wide import ProcessWide
from .atomic_files import replacing

__all__ = [
    "MAGIC",
    "TARGETS",
    "Header",
    "LoadedProgram",
    "check_arguments",
    "compile_for",
    "compile_here",
    "header",
    "read",
    "write",
]

MAGIC = b"jax-q4k compiled program 2\n"
_DIGEST = 32  # bytes of a SHA-256
_LONGEST_HEADER = 1 << 20
_LARGEST_FILE = 1 << 31

#: Name -> the file beside the demo model that describes the device, XLA's GpuTargetConfigProto, and
#: its name in `ptx_kernels.devices`; None: this machine's CPU.
TARGETS: dict[str, tuple[str, str] | None] = {"cpu": None, "h200": ("h200.txtpb", "H200")}


@dataclasses.dataclass(frozen=True)
class Header:
    """What a file says of its program.

    Attributes:
      program: its name and version of its arguments: another one's file is refused.
      model: a fingerprint of all of the model that the program depends on.
      shapes: of its arguments and whatever else its user has to know; JSON.
      target: the name in `TARGETS`, or the platform of a device that was there.
      device: whose code it is: `cpu` and a fingerprint of the processor, or a GPU's name.
      versions: of jax, jaxlib and jax_q4k, and of the CPU's kernels.
    """

    program: str
    model: str
    shapes: dict[str, Any]
    target: str
    device: str
    versions: dict[str, str]


def _versions(platform: str) -> dict[str, str]:
    kernels = f"{native.kernels()} {native.build.fingerprint()}" if platform == "cpu" else "none"
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "jax_q4k": __version__,
        "CPU kernels": kernels,
    }


def _device(device: jax.Device) -> str:
    if device.platform == "cpu":
        return f"cpu {topology_fingerprint(device):016x}"
    known = find_device(device.device_kind)
    return known.name if known else device.device_kind


def compile_for(
    target: str,
    program: Any,
    arguments: tuple[Any, ...],
    *,
    name: str,
    model: str,
    shapes: dict[str, Any],
    cuda_options: dict[str, Any] | None = None,
) -> tuple[Header, bytes]:
    """A jitted function, compiled for a device that need not be here: a file's header and body.

    Args:
      target: one of `TARGETS`.
      program: jitted with `keep_unused`.
      arguments: arrays or ShapeDtypeStructs, in pytrees.
      name, model, shapes: of the header.
      cuda_options: XLA's, for a GPU.

    Raises:
      ValueError: an unknown target. UnavailableError: JAX's plugin for it is not installed.
    """
    if target not in TARGETS:
        raise ValueError(f"target={target!r} must be one of {', '.join(TARGETS)}")
    described = TARGETS[target]
    if described is None:
        cpu = jax.local_devices(backend="cpu")[0]
        placed, device, platform, options = cpu, _device(cpu), "cpu", None
    else:
        text = Path(__file__).parents[1].joinpath("assets").joinpath(described[0]).read_text()
        try:
            placed = compile_only_devices(text)[0]
        except (RuntimeError, ValueError) as error:
            problem = f"target {target!r} needs JAX's CUDA plugin, which is in jax[cuda13-local]"
            raise UnavailableError(f"{problem}: {error}") from error
        device, platform, options = described[1], "cuda", cuda_options
    sharding = jax.sharding.SingleDeviceSharding(placed)
    avals = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments
    )
    lowered = program.trace(*avals).lower(lowering_platforms=(platform,))
    _, body = _compiled(lowered, options)
    return Header(name, model, shapes, target, device, _versions(platform)), body


def header(name: str, model: str, shapes: dict[str, Any], device: jax.Device) -> Header:
    """What a file says of a program for a device that is here."""
    platform = device.platform
    return Header(name, model, shapes, platform, _device(device), _versions(platform))


def compile_here(
    program: Any, arguments: Sequence[Any], results: Any, device: jax.Device
) -> tuple[LoadedProgram, bytes]:
    """A jitted function, compiled for a device that is here: ready to run, and a file's body.

    Args:
      program: jitted with `keep_unused`.
      arguments: arrays, in pytrees.
      results: shapes and dtypes that it must give, in pytrees.

    Raises:
      AssertionError: it gives others.
    """
    lowered = program.lower(*arguments)
    given, wanted = (
        [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(each)]
        for each in (lowered.out_info, results)
    )
    if given != wanted:
        raise AssertionError(f"the program gives {given}; {wanted} was expected")
    executable, body = _compiled(lowered)
    return LoadedProgram(executable.runtime_executable(), device), body


def _compiled(
    lowered: jax.stages.Lowered, options: dict[str, Any] | None = None
) -> tuple[jax.stages.Compiled, bytes]:
    """A program and its body, compiled without JAX's compilation cache.

    What that cache gives cannot be serialized once more: a CPU's executable loses functions. Nor
    need it hold a copy of what goes to a file.
    """
    with _without_cache.block():
        executable = lowered.compile(compiler_options=options)
    return executable, serialized_program(executable)


def _switch_off() -> bool:
    before: bool = jax.config.values["jax_enable_compilation_cache"]
    _switch(False)
    return before


def _switch(on: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", on)
    reset_cache()  # JAX looks when it next compiles


#: JAX's compilation cache is off inside a block: its switch is one of the process.
_without_cache = ProcessWide(_switch_off, _switch)


def write(path: str | os.PathLike[str], header: Header, body: bytes) -> None:
    """Writes a file whole or not at all."""
    said = dataclasses.asdict(header) | {
        "body_bytes": len(body),
        "body_sha256": hashlib.sha256(body).hexdigest(),
    }
    text = json.dumps(said, sort_keys=True).encode()
    with replacing(path) as partial, partial.open("xb") as file:
        file.write(MAGIC + len(text).to_bytes(4, "little") + hashlib.sha256(text).digest())
        file.write(text + body)


def read(
    path: str | os.PathLike[str],
    *,
    name: str,
    model: str,
    device: jax.Device,
    shapes: Callable[[dict[str, Any]], dict[str, Any]],
    private: bool = False,
) -> tuple[Header, LoadedProgram]:
    """The program of a file, ready to run on `device`; everything is checked before it is loaded.

    Args:
      shapes: gives what a header must say of them, from what it says.
      private: refuse links, and files that belong to others or that others may write.

    Raises:
      CompiledFileError: no such file, as its `field` says: `file` (no regular one, too large, or
        not private), `magic`, `header`, `body` (truncated or damaged), `program`, `device`,
        `versions`, `model` or `shapes` (for others than these). OSError: it cannot be read.
    """
    file = os.fsdecode(path)
    header, body = _parsed(file, _bytes_of(file, private))
    found: tuple[tuple[str, Any, Any], ...] = (
        ("program", header.program, name),
        ("device", header.device, _device(device)),
        ("versions", header.versions, _versions(device.platform)),
        ("model", header.model, model),
    )
    for field, has, wanted in found:
        if has != wanted:
            raise CompiledFileError(file, field, f"is for {_text(has)}; here is {_text(wanted)}")
    try:
        agree = header.shapes == shapes(header.shapes)
    except (KeyError, TypeError, ValueError, OverflowError):
        agree = False
    if not agree:
        raise CompiledFileError(file, "shapes", "do not go together")
    try:
        return header, load_program(body, device)
    except jax.errors.JaxRuntimeError as error:
        raise CompiledFileError(file, "body", f"XLA does not load it: {error}") from error


def _bytes_of(file: str, private: bool) -> bytes:
    """A file's bytes; whatever it is, nothing waits for it or takes more memory than it says."""
    with _opened(file, follow=not private) as opened:
        found = os.fstat(opened.fileno())
        if found.st_size > _LARGEST_FILE:
            problem = f"has {found.st_size} bytes; programs have at most {_LARGEST_FILE}"
            raise CompiledFileError(file, "file", problem)
        others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if private and (found.st_uid != os.geteuid() or others):
            raise CompiledFileError(
                file, "file", "belongs to another user or can be written by one"
            )
        start = opened.read(len(MAGIC))
        return start if start != MAGIC else start + opened.read(found.st_size - len(MAGIC))


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str], *, follow: bool) -> Iterator[BinaryIO]:
    """A regular file; raises CompiledFileError for others, and OSError for links without `follow`.

    `O_NONBLOCK`: opening a pipe would wait for a writer.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    number = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise CompiledFileError(os.fsdecode(path), "file", "is no regular file")
        with open(number, "rb", closefd=False) as opened:
            yield opened
    finally:
        os.close(number)


def is_of_this_format(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as `write` has it: others are of older versions, or no programs."""
    try:
        with _opened(path, follow=False) as opened:
            return opened.read(len(MAGIC)) == MAGIC
    except (CompiledFileError, OSError):
        return False


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {version}" for name, version in value.items())
    return str(value)


def _parsed(file: str, data: bytes) -> tuple[Header, bytes]:
    """The header and body of a file that is whole."""
    if not data.startswith(MAGIC):
        problem = f"begins with {data[:16]!r}: this is no compiled program of jax-q4k"
        raise CompiledFileError(file, "magic", problem)
    at = len(MAGIC)
    length = int.from_bytes(data[at : at + 4], "little")
    digest, text = data[at + 4 : at + 4 + _DIGEST], data[at + 4 + _DIGEST :][:length]
    if length > _LONGEST_HEADER or len(text) < length or hashlib.sha256(text).digest() != digest:
        raise CompiledFileError(file, "header", "is damaged or cut off")
    body = data[at + 4 + _DIGEST + length :]
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:  # no UTF-8 is a ValueError, too
        raise CompiledFileError(file, "header", f"is no JSON: {error}") from error
    said = _checked(file, parsed)
    size, checksum = said.pop("body_bytes"), said.pop("body_sha256")
    if len(body) != size:
        raise CompiledFileError(file, "body", f"has {len(body)} of {size} bytes")
    if hashlib.sha256(body).hexdigest() != checksum:
        raise CompiledFileError(file, "body", "is damaged: its checksum is another")
    return Header(**said), body


def _checked(file: str, said: Any) -> dict[str, Any]:
    kinds = {
        "program": str,
        "model": str,
        "shapes": dict,
        "target": str,
        "device": str,
        "versions": dict,
        "body_bytes": int,
        "body_sha256": str,
    }
    if not isinstance(said, dict) or said.keys() != kinds.keys():
        raise CompiledFileError(file, "header", f"must have {', '.join(kinds)}")
    for field, kind in kinds.items():
        if not isinstance(said[field], kind):
            raise CompiledFileError(file, "header", f"{field} must be a JSON {kind.__name__}")
    return said


def check_arguments(arguments: Sequence[Any], shapes: Sequence[Any]) -> None:
    """Raises TypeError unless arrays have these [shape, dtype]: XLA itself would not check."""
    for i, (array, (shape, dtype)) in enumerate(zip(arguments, shapes, strict=True)):
        if list(array.shape) != list(shape) or str(array.dtype) != dtype:
            raise TypeError(
                f"argument {i} is {array.dtype} {tuple(array.shape)}; the program was compiled for "
                f"{dtype} {tuple(shape)}"
            )
