"""Builds GGUF files byte by byte, so that tests can make invalid ones.

A valid file has every type.
"""

from __future__ import annotations

import io
import struct
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType as Tensor
from gguf.constants import GGUFValueType as Value

import jax_q4k as jq
from jax_q4k.gguf.header import parse_source
from jax_q4k.gguf.source import Source
from ptx_kernels import formats

ALIGNMENT = 32

SMALL = (0, 1, 2, 7, 9, 12, 31, 32, 255, 256, 65535)
LARGE = (1 << 31, 1 << 32, 1 << 36, 1 << 61, 1 << 63, (1 << 64) - 32)
SPECIAL = (*SMALL, *LARGE, *(value - 1 for value in LARGE), (1 << 64) - 1)
CHANGES = (
    "byte",
    "byte",
    "bit",
    "bit",
    "u32",
    "u64",
    "truncate",
    "delete",
    "insert",
    "repeat",
    "overwrite",
)


def parse(data: bytes) -> jq.gguf.Header:
    """Parses the header of a file in memory."""
    return parse_source(Source(io.BytesIO(data), "<bytes>"))


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return u64(len(data)) + data


def entry(key: str | bytes, kind: int, payload: bytes) -> bytes:
    return string(key) + u32(kind) + payload


def text_entry(key: str | bytes, text: str | bytes) -> bytes:
    return entry(key, Value.STRING, string(text))


def float_entry(key: str | bytes, value: float) -> bytes:
    return entry(key, Value.FLOAT32, struct.pack("<f", value))


def array_entry(key: str, kind: int, elements: list[bytes], count: int | None = None) -> bytes:
    count = len(elements) if count is None else count
    return entry(key, Value.ARRAY, u32(kind) + u64(count) + b"".join(elements))


def tensor(name: str | bytes, dims: list[int], kind: int = Tensor.F32, offset: int = 0) -> bytes:
    return (
        string(name)
        + u32(len(dims))
        + b"".join(map(u64, dims))
        + struct.pack("<i", kind)
        + u64(offset)
    )


def build(
    entries: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: bytes = u32(3),
    tensor_count: int | None = None,
    entry_count: int | None = None,
) -> bytes:
    """Builds a file from these parts; counts default to the lengths of the lists."""
    entries, tensors = entries or [], tensors or []
    tensor_count = len(tensors) if tensor_count is None else tensor_count
    entry_count = len(entries) if entry_count is None else entry_count
    header = (
        magic
        + version
        + u64(tensor_count)
        + u64(entry_count)
        + b"".join(entries)
        + b"".join(tensors)
    )
    return header + bytes(-len(header) % ALIGNMENT) + data


def damage(data: bytes, header: int, rng: np.random.Generator) -> bytes:
    """Applies one or a few random changes, seven of eight within the first `header` bytes."""
    changed = bytearray(data)
    for _ in range(rng.geometric(0.6)):
        end = min(header, len(changed)) if rng.random() < 7 / 8 else len(changed)
        if end == 0:
            break
        at, other, size = (int(rng.integers(n)) for n in (end, end, 40))
        kind = rng.choice(CHANGES)
        if kind == "byte":
            changed[at] = rng.integers(256)
        elif kind == "bit":
            changed[at] ^= 1 << int(rng.integers(8))
        elif kind in ("u32", "u64"):
            number = struct.pack("<Q", SPECIAL[rng.integers(len(SPECIAL))])[: int(kind[1:]) // 8]
            changed[at : at + len(number)] = number
        elif kind == "truncate":
            del changed[at:]
        elif kind == "delete":
            del changed[at : at + size]
        elif kind == "insert":
            changed[at:at] = rng.bytes(size)
        elif kind == "repeat":
            changed[at:at] = changed[other : other + size]
        else:
            changed[at : at + size] = changed[other : other + size]
    return bytes(changed)


def rewritten(path: Path, entries: dict[str, bytes]) -> bytes:
    """Returns a valid file with these metadata entries replaced or appended."""
    reader, rest = gguf.GGUFReader(path), dict(entries)
    metadata = [
        rest.pop(key, None) or b"".join(part.tobytes() for part in field.parts)
        for key, field in reader.fields.items()
        if not key.startswith("GGUF.")
    ]
    tensors, data = [], b""
    for t in reader.tensors:
        tensors.append(tensor(t.name, t.shape.tolist(), t.tensor_type, len(data)))
        data += t.data.tobytes()
        data += bytes(-len(data) % ALIGNMENT)
    return build([*metadata, *rest.values()], tensors, data)


def write_sample(path: Path, tokens: int = 60) -> Path:
    """Writes a valid file: every metadata type, a vocabulary, and tensors.

    The tensors have 1 to 3 axes and every supported type.
    """
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, "llama")
    for i, kind in enumerate(Value):
        if kind not in (Value.STRING, Value.ARRAY):
            wide = 2.5 if "FLOAT" in kind.name else True if kind is Value.BOOL else 100 + i
            writer.add_key_value(f"scalar.{kind.name}", wide, kind)
            writer.add_key_value(f"array.{kind.name}", [wide] * 3, Value.ARRAY, sub_type=kind)
    writer.add_string("text", "größe 木")
    names = [f"<0x{i:02X}>" if i < 8 else f"▁tok{i}" for i in range(tokens)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(names)
    writer.add_token_scores([-float(i) for i in range(tokens)])
    writer.add_token_types([6 if i < 8 else 1 for i in range(tokens)])
    writer.add_bos_token_id(8)
    writer.add_eos_token_id(9)
    for name in formats.names():
        block = formats.get(name)
        raw = rng.integers(
            0, 256, (2, 3, 512 // block.block_size, block.block_bytes), dtype=np.uint8
        )
        for field in block.scale_fields:
            block.store_scale(raw, field, rng.normal(size=raw.shape[:-1]))
        writer.add_tensor(f"packed.{name}", raw.reshape(2, 3, -1), raw_dtype=Tensor[name])
    writer.add_tensor("plain.F32", rng.normal(size=(3, 5)).astype(np.float32))
    writer.add_tensor("plain.F16", rng.normal(size=7).astype(np.float16))
    brain = (rng.normal(size=(2, 4)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    writer.add_tensor("plain.BF16", brain.view(np.uint8), raw_dtype=Tensor.BF16)
    close(writer)
    return path


def assert_same_as_ggufs_reader(file: jq.gguf.GGUFFile, path: Path) -> None:
    """Checks that metadata, shapes and bytes equal those of the `gguf` package's reader."""
    reader = gguf.GGUFReader(path)
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert list(file.metadata) == list(fields)
    for key, field in fields.items():
        value, want = file.metadata[key], field.contents()
        value = value.tolist() if isinstance(value, np.ndarray) else value
        np.testing.assert_equal(value, want, err_msg=key)  # treats NaN as equal to NaN
        assert type(value) is type(want), key
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for want in reader.tensors:
        got = file.tensors[want.name]
        assert got.shape == tuple(reversed(want.shape.tolist())), want.name
        if isinstance(got, jq.QuantizedArray):
            assert got.format == want.tensor_type.name
            assert got.to_gguf_bytes() == want.data.tobytes(), want.name
        else:
            dtype = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[want.tensor_type.name]
            assert got.dtype == dtype
            assert np.asarray(got).tobytes() == want.data.tobytes(), want.name


def write_tensors(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray]) -> None:
    """Writes tensors with the gguf package's writer and closes it."""
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    close(writer)


def close(writer: gguf.GGUFWriter) -> None:
    """Writes everything that was added to the gguf package's writer, and closes it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
