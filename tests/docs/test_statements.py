"""Statements of pages about behavior, limits and defaults; test_figures.py has the figures."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import tomllib
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from support.statements import ROOT, Statements, quoted, table

import jax_q4k as jq
from jax_q4k import gguf, models, native, quantizers
from jax_q4k.cache import compiled_files
from jax_q4k.gguf import parts
from jax_q4k.models import chat, cli
from jax_q4k.models.architectures import ARCHITECTURES
from jax_q4k.models.cli import cache
from jax_q4k.models.cli.commands import bench
from jax_q4k.models.cli.commands import chat as chat_command
from jax_q4k.models.cli.options import sampling_of
from jax_q4k.models.config.attention_fields import stored_head_dim
from jax_q4k.models.config.layer_patterns import windowed_by_default
from jax_q4k.models.config.pooling import POOLINGS, pooling_of
from jax_q4k.models.engine import arguments
from jax_q4k.models.engine.session import PIECE
from jax_q4k.models.files import hub, llama_cpp
from jax_q4k.models.files.quantizing import recipes
from jax_q4k.models.runner import model as runner_model
from jax_q4k.models.runner.prompt_programs import CPU_CHUNK, GPU_CHUNK
from jax_q4k.models.sampling import file_defaults
from jax_q4k.models.sampling.stages import SamplingStages
from jax_q4k.native import build
from ptx_kernels import devices, formats
from ptx_kernels.kernels import FAMILIES, prefetch
from ptx_kernels.kernels.attention import (
    paged_attention_rule,
    piece_attention_rule,
    prompt_attention_rule,
)
from ptx_kernels.kernels.gemm import (
    FEW_ROWS,
    decoded,
    decoded_products_rule,
    f16_products_rule,
    tensor_cores_rule,
)
from ptx_kernels.limits import PTX_VERSIONS, gemm_takes
from ptx_kernels.machine_code import model as cost
from ptx_kernels.machine_code.ptxas import TARGETS
from ptx_kernels.ptx import oldest
from tools import aot, snippets
from tools.machine_code import __main__ as machine_code

statements = Statements()
says = statements.says

H200 = devices.Target("H200", 132)
README, KERNELS = "README.md", "docs/kernels.md"
CLI, GENERATION, INSTALL = "docs/cli.md", "docs/generation.md", "docs/install.md"
MODELS, API, TUNING, COST = (
    "docs/models.md",
    "docs/api/index.md",
    "docs/tuning.md",
    "docs/cost-model.md",
)


def options(command: str) -> dict[str, Any]:
    """Options of a command: each option string -> argparse's action."""
    (commands,) = (
        action.choices[command]
        for action in cli.parser_of([command])._actions
        if isinstance(action.choices, dict)
    )
    return {name: action for action in commands._actions for name in action.option_strings}


def overview() -> list[list[str]]:
    """Rows of both tables of the API's page, which have the same head."""
    page = (ROOT / API).read_text()
    lines = [line for line in page.splitlines() if re.match(r"\| `", line)]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


def usual(command: str) -> Any:
    """Default sampling of a command for a file that suggests none."""
    given = types.SimpleNamespace(**{action.dest: None for action in options(command).values()})
    model: Any = types.SimpleNamespace(metadata={})
    return sampling_of(given, model, Console())


# The command line, and sampling.


@says(CLI, "temperature 0.7 and min-p 0.05 apply. The seed is random and is printed")
def defaults_of_sampling():
    for command in ("generate", "chat"):
        first, second = usual(command), usual(command)
        assert (first.temperature, first.min_p) == (0.7, 0.05) and first.seed != second.seed


@says(CLI, "use the sampling parameters of the model's file (`general.sampling.*`")
def suggested_by_the_file():
    assert all(key.startswith("general.sampling.") for key in file_defaults.KEYS.values())
    assert file_defaults.default_sampling({"general.sampling.temp": 0.3}) == {"temperature": 0.3}


@says(
    CLI,
    "`--temperature 0` takes the most likely token each time, which makes small models repeat "
    "themselves; it is also the default of `models.generate` in Python",
)
@says(GENERATION, "The default is greedy with up to 64 tokens", "| `seed` | 0 by default |")
@says("docs/troubleshooting.md", "`models.generate` samples with seed 0 unless you pass `seed=`")
def defaults_in_python():
    usual = models.Sampling()
    assert usual.greedy and usual.seed == 0 and usual.max_new_tokens == 64


@says(GENERATION, "penalties, DRY, processors, top-k, top-p, min-p, temperature")
def parameters_of_sampling():
    """Every field of Sampling stands in the table, the further ones of DRY by their prefix."""
    shown = {name for row in table(GENERATION, "| parameters |") for name in quoted(row[0])}
    fields = {field.name for field in dataclasses.fields(models.Sampling)}
    assert shown - {"dry_"} <= fields
    assert {name for name in fields - shown if not name.startswith("dry_")} == set()


@says(GENERATION, "a model keeps the 64 most recently used ones in memory")
def programs_in_memory():
    assert runner_model.MOST_PROGRAMS == 64


@says(GENERATION, '`"float32"` (the default), `"bfloat16"`, `"float16"`, `"int8"`')
def cache_dtypes():
    shown = "float32", "bfloat16", "float16", "int8", "float8_e4m3fn"
    assert [str(jq.page_dtype(name)) for name in shown] == list(map(str, jq.PAGE_DTYPES))
    default = inspect.signature(models.generate).parameters["cache_dtype"].default
    assert default == jnp.float32


