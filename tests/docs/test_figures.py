"""Figures on pages match benchmarks/results/, the demo model, and the recipes."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from support.model_sizes import packed_tensors
from support.statements import ROOT, Statements, quoted, table

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models.config.tensors import expected_tensors
from jax_q4k.models.files.quantizing import recipes
from ptx_kernels.devices import REFERENCE
from ptx_kernels.kernels import KERNELS
from ptx_kernels.kernels.matvec import PRESETS
from ptx_kernels.machine_code.accesses import accesses
from ptx_kernels.machine_code.model import MEASURED
from tools import cards, event_model
from tools.random_model import LLAMA_3_1_8B

statements = Statements()
says = statements.says

PEERS = ("ours", "llama.cpp", "ik_llama.cpp")
PERFORMANCE, PREDICTIONS = "docs/performance.md", "docs/predictions.md"
#: Rows of the tables of CPUs -> the keys of results, figure by figure.
ROWS = {
    "prompt of 128 / 512": ("prefill_128", "prefill_512"),
    "prompt of 128 / 512, tokens per second": ("prefill_128", "prefill_512"),
    "decode, no context / after 2048": ("decode_0", "decode_2048"),
    "decode, batch of 2 / 4 / 8 / 16": ("batch_2", "batch_4", "batch_8", "batch_16"),
    "decode, another program busy on each core": ("decode_shared",),
    "peak memory of a prompt of 512, MiB": ("peak_megabytes_512",),
}


def results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def of_threads(name: str, threads: int) -> dict[str, Any]:
    return next(run for run in results(name)["results"] if run["threads"] == threads)


def assert_cell(cell: str, run: dict[str, float], keys: tuple[str, ...]) -> None:
    """Compares a cell's figures with a result, rounded to the digits that the page shows."""
    shown = cell.split(" / ")
    for figure, key in zip(shown, keys, strict=True):
        digits = len(figure.partition(".")[2])
        assert figure == f"{run[key]:.{digits}f}", key


