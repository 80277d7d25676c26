"""Importance matrices, compared with float64 NumPy and with files of llama.cpp's llama-imatrix."""

from __future__ import annotations

import json
import os
import re
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import TokenType
from support.helpers import nmse
from support.paths import DATA, GOLDEN

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models import cli, tokenizer
from jax_q4k.models.cli import interrupts
from jax_q4k.models.network.observing import matrices, observed
from jax_q4k.models.tasks.perplexity import TooShortError

from ..golden_files import FEATURED, model, path

pytestmark = pytest.mark.cpu_kernels

FILE = GOLDEN / "text-spm.Q4_K_M.gguf"
TEXT = "The sea was calm, and the two sisters walked along the shore until the evening came. " * 4
LENGTH = 24
#: Files with fused matrices, shared experts, and a router with factors of its input.
MORE = ("phi3", "qwen2-fused", "gemma4-moe", "qwen2moe", "qwen3next")
#: The characters are bytes of the vocabulary of `with_bytes`; the text has two chunks of 64 tokens.
BYTES = "".join(chr(33 + (7 * i * i + 3 * i) % 90) for i in range(150))


def byte_vocabulary(size: int) -> dict[str, Any]:
    """Returns metadata of a tokenizer whose tokens 3 to 258 are bytes; other tokens are unused."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.BYTE] * 256]
    rest = size - len(tokens)
    prefix = "tokenizer.ggml."
    return {
        f"{prefix}model": "llama",
        f"{prefix}tokens": [*tokens, *(f"[{i}]" for i in range(rest))],
        f"{prefix}scores": np.zeros(size, np.float32),
        f"{prefix}token_type": np.array([*types, *[TokenType.UNUSED] * rest], np.int32),
        f"{prefix}bos_token_id": 1,
        f"{prefix}eos_token_id": 2,
        f"{prefix}unknown_token_id": 0,
        f"{prefix}add_bos_token": True,
        f"{prefix}add_eos_token": False,
        f"{prefix}add_space_prefix": False,
    }


def with_bytes(given: str | models.Model) -> models.Model:
    """Returns a model, or a golden one, with the vocabulary of bytes."""
    found = model(given) if isinstance(given, str) else given
    words = byte_vocabulary(found.config.vocab_size)
    copy = models.Model(found.parts(), tokenizer.from_metadata(words), found.metadata)
    copy.fused = found.fused
    return copy


def inputs_of_a_llama(weights: dict[str, Any], config: Any, ids: list[int]) -> dict[str, Any]:
    """Runs a llama on a window in float64; returns tensor name -> its inputs (time, k)."""
    w = {
        name: np.asarray(x.dequantize() if jq.is_quantized(x) else x, np.float64)
        for name, x in weights.items()
    }
    seen: dict[str, Any] = {}
    heads, kv_heads, dim, time = config.num_heads, config.num_kv_heads, config.head_dim, len(ids)
    angles = np.arange(time)[:, None] * 10000.0 ** (-2.0 * np.arange(dim // 2) / dim)[None]

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        seen[name] = x
        y: np.ndarray = x @ w[name].T
        return y

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        y: np.ndarray = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * w[name]
        return y

    def rotated(x: np.ndarray) -> np.ndarray:
        pairs = x.reshape(time, -1, dim // 2, 2)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)[:, None]
        return np.stack([turned.real, turned.imag], -1).reshape(time, -1, dim)

    x = w["token_embd.weight"][ids]
    future = np.triu(np.ones((time, time), bool), 1)
    for i in range(config.num_layers):
        at = f"blk.{i}."
        h = norm(f"{at}attn_norm.weight", x)
        q, k, v = (linear(f"{at}attn_{part}.weight", h) for part in "qkv")
        q, k = rotated(q), np.repeat(rotated(k), heads // kv_heads, 1)
        v = np.repeat(v.reshape(time, kv_heads, dim), heads // kv_heads, 1)
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(dim)
        scores = np.exp(np.where(future, -np.inf, scores))
        attended = np.einsum("hts,shd->thd", scores / scores.sum(-1, keepdims=True), v)
        x = x + linear(f"{at}attn_output.weight", attended.reshape(time, -1))
        h = norm(f"{at}ffn_norm.weight", x)
        gate, up = (linear(f"{at}ffn_{part}.weight", h) for part in ("gate", "up"))
        x = x + linear(f"{at}ffn_down.weight", gate / (1 + np.exp(-gate)) * up)
    seen["output.weight"] = norm("output_norm.weight", x)
    return seen


@pytest.mark.usefixtures("exact")
def test_against_float64() -> None:
    spm = models.from_gguf(FILE)
    assert spm.tokenizer is not None
    ids = spm.tokenizer.encode(TEXT)
    seen: list[tuple[int, int]] = []
    found = models.imatrix(
        spm,
        TEXT,
        context=LENGTH,
        chunks=2,
        output=True,
        dataset="sea.txt",
        progress=lambda *call: seen.append(call),
    )
    assert seen == [(1, 2), (2, 2)]
    assert (found.chunks, found.chunk_size, found.datasets) == (2, LENGTH, ("sea.txt",))
    weights = dict(models.named_tensors(spm))
    windows = [[1, *ids[at + 1 : at + LENGTH]] for at in (0, LENGTH)]
    parts = [inputs_of_a_llama(weights, spm.config, window) for window in windows]
    names = set(parts[0]) & {*weights}  # the output may be tied to the embedding
    assert set(found.sums) == names and len(names) >= 14
    for name, sums in found.sums.items():
        want = sum((part[name] ** 2).sum(0) for part in parts)
        np.testing.assert_allclose(sums, want, rtol=2e-4, err_msg=name)
        np.testing.assert_array_equal(found.counts[name], [2 * LENGTH])
        np.testing.assert_allclose(found.means()[name], want / (2 * LENGTH), rtol=2e-4)
    second = models.imatrix(spm, TEXT, context=LENGTH, first=1, chunks=1)
    first = models.imatrix(spm, TEXT, context=LENGTH, chunks=1, dataset="a")
    both = first.added(second)
    assert (both.chunks, both.datasets) == (2, ("a", ""))
    for name, sums in both.sums.items():
        np.testing.assert_allclose(sums, found.sums[name], rtol=1e-6)


def test_what_is_left_out_by_default() -> None:
    """The output matrix, and control tokens in the text."""
    sums = models.imatrix(with_bytes("llama-gqa"), BYTES, context=64, chunks=1).sums
    assert "blk.0.attn_q.weight" in sums and "output.weight" not in sums
    spm, text = models.from_gguf(FILE), "</s>" * 50
    assert models.imatrix(spm, text, context=LENGTH, parse_special=True).chunks == 2
    assert models.imatrix(spm, text, context=LENGTH).chunks >= 4


def test_names_are_those_of_the_file(tmp_path: Path) -> None:
    """Here the first layer's matrices are apart, which files of the architecture fuse."""
    file, found = jq.gguf.read(path("phi3")), model("phi3")
    tensors, config = dict(file.tensors), found.config
    whole = tensors.pop("blk.0.attn_qkv.weight")
    sizes = [heads * config.head_dim for heads in (config.num_heads, *[config.num_kv_heads] * 2)]
    ends = np.cumsum(sizes)
    for part, start, end in zip("qkv", ends - sizes, ends, strict=True):
        tensors[f"blk.0.attn_{part}.weight"] = whole[start:end]
    jq.gguf.write(tmp_path / "a.gguf", file.metadata, tensors)
    given = with_bytes(models.from_gguf(tmp_path / "a.gguf"))
    sums = models.imatrix(given, BYTES, context=64, chunks=1).sums
    assert set(sums) == {n for n, x in tensors.items() if n.startswith("blk.") and len(x.shape) > 1}
    assert "blk.0.attn_k.weight" in sums and "blk.1.attn_qkv.weight" in sums