@says(
    GENERATION,
    "changing the temperature does not recompile (unless it becomes 0 or stops being 0)",
)
@says(CLI, "the same set of sampling options (their values and the seed may differ)")
def numbers_are_data():
    one = dict(temperature=0.8, top_k=40, top_p=0.9, repetition_penalty=1.1, seed=1)
    other = dict(temperature=0.3, top_k=20, top_p=0.5, repetition_penalty=1.3, seed=2)
    assert SamplingStages.of([models.Sampling(**one)]) == SamplingStages.of(
        [models.Sampling(**other)]
    )


@says(CLI, "for instance with `--temperature 0`, `--logprobs` or a much longer prompt")
def other_kinds_of_calls():
    drawn = models.Sampling(temperature=0.7)
    kinds = [drawn, models.Sampling(), dataclasses.replace(drawn, logprobs=1)]
    assert len({SamplingStages.of([kind]) for kind in kinds}) == 3
    model = models.load("demo")
    assert model.padded_length(3) == model.padded_length(5) < model.padded_length(37)


@says(GENERATION, "row i draws with seed 7 + i")
def seeds_of_a_batch():
    samplings = arguments.samplings_of(models.Sampling(seed=7), {}, 4)
    assert [one.seed for one in samplings] == [7, 8, 9, 10]


@says(CLI, "Compiled programs are cached in `~/.cache/jax-q4k` (`$XDG_CACHE_HOME`; up to 256 MiB)")
@says("docs/export.md", "one for the loop, in `~/.cache/jax-q4k/programs`")
def place_of_programs():
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("XDG_CACHE_HOME", raising=False)
        environment.setenv("HOME", "/home/jane")
        assert str(cache.folder()) == "/home/jane/.cache/jax-q4k/programs"
        environment.setenv("XDG_CACHE_HOME", "/caches")
        assert str(cache.folder()) == "/caches/jax-q4k/programs"
    assert 2 * cache.MAX_BYTES == 256 << 20  # JAX's entries plus programs


@says(CLI, "If `JAX_COMPILATION_CACHE_DIR` is set, only JAX's own cache in that folder is used")
def jaxs_own_cache():
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", before or tempfile.gettempdir())
    try:
        with cache.programs(Console()) as kept:
            assert kept is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@says("docs/chat.md", "an answer has up to 1024 tokens (`-n`)", "`/system TEXT`", "`/quit`, Ctrl-D")
def commands_of_a_chat():
    assert options("chat")["-n"].default == 1024
    shown = {
        name.split()[0]
        for cell, _ in table("docs/chat.md", "| input |")
        for name in quoted(cell)
        if name.startswith("/")
    }
    session = chat_command.Session(None, None, {}, None)
    assert shown == {*session.commands, "/quit"}
    assert shown == set(re.findall(r"^/\w+", chat_command.HELP, re.MULTILINE))


@says(
    "docs/chat.md",
    "`chat.Limits` bounds its time, memory and output (10 s, 512 MB, 4 million characters)",
)
def limits_of_templates():
    assert chat.Limits() == chat.Limits(seconds=10, megabytes=512, characters=4_000_000)


@says("docs/troubleshooting.md", "`temperature=-1.0 must be float in [0, 100]`")
def message_of_a_range():
    with pytest.raises(ValueError) as caught:
        models.Sampling(temperature=-1.0)
    assert str(caught.value) == "temperature=-1.0 must be float in [0, 100]"


@says("docs/troubleshooting.md", "prints a failure as one line, `error: ...`, with exit code 2")
@says(CLI, "A failure is one line, `error: ...`, with exit code 2")
def failures():
    assert cli.FAILURE == 2


@says("docs/bench.md", "Every combination is a test")
def options_of_bench():
    known = options("bench")
    for cell, default, _ in table("docs/bench.md", "| option | default"):
        for option in quoted(cell):
            action = known[option.split()[0]]
            if default.isdigit():
                assert action.default == [int(default)], option


@says(
    "docs/bench.md",
    "appended in chunks of 128 tokens",
    "llama-bench's cache is float16, the default here float32",
)
def defaults_of_bench():
    assert PIECE == 128 and options("bench")["--cache-dtype"].default == "float32"


@says(
    "docs/embeddings.md",
    "The default of `pooling` is what the model's file says",
    "`mean` if there is neither",
    "(a classifier's `rank`, the maximum",
)
def poolings():
    shown = [quoted(cell)[0] for cell, _ in table("docs/embeddings.md", "| `pooling`")]
    assert sorted(shown) == sorted(POOLINGS)
    assert inspect.signature(models.embed).parameters["pooling"].default is None
    assert options("embed")["--pooling"].default is None
    key = "llama.pooling_type"
    assert pooling_of({}, "llama") == "mean" and pooling_of({key: 3}, "llama") == "last"
    with pytest.raises(ValueError, match="rank"):
        pooling_of({key: 4}, "llama")


