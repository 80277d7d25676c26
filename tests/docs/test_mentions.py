"""Pages mention only what exists: files, names, arguments, options, modules, variables, extras."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import jax
import pytest
from support.paths import ROOT

import jax_q4k as jq
import ptx_kernels
from jax_q4k import models
from jax_q4k.models import chat, server
from ptx_kernels import simulator, tuning
from ptx_kernels.kernels import KERNELS
from tools import snippets

FOLDERS = ("ptx_kernels/ptx", "ptx_kernels/simulator", "ptx_kernels/tuning", "jax_q4k/native")
PAGES = [
    *snippets.pages(),
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    *(f"{folder}/README.md" for folder in FOLDERS),
]
pages = pytest.mark.parametrize("page", PAGES)

#: Names that pages use for this package's modules and objects.
NAMES = {
    "jq": jq,
    "jax_q4k": jq,
    "models": models,
    "chat": chat,
    "ptx_kernels": ptx_kernels,
    "simulator": simulator,
    "tuning": tuning,
}

#: Files of other programs and of readers, and a model of the hub.
THEIRS = (
    r"(adapter_)?config\.json|tokenizer(_config)?\.json|convert_lora_to_gguf\.py|src/models/NAME\.cpp"
    r"|modeling_NAME\.py|~/\.nv/ComputeCache|modules\.json|1_Pooling/config\.json"
    r"|Qwen/Qwen2\.5-0\.5B-Instruct-GGUF"
)
#: Files that a reader would write, and those that commands make.
UNWRITTEN = r".*NAME\.py|.*\b(q4_x|scale_rows|fictitious)\.py|site/|~/\.cache(/.*)?"
#: Options of other programs: XLA, Slurm, pip, git, pytest, aider, Continue.
OTHERS = r"--(xla_\w+|nodes|ntasks-per-node|gpus-per-node|json|help|openai-api-(base|key)|exclude)"


@functools.cache
def text(page: str) -> str:
    return (ROOT / page).read_text()


@functools.cache
def spans(page: str) -> frozenset[str]:
    """Inline code of a page."""
    outside = re.sub(r"^```.*?^```$", "", text(page), flags=re.DOTALL | re.MULTILINE)
    return frozenset(found.replace("\n", " ") for found in re.findall(r"`([^`]+)`", outside))


@functools.cache
def files() -> tuple[str, ...]:
    """Files and folders of the repository; folders end with a slash."""
    kinds = ("ptx_kernels", "jax_q4k", "models", "examples", "benchmarks", "tools", "tests", "docs")
    found = [path for kind in kinds for path in (ROOT / kind).rglob("*")]
    names = [path.relative_to(ROOT).as_posix() + "/" * path.is_dir() for path in found]
    return (*names, *(f"{kind}/" for kind in kinds), ".ci/others", ".ci/run", ".ci/stranger")


def is_there(name: str) -> bool:
    """Whether `name` is a file's path or the end of one."""
    return any(f"/{file}".endswith((f"/{name}", f"/{name}/")) for file in files())


@pages
def test_files(page):
    pattern = r"[\w.~*-]+/|[\w.~*-]*(/[\w.*-]+)+/?|\w+\.(py|h|cpp|json|md)"
    paths = {span for span in spans(page) if re.fullmatch(pattern, span)}
    paths = {path for path in paths if not re.fullmatch(rf"{THEIRS}|{UNWRITTEN}|/\w+", path)}
    paths -= {route.path for route in server.app().routes}
    endings = {path: re.sub(r"^.*\*", "", path) for path in paths}
    missing = {
        path
        for path, end in endings.items()
        if not (is_there(path) if "*" not in path else any(f.endswith(end) for f in files()))
    }
    assert not missing


def resolved(name: str) -> Any:
    """Returns the object of a dotted name, or raises ImportError or AttributeError."""
    first, *rest = name.split(".")
    try:
        return functools.reduce(getattr, rest, NAMES[first])
    except AttributeError:  # a module that is not imported yet or is hidden by a function
        module = importlib.import_module(".".join([NAMES[first].__name__, *rest[:-1]]))
        if hasattr(module, rest[-1]):
            return getattr(module, rest[-1])
        return importlib.import_module(f"{module.__name__}.{rest[-1]}")


@pages
def test_names(page):
    pattern = rf"(?<![\w.])(?:{'|'.join(NAMES)})(?:\.[A-Za-z_]\w*)+(?!\.?\w)"
    for name in set(re.findall(pattern, text(page))):
        if not name.endswith((".md", ".yaml")):
            assert resolved(name) is not None, name


def calls(page: str) -> list[ast.Call]:
    """Calls in the inline code of a page, such as `models.load(path, mesh=None)`."""
    found = []
    for span in spans(page):
        try:
            tree = ast.parse(span.removeprefix("with ").removesuffix(": ..."), mode="eval")
        except SyntaxError:
            continue
        if isinstance(tree.body, ast.Call) and ast.unparse(tree.body.func).split(".")[0] in NAMES:
            found.append(tree.body)
    return found


@pages
def test_arguments(page):
    for call in calls(page):
        function = resolved(ast.unparse(call.func))
        given = {keyword.arg: None for keyword in call.keywords if keyword.arg}
        inspect.signature(function).bind_partial(*call.args, **given)


