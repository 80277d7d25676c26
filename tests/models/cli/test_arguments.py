"""Command lines of people who come from other tools, and files that hold no language model."""

import io
import re
import sys

import numpy as np
import pytest
from support.paths import DATA

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models import cli
from jax_q4k.models.cli.arguments import COMMANDS_ELSEWHERE
from jax_q4k.models.cli.options import implementation_arguments, implementation_of
from jax_q4k.models.files.quantizing.recipes import RECIPES
from jax_q4k.selection import Selection

from ..golden_files import model, path

MODEL = str(path("text-spm"))
GREEDY = ("--temperature", "0", "-n", "4")


@pytest.fixture
def run(capsys, monkeypatch):
    """Returns (exit code, standard output, standard error) of a command line."""

    def run(*arguments, stdin=None):
        text = None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin))
        monkeypatch.setattr(sys, "stdin", text)
        capsys.readouterr()
        try:
            code = cli.main(arguments)
        except SystemExit as ending:
            code = ending.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def want():
    (prompt,) = ["The sea"]
    return models.generate(model("text-spm"), prompt, max_new_tokens=4).text + "\n"


@pytest.mark.parametrize(
    ("arguments", "stdin"),
    [
        ((MODEL, "The sea", *GREEDY), None),
        ((MODEL, *GREEDY, "The sea"), None),
        ((MODEL, *GREEDY), b"The sea\n"),
        (("-m", MODEL, *GREEDY, "-p", "The sea"), None),
        (("-m", MODEL, "The sea", *GREEDY), None),
        (("-hf", MODEL, "The sea", *GREEDY), None),
        ((MODEL, "-p", "The sea", "--temp", "0", "--max-tokens", "4"), None),
        ((MODEL, "-p", "The sea", "--temp", "0", "--n-predict", "4"), b"not read"),
    ],
    ids=["word", "last-word", "pipe", "m", "m-word", "hf", "max-tokens", "n-predict"],
)
def test_other_ways_to_name_a_model_and_a_prompt(run, want, arguments, stdin):
    code, out, _ = run("generate", *arguments, stdin=stdin)
    assert (code, out) == (0, want)


@pytest.mark.parametrize(
    "arguments",
    [
        ("a", "b"),
        ("a", "--force", "b"),
        ("--type", "Q8_0", "a", "b"),
        ("a", "b", "--force"),
        ("a", "--type", "Q8_0", "b", "--force"),
        ("-m", "a", "--force", "b"),
        ("--force", "b", "-m", "a"),
    ],
)
def test_options_between_the_input_and_the_output(arguments):
    """Whatever comes between, the first word is read and the second is written."""
    options = cli.parse(("quantize", *arguments))
    assert (options.model, options.target) == ("a", "b")


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (("generate", MODEL), None, "no prompt: give -p TEXT, -f FILE, --tokens IDS, or pipe"),
        (("generate", MODEL), b"", "no prompt: standard input is empty; give -p TEXT"),
        (("generate", "-p", "x"), None, "no model given; MODEL is a GGUF file"),
        (("generate", MODEL, "The", "sea"), None, "unexpected argument 'The'; put the prompt in"),
        (("generate", MODEL, "x", "-p", "y"), None, "unexpected argument 'x'"),
        (("inspect", MODEL, "x"), None, "unexpected argument 'x'\n"),
        (
            ("quantize", "--force", MODEL),
            None,
            "the file to write is missing: jax-q4k quantize MODEL OUT.gguf\n",
        ),
        (("quantize", MODEL, "x", "--force", "y"), None, "unexpected argument 'y'\n"),
        (("generate", MODEL, "--frobnicate"), None, "unknown option --frobnicate"),
        (("generate", MODEL, "-t", "4"), None, "-t/--threads is not an option here: all cores"),
        (("chat", MODEL, "-ngl", "99"), None, "if JAX finds a GPU, it runs all layers"),
        (("generate", MODEL, "-c", "4096"), None, "the context grows as needed"),
        (("run", "llama3.2"), None, "run is not a command here: `jax-q4k chat MODEL` talks"),
        (("pull", "llama3.2"), None, "a hub model is downloaded when"),
        (("generate", MODEL, "-p", "x", "--system", "y"), None, "need --chat"),
        (("embed", MODEL), None, "no text: give -p TEXT, -f FILE, or pipe lines of text"),
    ],
)
def test_what_cannot_be_met_gets_a_hint(run, arguments, stdin, message):
    code, out, err = run(*arguments, stdin=stdin)
    assert (code, out) == (2, "") and err.startswith("error: ") and message in err
    assert len(err.splitlines()) <= 2


