"""Static figures of kernels, from their machine code: what `python -m ptx_kernels report` prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

from .assemble import assemble, assemble_all, kernel_occupancy
from .ptx import Kernel
from .sass import Loop, disassemble, hot_loop, load_bits

#: Bits per weight of the planes that a dot product reads through dp4a; scales and headers don't count.
QUANT_BITS = {"Q4_0": 4, "Q4_K": 4, "Q5_0": 5, "Q5_K": 5, "Q6_K": 6, "Q8_0": 8}


@dataclass(frozen=True)
class Figures:
    """One kernel on one architecture.

    Attributes:
      shared_bytes: static and dynamic shared memory per block.
      loop_instructions: instructions of the hot loop, 0 where the kernel has none; then the rest is of the whole
        kernel, which runs each of its instructions once at most.
      mix: the hot loop's instructions by category.
      loads_in_flight: most 16-byte global loads outstanding at once per lane in the hot loop.
      narrowest_load, widest_load: bits per lane of the hot loop's global loads; None without such loads.
      instructions_per_quant_byte: hot loop instructions per byte of packed quants (without scales) and lane;
        None where the loop has no dp4a on packed weights.
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


def quant_bytes_per_dp4a(format: str, rows: int) -> float:
    """Bytes of quants behind one dp4a: four weights, which serve one of `rows` activation rows each time.

    Counted per dp4a, and not per load, because ptxas unrolls loops as it likes.
    """
    return 4 * QUANT_BITS[format] / 8 / rows


def figures(
    kernel: Kernel, arch: str, *, label: str = "", family: str = "", quant_bytes: float | None = None
) -> Figures:
    """Figures of `kernel` on `arch`.

    Args:
      quant_bytes: `quant_bytes_per_dp4a` of a kernel that multiplies packed weights, None for others.
    """
    assembly = assemble(kernel.text, arch)
    code = disassemble(assembly.cubin)
    loop = hot_loop(code)
    body = loop or Loop(code)
    loads = [load_bits(i.opcode) for i in body.instructions if i.category.startswith("load global")]
    dp4a = body.count("dp4a")
    fit = kernel_occupancy(kernel, arch)
    x, y, z = kernel.block
    return Figures(
        label=label or kernel.name,
        family=family,
        arch=arch,
        threads=x * y * z,
        registers=assembly.registers,
        spill_bytes=assembly.spill_store_bytes + assembly.spill_load_bytes,
        stack_bytes=assembly.stack_bytes,
        shared_bytes=assembly.shared_bytes + kernel.dynamic_shared_bytes,
        blocks_per_multiprocessor=fit.blocks,
        occupancy=fit.fraction,
        occupancy_limit=fit.limit,
        loop_instructions=loop.issued() if loop else 0,
        loads_in_flight=body.loads_in_flight(),
        narrowest_load=min(loads, default=None),
        widest_load=max(loads, default=None),
        instructions_per_quant_byte=body.issued() / (dp4a * quant_bytes) if dp4a and quant_bytes else None,
        mix=body.mix(),
    )


def _quant_bytes(arguments: dict[str, object]) -> float | None:
    format, rows = arguments.get("format"), arguments.get("m")
    return quant_bytes_per_dp4a(format, rows) if format in QUANT_BITS and isinstance(rows, int) else None


def report(cases: Iterable, kernels: dict, arch: str) -> list[Figures]:
    """Figures of `cases` (`ptx_kernels.cases.CASES`), whose families `kernels` builds, in their order."""
    built = [(case, kernels[case.family](**case.arguments)) for case in cases]
    assemble_all((kernel.text for _, kernel in built), (arch,))

    def one(pair: tuple) -> Figures:
        case, kernel = pair
        return figures(kernel, arch, label=case.label, family=case.family, quant_bytes=_quant_bytes(case.arguments))

    with ThreadPoolExecutor() as pool:
        return list(pool.map(one, built))


_HEADER = ("kernel", "threads", "regs", "spill", "shared", "occupancy", "loop", "instr/qB", "loads", "in flight")


def _row(f: Figures) -> tuple[str, ...]:
    per_byte = f.instructions_per_quant_byte
    loads = (
        "-"
        if f.widest_load is None
        else f"{f.widest_load}"
        if f.narrowest_load == f.widest_load
        else f"{f.narrowest_load}-{f.widest_load}"
    )
    return (
        f.label,
        str(f.threads),
        str(f.registers),
        str(f.spill_bytes),
        str(f.shared_bytes),
        f"{f.occupancy:.0%} ({f.occupancy_limit})",
        str(f.loop_instructions or "-"),
        f"{per_byte:.2f}" if per_byte else "-",
        loads,
        str(f.loads_in_flight or "-"),
    )


def plain_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns of text: the first to the left, the others to the right, a rule under the header."""
    cells = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        row[0].ljust(widths[0])
        + "".join("  " + cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in cells
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def table(rows: Sequence[Figures]) -> str:
    """A plain text table with a legend; one architecture per table."""
    arch = rows[0].arch if rows else ""
    legend = (
        "regs: per thread. spill, shared: bytes. occupancy: resident warps (what limits them).",
        "loop: instructions of the hot loop (-: none, and what follows is of the whole kernel).",
        "instr/qB: instructions per byte of packed quants and lane. loads: bits of the global loads.",
        "in flight: most 16-byte loads outstanding per lane.",
    )
    return "\n".join([f"{arch}: {len(rows)} kernels", plain_table(_HEADER, map(_row, rows)), "", *legend])


def as_dicts(rows: Sequence[Figures]) -> list[dict]:
    return [asdict(row) for row in rows]