@pytest.mark.parametrize("name", (*FEATURED, *MORE))
@pytest.mark.slow("compiles a program of each kind", quick=["deepseek2", "qwen2-fused"])
@pytest.mark.usefixtures("exact")
def test_every_matrix_is_seen(name: str) -> None:
    """The sums are those of the file's matrices; experts count the tokens that use them."""
    given = with_bytes(name)
    config = given.config
    found = models.imatrix(given, BYTES, context=64, chunks=1, output=True)
    header = jq.gguf.read_header(path(name))
    held = {tensor.name: tensor.shape for tensor in header.tensors.values()}
    places = matrices(config)
    fused = {"attn_qkv", "ffn_up", "ffn_gate_up_exps"}
    wanted = {n for n in held if n in places or (n.split(".")[-2] in fused and len(held[n]) > 1)}
    assert set(found.sums) == wanted
    for tensor, sums in found.sums.items():
        *stack, _, k = held[tensor]
        counts = found.counts[tensor]
        assert np.isfinite(sums).all() and sums.sum() > 0, tensor
        if "_exps" in tensor:
            assert config.experts is not None
            assert sums.shape == (*stack, k) and counts.shape == tuple(stack)
            assert counts.sum() == 64 * config.experts.used
            assert not sums[counts == 0].any() and (sums[counts > 0].sum(1) > 0).all()
        else:
            assert sums.size == np.prod((*stack, k)) and counts.tolist() == [64], tensor
    tokens = np.array([[1, *range(40, 71)]])
    want = np.asarray(given.logits(tokens))
    decoder = observed(
        given.decoder(), [n for n in places if n in models.named_tensors(given)], lambda *_: None
    )
    assert nmse(np.asarray(decoder(tokens)), want) <= 1e-8


