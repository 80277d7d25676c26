import dataclasses
import importlib.resources
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import pytest
from rich.console import Console
from rich.progress import MofNCompleteColumn
from support.gguf_bytes import rewritten, text_entry
from support.paths import GOLDEN

import jax_q4k as jq
from jax_q4k import current_selection, models
from jax_q4k.models import cli
from jax_q4k.models.cli import output, prompts
from jax_q4k.models.cli.commands import inspect
from jax_q4k.models.sampling.grammars import Grammars

from ..golden_files import model, path

pytestmark = pytest.mark.cpu_kernels

SPM = json.loads((GOLDEN / "text-spm.json").read_text())
TEXT_MODEL, TOKEN_MODEL = str(path("text-spm")), str(path("llama-gqa"))
GREEDY = ("--temperature", "0")
SECONDS = (
    r"\d+\.\d\d s in total: imports \d+\.\d\d, loading \d+\.\d\d, compiling \d+\.\d\d, "
    r"prompt \d+\.\d{3} \(\d+ tokens\), decoding \d+\.\d{3}"
)


@pytest.fixture
def run(capsys):
    """Returns a function that runs a command line: (exit code, standard output, standard error)."""

    def run(*arguments):
        capsys.readouterr()
        code = cli.main(arguments)
        return code, *capsys.readouterr()

    return run


def test_generate_text(run):
    code, out, err = run(
        *("generate", TEXT_MODEL, "-p", SPM["prompt_text"], "-n", "32", *GREEDY),
        *("--implementation", "xla"),
    )
    tokenizer = model("text-spm").tokenizer
    assert (code, out) == (0, tokenizer.decode(SPM["greedy_f32"], strip_prefix=False) + "\n")
    assert re.fullmatch(rf"32 tokens, \d+\.\d tokens/s; {SECONDS}\n", err)


def test_generate_tokens(run):
    golden = json.loads((GOLDEN / "llama-gqa.json").read_text())
    prompt = ",".join(map(str, golden["prompt"]))
    code, out, _ = run("generate", TOKEN_MODEL, "--tokens", prompt, "-n", "24", *GREEDY)
    assert code == 0 and [int(part) for part in out.split()] == golden["greedy_f32"]


@pytest.mark.slow("starts the command several times")
def test_generate_with_drafts(run):
    """Tokens stay the same; the line below reports how many drafts were accepted."""
    golden = json.loads((GOLDEN / "llama-gqa.json").read_text())
    prompt = ",".join(map(str, golden["prompt"] * 2))
    options = ("--tokens", prompt, "-n", "24", *GREEDY)
    plain = run("generate", TOKEN_MODEL, *options)
    for draft in ("lookup", TOKEN_MODEL):
        code, out, err = run("generate", TOKEN_MODEL, *options, "--draft", draft)
        assert (code, out) == (0, plain[1])
        drafted = re.search(r"(\d+) of (\d+) draft tokens accepted", err)
        assert (draft == "lookup") or drafted[1] == drafted[2]
    code, _, err = run("generate", TOKEN_MODEL, "--tokens", "1", "--draft", str(path("lfm2")))
    assert code == 2 and "draft has a vocabulary of 272 tokens, the model one of" in err
    code, _, err = run("generate", TOKEN_MODEL, "--tokens", "1", "--draft", "nextn")
    assert code != 0 and "llama.nextn_predict_layers: is 0; drafts need one such layer" in err
    code, _, err = run("generate", "--demo", "-p", "x", "--draft", "nextn")
    assert code == 2 and "--draft nextn needs a GGUF file" in err
    code, _, err = run("generate", TOKEN_MODEL, "--tokens", "1", "--draft", "nothing.gguf")
    assert code != 0 and "nothing.gguf" in err