@says("docs/troubleshooting.md", "`--cache-dtype bfloat16` or `int8` halves or quarters it")
@says(API, "(float32, bfloat16, float16, int8, float8_e4m3fn)", "heads of up to 512 dimensions")
def caches():
    shown = "float32, bfloat16, float16, int8, float8_e4m3fn"
    assert [str(dtype) for dtype in jq.PAGE_DTYPES] == shown.split(", ")
    assert options("generate")["--cache-dtype"].choices == shown.split(", ")
    assert max(jq.HEAD_DIMS) == 512


# Perplexity.


@says(CLI, "jax-q4k perplexity MODEL.gguf TEXT.txt # llama.cpp's perplexity, and bits per byte")
@says(
    "docs/quantizing.md",
    "counts only the tokens of each window's second half",
    "`models.score` counts all tokens, including the end of the text",
)
def perplexity():
    """Counts tokens like llama.cpp's perplexity.cpp.

    llama.cpp computes `count += n_ctx - first - 1` with `first = n_ctx/2`.
    """
    model, text = models.load("demo"), "The sea was calm, and the evening came. " * 12
    ids, with_bos = (model.tokenizer.encode(text, add_special=add) for add in (False, True))
    windows, rest = divmod(len(with_bos), 32)
    assert len(with_bos) == len(ids) + 1 and rest, "a BOS, and an end that fills no window"
    theirs = models.score(model, text, context=32, windows="llama.cpp")
    assert theirs.second_halves.tokens == windows * (32 - 16 - 1)
    assert theirs.tokens == windows * (32 - 1)
    ours = models.score(model, text, context=32)
    assert ours.tokens == len(ids) and ours.second_halves is None


@says("docs/generation.md", "The logits of 32 tokens (256 on a GPU) are in memory at a time.")
def logits_of_prompts():
    assert (CPU_CHUNK, GPU_CHUNK) == (32, 256)


@says("docs/quantizing.md", "512 tokens, or the model's context if that is shorter")
def context_of_perplexity():
    demo = gguf.read(models.demo_path())
    for context, window in ((2048, 512), (128, 128)):
        metadata = demo.metadata | {"llama.context_length": context}
        gguf.write("model.gguf", metadata, demo.tensors)
        text = "The sea was calm, and the evening came. " * 150
        found = models.score(models.load("model.gguf"), text, windows="llama.cpp")
        windows = len(models.load("demo").tokenizer.encode(text)) // window
        assert windows >= 2 and found.tokens == windows * (window - 1)


# Files and names.


@says("docs/files.md", "There may be up to 512 parts.", "M is 10^6 and G 10^9")
def parts_of_files():
    assert parts.MAX_PARTS == 512
    to_bytes = options("quantize")["--split-max-size"].type
    assert [to_bytes(text) for text in ("7", "7M", "7G")] == [7, 7_000_000, 7_000_000_000]