#: For each file: tensor -> (sum of in_sum2, its product with cos(0), cos(1), ...), and counts.
OF_LLAMA_CPP = json.loads((DATA / "imatrix.json").read_text())


@pytest.mark.parametrize("name", OF_LLAMA_CPP)
@pytest.mark.slow("compiles a program of each kind", quick=["llama-gqa"])
@pytest.mark.usefixtures("exact")
def test_against_llama_imatrix(name: str) -> None:
    """Sums of llama-imatrix of llama-cpp-python 0.3.36.

    It read the model in F32 with the vocabulary of bytes, and ran with `-c 64 -b 64 --no-ppl
    --output-tensor`.
    """
    found = models.imatrix(with_bytes(name), BYTES, context=64, output=True)
    assert found.chunks == 2
    want = OF_LLAMA_CPP[name]
    # It leaves out matrices outside layers, and includes the gate of a shared expert, a vector.
    alone = "per_layer_model_proj.weight"
    sums_of = {tensor: sums for tensor, sums in found.sums.items() if tensor != alone}
    assert set(sums_of) == {tensor for tensor in want if "_inp_shexp" not in tensor}
    for tensor, sums in sums_of.items():
        flat = sums.reshape(-1)
        got = flat.sum(), flat @ np.cos(np.arange(flat.size))
        total, product, counts = want[tensor]
        assert got == pytest.approx((total, product), rel=1e-3, abs=1e-3 * total), tensor
        assert found.counts[tensor].tolist() == counts, tensor


