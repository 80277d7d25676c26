"""Public-domain English from two Debian packages: the training data of `train_tiny.py`.

`r-cran-janeaustenr` holds Jane Austen's six novels as an R data file. The novels are in the public
domain; the package is under the MIT license. `sword-text-web` holds the World English Bible, a
modern translation in the public domain, as a SWORD module.

    # how the packages are fetched; dpkg unpacks them, nothing is installed
    apt-get download r-cran-janeaustenr sword-text-web

    python examples/tiny_corpus.py FOLDER    # prints the length of each book
"""

from __future__ import annotations

import argparse
import pathlib
import re
import struct
import subprocess
import zlib
from collections.abc import Iterator

PACKAGES = ("r-cran-janeaustenr", "sword-text-web")
AUSTEN = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
BIBLE = "usr/share/sword/modules/texts/ztext/engWEB2015eb"
ASCII = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2014": "--",
        "\u2013": "-",
        "\u2026": "...",
    }
)


def load(folder: pathlib.Path) -> list[str]:
    """Returns one text per book, a paragraph a line; downloads missing packages into `folder`."""
    root = folder / "packages"
    if not all((root / path).exists() for path in (AUSTEN, BIBLE)):
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, check=True)
        for package in folder.glob("*.deb"):
            subprocess.run(["dpkg-deb", "--extract", package, root], check=True)
    return [*_austen((root / AUSTEN).read_bytes()), *_bible(root / BIBLE)]


def from_files(paths: list[pathlib.Path]) -> list[str]:
    """Reads plain text files whose paragraphs are separated by blank lines."""
    return [
        _paragraphs(path.read_text(encoding="utf-8", errors="replace").splitlines())
        for path in paths
    ]


def _austen(database: bytes) -> Iterator[str]:
    """Yields the novels from R's lazy-load database.

    An object has a length and a zlib stream of one character vector.
    """
    while database:
        stream = zlib.decompressobj()
        yield _paragraphs(list(_strings(stream.decompress(database[4:]))))
        database = stream.unused_data


def _strings(serialized: bytes) -> Iterator[str]:
    """Yields the elements of a character vector in R's XDR serialization (R Internals, 1.8).

    They follow the 23-byte header of the serialization.
    """
    kind, count = struct.unpack_from(">II", serialized, 23)
    if kind & 0xFF != 16:  # STRSXP
        raise ValueError(f"expected an R character vector, got type {kind & 0xFF}")
    position = 31
    for _ in range(count):
        _, length = struct.unpack_from(">Ii", serialized, position)  # CHARSXP flags, size in bytes
        position += 8
        yield serialized[position : position + length].decode()
        position += length


def _paragraphs(lines: list[str]) -> str:
    """Joins lines that were wrapped at 70 columns into one line per paragraph.

    Blank lines separate paragraphs.
    """
    paragraphs = re.split(r"\n\s*\n", "\n".join(line.strip() for line in lines))
    joined = (
        " ".join(paragraph.split()).replace("_", "").translate(ASCII) for paragraph in paragraphs
    )
    return "\n".join(paragraph for paragraph in joined if paragraph)


def _bible(module: pathlib.Path) -> Iterator[str]:
    """Yields the books from SWORD's zText.

    Its index holds (offset, compressed size, size) of each zlib block.
    """
    for testament in ("ot", "nt"):
        blocks = module.joinpath(f"{testament}.bzz").read_bytes()
        for offset, size, _ in struct.iter_unpack(
            "<III", module.joinpath(f"{testament}.bzs").read_bytes()
        ):
            if size:
                text = _plain(
                    zlib.decompress(blocks[offset : offset + size]).decode(errors="replace")
                )
                if len(text) > 1000:  # skips titles and prefaces of parts
                    yield text


def _plain(osis: str) -> str:
    """Converts OSIS markup to one line per paragraph, without notes and titles."""
    osis = re.sub(r"<note\b.*?</note>|<title\b.*?</title>", "", osis, flags=re.DOTALL)
    osis = re.sub(r'<div\b[^>]*type="x-[a-z0-9]*"[^>]*>|<lg?\b[^>]*>|<chapter\b[^>]*>', "\n", osis)
    text = (
        re.sub(r"<[^>]*>", "", osis).replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")
    )
    return _paragraphs(text.replace("\n", "\n\n").splitlines())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=pathlib.Path, help="where the packages are, or are put")
    for number, book in enumerate(load(parser.parse_args().folder), 1):
        print(f"book {number}: {len(book):,} characters")
