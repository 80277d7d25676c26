"""Kullback-Leibler divergence of two models, compared with float64 NumPy on their logits."""

from __future__ import annotations

import json
import math
import os
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.helpers import nmse
from support.paths import GOLDEN, TESTS

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models import cli
from jax_q4k.models.cli.commands.perplexity import _table
from jax_q4k.models.tasks.base_logits import encoded
from jax_q4k.models.tasks.divergence import Divergence
from jax_q4k.models.tasks.perplexity import TooShortError

pytestmark = pytest.mark.cpu_kernels

TEXT = "The sea was calm, and the two sisters walked along the shore until the evening came. " * 18
LENGTH = 13
FILE = GOLDEN / "text-spm.Q4_K_M.gguf"


@pytest.fixture(scope="module")
def model() -> models.Model:
    return models.from_gguf(FILE)


@pytest.fixture(scope="module")
def base(model: models.Model) -> models.Model:
    """The model with another final norm."""
    decoder = model.decoder()
    weight = decoder.norm.weight
    weight.set_value(weight.get_value() * np.linspace(0.7, 0.9, weight.shape[0], dtype=np.float32))
    return models.Model(decoder, model.tokenizer, model.metadata)


def log_p_of(model: models.Model, ids: list[int]) -> np.ndarray:
    logits = np.asarray(model.logits([ids])[0], np.float64)
    logits -= logits.max(-1, keepdims=True)
    found: np.ndarray = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return found


