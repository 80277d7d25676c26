"""Assembles kernels for every architecture, many of them in one run of ptxas.

Starting ptxas takes a third of the time.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from ptx_kernels.machine_code.ptxas import TARGETS, Assembly, assemble_together

_AT_ONCE = 16


def assemble_each(
    texts: Iterable[str], archs: Iterable[str] = TARGETS
) -> dict[tuple[str, str], Assembly]:
    """Assembles each text for each of `archs` that its target allows: (text, arch) -> Assembly.

    The results are those of `assemble`, except for the cubin.

    Texts share a run only if they declare the same PTX version and target. So each text is checked
    against its own declaration.
    """

    def head(text: str) -> list[str]:
        return [line for line in text.splitlines() if line.startswith((".version", ".target"))]

    by_head = itertools.groupby(sorted(dict.fromkeys(texts), key=head), head)
    parts = [
        (part, arch)
        for (_, target), alike in by_head
        for part in _batches(list(alike))
        for arch in archs
        if _number(arch) >= _number(target)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(lambda part: assemble_together(*part), parts))
    return {
        (text, arch): assembly
        for (part, arch), found in zip(parts, made, strict=True)
        for text, (_, assembly) in zip(part, found, strict=True)
    }


def _number(target: str) -> int:
    return int(target.rpartition("sm_")[2])


def _batches(texts: list[str]) -> list[list[str]]:
    return [texts[i : i + _AT_ONCE] for i in range(0, len(texts), _AT_ONCE)]


def spilled(labels: Mapping[str, str]) -> dict[tuple[str, str], int]:
    """Returns {(label, arch): bytes} of kernels {text: label} that spill on some architecture."""
    return {
        (labels[text], arch): assembly.spill_store_bytes
        for (text, arch), assembly in assemble_each(labels).items()
        if assembly.spill_store_bytes or assembly.stack_bytes
    }