@pytest.mark.slow("starts the command several times")
def test_generate_over_devices(run):
    """Runs in a new process with two CPU devices; its tokens equal those of one device."""
    golden = json.loads((GOLDEN / "llama-gqa.json").read_text())
    prompt = ",".join(map(str, golden["prompt"]))
    command = ["generate", TOKEN_MODEL, "--tokens", prompt, "-n", "8", *GREEDY]
    command += ["--devices", "2"]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-m", "jax_q4k", *command],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert [int(part) for part in done.stdout.split()] == golden["greedy_f32"][:8]


@pytest.mark.parametrize("count", ["0", "99"])
def test_devices_that_are_not_there(run, count):
    code, _, err = run("generate", TOKEN_MODEL, "--tokens", "1,2", "-n", "1", "--devices", count)
    assert code == 2 and f"--devices {count} must be 1 to 8, the number of devices" in err


def test_devices_reach_loading(run, monkeypatch):
    seen = {}

    def record(path, **options):
        seen.update(options)
        raise output.UsageError("seen")

    monkeypatch.setattr(models, "load", record)
    given = ("generate", TOKEN_MODEL, "--tokens", "1,2", "--devices")
    for count, axes in (("1", None), ("2", {"tp": 2})):
        assert run(*given, count) == (2, "", "error: seen\n")
        assert (seen["mesh"] and dict(seen["mesh"].shape)) == axes


@pytest.mark.parametrize("bias", ["3", "a=1", "3=x", "=", ""])
def test_biases_that_are_none(capsys, bias):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["generate", str(TEXT_MODEL), "-p", "x", "--logit-bias", bias])
    assert f"{bias!r} must be a token id, =, and a number" in capsys.readouterr().err


def test_forms_of_the_text(run, monkeypatch, tmp_path, capsys):
    """Texts or files; wrong ones are refused before anything runs."""
    seen = []

    def record(_, constraint):
        seen.append(constraint)
        raise ValueError("seen")

    schema, file = '{"type": "integer"}', tmp_path / "schema.json"
    file.write_text(schema)
    given = "generate", TEXT_MODEL, "-p", "x"
    with monkeypatch.context() as patched:
        patched.setattr(Grammars, "matcher", record)
        for option, value, want in (
            ("--json-schema", schema, models.Constraint.json_schema({"type": "integer"})),
            ("--json-schema", str(file), models.Constraint.json_schema(schema)),
            ("--grammar", 'root ::= "a"', models.Constraint.grammar('root ::= "a"')),
            ("--regex", "[0-9]+", models.Constraint.regex("[0-9]+")),
        ):
            assert run(*given, option, value) == (2, "", "error: seen\n")
            assert seen.pop() == want
    code, _, err = run(*given, "--json-schema", '{"type": "foo"}')
    assert code == 2 and "json_schema: Invalid type: foo" in err
    os.truncate(file, 200 << 30)
    for option in ("--json-schema", "--grammar"):
        with pytest.raises(SystemExit, match="2"):
            run(*given, option, str(file))
        assert "schema.json is longer than 64 MiB" in capsys.readouterr().err


def test_one_form_of_the_text(run):
    _, out, _ = run("generate", "demo", "-p", "One", "--regex", "[0-9]{3}", "--temperature", "0")
    assert re.fullmatch("(One)?[0-9]{3}", out.strip())


