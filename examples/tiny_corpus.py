"""Public-domain English from two Debian packages: what `train_tiny.py` trains on.

`r-cran-janeaustenr` holds Jane Austen's six novels (public domain; the package around them: MIT),
an R data file. `sword-text-web` holds the World English Bible, a modern translation (public
domain), a SWORD module.

    apt-get download r-cran-janeaustenr sword-text-web    # fetched so, unpacked by dpkg, nothing is
    installed

    python examples/tiny_corpus.py FOLDER    # how long each book is
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
    """One text per book, a paragraph a line; downloads into `folder` what is not there yet."""
    root = folder / "packages"
    if not all((root / path).exists() for path in (AUSTEN, BIBLE)):
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, check=True)
        for package in folder.glob("*.deb"):
            subprocess.run(["dpkg-deb", "--extract", package, root], check=True)
    return [*_austen((root / AUSTEN).read_bytes()), *_bible(root / BIBLE)]


def from_files(paths: list[pathlib.Path]) -> list[str]:
    """Plain text files, paragraphs between blank lines."""
    return [
        _paragraphs(path.read_text(encoding="utf-8", errors="replace").splitlines())
        for path in paths
    ]


def _austen(database: bytes) -> Iterator[str]:
    """The novels, from R's lazy-load database.

    An object has a length and a zlib stream of one character vector.
    """
    while database:
        stream = zlib.decompressobj()
        yield _paragraphs(list(_strings(stream.decompress(database[4:]))))
        database = stream.unused_data


def _strings(serialized: bytes) -> Iterator[str]:
    """Elements of a character vector in R's XDR serialization (R Internals, 1.8).

    They lie after the serialization's 23-byte header.
    """
    kind, count = struct.unpack_from(">II", serialized, 23)
    if kind & 0xFF != 16:  # STRSXP
        raise ValueError(f"expected an R character vector, got type {kind & 0xFF}")
    position = 31
    for _ in range(count):
        _, length = struct.unpack_from(">Ii", serialized, position)  # flags of a CHARSXP, bytes
        position += 8
        yield serialized[position : position + length].decode()
        position += length


def _paragraphs(lines: list[str]) -> str:
    """Joins lines that were wrapped at 70 columns: a paragraph a line.

    Blank lines separate paragraphs.
    """
    paragraphs = re.split(r"\n\s*\n", "\n".join(line.strip() for line in lines))
    joined = (
        " ".join(paragraph.split()).replace("_", "").translate(ASCII) for paragraph in paragraphs
    )
    return "\n".join(paragraph for paragraph in joined if paragraph)


def _bible(module: pathlib.Path) -> Iterator[str]:
    """The books, from SWORD's zText.

    Its index holds (offset, compressed size, size) of every zlib block.
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
                if len(text) > 1000:  # titles and prefaces of parts
                    yield text


def _plain(osis: str) -> str:
    """OSIS markup -> a paragraph a line, without notes and titles."""
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
