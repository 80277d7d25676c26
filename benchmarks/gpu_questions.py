"""Questions for the first hour on a GPU, each answered by a small measurement in one line.

They concern unmeasured assumptions of the cost model (`ptx_kernels.machine_code.model`), and
choices based on them. `QUESTIONS` is the list. To add a question, write a function
`Bench -> Answer` and add an entry there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from ptx_kernels.driver import Device, rotated
from ptx_kernels.kernels import KERNELS, prefetch_rule
from ptx_kernels.kernels.gemm import GemmConfig
from ptx_kernels.kernels.matvec import fused_matvec_rule, matvec_rule
from ptx_kernels.kernels.matvec.rules import even_blocks
from ptx_kernels.kernels.operands import random_operands
from ptx_kernels.machine_code.model import CLUSTER_BARRIER, LAUNCH
from ptx_kernels.probes import cluster_barriers, cluster_ring, ring_result
from ptx_kernels.ptx import Builder, Kernel, Prefetch, kernel, u8
from ptx_kernels.simulate import deviation
from ptx_kernels.tuning import choose, current_device
from tools.tune import MOST_NMSE

from . import gpu_kernels
from .common import part_of
from .gpu_kernels import Measurement, Timed, packed_bytes
from .gpu_predictions import Predictions
from .gpu_sizes import Sizes
from .module_loads import measure_loads

_CLUSTERS = (2, 4, 8)  # blocks
_FEW_ROWS = (1, 4)  # of activations


@dataclass(frozen=True)
class Bench:
    """Resources for answering a question.

    Attributes:
      copy_bandwidth: bytes/s of a copy, read plus written.
      dry_run: whether the device is simulated.
    """

    gpu: Device
    sizes: Sizes
    copy_bandwidth: float
    predictions: Predictions
    dry_run: bool = False

    def measure(self, timed: Timed) -> Measurement:
        return gpu_kernels.measure(
            self.gpu, timed, self.copy_bandwidth, self.predictions.of(timed[1])
        )


@dataclass(frozen=True)
class Answer:
    """Answer to a question.

    Attributes:
      line: text for readers.
      measured: numbers by name, times in seconds.
      kernels: kernels that were timed for it.
    """

    line: str
    measured: dict[str, Any] = field(default_factory=dict)
    kernels: Sequence[Measurement] = ()

    def as_dict(self) -> dict[str, Any]:
        kernels = [row.as_dict() for row in self.kernels]
        return {"answer": self.line, "measured": self.measured, "kernels": kernels}


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
      name: unique.
      asks: the question, in a line.
      answer: measures it. An exception fails only this question.
      kernels: kernels that it times and that have predictions.
    """

    name: str
    asks: str
    answer: Callable[[Bench], Answer]
    kernels: Callable[[Sizes], Sequence[Timed]] = lambda sizes: ()


def _us(seconds: float | None) -> str:
    return "not known" if seconds is None else f"{1e6 * seconds:.2f} us"


def _beside(row: Measurement) -> str:
    """Formats `7.52 us (predicted 4.90 us, l1)`."""
    bound = f", {row.bound}" if row.bound else ""
    return f"{_us(row.seconds)} (predicted {_us(row.predicted)}{bound})"


def _agreeing(gpu: Device, kernels: Sequence[Kernel]) -> float:
    """Returns the largest NMSE of kernels' results against the first one's, on the same operands.

    Raises RuntimeError if it is more than a different order of sums explains.
    """
    operands = random_operands(kernels[0])
    first, *others = (gpu.run(each, *operands) for each in kernels)
    largest = 0.0
    for built, other in zip(kernels[1:], others, strict=True):
        error = float(np.max([*map(deviation, built.results, first, other)]))
        if not error <= MOST_NMSE:
            raise RuntimeError(f"{built.name} computes something else: NMSE {error:.1e}")
        largest = max(largest, error)
    return largest


# --- the launch ---


