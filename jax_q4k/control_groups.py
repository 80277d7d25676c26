"""Finds the folders of this process's control groups (Linux), which have a container's limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["folders", "text_of"]

_LONGEST = 1 << 20  # bytes of a file in /proc or /sys


def folders(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Yields the folders of this process's control groups, and of their parents.

    controller: such as "cpu" or "memory", for version 1, which has separate groups for each; the
    folders of version 2 come, too. root: folder that has `proc` and `sys`.
    """
    groups: dict[str, str] = {}  # controller -> group; version 2 has the name ""
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, group = (line.split(":", 2) + ["", ""])[:3]
        groups |= dict.fromkeys(controllers.split(","), group)
    for line in text_of(root / "proc/self/mountinfo").splitlines():
        mount, _, filesystem = line.partition(" - ")
        kind, _, options = (filesystem.split(" ", 2) + ["", ""])[:3]
        name = {"cgroup2": "", "cgroup": controller}.get(kind)
        fields = mount.split(" ")
        if name not in groups or (name and name not in options.split(",")):
            continue
        if len(fields) < 5:
            continue
        top = root / fields[4].lstrip("/")
        path = PurePosixPath(groups[name])
        # Inside a container the group may be named as outside, where its mount has another root.
        if path.is_relative_to(fields[3]):
            path = path.relative_to(fields[3])
        parts = [part for part in path.parts if part not in ("/", "..")]
        yield from (top.joinpath(*parts[:count]) for count in range(len(parts), -1, -1))


def text_of(path: Path) -> str:
    """Returns the text of a file of a control group; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(_LONGEST).decode(errors="replace")
    except OSError:
        return ""
