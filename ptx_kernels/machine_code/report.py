"""Static figures of kernels from their machine code, printed by `python -m ptx_kernels report`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

from ..devices import DEVICES, Device
from ..ptx import WARP, Kernel
from .accesses import Accesses, accesses, in_memory
from .model import Launch, predict
from .ptxas import (
    Assembly,
    Occupancy,
    assemble,
    assemble_all,
    assemble_together,
    occupancy,
    shared_split,
)
from .sass import (
    CATEGORIES,
    Loop,
    disassemble,
    disassemble_all,
    filled,
    load_bits,
    registers,
)
from .stretches import Stretches, stretches
from .timeline import Section
from .work import Work, outer_turns, packed_weights, staged_bytes, work

#: Classes of the hot loop's instructions -> the categories of `sass` that each one sums.
CLASSES: dict[str, tuple[str, ...]] = {
    "load": (*(c for c in CATEGORIES if c.startswith("load")), "shared", "local", "async copy"),
    "integer": ("integer",),
    "dot": ("dp4a", "mma"),
    "float": ("float", "conversion"),
    "control": ("control", "shuffle", "store global", "other"),
}


@dataclass(frozen=True)
class Figures:
    """Static figures of one kernel on one architecture.

    Attributes:
      shared_bytes: static and dynamic shared memory per thread block.
      loop_instructions: instructions of the hot loop; 0 if the kernel has none. The other figures
        then are for the full kernel, which runs each of its instructions at most once.
      mix: the hot loop's instructions by category.
      loads_in_flight: maximum 16-byte global loads in flight per lane in the hot loop.
      narrowest_load, widest_load: bits per lane of the hot loop's global loads; None if the loop
        has no global loads.
      instructions_per_quant_byte: hot loop instructions per byte of packed quants (without scales)
        and lane; None if the loop multiplies no packed weights.
      classes: instructions_per_quant_byte by instruction class (`CLASSES`); empty if it is None.
      shared_split: bytes of a multiprocessor's shared memory during a launch; 0 if no block fits.
      device: device for which `model` predicts `seconds` and `bound`; both are None if the model
        does not know the trips of the hot loop. `bounds`: the seconds of each bound separately.
      nbytes: bytes of memory traffic of the launch.
      bytes_in_flight: bytes per multiprocessor that the hot loop's global loads have in flight.
    """

    label: str
    family: str
    arch: str
    threads: int
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    blocks_per_multiprocessor: int
    occupancy: float
    occupancy_limit: str
    loop_instructions: int
    loads_in_flight: int
    narrowest_load: int | None
    widest_load: int | None
    instructions_per_quant_byte: float | None
    mix: dict[str, int] = field(default_factory=dict)
    classes: dict[str, float] = field(default_factory=dict)
    shared_split: int = 0
    device: str = ""
    nbytes: int = 0
    bytes_in_flight: int = 0
    seconds: float | None = None
    bound: str | None = None
    bounds: dict[str, float] = field(default_factory=dict)


def device_of(arch: str) -> Device:
    """Returns the first known device of an architecture, which stands for it in figures."""
    return next(device for device in DEVICES.values() if device.arch == arch)


@dataclass(frozen=True)
class Code:
    """Machine code of a kernel on one architecture, split into sections."""

    assembly: Assembly
    stretches: Stretches

    @property
    def body(self) -> Loop:
        """The hot loop, or all code after the prologue if there is none (`looped` False)."""
        return self.stretches.body

    @property
    def looped(self) -> bool:
        return self.stretches.looped


def code(kernel: Kernel, arch: str) -> Code:
    """Assembles `kernel` for `arch` and finds its hot loop."""
    assembly = assemble(kernel.text, arch)
    return Code(assembly, stretches(disassemble(assembly.cubin)))


def codes(kernels: Sequence[Kernel], arch: str) -> list[Code]:
    """Assembles the kernels together; returns `code` of each, several times faster than singly."""
    made = assemble_together([kernel.text for kernel in kernels], arch)
    listings = disassemble_all(made[0][1].cubin) if made else {}
    return [Code(assembly, stretches(listings[name])) for name, assembly in made]


def launch(kernel: Kernel, machine: Code) -> Launch | None:
    """Returns the resources that one launch needs, as input of `model.predict`.

    None if the trips through the hot loop are unknown. `machine` may be the code of a kernel that
    differs only in its number of rows.
    """
    return _launch(kernel, machine, _work(kernel, machine), _fit(kernel, machine))


def _work(kernel: Kernel, machine: Code) -> Work:
    """Returns the `Work` of the hot loop; without one, of all code after the prologue."""
    parts = machine.stretches
    done = list(work_of_loops(kernel, machine))
    return done[parts.peers.index(parts.body) if machine.looped else 0]


def work_of_loops(kernel: Kernel, machine: Code) -> Iterator[Work]:
    """Yields the `Work` of each loop in `Stretches.peers`, or of all code after the prologue.

    If there are as many loops as matrices, each loop is taken to multiply the matrix at its
    position.
    """
    loops, packed = machine.stretches.peers, packed_weights(kernel)
    formats: Sequence[str | None] = packed.formats if packed else ()
    if len(formats) != len(loops):
        formats = [None] * len(loops)
    for loop, format in zip(loops, formats, strict=True):
        yield work(kernel, loop, format=format)
    if not machine.looped:
        yield work(kernel, machine.body, whole=True)


def _fit(kernel: Kernel, machine: Code) -> Occupancy:
    return occupancy(machine.assembly, math.prod(kernel.block), kernel.dynamic_shared_bytes)


def _split(kernel: Kernel, assembly: Assembly) -> int:
    return shared_split(assembly, math.prod(kernel.block), kernel.dynamic_shared_bytes)


def _launch(kernel: Kernel, machine: Code, done: Work, fit: Occupancy) -> Launch | None:
    if done.trips is None:
        return None
    blocks, warps = math.prod(kernel.grid), math.ceil(math.prod(kernel.block) / WARP)
    parts, found = machine.stretches, accesses(kernel)
    turns = outer_turns(kernel) if parts.outer or parts.behind else 1.0
    loop = Section((parts.body.instructions,), done.trips / (blocks * warps) / turns)
    staging = (Section((each.instructions,), _staging(kernel, each)) for each in parts.before_loops)
    return Launch(
        blocks=blocks,
        warps=warps,
        resident_blocks=fit.blocks,
        cluster=math.prod(kernel.cluster),
        unpacks=packed_weights(kernel) is not None,
        nbytes=done.nbytes,
        prologue=Section((*staging, parts.before)),
        body=Section((Section((parts.outer, loop, parts.behind), turns), parts.once)),
        cold=packed_weights(kernel) is None and any(in_memory(b, kernel) for b in kernel.buffers),
        wavefronts=found.wavefronts,
        l2_bytes=found.l2_bytes,
        memory_bytes=found.memory_bytes,
        block_bytes_in_flight=_in_flight(parts, outer_turns(kernel), warps, found),
        early_bytes=warps * WARP * _early(parts) * found.distinct,
        skipped=_skipped(parts, turns),
    )


def _early(parts: Stretches) -> int:
    """Returns the bytes of constants that a lane requests in the prologue and uses after it."""
    nbytes, named = 0, set[int]()
    for i in reversed(parts.before):
        if i.category.startswith("load global") and ".CONSTANT" in i.opcode:
            nbytes += 0 if named & set(filled(i)) else load_bits(i.opcode) // 8
        named |= registers(i.operands)
    return nbytes


def _skipped(parts: Stretches, turns: float) -> Section:
    """Returns the loads in the hot loop that prefetch a next trip.

    The last trip of a round skips them; the section has as many turns as rounds.
    """
    loads = tuple(
        i
        for i in parts.body.instructions
        if i.predicate and i.category.startswith("load global") and ".CONSTANT" in i.opcode
    )
    return Section((loads,), turns) if _early(parts) else Section(())


def _staging(kernel: Kernel, loop: Loop) -> float:
    """Returns the trips of a loop if it stages activations in shared memory; 1 for other loops."""
    brought = math.prod(kernel.block) * sum(
        load_bits(i.opcode) // 8
        for i in loop.instructions
        if i.category.startswith("load global") and ".CONSTANT" not in i.opcode
    )
    return staged_bytes(kernel) / brought if brought and staged_bytes(kernel) else 1.0


def _in_flight(parts: Stretches, turns: float, warps: int, found: Accesses) -> float:
    """Returns the distinct bytes from memory that a thread block has in flight.

    They are of its loads, or of the stages of its asynchronous copies.
    """
    code = (*parts.outer, *parts.body.instructions, *parts.behind)
    if any(i.name == "LDGSTS" for i in code):
        waits = [i.operands for i in code if i.opcode == "DEPBAR.LE"]
        pending = max((int(each.split(",")[-1], 0) for each in waits), default=0)
        return min(pending + 1, turns) * found.memory_bytes / turns
    weights = any(".CONSTANT" in i.opcode for i in parts.body.instructions)
    outstanding = parts.body.outstanding(lambda i: ".CONSTANT" in i.opcode or not weights)
    return warps * WARP * outstanding.nbytes * found.distinct


def figures(
    kernel: Kernel,
    arch: str,
    *,
    label: str = "",
    family: str = "",
    device: Device | None = None,
    predict_time: bool = True,
) -> Figures:
    """Returns the figures of `kernel` on `arch`.

    `device` None means the architecture's first one. The time is not predicted if no thread block
    fits on a multiprocessor, or if `predict_time` is false: the prediction simulates thread blocks
    of the launch.
    """
    device = device or device_of(arch)
    machine = code(kernel, arch)
    assembly, body = machine.assembly, machine.body
    loads = [load_bits(i.opcode) for i in body.instructions if i.category.startswith("load global")]
    done, fit = _work(kernel, machine), _fit(kernel, machine)
    mix, outstanding = body.mix(), body.outstanding()
    asked = _launch(kernel, machine, done, fit) if fit.blocks and predict_time else None
    predicted = predict(asked, device) if asked else None
    classes = {
        name: sum(mix.get(category, 0) for category in categories) / done.quant_bytes
        for name, categories in CLASSES.items()
        if done.quant_bytes
    }
    return Figures(
        label=label or kernel.name,
        family=family or kernel.family,
        arch=arch,
        threads=math.prod(kernel.block),
        registers=assembly.registers,
        spill_bytes=assembly.spill_store_bytes + assembly.spill_load_bytes,
        stack_bytes=assembly.stack_bytes,
        shared_bytes=assembly.shared_bytes + kernel.dynamic_shared_bytes,
        blocks_per_multiprocessor=fit.blocks,
        occupancy=fit.fraction,
        occupancy_limit=fit.limit,
        loop_instructions=body.issued() if machine.looped else 0,
        loads_in_flight=outstanding.wide,
        narrowest_load=min(loads, default=None),
        widest_load=max(loads, default=None),
        instructions_per_quant_byte=body.issued() / done.quant_bytes if done.quant_bytes else None,
        mix=mix,
        classes=classes,
        shared_split=_split(kernel, assembly) if fit.blocks else 0,
        device=device.name,
        nbytes=done.nbytes,
        bytes_in_flight=predicted.bytes_in_flight
        if predicted
        else fit.warps * WARP * outstanding.nbytes,
        seconds=predicted.seconds if predicted else None,
        bound=predicted.bound if predicted else None,
        bounds=predicted.bounds if predicted else {},
    )


def report(cases: Iterable, kernels: dict, arch: str) -> list[Figures]:
    """Returns the figures of `cases` (`ptx_kernels.kernels.CASES`), in order.

    `kernels` maps a family's name to its kernel function. Clusters are omitted if the architecture
    has none.
    """
    built = [(case, kernels[case.family](**case.arguments)) for case in cases]
    if not device_of(arch).clusters:
        built = [(case, kernel) for case, kernel in built if max(kernel.cluster) == 1]
    assemble_all((kernel.text for _, kernel in built), (arch,))

    def one(pair: tuple) -> Figures:
        case, kernel = pair
        return figures(kernel, arch, label=case.label, family=case.family)

    with ThreadPoolExecutor() as pool:
        return list(pool.map(one, built))


_HEADER = (
    *("kernel", "threads", "regs", "spill", "shared", "occupancy", "loop", "instr/qB", "l/i/d/f/c"),
    *("loads", "in flight", "KB/SM", "bound", "us"),
)


def load_range(f: Figures) -> str:
    """Formats the widths in bits of the narrowest and the widest global load: `32-128`."""
    if f.widest_load is None:
        return "-"
    return (
        f"{f.widest_load}"
        if f.narrowest_load == f.widest_load
        else f"{f.narrowest_load}-{f.widest_load}"
    )


def row(f: Figures) -> tuple[str, ...]:
    """Returns the cells of a kernel's row under the table's header."""
    per_byte = f.instructions_per_quant_byte
    return (
        f.label,
        str(f.threads),
        str(f.registers),
        str(f.spill_bytes),
        str(f.shared_bytes),
        f"{f.occupancy:.0%} ({f.occupancy_limit})",
        str(f.loop_instructions or "-"),
        f"{per_byte:.2f}" if per_byte else "-",
        " ".join(f"{value:.1f}" for value in f.classes.values()) or "-",
        load_range(f),
        str(f.loads_in_flight or "-"),
        f"{f.bytes_in_flight / 1024:.0f}",
        f.bound or "-",
        f"{f.seconds * 1e6:.1f}" if f.seconds else "-",
    )


def plain_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Formats a text table: first column left-aligned, others right-aligned, under a header."""
    cells = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        row[0].ljust(widths[0])
        + "".join("  " + cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in cells
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def table(rows: Sequence[Figures]) -> str:
    """Formats a plain text table with a legend; one architecture per table."""
    arch = f"{rows[0].arch} ({rows[0].device})" if rows else ""
    legend = (
        "regs: per thread. spill, shared: bytes. occupancy: resident warps (what limits them).",
        "loop: instructions of the hot loop (-: none, and what follows is of the whole kernel).",
        "instr/qB: instructions per byte of packed quants and lane; l/i/d/f/c: loads, integer, dot,"
        " float, control.",
        "loads: bits of the global loads. in flight: most 16-byte loads outstanding per lane.",
        "KB/SM: bytes in flight per multiprocessor. bound, us: predicted for the device by"
        " ptx_kernels.machine_code.model.",
    )
    return "\n".join(
        [f"{arch}: {len(rows)} kernels", plain_table(_HEADER, map(row, rows)), "", *legend]
    )


def as_dicts(rows: Sequence[Figures]) -> list[dict]:
    return [asdict(row) for row in rows]