def test_options_reach_generation(run, monkeypatch):
    seen = {}

    def record(model, prompt, sampling, **options):
        fields = dataclasses.asdict(sampling)
        seen.update(
            options, **fields, prompt=prompt, implementation=current_selection().implementation
        )
        assert not jax.config.jax_enable_compilation_cache  # set by --no-cache
        raise ValueError("seen")

    monkeypatch.setattr(models, "stream", record)
    options = {
        "--temperature": 0.5,
        "--top-k": 3,
        "--top-p": 0.75,
        "--min-p": 0.25,
        "--repetition-penalty": 1.5,
        "--presence-penalty": 0.5,
        "--frequency-penalty": -0.5,
        "--dry-multiplier": 0.5,
        "--dry-base": 1.5,
        "--dry-allowed-length": 3,
        "--dry-penalty-last-n": 9,
        "--logprobs": 2,
        "--prompt-logprobs": 3,
        "--seed": 7,
        "--max-new-tokens": 9,
        "--cache-dtype": "bfloat16",
        "--draft": "lookup",
        "--min-new-tokens": 1,
    }
    flags = [str(part) for pair in options.items() for part in pair]
    code, _, err = run(
        "generate",
        TEXT_MODEL,
        "-p",
        "x",
        *flags,
        "--stop",
        "a",
        "--stop",
        "b",
        "--logit-bias",
        "3=-inf",
        "--logit-bias",
        "7=1.5",
        "--dry-sequence-breaker",
        "q",
        "--ignore-end",
        "--penalize-new-only",
        *("--stop-token-id", "4", "--stop-token-id", "5"),
        *("--spelled-token", "<s>"),
        "--no-cache",
        "--implementation",
        "sim",
    )
    assert code == 2 and err == "error: seen\n"
    expected = {flag[2:].replace("-", "_"): value for flag, value in options.items()}
    assert seen == expected | {
        "prompt": model("text-spm").tokenizer.encode("x"),
        "stop": ("a", "b"),
        "logit_bias": ((3, -math.inf), (7, 1.5)),
        "dry_sequence_breakers": ("q",),
        "processors": (),
        "constraint": None,
        "spelled_tokens": ("<s>",),
        "shift": None,
        "ignore_end": True,
        "stop_token_ids": (4, 5),
        "penalize_new_only": True,
        "implementation": "sim",
    }


def test_generate_the_demo(run, tmp_path, monkeypatch):
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "demo.gguf").symlink_to(TEXT_MODEL)
    monkeypatch.setattr(
        importlib.resources, "files", lambda package: tmp_path if package == "jax_q4k" else None
    )
    code, out, _ = run("generate", "--demo", "-p", SPM["prompt_text"], "-n", "4", *GREEDY)
    assert (code, out) == (
        0,
        model("text-spm").tokenizer.decode(SPM["greedy_f32"][:4], strip_prefix=False) + "\n",
    )


@pytest.mark.parametrize("count", [0, 2])
def test_a_package_without_the_demo(run, tmp_path, monkeypatch, count):
    for i in range(count):
        (tmp_path / "assets").mkdir(exist_ok=True)
        (tmp_path / "assets" / f"{i}.gguf").touch()
    monkeypatch.setattr(importlib.resources, "files", lambda package: tmp_path)
    code, out, err = run("generate", "--demo", "-p", "x")
    found = f"{tmp_path}/assets holds {count} .gguf files, expected one"
    message = f"error: the demo model is not installed: {found}\n"
    assert (code, out, err) == (2, "", message)