@says("docs/files.md", "is looked up on the Hugging Face hub, unless a file of that name")
@says(CLI, "a name on the [Hugging Face hub]", "which is downloaded")
@says(README, "downloads its Q4_K_M file")
@says("docs/troubleshooting.md", "ORG/NAME was looked up on [the hub]")
def names_of_the_hub():
    """The hub's package is a dependency, so nothing else must be installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(name.startswith("huggingface-hub") for name in project["dependencies"])
    assert hub.named("Org/Name").repository == "Org/Name"
    assert hub.named("Qwen/Qwen2.5-0.5B-Instruct-GGUF") and hub.DEFAULT == "Q4_K_M"
    assert hub.named("Org/Name:Q8_0").kind == "Q8_0"
    os.mkdir("folder")
    for file in (
        "name",
        "folder/name",
        "Org/m.gguf",
        "Org/m.safetensors",
        "Org/m.json",
        "Org/m.bin",
    ):
        assert hub.named(file) is None, file


@says("docs/files.md", "no pickles, no code")
def what_is_fetched():
    assert not [name for name in hub.CHECKPOINT if name.endswith((".py", ".bin", ".pth", ".pt"))]


@says(
    "docs/files.md",
    "`save_gguf` refuses a model with adapters",
    "is split over devices takes none",
)
@says(MODELS, "[Adapters](files.md#lora-adapters) are loaded together with a model")
@says(MODELS, "a LoRA adapter alone")
def adapters():
    model = models.load("demo")
    a, b = np.zeros((2, 256), np.float32), np.zeros((256, 2), np.float32)
    about = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 4.0}
    about |= {"general.architecture": "llama"}
    name = "blk.0.attn_output.weight"
    gguf.write("adapter.gguf", about, {f"{name}.lora_a": a, f"{name}.lora_b": b})
    with pytest.raises((TypeError, ValueError), match="blk.0.attn_output"):
        models.save_gguf(models.with_lora(model, "adapter.gguf"), "out.gguf")
    with pytest.raises(ValueError, match="adapter"):
        models.load("adapter.gguf")
    split = models.load("demo", mesh=jax.make_mesh((1,), ("tp",)))
    with pytest.raises(ValueError, match="several devices"):
        models.with_lora(split, "adapter.gguf")


@says(MODELS, "a part other than the first of a [split model]")
@says("docs/files.md", "Give the first part; the others are found in the same folder")
def several_files():
    paths = models.save_gguf(models.load("demo"), "austen.gguf", max_bytes=2_000_000)
    assert len(paths) == 2 and repr(models.load(paths[0])) == repr(models.load("demo"))
    with pytest.raises(jq.GGUFError, match="this is part 2 of 2; give"):
        models.load(paths[1])


@says("docs/troubleshooting.md", "`generate`, `chat` and `quantize` also take a checkpoint folder")
@says("docs/troubleshooting.md", "`jax-q4k inspect` takes GGUF files")
def folders():
    with pytest.raises(jq.GGUFError, match="path: must be a regular file"):
        gguf.read_header(".")


@says(API, "a malformed file raises `jq.GGUFError`")
def malformed():
    with open("bad.gguf", "wb") as file:
        file.write(b"GGUF")
    with pytest.raises(jq.GGUFError):
        gguf.read("bad.gguf")


# Layers of models.


@says(MODELS, "has no windows in")
def windows_of_checkpoints_alone():
    """Architectures whose checkpoints may have windows, and whose files by llama.cpp have none."""
    (row,) = (row for row in table(MODELS, "| key after") if "sliding_window_pattern" in row[0])
    alone = {
        kind.name
        for kind in ARCHITECTURES.values()
        if any(checkpoint.window for checkpoint in kind.checkpoints)
        and not any(windowed_by_default(kind, 6))
    }
    assert set(re.findall(r"`(\w+)`", row[2])) == alone == llama_cpp.WITHOUT_WINDOWS


@says(MODELS, "the next multiple of 16 that is at least 32", "any even size up to 512")
def stored_sizes_of_heads():
    assert [stored_head_dim(size) for size in (2, 32, 34, 72, 512)] == [32, 32, 48, 80, 512]


# Formats.


@says("docs/quantizing.md", "`jq.quantize` produces all packed types")
def formats_made():
    assert quantizers.names() == tuple(formats.names())


@says("docs/quantizing.md", "NVFP4 has no recipe", "from 0.01 to 2688")
def scales_of_nvfp4():
    assert not any("NVFP4" in name for name in recipes.RECIPES)
    assert quantizers.largest("NVFP4") == 2688
    w = 0.01 * np.random.default_rng(0).standard_normal((8, 64), np.float32)
    got = np.asarray(jq.quantize(w, "NVFP4").dequantize())
    assert np.linalg.norm(got - w) <= 0.1 * np.linalg.norm(w)


@says(MODELS, "| type | products on CUDA |")
@says(README, "all 23 packed types")
def packed_types():
    rows = [cell for cell, *_ in table(MODELS, "| type | products")][:-1]
    assert sorted(", ".join(rows).split(", ")) == sorted(formats.names())
    assert len(list(formats.names())) == 23


@says(README, "37 architectures")
def number_of_architectures():
    assert len(ARCHITECTURES) == 37


@says(MODELS, "mat-vec kernels for 1 to 3 rows (to 8 with few columns or float32 activations)")
@says(MODELS, "mat-vec kernels for 1 to 8 rows; for more, weights are decoded for XLA's product")
@says(KERNELS, "*Wins*: from four rows of activations on (`tensor_cores_rule`)")
def products():
    for cell, kernels, *_ in table(MODELS, "| type | products")[:-1]:
        on_tensor_cores = "decoded" not in kernels
        for name in cell.split(", "):
            assert gemm_takes(name, 4096) == on_tensor_cores
            found = [m for m in range(1, 9) if tensor_cores_rule(H200, (name,), 4096, m)]
            assert found == (list(range(4, 9)) if on_tensor_cores else []), name
    assert not tensor_cores_rule(H200, ("Q4_K",), 256, 8)


@says(
    "docs/devices.md",
    "(256 weights for the K types, TQ1_0, TQ2_0 and the IQ types except IQ4_NL; 64 for NVFP4; "
    "32 for the others)",
)
@says("docs/quantizing.md", "A K type has blocks of 256 weights")
@says(
    "docs/troubleshooting.md",
    "K formats have blocks of 256 columns. Use a format with blocks of 32 (`Q8_0`, `Q4_0`, `Q5_0`, "
    "`IQ4_NL`)",
)
def blocks():
    for name in formats.names():
        large = name.endswith("_K") or name.startswith(("TQ", "IQ")) and name != "IQ4_NL"
        want = 256 if large else 64 if name == "NVFP4" else 32
        assert formats.get(name).block_size == want, name


@says(API, "llama.cpp's recipes: `Q4_K_M`, `Q4_K_S`")
@says("docs/quantizing.md", "The types are llama.cpp's recipes")
def known_recipes():
    line = next(row for row in overview() if "models.quantize(" in row[0])
    in_docs = [
        name for cell, *_ in table("docs/quantizing.md", "| type | bits") for name in quoted(cell)
    ]
    assert set(quoted(line[1])) == set(in_docs) == set(recipes.RECIPES)
    assert options("quantize")["--type"].default == "Q4_K_M"


# Arrays.


@says("docs/arrays.md", "TypeError that says what to use; nothing is decoded implicitly")
@says("docs/troubleshooting.md", "use jq.matmul(x, w), which is x @ w.T, or w.dequantize()")
def packed_is_no_array():
    w, x = jq.quantize(np.ones((64, 256)), "Q8_0"), jnp.ones((3, 64))
    for use in (
        lambda: x @ w,
        lambda: jnp.dot(x, w),
        lambda: jnp.asarray(w),
        lambda: np.asarray(w),
        lambda: jnp.ones((64, 256)) + w,
    ):
        with pytest.raises(TypeError, match="is packed, not an array of numbers: use "):
            use()


@says("docs/arrays.md", "| `jq.matmul(x, w.T)`, `w.T` of three axes | TypeError, ValueError")
@says("docs/arrays.md", "| `bool(w)`, `if w:` | TypeError, as for arrays of numbers")
@says("docs/arrays.md", "`w == v` is `w is v`", "AttributeError: call `w.dequantize()` first")
def other_uses():
    w = jq.quantize(np.ones((64, 256)), "Q8_0")
    with pytest.raises(TypeError):
        jq.matmul(jnp.ones((3, 64)), w.T)
    with pytest.raises(ValueError, match="two axes"):
        _ = w[None].T
    same = jq.quantize(np.ones((64, 256)), "Q8_0")
    assert w == w and w != same and isinstance(hash(w), int)
    with pytest.raises(TypeError, match="is packed"):
        bool(w)
    assert w.to_gguf_bytes() == same.to_gguf_bytes()
    assert not hasattr(w, "astype") and not hasattr(w, "reshape")


@says("docs/arrays.md", "A concrete index out of range raises an IndexError")
def known_index():
    stack = jq.quantize(np.ones((3, 32, 32)), "Q8_0")
    with pytest.raises(IndexError):
        jq.matmul(jnp.ones((1, 32)), stack, index=3)


@says(
    "docs/arrays.md",
    "negative values count from the end, and values beyond either end are clamped",
)
def traced_index():
    stack = jq.quantize(np.arange(3.0)[:, None, None] * np.ones((3, 32, 32)), "Q8_0")
    x = jnp.ones((1, 32))
    product = jax.jit(lambda index: jq.matmul(x, stack, index=index)[0, 0])
    found = [float(product(index)) for index in (-9, -1, 1, 9)]
    np.testing.assert_allclose(found, [0, 64, 32, 64], rtol=1e-2)


@says("docs/arrays.md", "any axis but the last one, k")
def indexing():
    w = jq.quantize(np.ones((64, 256)), "Q8_0")
    with pytest.raises(IndexError, match="is packed"):
        _ = w[:, 3]


@says("docs/arrays.md", "gives float0 leaves, which optax refuses")
def gradients_of_bytes():
    w = jq.quantize(np.ones((64, 256)), "Q8_0")
    tree = {"w": w, "scale": jnp.ones(64)}

    def loss(tree):
        return (jq.matmul(jnp.ones((1, 256)), tree["w"]) * tree["scale"]).sum()

    gradient = jax.grad(loss, allow_int=True)(tree)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient["w"])} == {jax.dtypes.float0}
    optimizer = optax.adam(1e-3)
    with pytest.raises(TypeError):
        optimizer.update(gradient, optimizer.init(tree), tree)


@says("docs/export.md", "so on CUDA a symbolic size raises a `jq.UnavailableError`")
@says("docs/export.md", 'inside `jq.implementation("xla")`. Plain JAX')
def symbolic_sizes_on_cuda():
    w = jq.quantize(np.ones((64, 256)), "Q8_0")
    (b,) = jax.export.symbolic_shape("b")
    rows = jax.ShapeDtypeStruct((b, 256), jnp.float32)
    for_cuda = jax.export.export(
        jax.jit(jq.matmul), platforms=["cuda"], disabled_checks=jq.EXPORT_CHECKS
    )
    with pytest.raises(jq.UnavailableError, match="are symbols"):
        for_cuda(rows, w)
    with jq.implementation("xla"):
        assert for_cuda(rows, w).platforms == ("cuda",)


@says("docs/devices.md", "and `jax.export` refuses them")
def exporting_automatic_axes():
    automatic = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    w = jq.quantize(np.ones((64, 256)), "Q8_0")
    rows = jax.device_put(w, NamedSharding(automatic, P("tp")))
    x = jax.device_put(jnp.ones((1, 256)), NamedSharding(automatic, P()))
    exported = jax.export.export(jax.jit(jq.matmul), disabled_checks=jq.EXPORT_CHECKS)
    with pytest.raises(NotImplementedError, match="host_callbacks"):
        exported(x, rows)


@says(
    "docs/devices.md",
    "A rule that names no tensor or splits a block is an error before anything is read.",
)
def rules_that_cannot_be():
    mesh = jax.make_mesh((2,), ("tp",), devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="the model has no such tensor"):
        models.load("demo", mesh=mesh, rules={"ffn_sideways": P("tp")})
    with pytest.raises(ValueError, match="blocks of 256 must divide evenly"):
        models.load("demo", mesh=mesh, rules={"attn_output": P(None, "tp")})


@says(
    "docs/arrays.md",
    '`w: plane "ql" of Q6_K is bfloat16, not uint8: was params mapped leaf by leaf? use '
    "is_leaf=jq.is_quantized`",
)
def mapped_leaf_by_leaf():
    w = jq.quantize(np.ones((64, 256)), "Q6_K")
    cast = jax.tree.map(lambda plane: plane.astype(jnp.bfloat16), w)
    with pytest.raises(TypeError) as caught:
        jq.matmul(jnp.ones((1, 256)), cast)
    wanted = 'w: plane "ql" of Q6_K is bfloat16, not uint8: was params mapped leaf by leaf? '
    assert str(caught.value).startswith(wanted + "use is_leaf=jq.is_quantized")


@says(
    "docs/arrays.md",
    "`jax.grad` in `params` raises, because it would differentiate with respect to bytes",
)
@says("docs/troubleshooting.md", "`grad requires real- or complex-valued inputs ... got uint8`")
@says("docs/transforms.md", "`jax.grad` with respect to one raises JAX's `TypeError` for integers")
def gradient_in_packed_weights():
    w = jq.quantize(np.ones((64, 256)), "Q8_0")
    with pytest.raises(TypeError, match=r"grad requires real- or complex-valued inputs .* uint8"):
        jax.grad(lambda w: jq.matmul(jnp.ones((1, 256)), w).sum())(w)


@says("docs/arrays.md", "The search for the best scales is then part of the program")
@says("docs/arrays.md", "the weights of its block become NaN or infinite")
def quantizing_while_tracing():
    quantized = jax.jit(lambda w: jq.quantize(w, "Q8_0"))(jnp.ones((1, 64)).at[0, 40].set(jnp.nan))
    finite = np.isfinite(np.asarray(quantized.dequantize()))
    assert finite[0, :32].all() and not finite[0, 32:].any()


@says(API, "| `jq.implementation(name, activations=..., fused=...)`")
@says("ARCHITECTURE.md", "| `xla` (default elsewhere) | any |")
def implementations():
    row = next(row for row in overview() if "jq.implementation" in row[0])
    assert {name.strip('"') for name in quoted(row[1])} == set(jq.IMPLEMENTATIONS)
    shown = {quoted(cell)[0] for cell, *_ in table("ARCHITECTURE.md", "| implementation |")}
    assert shown == set(jq.IMPLEMENTATIONS)


@says("docs/devices.md", "| operation | axes that may be split |")
def split_operations():
    """The table of devices has the axes of every operation in the table of transforms."""
    shown = {name for cell, _ in table("docs/devices.md", "| operation |") for name in quoted(cell)}
    all_of_them = {quoted(row[0])[0] for row in table("docs/transforms.md", "| operation | jit")}
    assert not all_of_them - shown


# Programs in other processes.

PROCESS = """
import sys

