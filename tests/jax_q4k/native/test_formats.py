"""The list of formats in C++ is Python's."""

import re
from pathlib import Path

import jax_q4k.native
from ptx_kernels import formats

SOURCES = Path(jax_q4k.native.__file__).with_name("src")


def test_list_of_formats_is_pythons():
    """Names, quantization blocks and the bytes of every plane; enum and tables expand from it."""
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
    """No other source names a format, outside its own reader and comments."""
    for path in SOURCES.iterdir():
        code = re.sub(r"//[^\n]*", "", path.read_text())
        if path.name != "formats.h":
            assert not [name for name in formats.names() if re.search(rf"\bk?{name}\b", code)], path
