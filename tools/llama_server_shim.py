#!/usr/bin/env python3
"""Starts `jax-q4k serve` with llama-server's options, for programs that start llama-server.

llama.cpp's server tests are one of them: `LLAMA_SERVER_BIN_PATH=tools/llama_server_shim.py`.
Options without a counterpart are dropped, each with a line on standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

#: Options of llama-server -> option of `jax-q4k serve` that takes the same value.
SAME = {
    ("-m", "--model"): "--model",
    ("-hf", "--hf-repo"): "--hf-repo",
    ("-md", "--model-draft"): "--draft",
    ("--host",): "--host",
    ("--port",): "--port",
    ("-np", "--parallel"): "--rows",
    ("-to", "--timeout"): "--timeout",
    ("--api-key-file",): "--api-key-file",
    ("--chat-template-file",): "--chat-template-file",
}
#: Options of llama-server that take several values with commas -> option that is repeated.
LISTS = {
    ("--api-key",): "--api-key",
    ("--cors-origins",): "--cors-origin",
    ("--lora",): "--lora",
}


def translated(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns arguments of `jax-q4k serve`, and the ones that have no counterpart."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for names in [*SAME, *LISTS, ("-a", "--alias"), ("-c", "--ctx-size")]:
        parser.add_argument(*names, dest=names[-1])
    parser.add_argument("-rea", "--reasoning", dest="--reasoning")
    parser.add_argument("--chat-template-kwargs", dest="--chat-template-kwargs", default="{}")
    parser.add_argument("-kvu", "--kv-unified", action="store_true", dest="--kv-unified")
    options, rest = parser.parse_known_args(arguments)
    found, values = ["--any-model"], vars(options)
    values = {name: value for name, value in values.items() if value not in (None, False, "-1")}
    for names, ours in SAME.items():
        if value := values.get(names[-1]):
            found += [ours, value]
    for names, ours in LISTS.items():
        for value in values.get(names[-1], "").split(","):
            found += [ours, value] if value else []
    if alias := values.get("--alias"):
        found += ["--name", min(alias.split(","))]  # as llama-server chooses
    if context := int(values.get("--ctx-size", 0)):  # of all slots together, unless unified
        unified = "--kv-unified" in values or "--parallel" not in values
        rows = 1 if unified else int(values["--parallel"])
        found += ["--context", str(context // rows)]
    # llama-server sets this variable; here, as in transformers, a template has its own default.
    variables = {"enable_thinking": values.get("--reasoning") != "off"}
    variables |= json.loads(values["--chat-template-kwargs"])
    found += ["--chat-template-kwargs", json.dumps(variables)]
    return found, rest


def main() -> None:
    """Becomes the server."""
    arguments, dropped = translated(sys.argv[1:])
    if dropped:
        print(f"dropped: {' '.join(dropped)}", file=sys.stderr, flush=True)
    os.execv(sys.executable, [sys.executable, "-m", "jax_q4k", "serve", *arguments])


if __name__ == "__main__":
    main()