@kernel
def empty(k: Builder, *, blocks: int) -> None:
    """Does nothing, with one warp per block."""
    k.launch((blocks,), 32)


def _chain(bench: Bench) -> Answer:
    """Measures a node's time: the difference of a long and a short chain, per node."""
    long, short = bench.sizes.chain, bench.sizes.chain // 10
    found = {}
    for blocks in (1, current_device().multiprocessors):
        launch = (empty(blocks=blocks), ())
        times = {count: count * bench.gpu.time([launch] * count).median for count in (long, short)}
        found[blocks] = (times[long] - times[short]) / (long - short)
    said = ", ".join(f"{_us(seconds)} with a grid of {n}" for n, seconds in found.items())
    return Answer(
        f"a node of a graph: {said} (model: {_us(LAUNCH)})",
        {"nodes": long, "seconds_per_node": {str(b): s for b, s in found.items()}},
    )


# --- products ---


def _few_rows_kernels(sizes: Sizes) -> list[Timed]:
    found: list[Timed] = []
    for n in (sizes.hidden, sizes.inner):
        for m in _FEW_ROWS:
            config = choose(matvec_rule, "Q4_K", n, sizes.hidden, m)
            built = KERNELS["matvec"](format="Q4_K", n=n, columns=sizes.hidden, m=m, config=config)
            found.append((f"{n}x{sizes.hidden} m={m}", built, packed_bytes(built), config))
    return found


def _few_rows(bench: Bench) -> Answer:
    """Compares four rows with the prediction; a longer time would show bank conflicts."""
    rows = [bench.measure(timed) for timed in _few_rows_kernels(bench.sizes)]
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    said = "; ".join(f"{four.name}: {_beside(four)}, m=1 {_beside(one)}" for one, four in pairs)
    return Answer(f"Q4_K mat-vec {said}", kernels=rows)


def _tiles_kernels(sizes: Sizes) -> list[Timed]:
    tilings = {
        16: GemmConfig(row_warps=1, column_warps=4, tiles=1, m_tile=32, stages=3),
        64: GemmConfig(row_warps=4, column_warps=1, tiles=1, m_tile=32, stages=3),
        128: GemmConfig(row_warps=4, column_warps=1, tiles=2, m_tile=32, stages=3),
    }
    found: list[Timed] = []
    for rows, config in tilings.items():
        built = KERNELS["gemm"](
            format="Q4_K", n=sizes.inner, columns=sizes.hidden, m=32, config=config
        )
        found.append((f"{rows} rows", built, packed_bytes(built), config))
    return found


def _compared(bench: Bench, timed: Sequence[Timed]) -> tuple[float, list[Measurement], str]:
    """Times kernels with equal results: NMSE between them, their times, and the fastest's name."""
    nmse = _agreeing(bench.gpu, [built for _, built, *_ in timed])
    rows = [bench.measure(each) for each in timed]
    return nmse, rows, min(rows, key=lambda row: row.seconds).name


def _tiles(bench: Bench) -> Answer:
    """Times tile sizes; small blocks read the activations more often, through L2."""
    nmse, rows, best = _compared(bench, _tiles_kernels(bench.sizes))
    said = ", ".join(f"{row.name} {_beside(row)}" for row in rows)
    return Answer(f"gemm m=32 with blocks of {said}: {best} are fastest", {"nmse": nmse}, rows)


def _ahead_kernels(sizes: Sizes) -> list[Timed]:
    shape = ("Q4_K", "Q4_K"), (sizes.inner,), sizes.hidden, 1, True, "q8_1"
    ahead = replace(choose(fused_matvec_rule, *shape), ahead=True)
    other = replace(ahead, ahead=False, warps=16, rows_per_warp=2, resident_blocks=1)
    blocks = even_blocks((sizes.inner,), other.block_rows, 1, current_device().multiprocessors)
    configs = {
        "ahead": ahead,
        "not ahead": replace(ahead, ahead=False),
        "not ahead, 16 warps of 2 rows": replace(other, persistent=blocks),
    }
    found: list[Timed] = []
    for name, config in configs.items():
        built = KERNELS["gated_matvec"](
            formats=shape[0],
            n=sizes.inner,
            columns=sizes.hidden,
            m=1,
            norm=True,
            eps=1e-5,
            output="q8_1",
            config=config,
        )
        found.append((name, built, packed_bytes(built), config))
    return found