@pytest.mark.slow("simulates every launch")
def test_generate_with_every_kernel_simulated(run):
    code, out, _ = run(
        "generate", TOKEN_MODEL, "--tokens", "5,6,7", "-n", "2", "--implementation", "sim"
    )
    assert code == 0 and len(out.split()) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("generate", "/no/such.gguf", "-p", "x"),
            "/no/such.gguf: no such file or folder",
        ),
        (("inspect", "llama3.2"), "llama3.2: no such file or folder; a model is a GGUF file"),
        (("generate", __file__, "-p", "x"), r"test_cli.py: magic: expected b'GGUF'"),
        (("inspect", __file__), r"test_cli.py: magic: expected b'GGUF'"),
        (("generate", TOKEN_MODEL, "-p", "x"), "has no tokenizer: give the prompt as --tokens"),
        (
            ("generate", TOKEN_MODEL, "--tokens", "1,x"),
            "--tokens '1,x' must be comma-separated integers",
        ),
        (
            ("generate", TOKEN_MODEL, "--tokens", "1", "--chat"),
            "--chat needs the prompt as text, not as --tokens",
        ),
        (
            ("generate", TOKEN_MODEL, "--tokens", "1,512"),
            "prompt holds token id 512; ids must be 0 to 511",
        ),
        (
            ("generate", TOKEN_MODEL, "--tokens", "1", "-n", "0"),
            "max_new_tokens=0 must be at least 1",
        ),
        (
            ("generate", TOKEN_MODEL, "--tokens", ",".join(["1"] * 2048)),
            "exceed the context length, 2048",
        ),
        (("generate", TEXT_MODEL, "-f", "-", "-f", "-"), "standard input is read once"),
        (("generate", TEXT_MODEL, "-f", "/no/such.txt"), "No such file or directory"),
        (("generate", TEXT_MODEL, "-f", TEXT_MODEL), "Q4_K_M.gguf is not UTF-8: invalid"),
        (
            ("generate", TOKEN_MODEL, "--tokens", "1", "--temperature", "nan"),
            "temperature=nan must be",
        ),
        (("generate", TOKEN_MODEL, "--tokens", "1", "--top-p", "2"), "top_p=2.0 must be"),
        (("generate", TOKEN_MODEL, "--tokens", "1", "--stop", "x"), "needs a tokenizer"),
        (("generate", TEXT_MODEL, "-p", "x", "--chat"), "tokenizer.chat_template: is missing"),
        (
            ("generate", TOKEN_MODEL, "--tokens", "1", "--implementation", "ptx"),
            "'ptx' needs a CUDA device",
        ),
        (("perplexity", TEXT_MODEL, "/no/such.txt"), "/no/such.txt: No such file or directory"),
        (("perplexity", TEXT_MODEL, TEXT_MODEL), "text-spm.Q4_K_M.gguf is not UTF-8: invalid "),
        (("perplexity", TOKEN_MODEL, __file__), "model has no tokenizer"),
        (("perplexity", TEXT_MODEL, __file__, "--context", "1"), "context=1 must be 2 to 2048"),
    ],
)
def test_errors_are_one_line(run, arguments, message):
    code, out, err = run(*arguments)
    assert code == 2 and out == ""
    assert re.fullmatch(
        rf"error: [^\n]*{re.escape(message) if 'magic' not in message else message}[^\n]*\n", err
    )


@pytest.mark.slow("starts the command several times")
def test_a_prompt_that_is_not_utf8(run, tmp_path):
    templated = tmp_path / "templated.gguf"
    template = text_entry("tokenizer.chat_template", "{{ messages[0].content }}")
    templated.write_bytes(rewritten(path("text-spm"), {"tokenizer.chat_template": template}))
    for options in ((), ("--chat",)):
        given = os.fsdecode(b"the \xff")
        code, out, err = run("generate", str(templated), "-p", given, *options)
        problem = "-p is not UTF-8: invalid byte after 4 characters"
        assert (code, out, err) == (2, "", f"error: {problem}\n")


def test_more_memory_than_there_is(run, monkeypatch):
    def exhausted(*_, **__):
        raise MemoryError("Unable to allocate 1 TiB")

    monkeypatch.setattr(models, "load", exhausted)
    assert run("generate", TOKEN_MODEL, "--tokens", "1") == (
        2,
        "",
        "error: Unable to allocate 1 TiB\n",
    )


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("frobnicate",),
        ("generate", "-p", "x"),
        ("generate", "m", "--demo", "-p", "x"),
        ("generate", "m", "-p", "x", "--json", "--jsonl"),
        ("perplexity", "m", "text.txt", "--activations", "bf16"),
        ("join", "in.gguf"),
        ("quantize", "in.gguf", "out.gguf", "--type", "Q2_K_L"),
    ],
)
def test_wrong_usage_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    error, hint = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2 and error.startswith("error: ")
    assert re.fullmatch(r"Try `jax-q4k( \w+)? --help`\.", hint)


