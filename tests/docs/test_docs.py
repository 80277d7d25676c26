"""Runs the Python snippets of docs/ and the `jax-q4k` commands of docs/ and README.md unchanged.

Python: the blocks of a section run in one namespace, after the blocks that precede the first
section. Commands: those of a page run in order, in a folder that has the files they name.
"""

from __future__ import annotations

import io
import re
import shlex
import shutil
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from support import encoders
from support.paths import ROOT

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models import cli
from jax_q4k.models.architectures import ARCHITECTURES
from tools import snippets

DOCS = ROOT / "docs"
CHECKPOINT = ROOT / "tests" / "data" / "checkpoints" / "llama"

#: Optional dependencies of snippets: module -> text of the snippets that use it.
OPTIONAL = {"orbax.checkpoint": "import orbax", "flatbuffers": ".serialize()"}

#: Blocks that do not run here, keyed by page and start of the first line -> reason.
NOT_RUN = {
    (
        "README.md",
        "jax-q4k chat Qwen/Qwen2.5-0.5B-Instruct-GGUF",
    ): "needs a network, and serves until a signal",
    ("docs/bench.md", "jax-q4k bench MODEL.gguf -p 512"): "takes minutes",
    ("docs/clients.md", "$ jax-q4k serve --demo"): "serves until a signal",
    ("docs/clients.md", "import asyncio"): "needs a server",  # test_clients.py
    ("docs/clients.md", "from anthropic import"): "needs a server",
    ("docs/clients.md", "from langchain_openai import"): "needs a server",
    ("docs/clients.md", "from llama_index.llms.openai_like import"): "needs a server",
    ("docs/clients.md", "import litellm"): "needs a server",
    ("docs/devices.md", "jax.distributed.initialize()"): "needs several processes",
    ("docs/embeddings.md", "with models.EncoderEngine"): "needs a file of an encoder",
    ("docs/embeddings.md", 'model = models.load("jina'): "needs the folder of a model",
    ("docs/embeddings.md", "reranker = models.load"): "needs a file of a reranker",
    ("docs/files.md", "jax-q4k generate NAME-00001-of-00003.gguf"): "needs files of a split model",
    ("docs/files.md", "jax-q4k chat Qwen/Qwen2.5-0.5B-Instruct-GGUF"): "needs a network",
    ("docs/performance.md", "$ python -m benchmarks.gpu"): "measures on an NVIDIA GPU",
    ("docs/scale.md", "$ jax-q4k serve MODEL"): "needs GPUs, and serves until a signal",
    ("docs/scale.md", "$ for i in 0 1 2"): "needs GPUs, and serves until a signal",
    ("docs/scale.md", "$ pip install 'ray"): "needs Ray, and serves until a signal",
    ("docs/serving.md", "$ jax-q4k serve --demo"): "serves until a signal",
    ("docs/serving.md", "$ jax-q4k serve MODEL"): "needs adapters, and serves until a signal",
    ("docs/tuning.md", "$ python -m tools.tune --out"): "measures on an NVIDIA GPU",
    ("docs/tuning.md", "$ python -m tools.tune  "): "measures on an NVIDIA GPU",
}

TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
TEXT = "It is a truth universally acknowledged, that a single man must be in want of a wife.\n"


def sections() -> list:
    """Returns (setup, code) of each section with Python code, by page and heading."""
    found = []
    for page in snippets.pages():
        if page == "README.md":
            continue  # tests/docs/test_readme.py
        code: dict[str, str] = {}
        for block in snippets.blocks(page):
            if block.language == "python" and not block.not_run:
                code[block.section] = code.get(block.section, "") + block.code
        setup = code.pop("", "")
        name = page.removeprefix("docs/").removesuffix(".md")
        if name in IN_ORDER:
            code = {"all": "".join(code.values())} if code or setup else {}
        elif setup and not code:
            code = {"all": ""}
        found += [pytest.param(setup, text, id=f"{name}-{part}") for part, text in code.items()]
    return found


#: Pages whose sections continue the preceding ones.
IN_ORDER = (
    "jax",
    "flax",
    "quantizing",
    "simulator",
    "add-architecture",
    "add-format",
    "add-operation",
)


