"""Removes what names the machine or its user from lines of a report."""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import jax_q4k as jq
import ptx_kernels

#: Absolute paths, and those that begin with a home folder. Quoted ones may have spaces.
_PATHS = re.compile(
    r"""(?<=")(?:~[\w.-]*)?/[^"\n]*(?=")|(?<=')(?:~[\w.-]*)?/[^'\n]*(?=')"""
    r"""|(?<![\w.~/])(?:~[\w.-]*)?/(?=[\w.~])[^\s"':)]+"""
)
_UUIDS = re.compile(r"\b(GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")

#: Folders that are alike on all machines.
_SYSTEM = ("/usr", "/lib", "/lib64", "/proc", "/dev")


def impersonal(text: str) -> str:
    """Replaces folders, except for the system's, UUIDs of GPUs, and names of host and user."""
    text = _UUIDS.sub(r"\1-UUID", _PATHS.sub(lambda found: _short(found[0]), text))
    for name, replacement in _names():
        domain = r"(?:\.[A-Za-z][\w-]*)*" if replacement == "HOST" else ""
        text = re.sub(rf"(?<!\w){re.escape(name)}{domain}(?!\w)", replacement, text)
    return text


def _short(path: str) -> str:
    """Returns a path from a known folder on; other paths are PATH."""
    folders = {
        **{folder: folder for folder in _SYSTEM},
        **{prefix: "PYTHON" for prefix in (sys.base_prefix, sys.prefix) if prefix != "/usr"},
        **{
            str(folder): name
            for name, module in (
                ("jax_q4k", jq.__file__),
                ("ptx_kernels", ptx_kernels.__file__),
                ("jax_q4k/models", str(Path(__file__).parents[1])),
            )
            for folder in (Path(module).parent, Path(module).resolve().parent)
        },
    }
    for folder in sorted(folders, key=len, reverse=True):
        if f"{path}/".startswith(f"{folder}/"):
            return folders[folder] + path[len(folder) :]
    return "PATH"


def _names() -> Iterator[tuple[str, str]]:
    """Yields names and their replacements; longer ones first."""
    host = platform.node()
    found = {host: "HOST", host.split(".")[0]: "HOST", os.environ.get("USER", ""): "USER"}
    with contextlib.suppress(OSError, KeyError):  # a user without a name
        found.setdefault(getpass.getuser(), "USER")
    for name in sorted(found, key=len, reverse=True):
        if len(name) > 1:
            yield name, found[name]
