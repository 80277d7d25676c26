"""Compiles the native CPU kernels, for `python -m jax_q4k.native` and for `pip install`.

Building needs only JAX's headers, because `pip install` provides nothing else.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

LIBRARY = "libjax_q4k.so"
HOW_TO = "with a C++17 compiler (g++, clang++ or $CXX), `python -m jax_q4k.native` builds it"
_SOURCES = Path(__file__).with_name("src")
_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",  # GCC's default; fuses across inlined operators, too
    "-Wall",
    "-Wextra",
]

_STATIC = ["-static-libstdc++", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections"]

_SEAL = b"\njax-q4k SHA-256\n"  # precedes the checksum of a library

_AVX2 = ["-mavx2", "-mfma", "-mf16c"]

#: Machine -> kernel sets: name and required flags. `library.cpp` checks that the processor has the
#: same features.
_KERNELS = {
    "x86_64": {
        "avx512": [
            *_AVX2,
            *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vnni")),
            "-mprefer-vector-width=512",
        ],
        "avxvnni": [*_AVX2, "-mavxvnni"],
        "avx2": _AVX2,
        "portable": [],
    },
    "aarch64": {"neon": ["-march=armv8.2-a+dotprod+fp16"], "portable": []},
}


def kernels() -> dict[str, list[str]]:
    """Returns the compiler flags of each kernel set for this machine's architecture, best first."""
    return _KERNELS.get(platform.machine(), {"portable": []})


def compiler() -> list[str]:
    """Returns the C++ compiler's command."""
    return shlex.split(os.environ.get("CXX") or "c++")


def fingerprint() -> str | None:
    """Returns a hash of the C++ sources and their compiler flags, None if there are no sources."""
    sources = sorted(path for path in _SOURCES.glob("*") if path.suffix in (".h", ".cpp"))
    digest = hashlib.sha256(repr((_FLAGS, _STATIC, kernels())).encode())
    for path in sources:
        digest.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()[:16] if sources else None


def is_current(library: Path) -> bool:
    """Returns whether a library was compiled from these sources with these flags, and is sound."""
    hash_now = fingerprint()
    if hash_now is None or not library.exists():
        return False
    data = library.read_bytes()
    return hash_now.encode() in data and is_sealed(data)


def seal(library: Path) -> None:
    """Appends a checksum to a library, which `is_sealed` verifies; loaders ignore it."""
    with open(library, "r+b") as file:
        file.write(_SEAL + hashlib.sha256(file.read()).digest())


def is_sealed(data: bytes) -> bool:
    """Returns whether a library's bytes end with their checksum, as `seal` writes it.

    A full disk or a power cut can leave a file that lacks its end or has zeros in place of data.
    Mapped, it would end the process, or compute wrong results.
    """
    end = len(data) - len(_SEAL) - hashlib.sha256().digest_size
    return end > 0 and data[end:] == _SEAL + hashlib.sha256(memoryview(data)[:end]).digest()


class BuildError(Exception):
    """The library could not be compiled; the message says why."""


def headers() -> str:
    """Returns the folder of XLA's FFI headers in the installed jaxlib.

    Raises BuildError if there is no jaxlib.
    """
    try:
        import jaxlib  # all that an installation has; jax.ffi.include_dir() uses it, too
    except ImportError as error:
        raise BuildError(f"jaxlib, whose headers are needed, is missing: {error}") from error
    return str(Path(jaxlib.__file__).with_name("include"))


def compile_library(
    target: Path,
    *,
    flags: Sequence[str] = (),
    sets: Collection[str] | None = None,
    progress: Callable[[str, int, int], object] = lambda name, done, total: None,
) -> list[str]:
    """Compiles the library to `target`.

    `flags` are added to the compiler's and the linker's, such as a sanitizer's. `sets` names the
    kernel sets to compile, which must include "portable"; None means all. `progress` is called
    after each object with its name, the number of finished objects, and their total. Returns the
    names of the kernel sets that the compiler is too old for. Raises BuildError.
    """
    include = ["-isystem", headers()]
    with tempfile.TemporaryDirectory() as folder:
        commands = []
        known = {
            name: machine
            for name, machine in kernels().items()
            if (sets is None or name in sets) and _knows(machine, Path(folder))
        }
        for name, machine in reversed(known.items()):  # "portable" takes longest
            defines = [
                f"-DJAX_Q4K_KERNELS=kernels_{name}",
                f"-DJAX_Q4K_QUANTIZER_SET=quantizers_{name}",
                f'-DJAX_Q4K_NAME="{name}"',
            ]
            for source in ("kernels", "quantizers"):
                commands.append(
                    [
                        *machine,
                        *defines,
                        "-c",
                        str(_SOURCES / f"{source}.cpp"),
                        "-o",
                        f"{folder}/{source}_{name}.o",
                    ]
                )
        defines = [
            f'-DJAX_Q4K_FINGERPRINT="{fingerprint()}"',
            *(f"-DJAX_Q4K_HAS_{name.upper()}" for name in known),
        ]
        for name in (*sorted(path.stem for path in _SOURCES.glob("*_handlers.cpp")), "library"):
            commands.append(
                [
                    *include,
                    *defines,
                    "-c",
                    str(_SOURCES / f"{name}.cpp"),
                    "-o",
                    f"{folder}/{name}.o",
                ]
            )
        objects = [command[-1] for command in commands]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            runs = {
                pool.submit(_run, [*compiler(), *_FLAGS, *flags, *command]): Path(command[-1]).stem
                for command in commands
            }
            for done, run in enumerate(as_completed(runs), 1):
                run.result()
                progress(runs[run], done, len(runs))
        partial = target.with_name(f"{target.name}.{os.getpid()}")
        try:
            _link(objects, partial, flags)
            seal(partial)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    return [name for name in kernels() if name not in known and (sets is None or name in sets)]


def _link(objects: Sequence[str], target: Path, flags: Sequence[str]) -> None:
    """Links the objects, with the C++ runtime inside if the system has it as an archive.

    The library then needs no newer libstdc++ than the system that runs it has.
    """
    command = [*compiler(), "-shared", *flags, *objects, "-o", str(target)]
    try:
        _run([*command, *_STATIC])
    except BuildError:
        _run(command)


def _knows(machine: Sequence[str], folder: Path) -> bool:
    """Returns whether the compiler accepts these flags.

    An old compiler may not; the library then lacks the kernel set.
    """
    empty = folder / "empty.cpp"
    empty.touch()
    try:
        _run([*compiler(), *machine, "-c", str(empty), "-o", str(folder / "empty.o")])
    except BuildError:
        return not machine  # without any compiler, compiling the portable set reports the error
    return True


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"no C++ compiler: {error}") from error
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr}")
