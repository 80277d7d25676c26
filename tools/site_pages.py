"""MkDocs hooks of the documentation site (mkdocs.yml).

Pages in docs/ link to files of the repository, as they must where a forge shows them. On the site
such a file becomes a page under repository/: Markdown as it is, other text as a listing. A line
`<!-- README.md: HEADING -->` is replaced by that section of README.md, so that the site's first
page repeats none of it. The title stands for the text above the first section.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
DOCS, COPIES = "docs", "repository"

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
_FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
_SECTION = re.compile(r"^<!-- README\.md: (.+) -->$", re.MULTILINE)
_LANGUAGES = {".py": "python", ".json": "json", ".h": "cpp", ".cpp": "cpp"}
_IMAGES = {".svg", ".png"}
#: Factors by which a search ranks pages, by section of the menu.
_BOOSTS = {"Guide": 4, "JAX and Flax": 3, "Reference": 2}


def repository_path(uri: str) -> str:
    """Returns the path in the repository of a page of the site; inverse of `site_uri`."""
    if uri.startswith(f"{COPIES}/"):
        path = uri.removeprefix(f"{COPIES}/")
        return path if (ROOT / path).is_file() else path.removesuffix(".md")
    return f"{DOCS}/{uri}"


def site_uri(path: str) -> str | None:
    """Returns the site's URI of a file of the repository; None for a folder."""
    if path.startswith(f"{DOCS}/"):
        return path.removeprefix(f"{DOCS}/")
    file = ROOT / path
    if not file.exists():
        raise FileNotFoundError(f"a page of the site links to {path}, which is not there")
    if file.is_dir():
        return None
    as_page = file.suffix == ".md" or file.suffix in _IMAGES
    return f"{COPIES}/{path}" if as_page else f"{COPIES}/{path}.md"


def with_sections(text: str) -> str:
    """Inserts the sections of README.md that `text` names, with links relative to docs/."""

    def section(match: re.Match[str]) -> str:
        readme = (ROOT / "README.md").read_text()
        parts = re.split(r"^(?:\A#|##) (.+)$", readme, flags=re.MULTILINE)
        found = dict(zip(parts[1::2], parts[2::2], strict=True)).get(match[1])
        if found is None:
            raise LookupError(f"README.md has no section {match[1]!r}, which a page shows")

        def link(bang: str, label: str, target: str, anchor: str) -> str:
            return f"{bang}[{label}](../{target}{anchor})"

        return map_links(found.strip("\n"), link)

    return _SECTION.sub(section, text)


def map_links(text: str, change: Callable[[str, str, str, str], str]) -> str:
    """Replaces each relative link outside code by the result of `change`."""

    def changed(match: re.Match[str]) -> str:
        return change(match[1], match[2], match[3], match[4] or "")

    parts = _FENCED.split(text)
    parts[::2] = [_LINK.sub(changed, part) for part in parts[::2]]
    return "".join(parts)


def links(text: str, path: str) -> list[str]:
    """Returns the paths in the repository that `text`, located at `path`, links to."""
    found = []

    def note(bang: str, label: str, target: str, anchor: str) -> str:
        found.append(posixpath.normpath(posixpath.join(posixpath.dirname(path), target)))
        return ""

    map_links(text, note)
    return found


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the files of the repository that pages link to, directly or indirectly."""
    waiting = [file.src_uri for file in files.documentation_pages()]
    waiting += [f"{COPIES}/{name}.md" for name in ("ARCHITECTURE", "CONTRIBUTING", "CHANGELOG")]
    seen = set(waiting)
    while waiting:
        uri = waiting.pop()
        path = repository_path(uri)
        if uri.startswith(f"{COPIES}/"):
            files.append(_copy(config, uri, path))
        if not path.endswith(".md"):
            continue
        for target in links(with_sections((ROOT / path).read_text()), path):
            new = site_uri(target)
            if new and new.startswith(f"{COPIES}/") and new not in seen:
                seen.add(new)
                waiting.append(new)
    return files


def _copy(config: Any, uri: str, path: str) -> File:
    """Converts a file of the repository to a file of the site."""
    source = ROOT / path
    if source.suffix in _IMAGES:
        return File.generated(config, uri, abs_src_path=str(source))
    text = source.read_text()
    if source.suffix != ".md":
        text = f"# {path}\n\n````{_LANGUAGES.get(source.suffix, 'text')}\n{text}````\n"
    return File.generated(config, uri, content=text)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Inserts sections, and redirects links to files of the repository to their pages."""
    uri = page.file.src_uri
    path = repository_path(uri)
    if not path.endswith(".md"):
        page.meta["search"] = {"exclude": True}
        return markdown  # a listing
    page.meta["search"] = {"boost": _BOOSTS.get(page.parent and page.parent.title, 1)}

    def lead(bang: str, label: str, target: str, anchor: str) -> str:
        new = site_uri(posixpath.normpath(posixpath.join(posixpath.dirname(path), target)))
        if new is None:
            return label
        return f"{bang}[{label}]({posixpath.relpath(new, posixpath.dirname(uri))}{anchor})"

    return map_links(with_sections(markdown), lead)


def on_page_content(html: str, *, page: Any, config: Any, files: Files) -> str:
    """Marks short code, which must not be broken into lines at its hyphens and spaces."""
    return re.sub("<code>(?=[^<\n]{1,24}</code>)", '<code class="short">', html)
