"""`jax-q4k inspect`: shows metadata, tensors and bytes per type of a GGUF file as tables."""

from __future__ import annotations

import argparse
import collections
import math
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import jax_q4k as jq

from ..arguments import add_model
from ..output import table_console

if TYPE_CHECKING:
    from jax_q4k.gguf import Header, TensorInfo

#: Maximum characters shown of a value; chat templates have thousands.
_WIDTH = 72


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        help="show a file's metadata and tensors",
        description="Show a file's metadata and tensors.",
    )
    parser.set_defaults(command=_inspect)
    add_model(parser)


def _inspect(options: argparse.Namespace, notes: Console) -> None:
    from ...files.load import located  # imports JAX

    header = jq.gguf.read_header(located(options.model))
    show(header, table_console())


def show(header: Header, console: Console) -> None:
    """Prints the tables; escapes text of the file, which could control the terminal."""
    tensors = list(header.tensors.values())
    from ...config.tensors import unused_tensors  # imports JAX

    unused = set(unused_tensors(header.metadata, header.tensors))
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
