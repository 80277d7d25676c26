"""Lazy imports: modules that few programs need are imported on first use."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.paths import ROOT

import jax_q4k as jq
from jax_q4k import lazy_imports, models
from ptx_kernels import formats

#: Modules that take tens of milliseconds each and that not every program needs.
HEAVY = (
    "flax",
    "gguf",
    "jax_q4k.gguf",
    "jax_q4k.quantizers",
    "jinja2",
    "optax",
    "ptx_kernels.kernels",
    "ptx_kernels.machine_code",
    "ptx_kernels.ptx",
    "ptx_kernels.simulator",
    "ptx_kernels.tuning",
    "rich",
    "safetensors",
    "tokenizers",
    "yaml",
)


def modules_after(code: str) -> set[str]:
    """Modules that a new process has imported after running `code`."""
    code += "\nimport json, sys; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("module", ["jax_q4k", "jax_q4k.models"])
def test_heavy_modules_are_imported_when_used(module):
    assert not modules_after(f"import {module}").intersection(HEAVY)


@pytest.mark.cpu_kernels
def test_products_on_a_cpu_import_no_kernels_for_a_gpu():
    code = """
import jax
jax.config.update("jax_platforms", "cpu")
import jax_q4k as jq, numpy as np
w = jq.QuantizedArray.from_gguf_bytes(np.zeros(34 * 64, np.uint8), "Q8_0", (64, 32))
jq.matmul(np.ones((16, 32), np.float32), w)
"""
    assert not modules_after(code).intersection({"ptx_kernels.kernels", "ptx_kernels.tuning"})


@pytest.mark.parametrize("module", [jq, models, formats])
def test_every_public_name_is_there_and_listed(module):
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        assert getattr(module, name) is not None


@pytest.mark.slow("compiles a program for each case", quick=["jax_q4k-modules0"])
@pytest.mark.parametrize(
    "module, modules",
    [
        (
            "jax_q4k",
            [
                "cache",
                "checkpoint_policies",
                "collecting",
                "control_groups",
                "cpus",
                "environment",
                "formats",
                "gguf",
                "gpu_checks",
                "lazy_imports",
                "native",
                "quantizers",
            ],
        ),
        ("jax_q4k.models", ["chat", "drafts", "sampling", "states", "tokenizer"]),
    ],
)
def test_a_function_is_not_hidden_by_a_module_that_was_imported_before(module, modules):
    modules_after(f"""
import importlib, pkgutil, types
import {module} as package
for found in pkgutil.iter_modules(package.__path__):
    if not found.name.startswith("__"):
        importlib.import_module("{module}." + found.name)
found = [n for n in package.__all__ if isinstance(getattr(package, n), types.ModuleType)]
assert found == {modules}, found
""")


@pytest.mark.parametrize("module", [jq, models, formats])
def test_unknown_names_are_refused(module):
    with pytest.raises(AttributeError, match="has no attribute 'mat_mul'"):
        module.mat_mul  # noqa: B018


def test_no_lazy_name_is_that_of_a_submodule():
    """Importing such a submodule would put itself in the place of what has its name."""
    lazy = [
        file
        for package in ("jax_q4k", "models", "ptx_kernels")
        for file in (ROOT / package).rglob("__init__.py")
        if "lazy_imports.attach" in file.read_text()
    ]
    assert len(lazy) > 3
    hidden = [
        (file, name)
        for file in lazy
        for name, (home, _) in lazy_imports._type_checking_imports(file).items()
        if home != "." and ((file.parent / f"{name}.py").exists() or (file.parent / name).is_dir())
    ]
    assert not hidden
