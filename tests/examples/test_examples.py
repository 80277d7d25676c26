import json
import re
import runpy
import sys

import pytest
from support.paths import EXAMPLES, GOLDEN

pytestmark = pytest.mark.cpu_kernels


def run(monkeypatch, capsys, name, *arguments):
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_decode(monkeypatch, capsys):
    golden = json.loads((GOLDEN / "text-spm.json").read_text())
    out = run(monkeypatch, capsys, "decode.py", str(GOLDEN / golden["file"]), golden["prompt_text"])
    from jax_q4k import models

    tokenizer = models.tokenizer.from_gguf(GOLDEN / golden["file"])
    assert out == tokenizer.decode(golden["greedy_f32"][:24], strip_prefix=False) + "\n"


def test_decode_without_arguments(monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, capsys, "decode.py")
    assert stopped.value.code == 2
    assert "the following arguments are required: MODEL.gguf, prompt" in capsys.readouterr().err


def test_primitives(monkeypatch, capsys):
    out = run(monkeypatch, capsys, "primitives.py")
    assert "589,824 bytes packed, 4,194,304 as float32" in out
    difference, error = (float(number) for number in re.findall(r"(\S+e-\d+)", out))
    assert difference <= 1e-4 and 1e-8 <= error <= 1e-3