def test_hints_name_commands_and_types_that_exist():
    for hint in COMMANDS_ELSEWHERE.values():
        assert {*re.findall(r"jax-q4k (\w+)", hint)} <= {*cli.COMMANDS}
        assert {*re.findall(r"--type (\w+)", hint)} <= {*RECIPES}


def test_the_demo_in_every_command(run, tmp_path):
    for arguments in (
        ("inspect", "--demo"),
        ("quantize", "--demo", str(tmp_path / "out.gguf"), "--type", "q8_0"),
    ):
        code, _, err = run(*arguments)
        assert code == 0, err
    header = jq.gguf.read_header(tmp_path / "out.gguf")
    assert "Q8_0" in {tensor.type.name for tensor in header.tensors.values()}


@pytest.mark.parametrize(
    "given, field, value",
    [
        (["--implementation", "sim"], "implementation", "sim"),
        (["--no-clusters"], "clusters", False),
        (["--no-prefetch"], "prefetch", False),
        (["--no-graphs"], "graphs", False),
        (["--decoded-products"], "decoded_products", True),
        (["--no-decoded-products"], "decoded_products", False),
    ],
    ids=str,
)
def test_switches_select_kernels(given, field, value):
    """Options select the same in this process and in another one that gets them."""
    options = cli.parser_of(["bench"]).parse_args(["bench", MODEL, *given])
    with implementation_of(options):
        assert jq.current_selection() == Selection()._replace(**{field: value})
    assert implementation_arguments(options) == given


def test_embed_reads_a_pipe(run):
    given = ("embed", MODEL, "--implementation", "xla")
    piped = run(*given, stdin=b"The sea\nThe moon\n")
    assert piped == run(*given, "-p", "The sea", "-p", "The moon")
    assert piped[0] == 0 and piped[1].count('"embedding", "index"') == 2


FILES = {
    "clip": ({"general.architecture": "clip", "general.type": "mmproj"}, "projector"),
    "adapter": ({"general.architecture": "llama", "general.type": "adapter"}, "LoRA adapter"),
    "imatrix": ({"general.type": "imatrix"}, "importance matrix"),
    "older-imatrix": ({"imatrix.chunk_count": 3}, "importance matrix"),
    "vector": ({"general.architecture": "controlvector"}, "control vector"),
    "t5": ({"general.architecture": "t5encoder"}, "encoder of a kind that is not supported"),
    "flux": ({"general.architecture": "flux"}, "diffusion model"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_is_no_language_model(run, tmp_path, kind):
    metadata, message = FILES[kind]
    file = tmp_path / "file.gguf"
    jq.gguf.write(file, {"general.architecture": "", **metadata}, {"t": np.ones(32, np.float32)})
    with pytest.raises(jq.GGUFError, match=f"file: is .*{message}"):
        models.load(file)
    code, out, err = run("quantize", str(file), str(tmp_path / "out.gguf"))
    assert (code, out) == (2, "") and message in err and len(err.splitlines()) == 1


def test_a_vocabulary_alone(run):
    file = DATA / "tokenizers" / "ggml-vocab-llama-spm.gguf"
    with pytest.raises(jq.GGUFError, match="file: holds only a vocabulary: it has no weights"):
        models.load(file)


def test_a_folder_with_a_gguf_file(run, tmp_path):
    (tmp_path / "mmproj-model.gguf").write_bytes(b"not read")
    with pytest.raises(FileNotFoundError, match="a checkpoint folder holds config.json"):
        models.load(tmp_path)
    (tmp_path / "model.gguf").symlink_to(MODEL)
    assert models.load(tmp_path).config == model("text-spm").config
    (tmp_path / "other.gguf").symlink_to(MODEL)
    with pytest.raises(jq.CheckpointError, match="holds 2 models; name one: model.gguf, other"):
        models.load(tmp_path)


def test_a_folder_with_an_adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(jq.CheckpointError, match="is a LoRA adapter; load its base model"):
        models.load(tmp_path)