@pytest.mark.slow("starts the command several times")
def test_perplexity(run, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The sea was calm, and the two sisters walked along the shore.\n")
    code, out, err = run("perplexity", TEXT_MODEL, str(text), "--context", "16")
    found = models.score(model("text-spm"), text.read_text(), context=16)
    assert code == 0
    line = f"{found.bits_per_byte:.4f} bits per byte, perplexity {found.perplexity:.3f} per token\n"
    assert out == line
    assert re.fullmatch(
        r"text has \d+ tokens; llama.cpp's windows of 16 tokens need 32: reporting only the result "
        rf"for all tokens.\n{found.tokens} tokens, {found.bytes} bytes\n",
        err,
    )
    text.write_text(text.read_text() * 3)
    given = ("perplexity", TEXT_MODEL, str(text), "--context", "16", "--activations", "f32")
    with jq.implementation(activations="f32"):
        found = models.score(model("text-spm"), text.read_text(), context=16, windows="llama.cpp")
    halves = found.second_halves
    code, out, err = run(*given)
    assert code == 0 and err == f"{found.tokens} tokens, {found.bytes} bytes\n"
    assert out == (
        f"perplexity {halves.perplexity:.4f} +/- {halves.error:.5f} of {halves.tokens} tokens, as "
        f"llama.cpp counts\n{found.bits_per_byte:.4f} bits per byte, perplexity "
        f"{found.perplexity:.3f} per token\n"
    )
    described = json.loads(run(*given, "--json")[1])
    assert described["llama_cpp"]["perplexity"] == halves.perplexity
    assert (described["tokens"], described["bits_per_byte"]) == (found.tokens, found.bits_per_byte)


def test_a_text_without_end(run, monkeypatch):
    monkeypatch.setattr(prompts, "MAX_TEXT", 1 << 20)
    line = "error: /dev/zero is longer than 1 MiB\n"
    assert run("perplexity", TEXT_MODEL, "/dev/zero") == (2, "", line)


def test_progress_on_a_terminal_and_elsewhere():
    for terminal in (True, False):
        notes = Console(file=io.StringIO(), force_terminal=terminal, width=100)
        with cli.output.progress("Windows", notes, MofNCompleteColumn()) as report:
            report(3, 8)
        shown = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", notes.file.getvalue())
        assert bool(re.search(r"Windows .* 3/8 ", shown)) == terminal == bool(shown)


def test_inspect(run):
    code, out, err = run("inspect", str(path("qwen2-odd")))
    assert code == 0 and err == ""
    lines = [re.sub(r"[│\s]+", " ", line).strip() for line in out.splitlines()]
    assert "qwen2.rope.freq_base 1000000.0" in lines
    assert "blk.1.attn_v.weight Q8_0 64 x 320 21,760" in lines
    assert "Q5_0 11 1,454,080 999,680 64.7% 5.5" in lines
    assert (
        "GGUF version 3, 1,547,552 bytes: 26 tensors, 2,132,416 weights in 1,545,344 bytes" in lines
    )


def test_inspect_on_a_narrow_terminal(run):
    console = Console(file=io.StringIO(), width=60)
    inspect.show(jq.gguf.read_header(path("qwen2-odd")), console)
    cells = [
        line.split("│")[1].strip() for line in console.file.getvalue().splitlines() if "│" in line
    ]
    assert "qwen2.attention.layer_norm_rms_epsilon" in "".join(cells)
    assert "blk.1.attn_output.weight" in "".join(cells)


def test_inspect_the_demo(run):
    assert run("inspect", "demo") == run("inspect", str(models.demo_path()))


def test_inspect_shortens_arrays(run):
    _, out, _ = run("inspect", TEXT_MODEL)
    assert "32000: ['<unk>', '<s>', '</s>', '<0x00>', ...]" in out


def test_control_characters_of_a_file_do_not_reach_the_terminal(run, tmp_path):
    data = path("llama-gqa").read_bytes()
    hostile = tmp_path / "hostile.gguf"
    hostile.write_bytes(
        data.replace(b"random llama seed 1", b"\x1b]0;[red]owned\x07 [/]").replace(
            b"ffn_gate", b"\x1b[2J_[/]"
        )
    )
    code, out, _ = run("inspect", str(hostile))
    assert code == 0 and "\x1b" not in out and "\\x1b]0;[red]owned\\x07 [/]" in out
    code, out, err = run("generate", str(hostile), "--tokens", "1")
    assert code == 2 and "\x1b" not in out + err
    assert (
        output.printable("a\x1b[2J\x9b\n\tö😀")
        == "a\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}\n\tö😀"
    )


@pytest.mark.slow("starts the command several times")
def test_interrupt_leaves_without_teardown():
    """XLA sometimes crashes if the interpreter shuts down during a compilation."""
    # the tests may run where Ctrl-C is ignored, such as in the background of a shell
    heeded = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    imports = f"{heeded}; import atexit; from jax_q4k.models import cli"
    program = f"{imports}; atexit.register(print, 'torn down'); cli.main()"
    quiet = ("-W", "ignore")  # hides a warning about a library that is not built
    command = [
        sys.executable,
        *quiet,
        "-c",
        program,
        "generate",
        TOKEN_MODEL,
        "--tokens",
        "1",
        "-n",
        "2000",
    ]
    # without the tests' compiled programs, so that the loop must be compiled
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    process.stdout.read(1)  # the first token is out; the loop's program comes next
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and b"torn down" not in out and err == b""


def test_a_platform_that_this_machine_lacks(run, monkeypatch):
    def devices(*_):
        raise AssertionError  # JAX raises it for a platform that it knows

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    problem = "Unable to initialize backend 'cuda', which $JAX_PLATFORMS names"
    line = f"error: {problem}: this machine has no such device\n"
    assert run("generate", TOKEN_MODEL, "--tokens", "1") == (2, "", line)
    assert run("quantize", TOKEN_MODEL, "out.gguf") == (2, "", line)
    assert run("inspect", TOKEN_MODEL)[0] == 0  # runs no program


def test_text_that_the_terminals_encoding_lacks(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii"))
    assert cli.main(["generate", TEXT_MODEL, "-p", SPM["prompt_text"], "-n", "32", *GREEDY]) == 0
    expected = models.generate(model("text-spm"), SPM["prompt_text"], max_new_tokens=32).text
    assert not expected.isascii() and raw.getvalue() == expected.encode("ascii", "replace") + b"\n"


@pytest.mark.slow("starts the command several times")
def test_version_and_help_need_no_jax(tmp_path):
    """Runs the script that is installed as `jax-q4k`."""
    script = shutil.copy(Path(cli.__file__).parent / "jax-q4k", tmp_path)
    command = [sys.executable, "-X", "importtime", str(script), "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == f"jax-q4k {jq.__version__}\n" and done.returncode == 0
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "ptx_kernels" in imported and not imported & {"jax", "numpy", "jax_q4k", "argparse"}
    for arguments in (["--help"], ["generate", "--help"], ["compile", "--help"]):
        done = subprocess.run([*command[:-1], *arguments], capture_output=True, text=True)
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert done.returncode == 0 and "usage: jax-q4k" in done.stdout
        assert "argparse" in imported and not imported & {"jax", "gguf", "flax"}


def test_the_collector_runs_once_the_command_is_imported():
    program = "import gc, jax_q4k.__main__; print(gc.isenabled(), gc.get_freeze_count() > 10_000)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "True True\n"


def test_no_standard_output(run, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)  # Python does so if its descriptor is closed
    assert run("inspect", TEXT_MODEL) == (2, "", "error: standard output is closed\n")


@pytest.mark.slow("starts the command several times")
def test_module_and_a_reader_that_leaves():
    command = [sys.executable, "-m", "jax_q4k", "inspect", TEXT_MODEL]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.wait(timeout=60) == 1 and b"Traceback" not in process.stderr.read()
    version = subprocess.run(
        [sys.executable, "-m", "jax_q4k", "--version"], capture_output=True, text=True, check=True
    )
    assert version.stdout == f"jax-q4k {jq.__version__}\n"


def test_warnings_of_a_command_that_fails_are_still_printed():
    notes = Console(file=io.StringIO(), width=80)
    with pytest.raises(ZeroDivisionError), output.warnings_in_a_line(notes):
        warnings.warn("5 tensors are skipped", stacklevel=1)
        raise ZeroDivisionError
    assert notes.file.getvalue() == "5 tensors are skipped\n"
