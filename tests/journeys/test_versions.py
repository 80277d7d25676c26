"""Several versions of a file at one path, and adapters: none gets another's output."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
from support.implementations import needs_native

from jax_q4k import models

from .calls import Call, alone
from .files import ADAPTERS, MADE, ORIGINAL, path
from .journey import Journey

pytestmark = needs_native


@pytest.mark.slow("compiles a program for each call of a journey", quick=["other weights"])
@pytest.mark.parametrize("name", [name for name in MADE if name != "short"])
def test_a_file_is_replaced(name: str, tmp_path: Path) -> None:
    """Replaces the file with another, and back, while a model of the first stays loaded."""
    journey, file = Journey(tmp_path / "programs"), tmp_path / "model.gguf"
    journey.folder.mkdir()
    loaded = []
    for version in (ORIGINAL, name, ORIGINAL):
        copy = shutil.copy(path(version), tmp_path / "new")
        os.replace(copy, file)
        call = Call(model=version)
        model = models.load(file)
        model.program_cache = journey.kept
        journey.say(f"{version} at {file}")
        journey.compare(call.run(model), alone(call))
        loaded.append((model, call))
    assert alone(Call(model=name)) != alone(Call())
    for model, call in loaded:
        journey.compare(call.run(model), alone(call))


@pytest.mark.slow("compiles a program for each call of a journey")
def test_adapters(tmp_path: Path) -> None:
    """Adapters with other values, ranks, layers and scales, alternating with the plain model."""
    journey, call = Journey(tmp_path), Call(sampling="logprobs")
    adapters = [None, *[(name, 1.0) for name in ADAPTERS], None, ("adapter", 0.5)]
    calls = [dataclasses.replace(call, lora=lora) for lora in adapters]
    for one in calls:
        journey.take(one)
        journey.restart()
    assert len({alone(one) for one in calls}) == len(calls) - 1


@pytest.mark.slow("compiles a program for each call of a journey")
def test_models_of_one_folder(tmp_path: Path) -> None:
    """Golden files with the same prompt in turn; some differ in a single number."""
    journey = Journey(tmp_path)
    names = (ORIGINAL, "other theta", "other epsilon", "other weights", "llama-bias")
    for name in (*names, *names[:3]):
        journey.take(Call(model=name))
        if name == "llama-bias":
            journey.restart()


@pytest.mark.slow("compiles a program for each call of a journey")
def test_a_folder_with_room_for_few(tmp_path: Path) -> None:
    """Programs that are evicted for others are compiled again."""
    journey = Journey(tmp_path, max_bytes=400_000)
    for new in (20, 90, 20, 200, 20):
        journey.take(Call(new_tokens=new))
        journey.restart()
    sizes = [file.stat().st_size for file in tmp_path.iterdir()]
    assert 0 < sum(sizes) <= 400_000
