"""The list of formats in C++ equals Python's."""

import re
from pathlib import Path

import jax_q4k.native
from ptx_kernels import formats

SOURCES = Path(jax_q4k.native.__file__).with_name("src")


def test_list_of_formats_is_pythons():
    """Names, block sizes and bytes of each plane; the enum and tables expand from this list."""
    text = (SOURCES / "formats.h").read_text()
    entries = re.findall(r"^ +X\((\w+), (\d+), ([\d, ]+)\) *\\?$", text, re.M)
    listed = {
        name: (int(block), [int(n) for n in sizes.split(", ")]) for name, block, sizes in entries
    }
    assert listed == {
        name: (
            (block := formats.get(name)).block_size,
            [plane.bytes_per_block * 256 // block.block_size for plane in block.planes],
        )
        for name in formats.names()
    }


def test_formats_have_one_list():
    """No other source names a format, except in its own reader and in comments.

    quantizers.h lists those that it quantizes.
    """
    for path in SOURCES.iterdir():
        code = re.sub(r"//[^\n]*", "", path.read_text())
        if path.name not in ("formats.h", "quantizers.h"):
            assert not [name for name in formats.names() if re.search(rf"\bk?{name}\b", code)], path
