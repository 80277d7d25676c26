"""`tokenize` and `detokenize`, which read no weights."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest
from support.paths import DATA, GOLDEN

import jax_q4k as jq
from jax_q4k.models import cli, tokenizer

SPM = str(GOLDEN / "text-spm.Q4_K_M.gguf")
FOLDER = str(DATA / "checkpoints" / "llama")
TEXT = "The sea, \N{WATER WAVE} été</s>"


@pytest.fixture
def run(capsys: Any, monkeypatch: Any) -> Any:
    """Returns (exit code, standard output, standard error) of a command line."""

    def run(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        return (cli.main(arguments), *capsys.readouterr())

    return run


def test_tokens_in_lines(run: Any) -> None:
    spm = tokenizer.from_gguf(SPM)
    ids = spm.encode(TEXT, parse_special=True)
    code, out, err = run("tokenize", SPM, TEXT)
    lines = [line.split("  ", 1) for line in out.splitlines() if line]
    assert (code, err) == (0, "") and ids[-1] == spm.eos_token_id and ids[0] == spm.bos_token_id
    assert [line.strip().partition("  ")[0] for line in out.splitlines()] == list(map(str, ids))
    assert lines and out.splitlines()[1].endswith('"The"') or '"' in out
    assert run("tokenize", SPM, TEXT, "--ids")[1] == f"{ids}\n"
    assert run("tokenize", SPM, "--ids", TEXT)[1] == f"{ids}\n"
    assert run("tokenize", "-m", SPM, "--ids", TEXT)[1] == f"{ids}\n"
    assert run("tokenize", SPM, "-", "--ids", stdin=TEXT.encode())[1] == f"{ids}\n"
    assert run("tokenize", SPM, "--ids", stdin=TEXT.encode())[1] == f"{ids}\n"
    assert run("tokenize", SPM, "", "--ids", stdin=b"not read")[1] == f"{spm.encode('')}\n"
    plain = spm.encode(TEXT, add_special=False)
    assert len(plain) > len(ids) - 1
    options = ("--ids", "--no-bos", "--no-parse-special", "--show-count")
    assert run("tokenize", SPM, TEXT, *options)[1] == f"{plain}\n{len(plain)} tokens\n"


def test_tokens_as_json(run: Any, tmp_path: Any) -> None:
    file = tmp_path / "t.txt"
    file.write_text(TEXT, encoding="utf-8")
    found = [
        json.loads(line) for line in run("tokenize", SPM, "-f", str(file), "--json")[1].splitlines()
    ]
    spm = tokenizer.from_gguf(SPM)
    assert [one["token"] for one in found] == spm.encode(TEXT, parse_special=True)
    assert b"".join(bytes(one["bytes"]) for one in found).decode() == f"<s> {TEXT}"
    assert any("\\x" in one["text"] for one in found)  # a character of several tokens


def test_text_of_ids(run: Any) -> None:
    ids = run("tokenize", SPM, "The sea, été", "--ids")[1]
    for code, out, err in (
        run("detokenize", SPM, stdin=ids.encode()),
        run("detokenize", SPM, ids.strip()),
        run("detokenize", SPM, ids.strip(" []\n").replace(",", " ")),
    ):
        assert (code, out, err) == (0, "<s> The sea, été\n", "")
    assert run("detokenize", SPM, ids, "--skip-special")[1] == "The sea, été\n"


def test_a_folder_and_a_vocabulary_alone(run: Any, tmp_path: Any) -> None:
    (tmp_path / "config.json").write_bytes((DATA / "checkpoints/llama/config.json").read_bytes())
    code, out, _ = run("tokenize", FOLDER, "The sea", "--ids")
    assert code == 0 and run("detokenize", FOLDER, out, "--skip-special")[1].strip() == "The sea"
    file = tmp_path / "vocabulary.gguf"
    metadata = jq.gguf.read_header(SPM).metadata
    jq.gguf.write(file, metadata, {})
    assert run("tokenize", str(file), TEXT)[1] == run("tokenize", SPM, TEXT)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tokenize", SPM, "a", "-f", "b"), "give TEXT or -f FILE, not both"),
        (("tokenize", SPM, "-f", "/no/such"), "/no/such: No such file or directory"),
        (("tokenize", SPM, "-f", SPM), "is not UTF-8"),
        (("tokenize", str(GOLDEN / "llama-gqa.Q4_K_M.gguf"), "a"), "the file has no vocabulary"),
        (("detokenize", SPM, "1,x"), "'x' is not a token id"),
        (("detokenize", SPM, "32000"), "token id 32000 is outside of the vocabulary"),
        (("detokenize", SPM, "-1"), "token id -1 is outside"),
    ],
)
def test_errors_are_one_line(run: Any, arguments: tuple[str, ...], message: str) -> None:
    try:
        code, out, err = run(*arguments)
    except SystemExit:
        pytest.fail("the parser refused the words")
    assert (code, out) == (2, "") and err.startswith("error: ") and message in err
    assert len(err.splitlines()) == 1
