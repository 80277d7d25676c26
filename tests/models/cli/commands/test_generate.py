"""`jax-q4k generate`: sources of prompts, output formats, and default sampling."""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from support.gguf_bytes import float_entry, rewritten, text_entry

from jax_q4k import models
from jax_q4k.models import cli
from jax_q4k.models.cli import options, prompts
from jax_q4k.models.cli.output import UsageError
from jax_q4k.models.engine.outputs import Output, Piece, Timings
from jax_q4k.models.sampling.file_defaults import KEYS, default_sampling

from ...files.lora.test_adapters import random_pairs, write_gguf
from ...golden_files import model, path

TEXT_MODEL, TOKEN_MODEL = str(path("text-spm")), str(path("llama-gqa"))
SHIFT = ("--context-shift", "--keep", "4")
DRAWN = ("-n", "8", "--temperature", "2", "--min-p", "0")
GREEDY = ("--temperature", "0", "-n", "6")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Returns a function that runs a command line: (exit code, standard output, standard error)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_special_tokens_in_a_prompt() -> None:
    """--parse-special reads them as tokens, and adds no second token in front."""
    spm = model("text-spm")
    end = spm.tokenizer.special_tokens["eos_token"]
    start = spm.tokenizer.special_tokens["bos_token"]

    def ids(prompt: str, parse_special: bool, chat: bool = False) -> list[int]:
        options = argparse.Namespace(
            parse_special=parse_special, chat=chat, model="m", system=None, no_thinking=False
        )
        return prompts.ids_of([prompt], spm, options)[0]

    want = spm.tokenizer.encode(f"sea{end}", parse_special=True)
    assert want[-1] == spm.tokenizer.eos_token_id and want[0] == spm.tokenizer.bos_token_id
    assert ids(f"sea{end}", True) == want
    assert ids(f"sea{end}", False) == spm.tokenizer.encode(f"sea{end}") != want
    assert ids(f"{start}{end}", True) == [want[0], want[-1]]
    with pytest.raises(UsageError, match="--parse-special is for prompts without --chat"):
        ids("sea", True, chat=True)
    with pytest.raises(UsageError, match="prompt has 10000000 characters, far too many for the"):
        ids("x" * 10_000_000, True)


@pytest.mark.slow("starts the command several times")
def test_prompts_of_files_and_standard_input(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line break at the end of a file is not part of the prompt."""
    want = run("generate", TEXT_MODEL, "-p", "The sea\nand", *GREEDY)[1]
    file = tmp_path / "prompt.txt"
    file.write_text("The sea\nand\n")
    assert run("generate", TEXT_MODEL, "-f", str(file), *GREEDY)[:2] == (0, want)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    assert run("generate", TEXT_MODEL, "-f", "-", *GREEDY)[:2] == (0, want)


def test_files_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's file and standard input have a maximum size."""
    monkeypatch.setattr(prompts, "MAX_FILE", 5)
    file = tmp_path / "prompt.txt"
    for given, name in ((str(file), file), ("-", "standard input")):
        options = argparse.Namespace(prompts=[prompts.PromptOption("file", given)])
        for text in ("waves", "waves "):
            file.write_text(text)
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
            if len(text) == 5:
                assert prompts.texts_of(options) == [text]
            else:
                with pytest.raises(prompts.UsageError, match=f"^{name} is longer than 0 MiB"):
                    prompts.texts_of(options)


@pytest.mark.slow("starts the command three times")
def test_several_prompts(run: Any) -> None:
    """Each prompt gets the output that it gets alone; seeds increase by one from row to row."""
    texts = ["The sea", "My dear", "And"]
    alone = [run("generate", TEXT_MODEL, "-p", text, *GREEDY)[1] for text in texts]
    given = [part for text in texts for part in ("-p", text)]
    code, out, err = run("generate", TEXT_MODEL, *given, *GREEDY)
    assert code == 0 and out == "---\n".join(alone) and err.startswith("18 tokens, ")
    code, out, _ = run("generate", TOKEN_MODEL, "--tokens", "1,2", "--tokens", "3", *GREEDY)
    assert code == 0 and [len(line.split()) for line in out.split("---\n")] == [6, 6]


def test_json(run: Any) -> None:
    options = ("-n", "4", "--temperature", "1", "--seed", "9", "--logprobs", "2")
    options += ("--prompt-logprobs", "1")
    given = ("-p", "The sea", "-p", "My dear", *options)
    code, out, _ = run("generate", TEXT_MODEL, *given, "--json")
    whole = json.loads(out)
    assert code == 0 and out.count("\n") == 1
    lines = [
        json.loads(line)
        for line in run("generate", TEXT_MODEL, *given, "--jsonl")[1].split("\n")[:-1]
    ]
    assert lines == whole["outputs"]
    fields = {"max_new_tokens": 4, "temperature": 1.0, "logprobs": 2, "min_p": 0.05}
    loaded = model("text-spm")
    for i, found in enumerate(lines):
        out = models.generate(loaded, ("The sea", "My dear")[i], seed=9 + i, **fields)
        assert (found["index"], found["seed"], found["text"]) == (i, 9 + i, out.text)
        assert found["tokens"] == out.tokens and found["finish_reason"] == "length"
        assert [one["token"] for one in found["logprobs"]] == out.tokens
        assert "".join(one["text"] for one in found["logprobs"]) == out.text
        assert [len(one["top"]) for one in found["logprobs"]] == [2] * 4
        first, *others = found["prompt_logprobs"]
        ids = loaded.tokenizer.encode(("The sea", "My dear")[i])
        assert first is None and [one["token"] for one in others] == ids[1:]
        assert [len(one["top"]) for one in others] == [1] * len(others)
        assert all(one["rank"] >= 1 for one in others)
    timings = whole["timings"]
    assert timings["new_tokens"] == 8 and timings["prompt_tokens"] > 2
    seconds = {name for name in timings if name.endswith("_seconds")}
    parts = ("imports", "load", "compile", "prompt", "decode", "from_start")
    assert seconds == {f"{part}_seconds" for part in parts}
    assert timings["from_start_seconds"] > timings["imports_seconds"] > 0
    code, out, _ = run("generate", TOKEN_MODEL, "--tokens", "1,2", *GREEDY, "--jsonl")
    found = json.loads(out)
    assert found["text"] is None and found["prompt"] == [1, 2] and found["seed"] is None


THINKING = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% endfor %}"
)


