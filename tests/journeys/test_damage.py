"""Program caches with damaged or foreign files: outputs are right, and nothing hangs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.implementations import needs_native

from .calls import Call
from .damage import DAMAGES, programs
from .journey import Journey

pytestmark = needs_native
CALL = Call(model="llama-bias")


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder as an earlier process leaves it."""
    journey = Journey(tmp_path_factory.mktemp("left"))
    journey.take(CALL)
    return journey.folder


@pytest.mark.parametrize(("index", "what"), list(enumerate(DAMAGES)))
def test_damaged_files(index: int, what: str, left: Path, tmp_path: Path) -> None:
    """Damages a program of the prompt or of the loop, in turn."""
    journey = Journey(shutil.copytree(left, tmp_path / "programs"))
    found = programs(journey.folder)
    file = found[index % len(found)]
    DAMAGES[what](file)
    journey.say(f"{what}: {file.name}")
    for _ in range(2):
        journey.take(CALL)
        journey.restart()


def test_another_models_programs(tmp_path: Path) -> None:
    """Programs of another model under this model's file names; each file states its model."""
    mine, theirs = (Journey(tmp_path / name) for name in ("mine", "theirs"))
    for journey, model in ((mine, "llama-gqa"), (theirs, "other theta")):
        journey.folder.mkdir()
        journey.take(Call(model=model))
    for file in programs(mine.folder):
        kind = file.name.split("-")[0]
        (other,) = (f for f in programs(theirs.folder) if f.name.startswith(kind))
        file.write_bytes(other.read_bytes())
    mine.restart()
    mine.take(Call(model="llama-gqa"))


def test_a_folder_that_goes_and_comes(tmp_path: Path) -> None:
    """The folder becomes a file and then a folder again."""
    folder = tmp_path / "programs"
    folder.mkdir()
    journey = Journey(folder)
    journey.take(CALL)
    shutil.rmtree(folder)
    folder.write_text("a file")
    journey.restart()
    journey.take(CALL)
    folder.unlink()
    folder.mkdir()
    journey.restart()
    journey.take(CALL)
    assert programs(folder)
