"""A copy of the repository with all chosen mutants planted, switched by `$MUTANT`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from jax_q4k.native import build

from . import cpp_code, python_code
from .mutant import Edit, Mutant, apply, draw

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "jax_q4k" / "native" / "src"


def python_mutants(count: int, seed: int) -> list[Mutant]:
    """Draws mutants of `models/` and `jax_q4k/`."""
    files = [file for part in ("models", "jax_q4k") for file in sorted((ROOT / part).rglob("*.py"))]
    names = [str(file.relative_to(ROOT)) for file in files]
    found = (
        mutant
        for name in names
        if not name.startswith("jax_q4k/models/")
        for mutant in python_code.mutants(name, (ROOT / name).read_text())
    )
    return draw(found, count, seed)


def cpp_mutants(count: int, seed: int) -> list[Mutant]:
    """Draws mutants of the CPU kernels that this machine's best instruction set compiles."""
    found = (
        mutant
        for file in sorted(SOURCES.glob("*.*"))
        for mutant in cpp_code.mutants(str(file.relative_to(ROOT)), file.read_text())
    )
    chosen = draw(found, 2 * count, seed)
    mutants = _compiled({number: mutant for number, mutant in enumerate(chosen, 1)})
    return list(mutants.values())[:count]


def _compiled(mutants: dict[int, Mutant]) -> dict[int, Mutant]:
    """Drops mutants that are invalid C++, or in code that is not compiled here."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "src"
        while True:
            _plant(mutants, folder)
            errors, text = _checked(folder)
            if not errors:
                return {
                    number: mutant
                    for number, mutant in mutants.items()
                    if re.search(rf"(?:<{number}>|\({number}\))", text)
                }
            bad = {number for number, m in mutants.items() if (Path(m.path).name, m.line) in errors}
            if not bad:
                raise RuntimeError(f"the sources do not compile: {sorted(errors)[:5]}")
            mutants = {number: m for number, m in mutants.items() if number not in bad}


def _plant(mutants: dict[int, Mutant], folder: Path) -> None:
    """Writes the sources with the mutants, and mutants.h, into the folder."""
    shutil.copytree(SOURCES, folder, dirs_exist_ok=True)
    for name in {mutant.path for mutant in mutants.values()}:
        here = [(number, m) for number, m in mutants.items() if m.path == name]
        (folder / Path(name).name).write_text(apply((ROOT / name).read_text(), here))
    (folder / "mutants.h").write_text(cpp_code.header())


def _checked(folder: Path) -> tuple[set[tuple[str, int]], str]:
    """Returns ({(file, line)} of compiler errors, the preprocessed sources)."""
    name, machine = next(iter(build.kernels().items()))
    defines = [f"-DJAX_Q4K_KERNELS=kernels_{name}", f'-DJAX_Q4K_NAME="{name}"']
    others = [*(f"-DJAX_Q4K_HAS_{n.upper()}" for n in build.kernels())]
    errors: set[tuple[str, int]] = set()
    text = ""
    for source in sorted(folder.glob("*.cpp")):
        options = [*machine, *defines] if source.stem == "kernels" else others
        command = [*build.compiler(), "-std=c++17", "-fmax-errors=0", "-Werror=vla", *options]
        command += ['-DJAX_Q4K_FINGERPRINT=""', "-isystem", build.headers(), str(source)]
        text += subprocess.run([*command, "-E"], capture_output=True, text=True).stdout
        flags = ["-include", str(folder / "mutants.h"), "-fsyntax-only"]
        done = subprocess.run([*command, *flags], capture_output=True, text=True)
        if done.returncode:
            positions = re.findall(rf"{re.escape(str(folder))}/([\w.]+):(\d+)", done.stderr)
            errors |= {(file, int(line)) for file, line in positions}
    return errors, text


def make(folder: Path, mutants: Sequence[Mutant]) -> None:
    """Copies the tracked files, plants the mutants, numbered from 1, and builds the library."""
    tree = folder / "tree"
    tree.mkdir(parents=True)
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT)
    tar = ["tar", "--create", "--null", "--files-from=-"]
    archive = subprocess.run(tar, cwd=ROOT, input=listed, capture_output=True, check=True).stdout
    subprocess.run(["tar", "--extract"], cwd=tree, input=archive, check=True)
    numbered = list(enumerate(mutants, 1))
    for name in sorted({m.path for m in mutants if m.path.endswith(".py")}):
        here = [(number, m) for number, m in numbered if m.path == name]
        (tree / name).write_text(python_code.with_import(apply((tree / name).read_text(), here)))
    shutil.copy(Path(__file__).with_name("switch.py"), tree / "jax_q4k" / "mutant_switch.py")
    native = {number: m for number, m in numbered if not m.path.endswith(".py")}
    sources = tree / "jax_q4k" / "native" / "src"
    _plant(native, sources)
    _one_instruction_set(sources.parent / "build.py")
    flags = ["-include", str(sources / "mutants.h"), "-O1", "-w"]
    program = (
        "import sys; from pathlib import Path; from jax_q4k.native import build;"
        "build.compile_library(Path(sys.argv[1]), flags=sys.argv[2:])"
    )
    library = str(sources.parent / build.LIBRARY)
    subprocess.run([sys.executable, "-c", program, library, *flags], cwd=tree, check=True)
    write(folder / "mutants.json", mutants)


def _one_instruction_set(script: Path) -> None:
    """Restricts the copy's build to the best kernels and the portable ones: switches are slow."""
    text = script.read_text()
    sets = build.kernels()
    best = repr({name: sets[name] for name in (next(iter(sets)), "portable")})
    was = 'return _KERNELS.get(platform.machine(), {"portable": []})'
    if was not in text:
        raise RuntimeError(f"{script} has no line {was!r}")
    script.write_text(text.replace(was, f"return {best}"))


def write(path: Path, mutants: Sequence[Mutant]) -> None:
    path.write_text(json.dumps([asdict(mutant) for mutant in mutants], indent=1))


def read(path: Path) -> list[Mutant]:
    def edit(table: dict) -> Edit:  # type: ignore[type-arg]
        return Edit(tuple(table["start"]), tuple(table["end"]), table["text"])

    return [
        Mutant(**table | {"edits": tuple(map(edit, table["edits"]))})
        for table in json.loads(path.read_text())
    ]