def test_thoughts_of_chats(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only answers go to standard output; a prompt without --chat has no thoughts."""
    file = tmp_path / "thinking.gguf"
    entry = text_entry("tokenizer.chat_template", THINKING)
    file.write_bytes(rewritten(path("text-spm"), {"tokenizer.chat_template": entry}))
    text = "<think>\nHm.\n</think>\n\nYes."
    output = Output([1, 2], text, "end", Timings())
    monkeypatch.setattr(models, "stream", lambda *_, **__: iter([Piece(1, text, output)]))
    monkeypatch.setattr(models, "generate", lambda _, prompts, *__, **___: [output] * len(prompts))
    ask = ("generate", str(file), "--temperature", "0", "-n", "4", "-p", "Why?")
    code, out, err = run(*ask, "--chat")
    assert (code, out) == (0, "Yes.\n") and "Thought for 0.0 s (1 token)\n" in err
    assert "Hm." not in err and "Hm." in run(*ask, "--chat", "--show-thinking")[2]
    assert run(*ask)[1] == f"{text}\n"
    code, out, err = run(*ask, "-p", "How?", "--chat", "--show-thinking")
    assert out == "Yes.\n---\nYes.\n" and err.startswith("Hm.\nHm.\n")
    (found,) = json.loads(run(*ask, "--chat", "--json")[1])["outputs"]
    assert (found["text"], found["reasoning"], found["tokens"]) == ("Yes.", "Hm.", [1, 2])
    (found,) = json.loads(run(*ask, "--json")[1])["outputs"]
    assert found["text"] == text and "reasoning" not in found


def test_control_characters_in_json(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON escapes them."""
    code, out, _ = run("generate", TEXT_MODEL, "-p", "a\x1b[31m", *GREEDY, "--json")
    assert code == 0 and "\x1b" not in out
    assert json.loads(out)["outputs"][0]["prompt"] == "a\x1b[31m"


def test_more_tokens_than_the_context_has_left(run: Any) -> None:
    given = ("--tokens", ",".join(["1"] * 2040), "-n", "600", "--temperature", "0", "--ignore-end")
    code, out, err = run("generate", TOKEN_MODEL, *given)
    assert code == 0 and len(out.split()) == 8
    assert "The context of 2048 tokens has room for 8 new ones, not -n 600" in err
    code, out, err = run("generate", TOKEN_MODEL, *given[:2], *given[4:], "-n", "20", *SHIFT)
    assert code == 0 and len(out.split()) == 20 and "has room for" not in err
    code, _, err = run("generate", TOKEN_MODEL, *given, "--context-shift", "--keep", "-1")
    assert (code, err) == (2, "error: keep=-1 must be at least 0\n")


@pytest.mark.slow("starts the command several times")
def test_a_seed_by_chance_is_printed(run: Any) -> None:
    texts, seeds = set(), set()
    for _ in range(3):
        code, out, err = run("generate", TEXT_MODEL, "-p", "The sea", *DRAWN)
        assert code == 0
        seeds.add(re.search(r", seed (\d+);", err)[1])  # type: ignore[index]
        texts.add(out)
    assert len(texts) == len(seeds) == 3
    seed = seeds.pop()
    again = run("generate", TEXT_MODEL, "-p", "The sea", *DRAWN, "--seed", seed)
    assert again[1] in texts and f", seed {seed};" in again[2]
    assert "seed" not in run("generate", TEXT_MODEL, "-p", "The sea", *GREEDY)[2]


def _sampling(run: Any, monkeypatch: pytest.MonkeyPatch, file: str, *arguments: str) -> Any:
    """Returns the Sampling of a command line, and its standard error without the error message."""
    seen = []

    def record(model: Any, prompt: Any, sampling: Any, **_: Any) -> None:
        seen.append(sampling)
        raise ValueError("seen")

    monkeypatch.setattr(models, "stream", record)
    code, _, err = run("generate", file, "-p", "x", *arguments)
    assert code == 2 and err.endswith("error: seen\n")
    return seen[0], err.removesuffix("error: seen\n")


@pytest.mark.slow("starts the command several times")
def test_default_sampling_of_a_file(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain, _ = _sampling(run, monkeypatch, TEXT_MODEL)
    assert (plain.temperature, plain.min_p, plain.top_p, plain.top_k) == (0.7, 0.05, 1, 0)
    file = tmp_path / "suggests.gguf"
    entries = {
        "general.sampling.temp": float_entry("general.sampling.temp", 0.5),
        "general.sampling.top_p": float_entry("general.sampling.top_p", 0.75),
    }
    file.write_bytes(rewritten(path("text-spm"), entries))
    found, notes = _sampling(run, monkeypatch, str(file))
    assert (found.temperature, found.min_p, found.top_p, notes) == (0.5, 0, 0.75, "")
    found, _ = _sampling(run, monkeypatch, str(file), "--temperature", "0", "--top-k", "7")
    assert found.greedy and (found.top_p, found.top_k) == (0.75, 7)
    key = "general.sampling.xtc_probability"
    entries |= {key: float_entry(key, 0.5)}
    file.write_bytes(rewritten(path("text-spm"), entries))
    _, notes = _sampling(run, monkeypatch, str(file))
    assert notes == "the file suggests general.sampling.xtc_probability=0.5, which is not applied\n"


def test_suggestions_that_are_not_applied() -> None:
    prefix = "general.sampling."
    neutral = {"mirostat": 0, "xtc_probability": 0.0, "penalty_last_n": 64, "penalty_repeat": 1.0}
    with warnings.catch_warnings(action="error"):
        default_sampling({prefix + key: value for key, value in neutral.items()})
    given = {"penalty_last_n": 64, "penalty_repeat": 1.1, "sequence": "top_k;temperature"}
    with pytest.warns(UserWarning, match=r"sequence=top_k;temp.*penalty_last_n=64, which is not"):
        found = default_sampling({prefix + key: value for key, value in given.items()})
    assert found == {"repetition_penalty": 1.1}


@pytest.mark.slow("starts the command for each value", quick=["range"])
@pytest.mark.parametrize("entry", ["text", "range"])
def test_bad_default_sampling_of_a_file(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, entry: str
) -> None:
    key, file = "general.sampling.top_p", tmp_path / "suggests.gguf"
    entries = {key: text_entry(key, "hot") if entry == "text" else float_entry(key, 7.0)}
    file.write_bytes(rewritten(path("text-spm"), entries))
    found, notes = _sampling(run, monkeypatch, str(file))
    assert found.temperature == 0.7
    assert notes.startswith(
        "The file's default sampling parameters are ignored: general.sampling.top_p: top_p="
    )
    with pytest.raises(ValueError, match="general.sampling.top_p: top_p="):
        default_sampling(models.load(file).metadata)


def test_every_key_is_a_field() -> None:
    metadata = {
        KEYS["temperature"]: 1,
        KEYS["top_k"]: 40,
        KEYS["top_p"]: 0.5,
        KEYS["min_p"]: 0.1,
        KEYS["repetition_penalty"]: 1.5,
    }
    assert metadata.keys() == set(KEYS.values())
    fields = default_sampling(metadata)
    assert fields == {field: metadata[key] for field, key in KEYS.items()}
    assert default_sampling({}) == {} and {*options.HELP} >= {*KEYS}


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion(run: Any, shell: str) -> None:
    """Completes commands and their options; bash accepts the script and completes model files."""
    code, out, _ = run("completion", shell)
    assert code == 0
    for word in (*cli.COMMANDS, "--context-shift", "--logprobs", "--imatrix"):
        assert word.lstrip("-") in out
    if shell == "bash" and shutil.which("bash"):
        script = out + '\nCOMP_WORDS=(jax-q4k gen); COMP_CWORD=1; _shtab_jax_q4k; echo "$COMPREPLY"'
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "generate\n")


@pytest.mark.slow("starts the command three times")
def test_an_adapter(run: Any, tmp_path: Path) -> None:
    loaded = model("llama-gqa")
    file = write_gguf(tmp_path / "a=b.gguf", loaded, random_pairs(loaded))
    given = ("generate", TOKEN_MODEL, "--tokens", "5,6,7", *GREEDY)
    plain = run(*given)[1]
    for scale, argument in ((1.0, str(file)), (0.25, f"{file}=0.25"), (0.0, f"{file}=0")):
        code, out, err = run(*given, "--lora", argument)
        adapted = models.with_lora(loaded, file, scale=scale)
        want = models.generate(adapted, [5, 6, 7], max_new_tokens=6).tokens
        assert code == 0 and [int(token) for token in out.split()] == want, err
        assert (out == plain) == (scale == 0)
    code, _, err = run(*given, "--lora", str(tmp_path / "no.gguf"))
    assert code == 2 and "no.gguf" in err