class Refused:  # what is not to be imported
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"jax_q4k", "ptx_kernels"}:
            raise ImportError(name)

sys.meta_path.insert(0, Refused())
"""


def process(code: str, before: str = PROCESS) -> Any:
    """Runs code in a new process and returns the JSON that it prints."""
    command = [sys.executable, "-c", before + textwrap.dedent(code)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@says("docs/export.md", "whose arguments and results are plain arrays needs no import: JAX alone")
@says("docs/export.md", "must `import jax_q4k` before it reads it, for two reasons")
@says("docs/export.md", "on a CPU the kernels are C++ handlers, which it registers as well")
def programs_without_the_import():
    """JAX alone reads and compiles the page's CUDA program; it refuses two others."""
    pytest.importorskip("flatbuffers", reason="flatbuffers is no dependency of jax-q4k")
    page = [b for b in snippets.blocks("docs/export.md") if b.language == "python"]
    code = "".join(block.code for block in page if block.section in ("", "jax.export"))
    code += textwrap.dedent("""
        open("plain.bin", "wb").write(stored)
        checks = {"disabled_checks": jq.EXPORT_CHECKS}
        with_type = export.export(jax.jit(jq.matmul), platforms=["cuda"], **checks)
        open("with_type.bin", "wb").write(with_type(x, w).serialize())
        on_cpu = export.export(jax.jit(product), **checks)
        with jq.implementation("native"):
            open("on_cpu.bin", "wb").write(on_cpu(x, *w.planes).serialize())
    """)
    if native.problem():
        pytest.skip(f"the library of the CPU's kernels is needed: {native.problem()}")
    exec(compile(code, "docs/export.md", "exec"), {"__name__": "snippets"})
    if aot.unavailable() is None:  # needs JAX's CUDA plugin; otherwise the program is only lowered
        shutil.copy(aot.TARGETS / "h200.txtpb", "gpu.txtpb")
    found = process("""
        import json
        import pathlib
        import jax
        from jax import export
        from jax.experimental import topologies

        def tried(call):
            try:
                return str(call())
            except Exception as error:
                return f"{type(error).__name__}: {error}"

        def read(name):
            return export.deserialize(open(name, "rb").read())

        plain, on_cpu = read("plain.bin"), read("on_cpu.bin")
        avals, described = plain.in_avals, pathlib.Path("gpu.txtpb")
        if described.exists():
            one = {"topology_name": "1x1x1", "topology": "1x1x1"}
            gpus = topologies.get_topology_desc(
                platform="cuda", target_config=described.read_text(), **one
            )
            place = jax.sharding.SingleDeviceSharding(gpus.devices[0])
            avals = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place) for a in avals]
        made = jax.jit(plain.call).trace(*avals).lower(lowering_platforms=("cuda",))
        if described.exists():
            made = made.compile()
        zeros = [jax.numpy.zeros(aval.shape, aval.dtype) for aval in on_cpu.in_avals]
        print(json.dumps({
            "plain": made.as_text().count("__gpu$xla.gpu.ptx"),
            "with type": tried(lambda: read("with_type.bin")),
            "on a CPU": tried(lambda: on_cpu.call(*zeros)),
        }))
    """)
    assert found["plain"] >= 1
    assert "unregistered type `jax_q4k.QuantizedArray`" in found["with type"]
    assert "No FFI handler registered for jax_q4k_linear" in found["on a CPU"], found