def test_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sums = {"a.weight": rng.uniform(0, 9, 8), "b_exps.weight": rng.uniform(1, 9, (3, 4))}
    sums["b_exps.weight"][1] = 0
    counts = {"a.weight": np.array([30.0]), "b_exps.weight": np.array([20.0, 0, 10])}
    matrix = models.ImportanceMatrix(sums, counts, ("sea.txt", "moon.txt"), 3, 10)
    file = tmp_path / "i.gguf"
    with pytest.warns(UserWarning, match="no token used some experts of 1 tensors: b_exps.weight"):
        models.save_imatrix(matrix, file)
    read = jq.gguf.read(file)
    assert read.metadata == {
        "general.type": "imatrix",
        "imatrix.datasets": ["sea.txt", "moon.txt"],
        "imatrix.chunk_count": 3,
        "imatrix.chunk_size": 10,
    }
    shapes = {name: tensor.shape for name, tensor in read.tensors.items()}
    assert shapes == {
        "a.weight.in_sum2": (8,),
        "a.weight.counts": (1,),
        "b_exps.weight.in_sum2": (3, 4),
        "b_exps.weight.counts": (3, 1),
    }
    again = models.load_imatrix(file)
    assert (again.datasets, again.chunks, again.chunk_size) == (matrix.datasets, 3, 10)
    twice = again.added(again)
    for name in sums:
        np.testing.assert_allclose(again.sums[name], sums[name], rtol=1e-6)
        np.testing.assert_array_equal(twice.counts[name], 2 * counts[name])
        np.testing.assert_allclose(twice.means()[name], matrix.means()[name], rtol=1e-6)
    assert (matrix.means()["b_exps.weight"][1] == 1).all()
    with pytest.warns(UserWarning):
        models.save_imatrix(matrix, tmp_path / "i.dat", "dat")
    data = (tmp_path / "i.dat").read_bytes()
    assert data.startswith(struct.pack("<ii8sii", 2, 8, b"a.weight", 3, 8))
    assert data.endswith(struct.pack("<ii", 3, 8) + b"moon.txt")
    older = models.load_imatrix(tmp_path / "i.dat", chunk_size=10)
    assert (older.chunks, older.datasets, older.counts["a.weight"].tolist()) == (
        (3, ("moon.txt",), [30])
    )
    for name, means in matrix.means().items():
        np.testing.assert_allclose(older.means()[name], means.reshape(-1), rtol=1e-6)
    both = older.added(again)  # the older format has one count for all experts
    assert both.sums["b_exps.weight"].shape == (3, 4)
    assert both.counts["b_exps.weight"].tolist() == [40, 20, 30]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:7], "entry 0"),
        (lambda data: b"\x00" * 4 + data[4:], "number of entries: is 0, less than 1"),
        (lambda data: b"\xff" * 4 + data[4:], "number of entries: is -1"),
        (lambda data: data[:4] + b"\xff\xff\xff\x7f" + data[8:], "takes 2147483647 bytes of"),
        (lambda data: data[:8] + b"\xff" + data[9:], "name of entry 0: is not UTF-8"),
        (lambda data: data[:16] + b"\xff" * 4 + data[20:], "chunks: is -1"),
        (lambda data: data[:24] + b"\xff" * 4 + data[28:], "finite non-negative"),
    ],
)
def test_damaged_files_of_the_older_format(change: Any, message: str, tmp_path: Path) -> None:
    matrix = models.ImportanceMatrix({"a.weight": np.ones(8)}, {"a.weight": np.ones(1)})
    file = tmp_path / "i.dat"
    models.save_imatrix(matrix, file, "dat")
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(jq.GGUFError, match=message):
        models.read_imatrix(file)


def test_large_files_of_the_older_format_are_read_piece_by_piece(tmp_path: Path) -> None:
    file = tmp_path / "i.dat"
    for size, message in (3 << 30, "number of entries: is 0"), (200 << 30, "has more than 4294967"):
        file.touch()
        os.truncate(file, size)
        tracemalloc.start()
        with pytest.raises(jq.GGUFError, match=message):
            models.read_imatrix(file)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()


def test_refused(tmp_path: Path) -> None:
    spm = models.from_gguf(FILE)
    with pytest.raises(TooShortError, match="need 2000"):
        models.imatrix(spm, TEXT, context=1000)
    with pytest.raises(ValueError, match="no chunks are left: the text has "):
        models.imatrix(spm, TEXT, context=LENGTH, first=99)
    with pytest.raises(ValueError, match="chunks=0"):
        models.imatrix(spm, TEXT, context=LENGTH, chunks=0)
    with pytest.raises(ValueError, match="no tokenizer"):
        models.imatrix(models.Model(spm.parts()), TEXT)
    one, other = (
        models.ImportanceMatrix({"a": np.ones(k)}, {"a": np.ones(1)}, (), 1, 2) for k in (3, 4)
    )
    with pytest.raises(ValueError, match=r"of 'a' have shapes \(4,\) and \(3,\)"):
        one.added(other)
    with pytest.raises(ValueError, match="format='json' must be"):
        models.save_imatrix(one, tmp_path / "i", "json")  # type: ignore[arg-type]
    large = models.ImportanceMatrix({"a": np.full(3, 1e39)}, {"a": np.ones(1)})
    with pytest.raises(ValueError, match="of 'a' exceed float32"):
        models.save_imatrix(large, tmp_path / "i")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Returns a function that runs a command line: (exit code, standard output, standard error)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main([str(word) for word in arguments])
        return code, *capsys.readouterr()

    return run