def expected(model: models.Model, base: models.Model, length: int) -> tuple[np.ndarray, ...]:
    """Returns divergences, -log p by both models, and which most likely tokens are the same."""
    ids = model.tokenizer.encode(TEXT)  # type: ignore[union-attr]
    rows: list[tuple[Any, ...]] = []
    for start in range(0, len(ids) - length + 1, length):
        window = [1, *ids[start + 1 : start + length]]
        pair = log_p_of(model, window), log_p_of(base, window)
        for at in range(length // 2, length - 1):
            q, p = (log_p[at] for log_p in pair)
            counted = p > -16
            divergence = (np.exp(p) * (p - q))[counted].sum()
            token = window[at + 1]
            rows.append((divergence, -q[token], -p[token], q.argmax() == p.argmax()))
    return tuple(np.array(column) for column in zip(*rows, strict=True))


@pytest.mark.usefixtures("exact")
def test_each_token(model: models.Model, base: models.Model) -> None:
    seen: list[tuple[int, int]] = []
    found = models.kl_divergence(
        model, base, TEXT, context=LENGTH, progress=lambda *call: seen.append(call)
    )
    divergences, nats, base_nats, agrees = expected(model, base, LENGTH)
    assert found.tokens == len(nats) > 40
    assert nmse(found.divergences, divergences) <= 1e-8 and divergences.min() > 1e-5
    assert nmse(found.nats, nats) <= 1e-8 and nmse(found.base_nats, base_nats) <= 1e-8
    np.testing.assert_array_equal(found.agrees, agrees)
    assert 0 < agrees.mean() < 1
    windows = len(nats) // (LENGTH - 1 - LENGTH // 2)
    assert seen[-1] == (windows, windows) and len(seen) == math.ceil(windows / 8)
    score = models.score(model, TEXT, context=LENGTH, windows="llama.cpp").second_halves
    assert score is not None
    assert found.perplexity.value == pytest.approx(score.perplexity, rel=1e-6)
    assert found.perplexity.error == pytest.approx(score.error, rel=1e-6)


@pytest.mark.usefixtures("exact")
def test_a_model_beside_itself(model: models.Model) -> None:
    found = models.kl_divergence(model, model, TEXT, context=LENGTH)
    assert abs(found.divergences).max() < 1e-6
    assert found.same_top == (1.0, 0.0) and found.ratio == (1.0, 0.0)
    assert found.delta_p == found.rms_delta_p == (0.0, 0.0)
    assert found.correlation == pytest.approx(1)


def test_statistics() -> None:
    """llama.cpp's formulas, from sums over the tokens."""
    rng = np.random.default_rng(5)
    base_nats = rng.exponential(2.0, 200)
    nats = np.abs(base_nats + 0.1 * rng.standard_normal(200))
    found = Divergence(rng.exponential(0.1, 200), nats, base_nats, rng.random(200) < 0.9)
    count = 200

    def error(values: np.ndarray) -> float:
        return float(values.std(ddof=0) / math.sqrt(count - 1))

    assert found.mean == pytest.approx((found.divergences.mean(), error(found.divergences)))
    assert found.percentile(50) == np.median(found.divergences)
    assert found.percentile(100) == found.divergences.max()
    p = np.exp(-nats) - np.exp(-base_nats)
    assert found.delta_p == pytest.approx((p.mean(), error(p)))
    rms = math.sqrt((p**2).mean())
    assert found.rms_delta_p == pytest.approx((rms, error(p**2) / (2 * rms)))
    ratios = nats - base_nats  # the error of a mean of differences
    assert found.log_ratio == pytest.approx((ratios.mean(), error(ratios)))
    ratio = math.exp(ratios.mean())
    assert found.ratio == pytest.approx((ratio, ratio * error(ratios)))
    assert found.correlation == pytest.approx(np.corrcoef(nats, base_nats)[0, 1])
    ours, theirs = math.exp(nats.mean()), math.exp(base_nats.mean())
    assert found.difference == pytest.approx(
        (ours - theirs, error(ours * nats - theirs * base_nats))
    )
    assert found.delta_p_percentile(50) == np.median(p)
    assert found.delta_p_percentile(0) == p.min()
    share = found.agrees.mean()
    assert found.same_top == pytest.approx((share, math.sqrt(share * (1 - share) / (count - 1))))


#: What llama.cpp's `llama-perplexity --kl-divergence` (of llama-cpp-python 0.3.36) prints for
#: examples/lora_text.txt with `-c 128 -b 128 -ctk f32 -ctv f32 -fa off`: the demo model in Q3_K_M
#: beside the demo model. Both files were converted to F32, since it rounds activations otherwise.
#: It rounds the base model's log-probabilities to 16 bits.
OF_LLAMA_CPP = {
    "perplexity": (402.750262, 45.752660),
    "mean": (0.070760, 0.002163),
    "delta_p": (-0.00222, 0.00106),
    "rms_delta_p": (0.03360, 0.00321),
    "same_top": (0.78770, 0.01289),
}
PERCENTILES = {100: 0.678977, 99.9: 0.656194, 99: 0.329020, 95: 0.194952, 90: 0.138325}
PERCENTILES |= {50: 0.053811, 10: 0.015324, 5: 0.007812, 1: 0.002214, 0: 0.000083}


@pytest.mark.filterwarnings("ignore:.*already quantized")
@pytest.mark.slow("quantizes a model, and predicts a text of several windows")
@pytest.mark.usefixtures("exact")
def test_llama_cpps_figures() -> None:
    demo = models.load("demo")
    small = models.quantize(demo, "Q3_K_M")
    text = (TESTS.parent / "examples" / "lora_text.txt").read_text()
    found = models.kl_divergence(small, demo, text, context=128)
    for name, want in OF_LLAMA_CPP.items():
        assert getattr(found, name) == pytest.approx(want, rel=1e-3, abs=6e-6), name
    for percent, figure in PERCENTILES.items():
        assert found.percentile(percent) == pytest.approx(figure, rel=2e-3, abs=1e-5), percent
    assert found.correlation == pytest.approx(0.9922, abs=2e-4)


def test_file_of_log_probabilities(model: models.Model, base: models.Model, tmp_path: Path) -> None:
    """The layout of llama.cpp's file, whose codes are within half a step of log p."""
    file = tmp_path / "base.logits"
    with jq.implementation(activations="f32"):
        perplexity = models.save_base_logits(base, TEXT, file, context=LENGTH)
        ids = model.tokenizer.encode(TEXT)  # type: ignore[union-attr]
        windows, rows = len(ids) // LENGTH, LENGTH - 1 - LENGTH // 2
        data, vocab = file.read_bytes(), model.config.vocab_size
        assert data[:20] == b"_logits_" + struct.pack("<iii", LENGTH, vocab, windows)
        tokens = np.frombuffer(data, "<i4", windows * LENGTH, 20)
        assert tokens.tolist() == ids[: windows * LENGTH]
        start = 20 + tokens.nbytes
        codes = np.frombuffer(data, "<u2", offset=start).reshape(windows, rows, 4 + vocab)
        ranges = np.ascontiguousarray(codes[..., :4]).view("<f4")
        log_p = ranges[..., 1:] + ranges[..., :1] * codes[..., 4:]
        window = [1, *ids[LENGTH + 1 : 2 * LENGTH]]
        want = log_p_of(base, window)[LENGTH // 2 : -1]
        want = np.maximum(want, want.max(-1, keepdims=True) - 16)
        assert abs(log_p[1] - want).max() <= 0.51 * ranges[1].max() + 1e-5
        assert codes[1, :, 4:].max() == 65535 and codes[1, :, 4:].min() == 0
        memory = models.kl_divergence(model, base, TEXT, context=LENGTH)
        seen: list[tuple[int, int]] = []
        found = models.kl_divergence(model, file, TEXT, progress=lambda *call: seen.append(call))
    assert seen[-1] == (windows, windows) and found.tokens == memory.tokens
    assert perplexity == pytest.approx(memory.base_perplexity, rel=1e-6)
    assert nmse(found.divergences, memory.divergences) <= 1e-4
    following = tokens.reshape(windows, LENGTH)[:, LENGTH // 2 + 1 :]
    in_file = np.take_along_axis(log_p, following[..., None], 2).reshape(-1)
    assert nmse(found.base_nats, -in_file) <= 1e-12
    assert nmse(found.nats, memory.nats) <= 1e-8
    assert (found.agrees == memory.agrees).mean() > 0.95


def test_codes_of_logits() -> None:
    """Logits 16 below the largest get code 0; equal logits have a scale of 0."""
    logits = np.array([[0, -8, -16, -40, 0.0], [3, 3, 3, 3, 3]], np.float32)
    rows = np.frombuffer(encoded(logits), "<u2").reshape(2, 4 + 6)
    (scale, least), (flat, log_p) = np.ascontiguousarray(rows[:, :4]).view("<f4")
    assert scale == np.float32(16) / np.float32(65535) and flat == 0
    assert least == pytest.approx(-16 - math.log(2 + math.exp(-8) + math.exp(-16)), abs=1e-6)
    assert log_p == pytest.approx(-math.log(5))
    assert rows[0, 4:].tolist() == [65535, 32768, 0, 0, 65535, 0] and not rows[1, 4:].any()
    with pytest.raises(ValueError, match="NaN or infinite"):
        encoded(np.array([[0, np.nan]], np.float32))


@pytest.fixture(scope="module")
def base_file(model: models.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file: Path = tmp_path_factory.mktemp("base") / "base.logits"
    models.save_base_logits(model, TEXT, file, context=LENGTH)
    return file


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"GGUF" + data[4:], "has no log-probabilities of llama.cpp's perplexity"),
        (lambda data: data[:15], "has no log-probabilities"),
        (lambda data: data[:-1], r"is cut off: it has \d+ of \d+ bytes"),
        (lambda data: data[:16] + b"\xff" * 4 + data[20:], "is cut off: it has"),
        (lambda data: data[:16] + bytes(4) + data[20:], "must have windows of tokens, not 0"),
        (lambda data: data[:8] + struct.pack("<i", 2) + data[12:], "must have .* windows of 2 tok"),
        (
            lambda data: data[:12] + struct.pack("<i", 31000) + data[16:],
            "has a vocabulary of 31000 tokens, the model one of 32000",
        ),
        (lambda data: data[:24] + bytes(4) + data[28:], "was made of another text, or with"),
    ],
)
def test_damaged_files_of_log_probabilities(
    change: Any, message: str, model: models.Model, base_file: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged.logits"
    damaged.write_bytes(change(base_file.read_bytes()))
    with pytest.raises(models.BaseLogitsError, match=f"{re.escape(str(damaged))} {message}"):
        models.kl_divergence(model, damaged, TEXT)


def test_log_probabilities_of_another_kind_of_file(model: models.Model, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(models.BaseLogitsError, match="pipe must be a regular file"):
        models.kl_divergence(model, tmp_path / "pipe", TEXT)
    (tmp_path / "sparse").write_bytes(b"_logits_" + struct.pack("<III", 3, 1, 1 << 31))
    os.truncate(tmp_path / "sparse", 200 << 30)
    with pytest.raises(models.BaseLogitsError, match="must have at most 16777216 tokens, not 644"):
        models.kl_divergence(model, tmp_path / "sparse", TEXT)


def test_refused(model: models.Model, base: models.Model) -> None:
    other = models.load("demo")
    with pytest.raises(ValueError, match="base has a vocabulary of 4096 tokens"):
        models.kl_divergence(model, other, TEXT, context=LENGTH)
    with pytest.raises(TooShortError, match="need 400"):
        models.kl_divergence(model, base, TEXT, context=200)
    with pytest.raises(ValueError, match="context=1 must be 2 to"):
        models.kl_divergence(model, base, TEXT, context=1)
    with pytest.raises(ValueError, match="no tokenizer"):
        models.kl_divergence(models.Model(model.decoder()), base, TEXT)


def test_command(model: models.Model, tmp_path: Any, capsys: Any) -> None:
    text, same = tmp_path / "text.txt", tmp_path / "same.gguf"
    text.write_text(TEXT)
    jq.gguf.write(same, model.metadata, dict(jq.gguf.read(FILE).tensors))
    given = ("perplexity", str(same), str(text), "--kl-divergence", str(FILE), "--json")
    assert cli.main((*given, "--context", str(LENGTH), "--activations", "f32")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] > 40 and found["same_top"] == {"value": 1.0, "error": 0.0}
    assert abs(found["kl_divergence"]["percentile_99"]) < 1e-6
    assert cli.main((*given, "--context", "400")) == 2
    assert "text has " in capsys.readouterr().err


def test_command_with_a_file(base_file: Path, tmp_path: Path, capsys: Any) -> None:
    text, file = tmp_path / "text.txt", tmp_path / "base.logits"
    text.write_text(TEXT)
    given = ("perplexity", str(FILE), str(text), "--kl-divergence-base", str(file))
    assert cli.main((*given, "--context", str(LENGTH))) == 0
    assert re.fullmatch(
        r"perplexity [\d.]+ \+/- [\d.]+, as llama.cpp counts\n", capsys.readouterr().out
    )
    assert file.read_bytes() == base_file.read_bytes()
    assert cli.main((*given, "--kl-divergence", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["same_top"]["value"] > 0.95 and abs(found["kl_divergence"]["value"]) < 1e-4
    assert cli.main(given) == 2 and file.read_bytes() == base_file.read_bytes()
    hint = "already exists; --kl-divergence compares with it, --force replaces it"
    assert hint in capsys.readouterr().err
    for more, message in (
        (
            ("--kl-divergence", "--context", "14"),
            "context=14 differs from the file's windows of 13",
        ),
        (("--kl-divergence", str(FILE)), "give --kl-divergence BASE or --kl-divergence-base FILE"),
    ):
        assert cli.main((*given, *more)) == 2
        assert message in capsys.readouterr().err
    assert cli.main((*given[:3], "--kl-divergence")) == 2
    assert "--kl-divergence needs BASE, a model, or" in capsys.readouterr().err


def test_table() -> None:
    nats = np.linspace(0.5, 3, 40)
    table = _table(Divergence(nats / 100, nats, nats, nats > 1))
    lines = dict(line.split("  ", 1) for line in table.split("\n"))
    assert {name: value.strip() for name, value in lines.items()}.items() >= {
        "ratio of perplexities": "1.000000 +/- 0.000000",
        "KL divergence, median": "0.017500",
        "KL divergence, 99.9 %": "0.029975",
        "KL divergence, minimum": "0.005000",
        "change of p, 10 %": "0.000 %",
        "same most likely token": "80.000 +/- 6.405 %",
    }.items()