@says(API, "`ptx_kernels` alone needs only NumPy (IQ1 to IQ3 also need the codebooks of `gguf`)")
def kernels_alone():
    refusing = PROCESS.replace('{"jax_q4k", "ptx_kernels"}', '{"jax", "jaxlib", "flax", "gguf"}')
    code = """
        import json
        from ptx_kernels import formats, simulator
        from ptx_kernels.kernels import KERNELS

        text = KERNELS["argmax"](rows=1, columns=256).text
        needs = []
        for name in formats.names():
            try:
                KERNELS["decode"](format=name, n=1, blocks=1)
            except ImportError:
                needs.append(name)
        print(json.dumps({"text": len(text), "needs gguf": needs}))
    """
    found = process(code, refusing)
    assert found["text"] > 1000
    assert found["needs gguf"] == [n for n in formats.names() if re.match("IQ[123]", n)]


# Compiled files, kernels of the CPU.


@says(
    "docs/export.md",
    "Its `field` names what is wrong: `file` (not a regular file), `magic`, `header`, `body`, "
    "`program`, `device`, `versions`, `model` or `shapes`",
)
def fields_of_errors():
    """The page lists exactly the fields of errors that the code raises."""
    page = (ROOT / "docs/export.md").read_text()
    shown = quoted(
        " ".join(page.partition("Its `field` names")[2].partition(". Checksums")[0].split())
    )
    source = inspect.getsource(compiled_files)
    raised = set(re.findall(r'CompiledFileError\(file, "(\w+)"', source))
    raised |= set(re.findall(r'^        \("(\w+)", header\.', source, re.MULTILINE))
    assert raised == set(shown) - {"field"}