def test_defaults_in_the_table():
    """Arguments in the overview of the API have the defaults that they are shown with."""
    checked = 0
    for call in calls("docs/api/index.md"):
        parameters = inspect.signature(resolved(ast.unparse(call.func))).parameters
        for keyword in call.keywords:
            if isinstance(keyword.value, ast.Constant) and keyword.value.value is not ...:
                assert parameters[keyword.arg].default == keyword.value.value, ast.unparse(call)
                checked += 1
    assert checked >= 8


@functools.cache
def sources() -> str:
    """Source code of all programs."""
    folders = ("models", "jax_q4k", "ptx_kernels", "benchmarks", "tools", "examples", "tests")
    return "\n".join(
        file.read_text()
        for folder in folders
        for file in (ROOT / folder).rglob("*.py")
        if file != Path(__file__)
    )


@functools.cache
def fields() -> frozenset[str]:
    """Fields of Sampling and arguments of kernels; command-line options are named after them."""
    found = set(models.Sampling.__dataclass_fields__)
    for build in KERNELS.values():
        found |= set(inspect.signature(build).parameters)
    return frozenset(found)


@pages
def test_options(page):
    for option in set(re.findall(r"(?<![\w-])--[a-z][\w-]+", text(page))):
        if not re.fullmatch(OTHERS, option):
            field = option.removeprefix("--").replace("-", "_")
            assert field in fields() or f'"{option}"' in sources(), option


def programs(page: str) -> set[tuple[str, str]]:
    """Collects (module or file of examples/, option) from lines that run a program with options."""
    found = set()
    for line in text(page).replace("\\\n", " ").splitlines():
        for program, rest in re.findall(r"python (?:-m )?([\w./]+)([^`#|]*)", line):
            found |= {(program, option) for option in re.findall(r"(?<!\S)--[a-z][\w-]+", rest)}
    return found


@pages
def test_options_of_programs(page):
    """Each option exists in the program that the page uses it with."""
    for program, option in programs(page):
        program = "tests/conftest.py" if program == "pytest" else program
        of_kernels = program == "ptx_kernels" and option[2:].replace("-", "_") in fields()
        assert of_kernels or option in source(program), (program, option)


@functools.cache
def source(program: str) -> str:
    """Returns a program's code, with that of the sibling modules that it imports by name."""
    if program.endswith(".py"):
        return (ROOT / program).read_text()
    spec = importlib.util.find_spec(program)
    if spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{program}.__main__")
    code = Path(spec.origin).read_text()
    named = set(re.findall(r"^from \.(\w+) import", code, re.MULTILINE))
    for names in re.findall(r"^from \. import (.+)", code, re.MULTILINE):
        named |= set(names.split(", "))
    beside = [Path(spec.origin).with_name(f"{name}.py") for name in named]
    return "\n".join([code, *(file.read_text() for file in beside if file.is_file())])


@pages
def test_modules_and_targets(page):
    for module in set(re.findall(r"python -m ([\w.]+)", text(page))):
        assert importlib.util.find_spec(module), module
    made = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:`|^    )make (\w+)", text(page), re.MULTILINE)):
        assert re.search(rf"^{target}:", made, re.MULTILINE), target


@functools.cache
def macros() -> str:
    return "\n".join(file.read_text() for file in (ROOT / "jax_q4k/native/src").iterdir())


@pages
def test_variables(page):
    """Environment variables are read by this package, or are options of JAX or huggingface_hub."""
    prefixes = "JAX|XLA|HF|CUDA|XDG|PJRT"
    for name in set(re.findall(rf"(?<![\w.])(?:{prefixes})_[A-Z0-9_]+\b", text(page))):
        ours = f'"{name}"' in sources() or name in macros()
        of_jax = name.startswith("JAX_") and name.lower() in jax.config.values
        of_the_hub = hasattr(huggingface_hub.constants, name)
        assert ours or of_jax or of_the_hub, name


@pages
def test_extras(page):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"])
    for names in re.findall(r"\.\[([\w,-]+)\]|EXTRAS=(\w+)", text(page)):
        assert set("".join(names).split(",")) <= extras


def test_the_reference_has_every_public_name():
    for page, module in {"jax_q4k": jq, "gguf": jq.gguf, "models": models}.items():
        shown = {
            resolved(name) if name.split(".")[0] in NAMES else None
            for name in re.findall(r"^::: (\S+)", text(f"docs/api/{page}.md"), re.MULTILINE)
        }
        public = {name: getattr(module, name) for name in module.__all__}
        missing = [
            name
            for name, found in public.items()
            if (inspect.isclass(found) or inspect.isfunction(found)) and found not in shown
        ]
        assert missing == (["GGUFError", "part_names"] if page == "gguf" else []), page


def test_missing_names_are_detected():
    assert is_there("ops/op.py") and is_there("models/cli/") and not is_there("ops/operation.py")
    with pytest.raises((AttributeError, ImportError)):
        resolved("models.load_model")
    with pytest.raises(TypeError):
        inspect.signature(models.load).bind_partial(lora_path=1)
