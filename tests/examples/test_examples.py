import json
import re
import runpy
import sys

import pytest
from support.paths import EXAMPLES, GOLDEN

from jax_q4k import models

pytestmark = pytest.mark.cpu_kernels


def run(monkeypatch, capsys, name, *arguments):
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_decode(monkeypatch, capsys):
    golden = json.loads((GOLDEN / "text-spm.json").read_text())
    out = run(monkeypatch, capsys, "decode.py", str(GOLDEN / golden["file"]), golden["prompt_text"])
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


@pytest.mark.slow("compiles two programs of a model", quick=["text-spm"])
@pytest.mark.parametrize("name", ["text-spm", "demo"])
def test_a_decoder_from_primitives(name, monkeypatch, capsys):
    file = models.demo_path() if name == "demo" else GOLDEN / f"{name}.Q4_K_M.gguf"
    out = run(monkeypatch, capsys, "decoder_from_primitives.py", str(file), "Once upon", "-n", "20")
    same, of = map(int, re.findall(r"(\d+) of (\d+) tokens are those of models.generate", out)[0])
    assert same == of >= 1


def test_a_decoder_from_primitives_of_another_architecture(monkeypatch, capsys):
    with pytest.raises(SystemExit, match="qwen2-bias.* is no plain llama"):
        run(
            monkeypatch,
            capsys,
            "decoder_from_primitives.py",
            str(GOLDEN / "qwen2-bias.Q4_K_M.gguf"),
        )


@pytest.mark.filterwarnings("error::DeprecationWarning:__main__")
def test_nnx_scan(monkeypatch, capsys):
    out = run(monkeypatch, capsys, "nnx_scan.py")
    assert "QuantizedArray(Q4_K, shape=(4, 256, 256), nbytes=147456)" in out
    first, last, restored = (float(number) for number in re.findall(r"\d\.\d+", out))
    assert max(last, restored) < first / 20