@says("docs/export.md", "`--target cpu` compiles for this machine")
def targets():
    assert set(compiled_files.TARGETS) == {"cpu", "h200", "t4"}


@says(INSTALL, "for AVX-512 VNNI, AVX-VNNI, AVX2, NEON and plain C++")
@says(README, "AVX-512 VNNI, AVX-VNNI, AVX2, NEON, portable C++")
@says(INSTALL, "(`avx512`, `avxvnni`, `avx2`, `neon` or `portable`)")
def sets_of_kernels():
    names = {name for kernels in build._KERNELS.values() for name in kernels}
    assert names == {"avx512", "avxvnni", "avx2", "neon", "portable"}
    assert native.VARIABLE == "JAX_Q4K_KERNELS"


@says(INSTALL, "`PJRT_NPROC=4` in the environment, sets their number")
def threads():
    assert bench.THREADS == "PJRT_NPROC"


@says("docs/performance.md", "A thread that waits for another one sleeps after 100 us")
def waiting_threads():
    assert "kLinger{100}" in (ROOT / "jax_q4k/native/src/threads.h").read_text()


# Versions.


@says(README, "Python 3.11 or newer; JAX 0.10.2 to 0.12 (0.11 and newer need Python 3.12)")
@says(INSTALL, "Python 3.11 or newer; JAX 0.10.2 to 0.12 (0.11 and newer need Python 3.12)")
def versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11" and "jax>=0.10.2,<0.13" in project["dependencies"]


@says("docs/simulator.md", "reads the machine code of sm_75, sm_80, sm_90 and sm_120")
def executed_machine_code():
    assert machine_code.TARGETS == ("sm_75", "sm_80", "sm_90", "sm_120")


@says("docs/simulator.md", "with `ptxas` for sm_75, sm_80, sm_90, sm_100 and sm_120")
@says(INSTALL, "a Turing GPU or newer (sm_75)", "more than 64 KB of shared memory per block")
@says(README, "NVIDIA, [Turing](docs/install.md#turing) (sm_75) or newer")
def architectures():
    assert TARGETS == ("sm_80", "sm_90", "sm_100", "sm_120")
    assert (oldest.LEAST, oldest.OLDER_SHARED_BYTES) == (75, 64 << 10)


@says(INSTALL, "525 is the first for CUDA 12.0, whose PTX 8.0 kernels for sm_90 need")
def gpus_and_their_evidence():
    rows = table(INSTALL, "| GPUs | machine code")
    known = {arch for row in rows for arch in re.findall(r"sm_\d+", row[1])}
    assert known == {device.arch for device in devices.DEVICES.values()}
    for _, archs, _, evidence in rows[:-1]:
        (run_as,) = re.findall(r"as (sm_\d+)", evidence) or [archs]
        assert ("executed" in evidence) == (run_as in machine_code.TARGETS)
        assert ("assembled" in evidence) == (run_as in (*TARGETS, "sm_75"))
    assert PTX_VERSIONS[90] == (8, 0)


