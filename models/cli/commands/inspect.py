"""`jax-q4k inspect`: shows metadata, tensors and bytes per type of a GGUF file; compares two."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import MofNCompleteColumn
from rich.table import Table
from rich.text import Text

import jax_q4k as jq

from ..arguments import add_model
from ..output import progress, table_console

if TYPE_CHECKING:
    from jax_q4k.gguf import Header, TensorInfo

    from ...files.comparing import Differences

#: Maximum characters shown of a value; chat templates have thousands.
_WIDTH = 72


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        help="show a file's metadata and tensors",
        description="Show a file's metadata and tensors, or with --diff what differs from another "
        "file; the exit code is then 1 if something differs, as diff's.",
    )
    parser.set_defaults(command=_inspect)
    add_model(parser)
    parser.add_argument("--tensors", action="store_true", help="show only the tensors")
    parser.add_argument("--json", action="store_true", help="write JSON, with values in full")
    parser.add_argument(
        "--diff",
        metavar="OTHER.gguf",
        help="show the metadata and tensors that differ from this file's: type, shape, and values",
    )


def _inspect(options: argparse.Namespace, notes: Console) -> int | None:
    from ...files.load import located  # imports JAX

    path = located(options.model)
    if options.diff is not None:
        return _diff(path, located(options.diff), options, notes)
    header = jq.gguf.read_header(path)
    if options.json:
        print(json.dumps(_described(header, only_tensors=options.tensors)))
    elif options.tensors:
        table_console().print(_tensors(list(header.tensors.values()), _unused(header)))
    else:
        show(header, table_console())
    return None


def _described(header: Header, *, only_tensors: bool) -> dict[str, Any]:
    """Returns a header for JSON output."""
    tensors = [
        {"name": t.name, "type": t.type.name, "shape": t.shape, "bytes": t.nbytes}
        for t in header.tensors.values()
    ]
    if only_tensors:
        return {"tensors": tensors}
    return {
        "version": header.version,
        "bytes": header.file_size,
        "files": list(header.parts),
        "metadata": {key: _plain(value) for key, value in header.metadata.items()},
        "tensors": tensors,
    }


def _plain(value: Any) -> Any:
    """Returns a value of metadata for JSON output; NaN and infinities are null."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _diff(path: Any, other: Any, options: argparse.Namespace, notes: Console) -> int | None:
    """Shows the differences of two files; returns 1 if there are any."""
    from ...files.comparing import compare  # imports JAX

    with progress("Comparing", notes, MofNCompleteColumn()) as report:
        found = compare(path, other, progress=report)
    metadata = {} if options.tensors else found.metadata
    if options.json:
        tensors = [dataclasses.asdict(one) for one in found.tensors]
        for one in tensors:
            one |= {name: _plain(one[name]) for name in ("nmse", "largest")}
        pairs = {key: [_plain(value) for value in pair] for key, pair in metadata.items()}
        print(json.dumps({"metadata": pairs, "tensors": tensors}))
    else:
        _show_differences(metadata, found, table_console())
    return 1 if metadata or found.tensors else None


def _show_differences(
    metadata: dict[str, tuple[Any, Any]], found: Differences, console: Console
) -> None:
    if metadata:
        table = Table(title="Metadata", title_justify="left")
        for column in ("key", "file", "other"):
            table.add_column(column, overflow="fold")
        for key, pair in metadata.items():
            table.add_row(_escaped(key), *(Text("-" if v is None else _value(v)) for v in pair))
        console.print(table)
    if found.tensors:
        table = Table(title="Tensors", title_justify="left")
        table.add_column("name", overflow="fold")
        table.add_column("type")
        for column in ("shape", "NMSE", "largest difference"):
            table.add_column(column, justify="right")
        for one in found.tensors:
            shapes = [None if s is None else " x ".join(map(str, s)) for s in one.shapes]
            figures = ("" if x is None else f"{x:.3g}" for x in (one.nmse, one.largest))
            table.add_row(_escaped(one.name), _pair(*one.types), _pair(*shapes), *figures)
        console.print(table)
    console.print(f"Different tensors: {len(found.tensors)} of {found.compared}", end="")
    console.print(f"; different metadata keys: {len(metadata)}")