@pytest.mark.parametrize("setup, code", sections())
def test_snippets(setup, code, tmp_path, monkeypatch):
    for module, use in OPTIONAL.items():
        if use in code:
            pytest.importorskip(module, reason=f"{module} is no dependency of jax-q4k")
    monkeypatch.chdir(tmp_path)
    with mock.patch.dict(ARCHITECTURES):  # a page registers an architecture
        exec(compile(f"{setup}\n{code}", "snippets", "exec"), {"__name__": "snippets"})


def pages_with_commands() -> list[str]:
    return [page for page in snippets.pages() if commands(page)]


def commands(page: str) -> list[snippets.Command]:
    """Commands of a page that run here."""
    shown = (b for b in snippets.blocks(page) if b.language != "python" and not b.not_run)
    return [command for block in shown for command in snippets.commands(block)]


def adapter():
    """A LoRA adapter of one matrix of the demo model; it changes nothing."""
    about = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 4.0}
    a, b = np.zeros((4, 256), np.float32), np.zeros((256, 4), np.float32)
    name = "blk.0.attn_output.weight"
    about["general.architecture"] = "llama"
    return about, {f"{name}.lora_a": a, f"{name}.lora_b": b}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with the files that pages name: the demo with a chat template, and a checkpoint."""
    folder = tmp_path_factory.mktemp("files")
    demo = jq.gguf.read(models.demo_path())
    more = {"tokenizer.chat_template": TEMPLATE, "llama.context_length": 8192}  # pages need these
    jq.gguf.write(folder / "MODEL.gguf", {**demo.metadata, **more}, demo.tensors)
    shutil.copy(folder / "MODEL.gguf", folder / "IN.gguf")
    shutil.copytree(CHECKPOINT, folder / "FOLDER")
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINT / file, folder)
    shutil.copy(CHECKPOINT / "model.safetensors", folder / "IN.safetensors")
    (folder / "TEXT.txt").write_text(TEXT * 8)
    (folder / "TEXTS.txt").write_text(TEXT * 2)
    (folder / "question.txt").write_text("Why is the sea salt?\n")
    jq.gguf.write(folder / "ADAPTER", *adapter())
    encoders.write(folder / "RERANKER.gguf", "bert", labels=1)
    return folder


@pytest.mark.slow("runs the commands of each page", quick=["*"])
@pytest.mark.parametrize("page", pages_with_commands())
def test_commands(page, files, tmp_path, monkeypatch, capfd):
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for command in commands(page):
        program, name, *arguments = command.words
        assert program == "jax-q4k"
        if name == "quantize":
            Path(arguments[1]).unlink(missing_ok=True)  # left by an alternative command
        with monkeypatch.context() as settings:
            for key, value in command.environment.items():
                settings.setenv(key, value)
            settings.setattr(sys, "stdin", io.StringIO("Good morning.\n"))
            code = cli.main([name, *arguments])
        assert code == 0, f"{page}:{command.line}: {command}\n{capfd.readouterr().err}"


def test_every_line_of_the_command_line_is_found():
    """Lines that only resemble a command, such as `$ FOO=1 jax-q4k`, run too."""
    for page in snippets.pages():
        text = (ROOT / page).read_text()
        looking = re.findall(r"^(?:    )?\$? ?(?:\w+=\S+ )*jax-q4k (\w+)", text, re.MULTILINE)
        of_blocks = [
            command.words[1]
            for block in snippets.blocks(page)
            if block.language != "python"
            for command in {c.line: c for c in snippets.commands(block)}.values()
        ]
        assert [word for word in looking if word in cli.COMMANDS] == of_blocks, page


def test_blocks_that_do_not_run_have_reasons():
    found = {
        (page, line): block.not_run
        for page in snippets.pages()
        for block in snippets.blocks(page)
        if block.not_run
        for line in [line for (at, line) in NOT_RUN if at == page and block.code.startswith(line)]
        or ["?"]
    }
    assert found == NOT_RUN


def test_a_block_that_is_marked_and_its_alternatives():
    block = snippets.Block("a.md", 3, "", "", '$ X=1 jax-q4k generate A.gguf|B -p "a b"  # c\n', "")
    assert [str(command) for command in snippets.commands(block)] == [
        "X=1 jax-q4k generate A.gguf -p 'a b'",
        "X=1 jax-q4k generate B -p 'a b'",
    ]
    assert shlex.split(str(snippets.commands(block)[0]))[0] == "X=1"


def test_links():
    for page in DOCS.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