@says(
    INSTALL,
    "For groups of query heads over bfloat16 pages they attend without tensor cores",
    "Prompts of more than 64 tokens decode the weights to float16",
    "once per chunk from float16 pages, and once per token from others",
)
def rules_for_turing():
    t4 = devices.target("Tesla T4")
    pages = {
        dtype: paged_attention_rule(t4, 1, 32, 8, 128, 512, dtype).tensor_cores
        for dtype in ("bf16", "f16", "int8", "fp8")
    }
    assert pages == {"bf16": False, "f16": True, "int8": True, "fp8": True}
    matrix = ("Q4_K",), (4096,), 4096
    decoded = [decoded_products_rule(t4, *matrix, m).decoded for m in (64, 65)]
    assert decoded == [False, True]
    chunk = 1, 512, 8, 128, 4096
    once = [piece_attention_rule(t4, *chunk, dtype, None, 4096) for dtype in ("f16", "bf16", "f32")]
    assert once == [True, False, False]
    assert not prompt_attention_rule(t4, 128, 128, 2)


# Pages about kernels: constants of the cost model, and rules.


@says(
    COST,
    "seconds = 1.3 us + prologue + first",
    "0.8 us for memory under the load of all blocks, 0.3 us for the L2 cache",
)
@says(
    COST,
    "0.5 us for memory that is idle and up to 0.8",
    "A cluster barrier is assumed to take 0.2 us, and a load from a peer's shared memory 0.1",
)
def constants_of_the_model():
    assert (cost.LAUNCH, cost.MEMORY_LATENCY, cost.IDLE_LATENCY) == (1.3e-6, 0.8e-6, 0.5e-6)
    assert (cost.L2_LATENCY, cost.CLUSTER_BARRIER, cost.PEER_LATENCY) == (0.3e-6, 0.2e-6, 0.1e-6)


@says(
    COST,
    "(4.3 TB/s on an H200)",
    "each block's sectors once, at 5.5 TB/s",
    "1.98 GHz, or 1.7 where tensor cores work",
)
@says(TUNING, "products at 700 TFLOP/s", "only the H100, H200 and GH200 have one")
def facts_of_devices():
    h200 = devices.find_device("H200")
    assert (h200.bandwidth, round(h200.l2_bandwidth / 1e12, 1)) == (4.3e12, 5.5)
    assert (h200.clock_hz, h200.tensor_clock_hz, h200.dot_float_ops) == (1.98e9, 1.7e9, 700e12)
    known = {name for name, device in devices.DEVICES.items() if device.dot_float_ops}
    assert known == {"H100", "H200", "GH200"}


@says(KERNELS, "A launch prefetches at most a sixth of the L2 cache")
def prefetched():
    assert prefetch.prefetch_rule(H200) == devices.find_device("H200").l2_bytes // 6


@says(
    TUNING,
    "decoded products must be better by 1.4 than float16 kernels by these estimates. They must "
    "be better by 1.25 than float32 products and by 1.8 than int8 kernels",
    "are decoded to float16 from 65 rows on",
    "decode from 65 rows on whatever the estimate, if rows and columns are multiples of 8",
)
def gains_of_decoding():
    assert decoded._GAIN == {"f16": 1.4, "int8": 1.8, "f32": 1.25} and FEW_ROWS == 64
    assert [n for n in range(64, 81) if decoded.decodable((n,), 4096, 1)] == [64, 72, 80]


@says("docs/kernel-tables.md", "chooses f16 where the device's rate is known, from 17 rows on")
@says(KERNELS, "From 17 rows on products are f16 where the device's rate is known")
def f16_products():
    assert [m for m in (8, 16, 17, 18) if f16_products_rule(H200, ("Q4_K",), m)] == [17, 18]


@says(
    TUNING,
    "Tables override the rules for mat-vecs (`matvec`), mat-vecs with prologues, epilogues or "
    "several matrices (`fused_matvec`), matrix products of prompts (`gemm`) and the choice between "
    "those and [decoded weights](#decoded-products) (`decoded_products`)",
)
def overruled_rules():
    rules = {rule.name: rule for family in FAMILIES.values() for rule in family.rules}
    overruled = {name for name, rule in rules.items() if rule.rows is not None}
    assert overruled == {"matvec", "fused_matvec", "gemm", "decoded_products"}


@says(
    "docs/performance.md",
    "A run that hangs is ended after 525 seconds",
    "`tests/gpu`, for 200 seconds at most",
)
@says(TUNING, "540 seconds, main shapes first")
@says(TUNING, "nine minutes: ptx_kernels/tuning/tuned/DEVICE.json")
def seconds_of_measuring():
    gpu = (ROOT / "benchmarks/gpu.py").read_text()
    seconds = int(re.search(r'"--seconds", type=float, default=(\d+)', gpu)[1])
    over = int(re.search(r"^_OVERTIME = (\d+)", gpu, re.MULTILINE)[1])
    share = float(re.search(r"^_TESTS_SHARE = ([\d.]+)", gpu, re.MULTILINE)[1])
    assert (seconds + over, seconds * share) == (525, 200)
    assert "math.inf if options.model else 540" in (ROOT / "tools/tune.py").read_text()


@pytest.mark.parametrize("statement", statements.parameters())
def test_statement(statement, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    statement.test()


def test_a_statement_that_is_gone_or_false_fails():
    other = Statements()
    other.says(README, "runs on the moon")(lambda: None)
    other.says(README, "# jax-q4k")(lambda: pytest.fail("it is false"))
    gone, false = (parameter.values[0] for parameter in other.parameters())
    with pytest.raises(AssertionError, match="does not say this any more"):
        gone.test()
    with pytest.raises(pytest.fail.Exception, match="it is false"):
        false.test()
