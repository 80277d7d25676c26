"""Import rules: imports only point down, and there are no import cycles."""

from __future__ import annotations

import graphlib
import importlib

import pytest

from tools.imports import PACKAGES, arrows, imported, modules

MODULES = modules(*PACKAGES)


def test_no_circle():
    try:
        tuple(graphlib.TopologicalSorter(arrows(*PACKAGES)).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


@pytest.mark.parametrize(
    "below, above",
    [
        ("ptx_kernels", "jax_q4k"),
        ("ptx_kernels", "models"),
        ("jax_q4k", "models"),
        ("ptx_kernels.ptx", "ptx_kernels.formats"),
        ("ptx_kernels.ptx", "ptx_kernels.simulator"),
        ("ptx_kernels.simulator", "ptx_kernels.kernels"),
        ("ptx_kernels.formats", "ptx_kernels.kernels"),
        ("ptx_kernels.formats", "ptx_kernels.tuning"),
        ("ptx_kernels.kernels", "ptx_kernels.tuning"),
        ("ptx_kernels.kernels", "ptx_kernels.machine_code"),
        ("ptx_kernels.tuning", "ptx_kernels.machine_code"),
    ],
)
def test_imports_point_down(below, above):
    def within(name: str, package: str) -> bool:
        return f"{name}.".startswith(f"{package}.") and name != "jax_q4k.__main__"  # the command

    found = [
        (name, other)
        for name, others in arrows(*PACKAGES).items()
        for other in others
        if within(name, below) and within(other, above)
    ]
    assert not found


#: Folders of `models/` from the bottom; each imports only folders that precede it in this list.
ROOMS = (
    "support",
    "architectures",
    "config",
    "tokenizer",
    "chat",
    "sampling",
    "sharding",
    "kv_cache",
    "network",
    "runner",
    "engine",
    "files",
    "tasks",
    "server",
    "cli",
)


def test_rooms_of_models():
    assert {name.split(".")[1] for name in MODULES if name.startswith("models.")} == {*ROOMS}
    upward = [
        f"{name} imports {other}"
        for name, others in arrows("models", typing=False).items()
        for other in others
        if name != "models" and other != "models"
        if ROOMS.index(name.split(".")[1]) < ROOMS.index(other.split(".")[1])
    ]
    assert not upward


@pytest.mark.parametrize(
    "room, kept_out", [("engine", "network"), ("engine", "files"), ("tasks", "files")]
)
def test_rooms_that_know_nothing_of_one_another(room, kept_out):
    found = [
        (name, other)
        for name, others in arrows("models").items()
        for other in others
        if f"{name}.".startswith(f"models.{room}.")
        and f"{other}.".startswith(f"models.{kept_out}.")
    ]
    assert not found


def test_ptx_kernels_needs_no_jax():
    roots = {
        source.split(".")[0]
        for name in MODULES
        if name.startswith("ptx_kernels")
        for source, _ in imported(name, MODULES[name])
    }
    assert not roots & {"jax", "jaxlib", "flax"}


def test_models_use_public_names_of_jax_q4k():
    """Public names are those in `__all__` of `jax_q4k` or of a package that `jax_q4k` lists."""
    private = [
        (name, source, taken)
        for name in MODULES
        if name.split(".")[0] == "models"
        for source, taken in imported(name, MODULES[name])
        if source.split(".")[0] == "jax_q4k" and (source, taken) != ("jax_q4k", "models")
        if not is_public(source, taken)
    ]
    assert not private


def is_public(source: str, taken: str) -> bool:
    package, _, rest = source.partition(".")
    listed = importlib.import_module(package).__all__
    if rest:
        above, _, last = source.rpartition(".")
        known = listed if above == package else importlib.import_module(above).__all__
        return last in known and taken in importlib.import_module(source).__all__
    return not taken or taken in listed