def _ahead(bench: Bench) -> Answer:
    nmse, rows, best = _compared(bench, _ahead_kernels(bench.sizes))
    said = "; ".join(f"{row.name} {_beside(row)}" for row in rows)
    return Answer(
        f"gated mat-vec, weights asked for {said}: {best} is fastest", {"nmse": nmse}, rows
    )


def _streamed_kernels(sizes: Sizes) -> list[Timed]:
    found: list[Timed] = []
    for columns in (sizes.hidden, sizes.inner):
        config = choose(matvec_rule, "Q4_K", sizes.hidden, columns, 1)
        for name, streamed in (("as they are", False), ("past L1", True)):
            changed = replace(config, streamed=streamed)
            built = KERNELS["matvec"](
                format="Q4_K", n=sizes.hidden, columns=columns, m=1, config=changed
            )
            name = f"{sizes.hidden}x{columns} {name}"
            found.append((name, built, packed_bytes(built), changed))
    return found


def _streamed(bench: Bench) -> Answer:
    """Times streaming load hints; they may lose, because L1 also serves later loads of a line."""
    timed = _streamed_kernels(bench.sizes)
    pairs = zip(timed[::2], timed[1::2], strict=True)
    nmse = max(_agreeing(bench.gpu, [a[1], b[1]]) for a, b in pairs)
    rows = [bench.measure(each) for each in timed]
    said = ", ".join(f"{row.name} {_us(row.seconds)}" for row in rows)
    return Answer(f"Q4_K mat-vec, weights loaded {said}", {"nmse": nmse}, rows)


# --- prefetch ---


