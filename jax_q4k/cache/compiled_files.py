"""Writes, reads and checks files of compiled programs: a header and XLA's executable.

A file holds, in this order: `MAGIC`; the header's length, four bytes, little-endian; the SHA-256
of the header; the header, JSON in UTF-8; the body, the executable as XLA serializes it. It contains
no pickle. The checks reject damaged files and files for another program, model or device. An
executable is still machine code, so load only files whose programs you would run.
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
from .targets import TARGETS

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


@dataclasses.dataclass(frozen=True)
class Header:
    """Description of a compiled program, stored in its file.

    Attributes:
      program: name of the program and version of its arguments; other programs' files are refused.
      model: fingerprint of everything in the model that the program depends on.
      shapes: shapes of the arguments and whatever else the caller needs; JSON.
      target: name in `TARGETS`, or the platform of a local device.
      device: device that the machine code is for: `cpu` and a fingerprint of the processor, or a
        GPU's name.
      versions: versions of jax, jaxlib, jax_q4k and the CPU kernels.
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
    """Compiles a jitted function for a device that need not be present.

    Returns the Header and the body (serialized executable) of a file.

    Args:
      target: one of `TARGETS`.
      program: function jitted with `keep_unused`.
      arguments: arrays or ShapeDtypeStructs, in pytrees.
      name, model, shapes: fields of the header.
      cuda_options: XLA compiler options for a GPU.

    Raises:
      ValueError: an unknown target. UnavailableError: JAX's CUDA plugin is not installed.
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
    """Returns the Header of a program that is compiled for a local device."""
    platform = device.platform
    return Header(name, model, shapes, platform, _device(device), _versions(platform))


def compile_here(
    program: Any, arguments: Sequence[Any], results: Any, device: jax.Device
) -> tuple[LoadedProgram, bytes]:
    """Compiles a jitted function for a local device.

    Returns the loaded program, and the body (serialized executable) of a file.

    Args:
      program: function jitted with `keep_unused`.
      arguments: arrays, in pytrees.
      results: expected shapes and dtypes of the results, in pytrees.

    Raises:
      AssertionError: the results have other shapes or dtypes.
    """
    lowered = program.lower(*arguments)
    actual, wanted = (
        [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(each)]
        for each in (lowered.out_info, results)
    )
    if actual != wanted:
        raise AssertionError(f"the program returns {actual}, expected {wanted}")
    executable, body = _compiled(lowered)
    return LoadedProgram(executable.runtime_executable(), device), body


def _compiled(
    lowered: jax.stages.Lowered, options: dict[str, Any] | None = None
) -> tuple[jax.stages.Compiled, bytes]:
    """Compiles a program without JAX's compilation cache.

    Returns the compiled program and its serialized executable. An executable from JAX's cache
    cannot be serialized again: on a CPU it loses functions. JAX's cache also need not hold a second
    copy of a program that goes to a file.
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
    reset_cache()  # JAX reads the option at the next compilation


#: Disables JAX's compilation cache inside a block; the option is process-wide.
_without_cache = ProcessWide(_switch_off, _switch)


def write(path: str | os.PathLike[str], header: Header, body: bytes) -> None:
    """Writes a compiled-program file atomically."""
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
    """Reads a compiled-program file, checks it, and loads the program on `device`.

    Args:
      name, model: expected values of the header's `program` and `model`.
      shapes: function from the header's `shapes` to the expected ones.
      private: refuses links, and files that another user owns or may write.

    Raises:
      CompiledFileError: the file cannot be used, for the reason in `field`: `file` (not a regular
        file, too large, or not private), `magic`, `header`, `body` (truncated or damaged), or a
        mismatch of `program`, `device`, `versions`, `model` or `shapes`. OSError: it cannot be
        read.
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
        raise CompiledFileError(file, "shapes", "do not fit together")
    try:
        return header, load_program(body, device)
    except jax.errors.JaxRuntimeError as error:
        raise CompiledFileError(file, "body", f"XLA cannot load it: {error}") from error


def _bytes_of(file: str, private: bool) -> bytes:
    """Returns a file's bytes; never blocks, and reads no more than `_LARGEST_FILE`."""
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
    """Yields a regular file, open for reading; raises CompiledFileError for other kinds of files.

    Raises OSError for a symbolic link unless `follow`. `O_NONBLOCK` keeps the open of a pipe from
    waiting for a writer.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    number = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise CompiledFileError(os.fsdecode(path), "file", "is not a regular file")
        with open(number, "rb", closefd=False) as opened:
            yield opened
    finally:
        os.close(number)


def is_of_this_format(path: str | os.PathLike[str]) -> bool:
    """Returns whether a file begins with `MAGIC`, the magic bytes of this version of the format."""
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
    """Parses and verifies a file's bytes; returns its Header and body (serialized executable)."""
    if not data.startswith(MAGIC):
        problem = f"begins with {data[:16]!r}: this is not a compiled program of jax-q4k"
        raise CompiledFileError(file, "magic", problem)
    at = len(MAGIC)
    length = int.from_bytes(data[at : at + 4], "little")
    digest, text = data[at + 4 : at + 4 + _DIGEST], data[at + 4 + _DIGEST :][:length]
    if length > _LONGEST_HEADER or len(text) < length or hashlib.sha256(text).digest() != digest:
        raise CompiledFileError(file, "header", "is damaged or truncated")
    body = data[at + 4 + _DIGEST + length :]
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:  # invalid UTF-8 is a ValueError
        raise CompiledFileError(file, "header", f"is not JSON: {error}") from error
    said = _checked(file, parsed)
    size, checksum = said.pop("body_bytes"), said.pop("body_sha256")
    if len(body) != size:
        raise CompiledFileError(file, "body", f"has {len(body)} of {size} bytes")
    if hashlib.sha256(body).hexdigest() != checksum:
        raise CompiledFileError(file, "body", "is damaged: its checksum differs")
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
    """Raises TypeError unless each array has its [shape, dtype] in `shapes`; XLA does not check."""
    for i, (array, (shape, dtype)) in enumerate(zip(arguments, shapes, strict=True)):
        if list(array.shape) != list(shape) or str(array.dtype) != dtype:
            raise TypeError(
                f"argument {i} is {array.dtype} {tuple(array.shape)}; the program was compiled for "
                f"{dtype} {tuple(shape)}"
            )
