"""The notebook: its cells run here on the CPU."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest
from support.paths import EXAMPLES, ROOT

from jax_q4k import environment
from jax_q4k.models import cli

pytestmark = pytest.mark.cpu_kernels

NOTEBOOK: dict[str, Any] = json.loads((EXAMPLES / "colab.ipynb").read_text())


def cells(kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == kind]


def commands() -> list[str]:
    return re.findall(r"^!(.+)$", "\n".join(cells("code")), re.MULTILINE)


def test_it_installs_as_the_documentation_says():
    """The command itself does not run: it would change the environment of the tests."""
    install, *others = commands()
    lines = (ROOT / "docs" / "install.md").read_text().splitlines()
    assert install in [line.split("#")[0].strip() for line in lines if line.startswith("    pip")]
    assert all(command.startswith("jax-q4k ") for command in others)


def test_its_commands_run(capsys, monkeypatch):
    monkeypatch.setattr(environment, "cuda_devices", lambda: 0)
    codes = {command: cli.main(shlex.split(command)[1:]) for command in commands()[1:]}
    assert codes == {"jax-q4k doctor": 0, "jax-q4k doctor --gpu": cli.FAILURE}
    assert "error: no GPU to check" in capsys.readouterr().err


@pytest.mark.slow("loads the demo model, compiles its programs and chooses kernels")
def test_its_cells_run(capsys):
    names: dict[str, Any] = {}
    for cell in cells("code"):
        if not cell.startswith("!"):
            exec(compile(cell, "colab.ipynb", "exec"), names)
    out = capsys.readouterr().out
    assert len(names["output"].tokens) == 40 and "The sea" + names["output"].text in out
    (error,) = re.findall(r"normalized squared error (\S+)", out)
    assert 0 < float(error) <= 1e-4
    assert "launch matvec_q4_k_m1" in out


def test_it_is_saved_without_results():
    for cell in NOTEBOOK["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None