@says(PERFORMANCE, "A Llama with 1.04 billion weights, beside llama.cpp and its fork")
def llama_beside_peers():
    for name, *cells in table(PERFORMANCE, "| | 1 core"):
        for at, cell in enumerate(cells):
            run = of_threads("cpu", 1 + at // 3)[PEERS[at % 3]]
            assert_cell(cell, run, ROWS[name])


@says(PERFORMANCE, "The shapes of Gemma 3 1B and Qwen 3.5 0.8B, and a mixture of experts")
def other_shapes():
    files = ("cpu_gemma3_1b", "cpu_qwen35_800m", "cpu_moe_3b")
    for name, *cells in table(PERFORMANCE, "| | Gemma 3 1B"):
        for at, cell in enumerate(cells):
            assert_cell(cell, of_threads(files[at // 2], 2)[PEERS[at % 2]], ROWS[name])


@says("README.md", "1.1 to 2.4 times the tokens per second of llama.cpp on two cores")
def beside_llama_cpp():
    """The range for four models, three figures each."""
    keys = ("decode_0", "decode_2048", "prefill_512")
    found = [
        run["ours"][key] / run["llama.cpp"][key]
        for file in ("cpu", "cpu_gemma3_1b", "cpu_qwen35_800m", "cpu_moe_3b")
        for run in [of_threads(file, 2)]
        for key in keys
    ]
    assert f"{min(found):.1f} {max(found):.1f} {len(found)}" == "1.1 2.4 12"


@says(
    PERFORMANCE,
    "The first token follows after 0.5 s, most of it compilation, or after 0.1 s with programs",
    "Decoding reads weights at nine tenths of the rate at which these cores can read memory",
    "Loading the 1.04 B model takes 0.8 to 1.3 s",
    "An idle model uses no CPU",
)
def first_tokens():
    runs = [of_threads("cpu", threads)["ours"] for threads in (1, 2)]
    assert {f"{ours['load_seconds']:.1f}" for ours in runs} == {"0.8", "1.3"}
    for ours in runs:
        assert ours["idle_percent"] < 0.1
        assert round(ours["first_token_seconds"], 1) == 0.5
        assert round(ours["kept_first_token_seconds"], 1) == 0.1
        assert round(ours["read_share"], 1) == 0.9


def started(stage: str) -> dict[str, float]:
    return next(run for run in results("startup")["results"] if run["stage"] == stage)


@says(
    PERFORMANCE,
    "the first token of `jax-q4k generate` comes 0.93 s after the process starts if its programs "
    "are cached and 1.85 s the first time; that of `llama-completion` comes after 0.78 s, "
    "each the fastest of five",
)
def starts():
    second = started("command, llama-1b, second start: first token")
    first = started("command, llama-1b, first start: first token")
    assert f"{second['seconds']:.2f} {second['llama.cpp']:.2f}" == "0.93 0.78"
    assert f"{first['seconds']:.2f}" == "1.85" and results("startup")["repeats"] == 5


@says(
    PERFORMANCE,
    "gives 1.6 to 2.1 times as many tokens per second on repetitive text, and 0.97 to 1.04 times "
    "as many on other text. On the demo model, whose steps take 0.3 ms, the factor is 1.0",
)
def drafts():
    cases = results("drafts")["cases"]
    ratios = {name: case["ratios"] for name, case in cases.items()}
    repeating, draws = ratios["a text that repeats itself"], ratios["a text of draws"]
    assert f"{min(repeating):.1f} {max(repeating):.1f}" == "1.6 2.1"
    assert f"{min(draws):.2f} {max(draws):.2f}" == "0.97 1.04"
    for name in ("the demo model, greedy", "the demo model, of draws"):
        assert round(cases[name]["ratio"], 1) == 1.0
        assert round(1000 / cases[name]["plain_tokens_per_second"], 1) == 0.3


@says(PERFORMANCE, "prompts are 1.14 to 1.26 times as fast as with ik_llama.cpp")
def avx2():
    runs = [run["ratios"]["ik_llama.cpp"] for run in results("cpu_avx2")["results"]]
    ratios = [x for run in runs for key in ("prefill_128", "prefill_512") for x in run[key]]
    assert f"{min(ratios):.2f} {max(ratios):.2f}" == "1.14 1.26"


@says(
    PERFORMANCE,
    "8.0 times the speed of one thread for prompts of 512 tokens with 8 threads, and 6.5 times "
    "for decoding",
)
def threads():
    figures = {run["figure"]: run["predicted"] for run in results("cpu_threads")["results"]}
    times = {name: predicted["8"] / predicted["1"] for name, predicted in figures.items()}
    assert f"{times['prefill_512']:.1f} {times['decode_0']:.1f}" == "8.0 6.5"


def predicted(shape: str) -> dict[str, dict[str, Any]]:
    """Predictions of a model's programs, by the names that docs/predictions.md gives them."""
    found = {}
    for program in results("step_times")["programs"]:
        after = f" after {program['before']}" if program.get("before") else ""
        prompt = f"prompt of {program['prompt']}{after}"
        what = prompt if program["prompt"] else f"batch {program['batch']}"
        if program["shape"] == shape:
            found[what] = program
    return found


@says(PREDICTIONS, "They agree within 15 % on each of these")
def whole_programs():
    now = predicted("llama-3.1-8b")
    rows = table(PREDICTIONS, "| program | launches")
    assert [what for what, *_ in rows] == list(now)
    for what, launches, us, by_events, of_xla, rate, event_rate in rows:
        one = now[what]
        seconds = [one[key] for key in ("seconds", "event_seconds", "xla_seconds")]
        assert [us, by_events, of_xla] == [f"{1e6 * s:.0f}" for s in seconds]
        rates = one["tokens_per_second"], one["event_tokens_per_second"]
        assert [launches, rate, event_rate] == [f"{x:.0f}" for x in (one["launches"], *rates)]
        assert abs(one["apart"]) < 0.15


@says(PREDICTIONS, "takes 0.92 to 1.25 times its time here, a batch of 8 up to 1.73 times")
def uncertainty():
    now = predicted("llama-3.1-8b")
    one, eight, *_ = results("step_ranges")["programs"]
    base = [now[f"batch {n}"]["event_tokens_per_second"] for n in (1, 8)]
    ends = base[0] / one["fast"], base[0] / one["slow"], base[1] / eight["slow"]
    assert [f"{end:.2f}" for end in ends] == ["0.92", "1.25", "1.73"]


@says(PREDICTIONS, "## Ranges", "had other Configs for batches of 8 and 32")
def ranges():
    found = results("step_ranges")
    assert found["assumptions"] == [dataclasses.asdict(each) for each in event_model.UNCERTAIN]
    rows = table(PREDICTIONS, "| program | worse")
    now, measured = predicted("llama-3.1-8b"), on_gpu("h200")["models"]
    for (what, *shown), one in zip(rows, found["programs"], strict=True):
        batch, prompt = one["asked"]["batch"], one["asked"]["prompt"]
        (rate,) = (
            m["tokens_per_second"]
            for m in measured
            if "8B" in m["name"]
            and (m["tokens"] == prompt if "ms" in m else m["batch"] == batch and not prompt)
        )
        if prompt == 512:  # with decoded weights, as by today's rule
            (rate,) = (
                1e3 * prompt / m["decoded_ms"]
                for m in results("gpu_decoded_h200")["prompts"]
                if m["tokens"] == prompt
            )
            assert f"{one['slow'] / rate - 1:.0%}" == "1%"
        base = now[what]["event_tokens_per_second"]
        assert what == (f"prompt of {prompt}" if prompt else f"batch {batch}")
        assert shown == [f"{x:.0f}" for x in (one["slow"], base, one["fast"], rate)]
        assert one["slow"] < base < one["fast"]
    said = table(PREDICTIONS, "| assumption | worse")
    units = {"launch": 1e6, "memory_latency": 1e6, "memory_rate": 4.3, "l2_rate": 5.5}
    units |= {"clock_rate": 1.98, "dot_rate": 700}
    for (_, slow, fast, reason), each in zip(said, event_model.UNCERTAIN, strict=True):
        unit = units.get(each.name, 1)
        assert [slow, fast] == [f"{unit * end:.3g}" for end in (each.slow, each.fast)]
        assert reason == each.reason


def on_gpu(device: str, date: str = "20261126") -> Any:
    return results(f"gpu-nvidia-{device}-{date}")


def engine_on_gpu() -> Any:
    return on_gpu("h100-80gb-hbm3", "20261128")


@says(
    "docs/performance.md",
    "predicted, H200 | times as long as predicted",
    "**Single sequences** take up to a quarter longer than predicted",
    "**Long prompts** are within 6 % of the prediction",
    "17194 tokens/s on the H100",
    "3222 tokens/s for batch 8 and 7314 for batch 32",
)
@says(
    "README.md",
    "decodes 549 tokens/s on the H200 (687 were predicted), and processes a prompt of 4096 tokens "
    "at 28258 tokens/s",
)
def measured_programs():
    rates, now = {}, engine_on_gpu()["models"]
    for device in ("h100-80gb-hbm3", "h200"):
        before = [
            one for one in on_gpu(device)["models"] if one["tokens"] == 512 or "200" in device
        ]
        for one in before + [one for one in now if one["tokens"] != 512 and "100" in device]:
            prompt = "ms" in one
            what = f"prompt of {one['tokens']}" if prompt else f"batch {one['batch']}"
            if "8B" in one["name"]:
                rates[device, what] = one["tokens_per_second"]
    foreseen, late = on_gpu("h200")["predicted_before"], {}
    for name, h100, h200, rate, ratio in table(PERFORMANCE, "| program | H100 | H200"):
        what = name.removesuffix(", packed")
        late[what] = foreseen[what] / rates["h200", what]
        assert [h100, h200] == [f"{rates[d, what]:.0f}" for d in ("h100-80gb-hbm3", "h200")]
        assert (rate, ratio) == (str(foreseen[what]), f"{late[what]:.2f}")
    assert len(late) == 5 and late["batch 1"] <= 1.26 and late["prompt of 4096"] <= 1.065
    (decoded,) = (one["tokens_per_second"] for one in now if one["tokens"] == 512)
    assert f"{decoded:.0f}" == "17194"
    later = (predicted("llama-3.1-8b")[f"batch {batch}"] for batch in (8, 32))
    assert [f"{one['tokens_per_second']:.0f}" for one in later] == ["3222", "7314"]


@says(
    "docs/performance.md", "| clients | engine, tokens/s | deterministic | `generate`", "after 9 ms"
)
def engine_on_a_gpu():
    found = engine_on_gpu()["engine"]
    for clients, *shown in table(PERFORMANCE, "| clients | engine, tokens/s | deterministic"):
        one = found["clients"][clients]
        names = ("engine", "deterministic", "generate")
        rates = [f"{one[name]['tokens_per_second']:.0f}" for name in names]
        engine = one["engine"]
        host = f"{engine['host_ms_per_step']:.1f} of {engine['step_ms']:.1f} ms"
        assert shown == [*rates, f"{1e3 * engine['first_token_p50']:.0f} ms", host]
    long, cached = (found[name]["engine"] for name in ("long_prompt", "cached_prompt"))
    assert (f"{long['first_token']:.2f}", f"{1e3 * long['gap_p99']:.0f}") == ("0.20", "51")
    assert [f"{1e3 * cached[key]:.0f}" for key in ("cached", "new")] == ["9", "86"]


@says("docs/serving.md", "medians of three rounds", "| clients | server, tokens/s | llama-server")
def server_beside_llama_server():
    found = results("server")["clients"]
    shown = table("docs/serving.md", "| clients | server, tokens/s | llama-server")
    assert [row[0] for row in shown] == list(found)
    for clients, *figures in shown:
        ours, theirs = found[clients]["server"], found[clients]["llama-server"]
        speeds = [one["tokens_per_second"] for one in (ours, theirs)]
        want = [f"{speed:.1f}" for speed in speeds] + [f"{speeds[0] / speeds[1]:.2f}"]
        want.append(f"{100 * found[clients]['overhead']:.1f} %")
        want += [f"{one['first_token_p50']:.2f}" for one in (ours, theirs)]
        assert figures == want + [f"{1e3 * one['gap_p99']:.0f}" for one in (ours, theirs)]


@says(
    "docs/engine.md",
    "wait 0.16 s for a token (p99), those of llama-server 1.4 s",
    "first token after 0.06 s, a new one after 0.43 s",
    "after 0.20 s (p50), llama-server's after 0.35 s",
    "1.0 ms of a step of 13 ms with one client, and 2.0 of 78 ms with 16",
)
def engine_beside_llama_server():
    found = results("engine")
    for clients, *shown in table("docs/engine.md", "| clients | engine, tokens/s | llama-server"):
        one = found["clients"][clients]
        names = ("engine", "llama-server", "generate", "deterministic")
        ours, peer, *others = (one[name]["tokens_per_second"] for name in names)
        cells = [f"{ours:.1f}", f"{peer:.1f}", f"{ours / peer:.2f}", *(f"{x:.1f}" for x in others)]
        cells += [f"{one[name]['first_token_p50']:.2f}" for name in names[:2]]
        assert shown == cells + [f"{1e3 * one[name]['gap_p99']:.0f}" for name in names[:2]]
    gaps = [found["long_prompt"][name]["gap_p99"] for name in names[:2]]
    assert [f"{gap:.2g}" for gap in gaps] == ["0.16", "1.4"]
    cached = found["cached_prompt"]["engine"]
    assert [f"{cached[name]:.2f}" for name in ("cached", "new")] == ["0.06", "0.43"]
    random = [found["poisson_0.75"][name]["first_token_p50"] for name in names[:2]]
    assert [f"{x:.2f}" for x in random] == ["0.20", "0.35"]
    steps = [found["clients"][count]["engine"] for count in ("1", "16")]
    hosts = [f"{s['host_ms_per_step']:.1f} {s['step_ms']:.0f}" for s in steps]
    assert hosts == ["1.0 13", "2.0 78"]


@says(
    "docs/engine.md",
    "2.45, 1.57, 1.21 and 1.30 times the tokens per second without it",
    "drafts nothing: 0.99 to 1.01 times",
)
def drafts_of_an_engine():
    repeating, draws = results("engine_drafts")["cases"].values()
    shown = [f"{found['ratio']:.2f}" for found in repeating["rows"].values()]
    assert shown == ["2.45", "1.57", "1.21", "1.30"]
    without = draws["rows"].values()
    assert not any(found["drafted"] for found in without)
    assert all(0.985 < found["ratio"] < 1.015 for found in without)


@says(
    "docs/performance.md",
    "Of 117 kernels on the H200 the median takes 1.1 times the predicted time, and 85 are within "
    "a quarter of it",
    "Single kernels, in CUDA graphs",
)
def measured_kernels():
    found = [{k["name"]: k for k in on_gpu(d)["kernels"]} for d in ("h100-80gb-hbm3", "h200")]
    for name, *shown in table("docs/performance.md", "| kernel | H100, us"):
        cells = []
        for kernel in (of[name] for of in found):
            cells += [f"{1e6 * kernel[key]:.1f}" for key in ("seconds", "predicted")]
            cells.append(f"{kernel['gigabytes_per_second']:.0f}")
        assert shown == cells
    late = sorted(k["seconds"] / k["predicted"] for k in found[1].values())
    assert (len(late), f"{late[len(late) // 2]:.1f}") == (117, "1.1")
    assert sum(abs(ratio - 1) < 0.25 for ratio in late) == 85


@says(
    "docs/cost-model.md",
    "2.0 times as many sectors as there are",
    "would otherwise take 24.0 us for L2 alone, and [took 19.9 us]",
)
def half_sectors():
    measured = {k["name"]: k for k in on_gpu("h200")["kernels"]}["gated_matvec Q4_K 14336x4096"]
    config = PRESETS["batched"]
    assert f"lanes={config.lanes}," in measured["config"]
    kernel = KERNELS["matvec"](format="Q4_K", n=64, columns=4096, m=1, config=config)
    excess = accesses(kernel).sector_excess
    through_l2 = excess * measured["bytes"] / REFERENCE.l2_bandwidth
    shown = f"{excess:.1f} {1e6 * through_l2:.1f} {1e6 * measured['seconds']:.1f}"
    assert shown == "2.0 24.0 19.9"


@says(PREDICTIONS, "`python -m tools.cards` predicts a step of one sequence of Llama 3.1 8B")
def other_gpus():
    found = results("cards")["cards"]
    assert {one["name"]: one["published"] for one in found} == {
        name: cards.PUBLISHED.get(name) for name in (*cards.OTHERS, *cards.PUBLISHED)
    }
    assert cards.SOURCE in (ROOT / PREDICTIONS).read_text()
    rows = table(PREDICTIONS, "| GPU | predicted")
    assert rows == [
        [
            one["name"],
            f"{one['predicted']:.0f}",
            cards.Card(**one).range,
            "" if one["published"] is None else f"{one['published']:.0f}",
        ]
        for one in sorted(found, key=lambda one: one["predicted"])
    ]


@says("docs/kernel-tables.md", "took from 0.4 to 1.9 times as long as predicted")
def all_measured_kernels():
    late = [k["seconds"] / k["predicted"] for k in on_gpu("h200")["kernels"]]
    assert (f"{min(late):.1f}", f"{max(late):.1f}") == ("0.4", "1.9")
    chosen = [
        k["seconds"] / k["predicted"]
        for k in on_gpu("h200")["kernels"]
        if "preset" not in k["name"]
    ]
    assert MEASURED == (round(min(chosen), 1), round(max(chosen), 1))


@says(
    "docs/performance.md",
    "the 70 golden models",
    "by an NMSE of 7e-11 at most",
    "of 68 models; qwen3next and starcoder2",
)
@says("README.md", "the 70 golden models")
def golden_models_on_gpus():
    found = results("gpu_golden")["models"]
    folder = ROOT / "tests" / "data" / "golden"
    files = {f.stem for of in (folder, folder / "formats") for f in of.glob("*.npz")}
    assert files - {one["name"] for one in found} == {"qwen3next", "starcoder2"}
    assert (len(found), len(files)) == (68, 70)
    assert all(one["greedy_equal"] and one["f32_nmse"] <= 7e-11 for one in found)


@says(
    "docs/performance.md",
    "account for 91 to 98 % of their time on the H200",
    "cuBLAS's products reach 766 TFLOP/s instead of the assumed 700",
)
def kernels_of_programs():
    shown = table("docs/performance.md", "| program | kernels, us")
    programs = results("gpu_profile_h200")["programs"]
    assert [us for _, us, _ in shown] == [f"{p['kernels_us']:.0f}" for p in programs]
    walls = [m.get("ms", m.get("ms_per_token")) for m in on_gpu("h200")["models"][:5]]
    parts = [p["kernels_us"] / wall / 1e3 for p, wall in zip(programs, walls, strict=True)]
    assert (f"{min(parts):.0%}", f"{max(parts):.0%}") == ("91%", "98%")
    products = sum(
        k["launches"] * k["us_each"]
        for k in programs[-1]["kernels"]
        if k["name"].startswith("nvjet")
    )
    columns = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 14336 * 4096
    assert f"{2 * 4096 * columns * 32 / products / 1e6:.0f}" == "766"


@says("docs/performance.md", "Whole prompts with all weights packed and with all weights decoded")
def packed_and_decoded():
    found = results("gpu_decoded_h200")["prompts"]
    rows = dict((name, cells) for name, *cells in table("docs/performance.md", "| tokens | 96"))
    for name, key in (("packed", "packed_ms"), ("decoded", "decoded_ms")):
        assert rows[name] == [str(one[key]) for one in found]


@says(
    PREDICTIONS,
    "Qwen 3 30B-A3B runs at 8989 tokens per second",
    "one of Gemma 3 12B at 10544",
    "Gemma 3 12B processes 20554 tokens per second",
    "The models differ by more than 15 % for short prompts of Qwen 3 30B-A3B",
)
def other_models():
    qwen, gemma = (predicted(shape) for shape in ("qwen3-30b-a3b", "gemma-3-12b"))
    piece = "prompt of 256 after 4096"
    rates = [p["tokens_per_second"] for p in (qwen[piece], gemma[piece], gemma["prompt of 4096"])]
    assert [f"{rate:.0f}" for rate in rates] == ["8989", "10544", "20554"]
    apart = {what: abs(program["apart"]) > 0.15 for what, program in qwen.items()}
    assert apart == {what: "prompt of 512" in what or "256" in what for what in qwen}
    assert not any(abs(program["apart"]) > 0.15 for program in gemma.values())


@says("docs/simulator.md", "they catch 299 of 300 bugs injected into the PTX")
def mutants():
    assert (results("mutation")["mutants"], results("mutation")["killed"]) == (300, 299)


@says("README.md", "the demo model, which has 4.6 million weights", "a 3 MB model that comes with")
@says("docs/flax.md", "Model(llama, 6 layers, 2948736 bytes of weights)")
def demo():
    model = models.load("demo")
    sizes = [math.prod(t.shape) for t in models.named_tensors(model).values()]
    assert f"{sum(sizes) / 1e6:.1f}" == "4.6"
    assert round(models.demo_path().stat().st_size / 1e6) == 3
    assert repr(model) == "Model(llama, 6 layers, 2948736 bytes of weights)"


@says("docs/quantizing.md", "llama.cpp's recipe: Q4_K, Q5_K, Q6_K")
def recipe_of_the_demo():
    model = models.load("demo")
    shapes = {name: t.shape for name, t in models.named_tensors(model).items()}
    types = recipes.tensor_types(recipes.get("Q4_K_S"), model.config, shapes)
    assert set(types.values()) == {"Q4_K", "Q5_K", "Q6_K", "F32"}


def bits_a_weight(recipe: str) -> float:
    """Bits of all tensors of Llama 3.1 8B divided by its weight count."""
    found = packed_tensors(LLAMA_3_1_8B, recipe).values()
    return 8 * sum(one.nbytes for one in found) / sum(math.prod(one.shape) for one in found)


@says("README.md", "Llama 3.1 8B in Q4_K_M takes 4.9 GB instead of 16 GB in bfloat16")
def gigabytes():
    needed = {n: e.shape for n, e in expected_tensors(LLAMA_3_1_8B).items() if e.required}
    weights = sum(map(math.prod, (needed | {"output.weight": (128256, 4096)}).values()))
    assert f"{weights * bits_a_weight('Q4_K_M') / 8e9:.1f} {weights * 2 / 1e9:.0f}" == "4.9 16"


@says("docs/quantizing.md", "Bits are those of Llama 3.1 8B, over all tensors")
def bits():
    shown = {}
    for names, figures, _ in table("docs/quantizing.md", "| type | bits"):
        shown |= dict(zip(quoted(names), figures.split(", "), strict=True))
    assert shown == {name: f"{bits_a_weight(name):.1f}" for name in recipes.RECIPES}


@says(
    "docs/arrays.md",
    "(64, 256), 2, 16384 weights, 13440 bytes",
    "nnx.Param only: 13 norms here",
)
def sizes():
    w = jq.quantize([[1.0] * 256] * 64, "Q6_K")
    assert (w.shape, w.ndim, w.size, w.nbytes) == ((64, 256), 2, 16384, 13440)
    tensors = models.named_tensors(models.load("demo"))
    assert sum(not jq.is_quantized(tensor) for tensor in tensors.values()) == 13


@pytest.mark.parametrize("statement", statements.parameters())
def test_statement(statement):
    statement.test()