def _pair(one: str | None, other: str | None) -> str:
    return str(one) if one == other else f"{one or '-'} -> {other or '-'}"


def show(header: Header, console: Console) -> None:
    """Prints the tables; escapes text of the file, which could control the terminal."""
    tensors, unused = list(header.tensors.values()), _unused(header)
    console.print(_metadata(header))
    console.print(_tensors(tensors, unused))
    console.print(_types(tensors))
    total, weights = sum(t.nbytes for t in tensors), sum(math.prod(t.shape) for t in tensors)
    files = f" in {len(header.parts)} files" if header.parts else ""
    console.print(
        f"GGUF version {header.version}, {header.file_size:,} bytes{files}: "
        f"{len(tensors)} tensors, {weights:,} weights in {total:,} bytes"
    )
    if unused:
        skipped = sum(header.tensors[name].nbytes for name in unused)
        console.print(
            f"{len(unused)} of the tensors, {skipped:,} bytes, are skipped: text generation does "
            "not use them"
        )


def _unused(header: Header) -> set[str]:
    """Returns the names of tensors that text generation does not use."""
    from ...config.tensors import unused_tensors  # imports JAX

    return set(unused_tensors(header.metadata, header.tensors))


def _metadata(header: Header) -> Table:
    table = Table(title="Metadata", title_justify="left", show_header=False)
    table.add_column(overflow="fold")  # shows complete keys in a narrow terminal
    table.add_column(overflow="fold")
    for key, value in header.metadata.items():
        table.add_row(_escaped(key), Text(_value(value)))
    return table


def _tensors(tensors: list[TensorInfo], unused: set[str]) -> Table:
    table = Table(title="Tensors", title_justify="left")
    table.add_column("name", overflow="fold")
    table.add_column("type")
    for column in ("shape", "bytes"):
        table.add_column(column, justify="right")
    for tensor in tensors:
        kind = tensor.type.name
        if tensor.name in unused:
            kind += " (skipped)"
        elif not tensor.supported:
            kind += " (not supported)"
        shape = " x ".join(map(str, tensor.shape))
        table.add_row(_escaped(tensor.name), kind, shape, f"{tensor.nbytes:,}")
    return table


def _types(tensors: list[TensorInfo]) -> Table:
    table = Table("type", title="Bytes per type", title_justify="left")
    for column in ("tensors", "weights", "bytes", "share", "bits per weight"):
        table.add_column(column, justify="right")
    by_type: dict[str, list[TensorInfo]] = collections.defaultdict(list)
    for tensor in tensors:
        by_type[tensor.type.name].append(tensor)
    total = sum(tensor.nbytes for tensor in tensors)
    for name, group in sorted(by_type.items(), key=lambda item: -sum(t.nbytes for t in item[1])):
        nbytes, weights = sum(t.nbytes for t in group), sum(math.prod(t.shape) for t in group)
        share = f"{nbytes / total:.1%}"
        table.add_row(
            name,
            f"{len(group)}",
            f"{weights:,}",
            f"{nbytes:,}",
            share,
            f"{8 * nbytes / weights:.4g}",
        )
    return table


def _value(value: Any) -> str:
    if hasattr(value, "__len__") and not isinstance(value, str):  # a list, or NumPy's array
        items = (v.item() if hasattr(v, "item") else v for v in value[:4])
        first = ", ".join(_shortened(repr(v), 16) for v in items)
        return f"{len(value)}: [{first}{', ...' if len(value) > 4 else ''}]"
    return _shortened(repr(value), _WIDTH)


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _escaped(text: str) -> Text:
    return Text(repr(text)[1:-1])
