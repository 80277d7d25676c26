"""`jax-q4k rerank`: prints documents by their relevance for a query as JSON."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn

from jax_q4k import models

from ..arguments import add_model
from ..options import add_devices, add_implementation, add_no_cache, implementation_of
from ..output import UsageError, load_model, progress
from .embed import given_texts


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "rerank",
        help="rank documents by their relevance for a query",
        description="Print documents with a reranker's scores, the most relevant first, in the "
        "JSON format of Jina's and Cohere's APIs.",
    )
    parser.set_defaults(command=_rerank, runs_programs=True)
    add_model(parser)
    parser.add_argument("-q", "--query", required=True, metavar="TEXT")
    documents = parser.add_mutually_exclusive_group()
    documents.add_argument(
        "-d",
        "--document",
        action="append",
        dest="documents",
        metavar="TEXT",
        help="may be repeated",
    )
    documents.add_argument(
        "-f", "--file", metavar="FILE", help="UTF-8, one document per line; -: standard input"
    )
    parser.add_argument(
        "-n", "--top", type=int, metavar="N", help="print the first N; default: all"
    )
    parser.add_argument(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="scores from 0 to 1, instead of the model's logits; default: on",
    )
    add_devices(parser)
    add_implementation(parser)
    add_no_cache(parser)


def _rerank(options: argparse.Namespace, notes: Console) -> None:
    if options.top is not None and options.top < 1:
        raise UsageError(f"--top {options.top} must be at least 1")
    documents = given_texts(options.documents, options.file, "no documents: give -d TEXT")
    model = load_model(options.model, notes, options.devices)
    with (
        progress("Documents", notes, MofNCompleteColumn()) as report,
        implementation_of(options),
    ):
        try:
            ranked = models.rerank(
                model, options.query, documents, normalize=options.normalize, progress=report
            )
        except ValueError as error:
            raise UsageError(error) from error
    rows = (
        json.dumps(
            {
                "index": one.index,
                "relevance_score": float(f"{one.score:.9g}"),
                "document": documents[one.index],
            },
            ensure_ascii=False,
        )
        for one in ranked[: options.top]
    )
    print('{"object": "list", "results": [\n' + ",\n".join(rows) + "\n]}")