def test_command_goes_on_after_ctrl_c(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, whole, part = tmp_path / "t.txt", tmp_path / "whole.gguf", tmp_path / "part.gguf"
    text.write_text(TEXT)
    given = ("imatrix", FILE, text, "--context", LENGTH, "--activations", "f32")
    assert run(*given, "-o", whole, "--chunks", 3) == (0, f"{whole}\n", "")
    assert run(*given, "-o", whole)[0] == 2  # it exists
    for option, value, least in ("--chunks", 0, 1), ("--from-chunk", -1, 0), ("--save-every", 0, 1):
        refused = run(*given, "-o", part, f"{option}={value}")
        assert refused == (2, "", f"error: {option} {value} must be at least {least}\n")

    noticing = interrupts.noticing

    def pressed_at_once() -> Any:
        context = noticing()
        enter = context.__enter__

        class Context:
            def __enter__(self) -> Any:
                found = enter()
                found.once = True
                return found

            def __exit__(self, *_: object) -> None:
                context.__exit__(None, None, None)

        return Context()

    with monkeypatch.context() as patched:
        patched.setattr(interrupts, "noticing", pressed_at_once)
        code, out, err = run(*given, "-o", part, "--chunks", 3)
    line = f"Saved 1 of 3 chunks; --in-file {part} --from-chunk 1 continues.\n"
    assert (code, out, err) == (130, "", line)
    assert models.load_imatrix(part).chunks == 1
    more = ("--in-file", part, "--from-chunk", 1, "--chunks", 2, "--save-every", 1)
    assert run(*given, "-o", part, *more)[0] == 0
    one, other = models.load_imatrix(whole), models.load_imatrix(part)
    assert (one.chunks, one.datasets) == (other.chunks, other.datasets) == (3, (str(text),))
    for name, sums in one.sums.items():
        np.testing.assert_allclose(sums, other.sums[name], rtol=1e-6)
    code, _, err = run(*given, "-o", tmp_path / "x", "--in-file", FILE)
    assert code == 2 and re.fullmatch("error: [^\n]*general.type: must be 'imatrix'[^\n]*\n", err)


@pytest.mark.slow("quantizes a model, and predicts a text of several windows")
@pytest.mark.filterwarnings("ignore:.*already quantized")
def test_from_importance_to_divergence(run: Any, tmp_path: Path) -> None:
    """An importance matrix of the text makes the text's predictions better."""
    text, imatrix = tmp_path / "t.txt", tmp_path / "i.gguf"
    text.write_text((Path(__file__).parents[3] / "examples" / "lora_text.txt").read_text())
    assert run("imatrix", "demo", text, "-o", imatrix, "--context", 128)[0] == 0
    base = tmp_path / "base.logits"
    given = ("--context", 128, "--kl-divergence-base", base)
    assert run("perplexity", "demo", text, *given)[0] == 0
    means = []
    for more in ((), ("--imatrix", imatrix)):
        small = tmp_path / f"small{len(more)}.gguf"
        assert run("quantize", "demo", small, "--type", "Q2_K", *more)[0] == 0
        code, out, _ = run("perplexity", small, text, *given, "--kl-divergence", "--json")
        assert code == 0
        means.append(json.loads(out)["kl_divergence"]["value"])
    assert means[1] < 0.98 * means[0]