def _prefetch_kernels(sizes: Sizes) -> list[Timed]:
    """Returns a product, the same with a prefetch for the next one, and that next one."""
    plain, reader = (
        KERNELS["matvec"](**shape, config=choose(matvec_rule, **shape))
        for shape in (
            dict(format="Q4_K", n=sizes.hidden, columns=columns, m=1)
            for columns in (sizes.hidden, sizes.inner)
        )
    )
    planes = [b for b in reader.operands if b.type is u8]
    rows = planes[0].shape[0]
    total = sum(plane.nbytes for plane in planes)
    last = min(rows, rows * choose(prefetch_rule) // total)
    wanted = Prefetch(tuple((p.shape[1], p.shape[2]) for p in planes), rows, 0, last)
    prefetching = KERNELS["matvec"](**plain.arguments, prefetch=(wanted,))
    nbytes = packed_bytes(plain)
    return [
        ("alone", plain, nbytes, plain.arguments["config"]),
        ("asking", prefetching, nbytes, prefetching.arguments["config"]),
        ("next", reader, packed_bytes(reader), reader.arguments["config"]),
    ]


def _prefetch(bench: Bench) -> Answer:
    """Times pairs of launches, with and without a prefetch for the second by the first."""
    (_, plain, *_), (_, prefetching, *_), (_, reader, *_) = _prefetch_kernels(bench.sizes)
    gpu, l2 = bench.gpu, bench.gpu.facts.l2_bytes
    count = len(plain.operands)
    planes = [i for i, b in enumerate(reader.operands) if b.type is u8]
    with gpu.scope():
        firsts, seconds = (rotated(gpu, k, random_operands(k), l2) for k in (plain, reader))
        turns = range(max(len(firsts), len(seconds)))
        pairs = [(firsts[i % len(firsts)][1], seconds[i % len(seconds)][1]) for i in turns]
        with_planes = [
            [*first[:count], *(second[i] for i in planes), *first[count:]]
            for first, second in pairs
        ]
        chains: dict[str, list[Any]] = {
            "pair": [each for a, b in pairs for each in ((plain, a), (reader, b))],
            "asking pair": [
                each
                for a, (_, b) in zip(with_planes, pairs, strict=True)
                for each in ((prefetching, a), (reader, b))
            ],
            "alone": [(plain, a) for a, _ in pairs],
            "asking alone": [(prefetching, a) for a in with_planes],
        }
        found = {name: gpu.time(chain).median for name, chain in chains.items()}
    found |= {name: 2 * found[name] for name in ("pair", "asking pair")}
    return Answer(
        f"a product and the next one take {_us(found['pair'])}, or {_us(found['asking pair'])} if"
        f" the first prefetches {prefetching.ahead_bytes / 1e6:.1f} MB of the second; the first"
        f" alone {_us(found['alone'])}, prefetching {_us(found['asking alone'])}",
        {"seconds": found, "ahead_bytes": prefetching.ahead_bytes},
    )


# --- clusters ---


def _clusters(bench: Bench) -> Answer:
    """Measures a cluster barrier: the difference of many and few in otherwise equal kernels."""
    gpu, many = bench.gpu, bench.sizes.barriers
    few, found = many // 10, {}
    for cluster in _CLUSTERS:
        blocks = current_device().multiprocessors // cluster * cluster
        shape = dict(blocks=blocks, cluster=cluster)
        (got,) = gpu.run(cluster_ring(**shape, turns=3))
        if not np.array_equal(got, ring_result(**shape, turns=3)):
            raise RuntimeError(f"blocks of a cluster of {cluster} read wrong numbers")
        times = {}
        for turns in (many, few):
            waiting = cluster_barriers(**shape, turns=turns)
            with gpu.scope():
                addresses = gpu.place(waiting, ())
                times[turns] = gpu.time([(waiting, addresses)] * 4).median
        found[cluster] = (times[many] - times[few]) / (many - few)
    said = ", ".join(f"{_us(seconds)} of {cluster} blocks" for cluster, seconds in found.items())
    return Answer(
        f"clusters launch and give right results; their barrier takes {said}"
        f" (model: {_us(CLUSTER_BARRIER)})",
        {"seconds_per_barrier": {str(cluster): s for cluster, s in found.items()}},
    )


# --- modules ---


def _module_loads(bench: Bench) -> Answer:
    found = measure_loads(bench.gpu.facts.name, simulated=bench.dry_run)
    took = {name: found.of_program(getattr(found, name)) for name in ("warm", "without")}
    return Answer(
        f"{found.texts} kernels of a decode step load in {found.cold:.2f} s with an empty cache,"
        f" {found.warm:.2f} s with a full one, {found.without:.2f} s without; its"
        f" {found.launches} launches in {took['warm']:.1f} s, without in {took['without']:.1f} s",
        asdict(found),
    )


QUESTIONS: tuple[Question, ...] = (
    Question("launch", "how long is a node of a graph?", _chain),
    Question(
        "few rows", "does a mat-vec of 4 rows take as predicted?", _few_rows, _few_rows_kernels
    ),
    Question("tiles", "which blocks does a product of 32 rows want?", _tiles, _tiles_kernels),
    Question("ahead", "do weights asked for ahead gain?", _ahead, _ahead_kernels),
    Question("streamed", "do loads of weights past L1 gain?", _streamed, _streamed_kernels),
    Question(
        "prefetch",
        "do bytes come that a launch asks for at its end, and does the next one gain?",
        _prefetch,
        _prefetch_kernels,
    ),
    Question("clusters", "do clusters run, and what is their barrier?", _clusters),
    Question("modules", "how long do a program's modules load?", _module_loads),
)


def timed_kernels(sizes: Sizes) -> list[Kernel]:
    """Returns the kernels of all questions, for prediction."""
    return [built for question in QUESTIONS for _, built, *_ in question.kernels(sizes)]


if __name__ == "__main__":
    part_of("gpu", __doc__)
