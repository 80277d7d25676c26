"""Malformed GGUF files: errors name the file, the field, and the expected value."""

from __future__ import annotations

import dataclasses
import os
import re
import struct

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Tensor
from gguf.constants import GGUFValueType as Value
from support.gguf_bytes import (
    array_entry,
    build,
    entry,
    parse,
    string,
    tensor,
    text_entry,
    u32,
    u64,
    write_sample,
)

import jax_q4k as jq
from ptx_kernels import formats

HUGE = (1 << 64) - 1


@dataclasses.dataclass(frozen=True)
class Case:
    id: str
    data: bytes
    message: str  # a regular expression


def one_tensor(**what) -> bytes:
    return build(tensors=[tensor(**{"name": "w", "dims": [8], **what})], data=bytes(32))


def vocabulary(*entries: bytes, tokens: tuple[str, ...] = ("a", "b", "<0x0A>")) -> bytes:
    listed = array_entry("tokenizer.ggml.tokens", Value.STRING, [string(token) for token in tokens])
    return build([*entries, listed])


def numbers(name: str, kind: int, code: str, values: list[float]) -> bytes:
    return array_entry(
        f"tokenizer.ggml.{name}", kind, [struct.pack(code, value) for value in values]
    )


FIRST, FOURTH = (entry("split.no", Value.UINT16, bytes([i, 0])) for i in (0, 3))

CASES = [
    # Start of the file and its counts
    Case("empty", b"", "magic: truncated: expected 4 bytes at byte 0, 0 are left of 0"),
    Case("bad-magic", build(magic=b"GGML"), "magic: expected b'GGUF', got b'GGML'"),
    *(
        Case(f"version-{n}", build(version=u32(n)), rf"version: expected 2 or 3, got {n}")
        for n in (0, 1, 4, 1 << 31)
    ),
    Case("big-endian", build(version=b"\0\0\0\3"), "version: expected 2 or 3, got 3 in big-endian"),
    Case(
        "metadata-count-huge",
        build(entry_count=HUGE),
        f"metadata count: {HUGE} entries of at least 14 bytes are more than the 8 bytes left",
    ),
    Case("tensor-count-huge", build(tensor_count=HUGE), f"tensor count: {HUGE} entries"),
    Case(
        "metadata-count-of-65537",
        build(data=bytes(1 << 20), entry_count=(1 << 16) + 1),
        "metadata count: must be at most 65536, not 65537",
    ),
    Case(
        "metadata-count-beyond",
        build([text_entry("a", "b" * 20)], entry_count=9),
        "metadata count: 9 entries",
    ),
    Case(
        "tensor-count-beyond",
        build(tensors=[tensor("w", [8])], data=bytes(32), tensor_count=9),
        "tensor count: 9 entries",
    ),
    # Metadata
    Case(
        "key-length-huge",
        build([u64(HUGE)], data=bytes(40)),
        f"metadata entry 0: key: length {HUGE} is more than the 40 bytes left",
    ),
    Case(
        "key-too-long",
        build([text_entry("k" * 65536, "")]),
        "metadata entry 0: key: length 65536 must be at most 65535",
    ),
    Case(
        "string-length-huge",
        build([entry("a", Value.STRING, u64(HUGE - 8) + bytes(40))]),
        f"a: length {HUGE - 8} is more than the",
    ),
    Case(
        "string-length-one-too-many",
        build([entry("a", Value.STRING, u64(4) + b"abc")]).rstrip(b"\0"),
        "a: length 4 is more than the 3 bytes left",
    ),
    Case("key-empty", build([text_entry("", "abc")]), "metadata entry 0: key: must not be empty"),
    Case(
        "key-duplicate",
        build([text_entry("a", "b"), text_entry("a", "c")]),
        "metadata entry 1: key: duplicate of 'a'",
    ),
    Case("value-type", build([entry("a", 13, bytes(8))]), "a: value type: must be 0 to 12, not 13"),
    Case(
        "value-type-huge",
        build([entry("a", 0xFFFFFFFF, bytes(8))]),
        "a: value type: must be 0 to 12, not 4294967295",
    ),
    Case(
        "element-type",
        build([array_entry("a", 13, [bytes(8)])]),
        "a: element type: must be 0 to 12, not 13",
    ),
    *(
        Case(
            f"array-count-{kind.name}",
            build([array_entry("a", kind, [bytes(32)], count=1 << 61)]),
            rf"a: length: {1 << 61} elements of at least \d bytes are more than the \d+ bytes left",
        )
        for kind in Value
        if kind is not Value.ARRAY
    ),
    Case(
        "array-count-one-too-many",
        build([array_entry("a", Value.UINT32, [u32(1)] * 3, count=4)]).rstrip(b"\0") + bytes(3),
        "a: length: 4 elements of at least 4 bytes are more than the 12 bytes left",
    ),
    Case(
        "strings-that-end-early",
        build([array_entry("a", Value.STRING, [string("xy")] * 2 + [u64(99)])]),
        r"a\[2\]: length 99 is more than the",
    ),
    Case(
        "nested-array",
        build([array_entry("a", Value.ARRAY, [u32(0) + u64(0)])]),
        "a: element type: arrays in arrays are not supported",
    ),
    Case(
        "key-not-utf8", build([text_entry(b"\xff", "abc")]), "metadata entry 0: key: expected UTF-8"
    ),
    Case("boolean", build([entry("a", Value.BOOL, b"\2")]), "a: a boolean must be 0 or 1, not 2"),
    Case(
        "boolean-element",
        build([array_entry("a", Value.BOOL, [b"\1\7"], count=2)]),
        "a: a boolean must be 0 or 1, not 7",
    ),
    # Alignment
    *(
        Case(
            f"alignment-{n}",
            build([entry("general.alignment", Value.UINT32, u32(n))]),
            f"general.alignment: must be a power of two up to 1048576, not {n}",
        )
        for n in (0, 3, 48, 1 << 21, (1 << 32) - 1)
    ),
    Case(
        "alignment-type",
        build([entry("general.alignment", Value.UINT64, u64(32))]),
        "general.alignment: must be of type UINT32, not UINT64",
    ),
    # Tensor names, dimensions, types
    Case("name-empty", one_tensor(name=""), "tensor 0: name: must not be empty"),
    Case("name-of-64", one_tensor(name="w" * 64), "tensor 0: name: length 64 must be at most 63"),
    Case("name-not-utf8", one_tensor(name=b"\xfe"), "tensor 0: name: expected UTF-8"),
    Case(
        "name-duplicate",
        build(tensors=[tensor("w", [8]), tensor("w", [8], offset=32)], data=bytes(64)),
        "tensor 1: name: duplicate of 'w'",
    ),
    Case(
        "five-dimensions",
        one_tensor(dims=[1] * 5),
        "tensor 'w': dimension count: must be at most 4",
    ),
    Case(
        "dimensions-huge",
        build(tensors=[string("w") + u32(0xFFFFFFFF) + bytes(32)]),
        "not 4294967295",
    ),
    Case(
        "dimension-zero",
        one_tensor(dims=[8, 0]),
        r"tensor 'w': dimensions: \[8, 0\]: every dimension must be positive, not 0",
    ),
    Case(
        "dimension-negative", one_tensor(dims=[HUGE, 2]), "every dimension must be positive, not -1"
    ),
    Case(
        "product-wraps-to-zero",
        one_tensor(dims=[1 << 32, 1 << 32]),
        rf"tensor 'w': dimensions: \[{1 << 32}, {1 << 32}\] of F32 take at least \d+ bytes; "
        "the file has",
    ),
    Case(
        "product-wraps-to-zero-Q4_K",
        one_tensor(dims=[1 << 36, 1 << 36], kind=Tensor.Q4_K),
        "of Q4_K take at least",
    ),
    Case("product-wraps-to-small", one_tensor(dims=[(1 << 62) + 1, 4]), "of F32 take at least"),
    Case("dimension-beyond-file", one_tensor(dims=[1 << 40]), f"take at least {1 << 42} bytes"),
    Case(
        "no-multiple-of-block",
        one_tensor(dims=[128, 2], kind=Tensor.Q4_K),
        r"tensor 'w': dimensions: \[128, 2\]: the first must be a multiple of 256, "
        "the block of Q4_K",
    ),
    Case("scalar-of-blocks", one_tensor(dims=[], kind=Tensor.Q8_0), "must be a multiple of 32"),
    Case(
        "type-negative",
        one_tensor(kind=-1),
        r"tensor 'w': type: -1 \(unknown\); supported: F32, F16",
    ),
    Case(
        "type-unknown",
        one_tensor(kind=9999),
        r"type: 9999 \(unknown\); supported: .*Q4_K, Q5_K, Q6_K",
    ),
    Case("type-removed", one_tensor(kind=4), r"type: 4 \(Q4_2, removed from ggml\); supported:"),
    *(
        Case(
            f"type-{kind.name}",
            build(tensors=[tensor("w", [256], kind)], data=bytes(4096)),
            f"tensor 'w': type: {kind.name} is not supported; "
            f"supported: {', '.join(jq.gguf.supported_types())}$",
        )
        for kind in Tensor
        if kind.name not in jq.gguf.supported_types()
    ),
    # Offsets
    Case(
        "offset-misaligned",
        build(tensors=[tensor("w", [4], offset=4)], data=bytes(64)),
        "tensor 'w': offset: 4 must be a multiple of the alignment, 32",
    ),
    Case(
        "overlap",
        build(tensors=[tensor("a", [9]), tensor("b", [8], offset=32)], data=bytes(96)),
        "tensor 'b': offset: 32 overlaps tensor 'a', which ends at 36",
    ),
    Case(
        "same-place",
        build(tensors=[tensor("a", [8]), tensor("b", [8])], data=bytes(96)),
        "tensor 'b': offset: 0 overlaps tensor 'a'",
    ),
    Case("offset-huge", one_tensor(offset=HUGE - 31), f"tensor 'w': offset: {HUGE - 31} "),
    Case("offset-huge-misaligned", one_tensor(offset=HUGE), f"offset: {HUGE} must be a multiple"),
    Case(
        "beyond-the-file",
        one_tensor(dims=[9]),
        "tensor 'w': offset: 0 [+] 36 bytes must lie within the 32 bytes of tensor data",
    ),
    Case(
        "offset-beyond-the-file",
        one_tensor(offset=64),
        "64 [+] 32 bytes must lie within the 32 bytes",
    ),
    # Tokenizer lists
    Case(
        "scores-short",
        vocabulary(numbers("scores", Value.FLOAT32, "<f", [0, 1])),
        "tokenizer.ggml.scores: has 2 entries, but there are 3 tokens",
    ),
    Case(
        "types-long",
        vocabulary(numbers("token_type", Value.INT32, "<i", [1] * 4)),
        "tokenizer.ggml.token_type: has 4 entries, but there are 3 tokens",
    ),
    Case(
        "scores-without-tokens",
        build([numbers("scores", Value.FLOAT32, "<f", [0, 1])]),
        "tokenizer.ggml.scores: has 2 entries, but there are 0 tokens",
    ),
    Case(
        "scores-of-integers",
        vocabulary(numbers("scores", Value.INT32, "<i", [0, 1, 2])),
        "tokenizer.ggml.scores: must be an array of floats",
    ),
    Case(
        "types-of-floats",
        vocabulary(numbers("token_type", Value.FLOAT32, "<f", [1, 1, 1])),
        "tokenizer.ggml.token_type: must be an array of integers",
    ),
    Case(
        "types-a-string",
        vocabulary(text_entry("tokenizer.ggml.token_type", "abc")),
        "tokenizer.ggml.token_type: must be an array of integers",
    ),
    Case(
        "tokens-a-number",
        build([entry("tokenizer.ggml.tokens", Value.UINT32, u32(3))]),
        "tokenizer.ggml.tokens: must be an array of strings",
    ),
    Case(
        "merges-of-numbers",
        vocabulary(numbers("merges", Value.UINT32, "<I", [1])),
        "tokenizer.ggml.merges: must be an array of strings",
    ),
    *(
        Case(
            f"{name}-{label}",
            vocabulary(entry(f"tokenizer.ggml.{name}_token_id", kind, payload)),
            f"tokenizer.ggml.{name}_token_id: is of type {found}, expected int",
        )
        for name in ("bos", "eos")
        for label, kind, payload, found in (
            ("text", Value.STRING, string("a"), "str"),
            ("bool", Value.BOOL, b"\1", "bool"),
        )
    ),
    *(
        Case(
            f"byte-token-{token}",
            vocabulary(numbers("token_type", Value.INT32, "<i", [1, 6]), tokens=("a", token)),
            rf"tokens\[1\]: a byte token must read <0x00> to <0xFF>, not {re.escape(repr(token))}",
        )
        for token in ("<0xG0>", "<0x0>", "<0x000>", "0x0A", "<0x0A>\n")
    ),
    # Requirements of the loader beyond a valid file
    *(
        Case(
            f"parts-{name}",
            build([entry("split.count", kind, data), *more]),
            message,
        )
        for name, kind, data, more, message in (
            (
                "negative",
                Value.INT16,
                struct.pack("<h", -3),
                [],
                "split.count: .* 0 to 512, not -3",
            ),
            ("many", Value.UINT16, b"\xff\xff", [], "split.count: .* from 0 to 512, not 65535"),
            (
                "huge",
                Value.UINT64,
                b"\xff" * 8,
                [],
                "split.count: .* to 512, not 18446744073709551615",
            ),
            ("text", Value.STRING, string("3"), [], "split.count: .* from 0 to 512, not '3'"),
            ("unnumbered", Value.UINT16, b"\3\0", [], "split.no: is missing"),
            ("beyond", Value.UINT16, b"\3\0", [FOURTH], "split.no: .* from 0 to 2, not 3"),
            (
                "later",
                Value.UINT16,
                b"\4\0",
                [FOURTH],
                "split.no: is 3: this is part 4 of 4; give the",
            ),
            (
                "unnamed",
                Value.UINT16,
                b"\3\0",
                [FIRST],
                "split.count: is 3, but the file is not named",
            ),
        )
    ),
    Case(
        "quantization-version",
        build(
            [entry("general.quantization_version", Value.UINT32, u32(1))],
            [tensor("w", [256], Tensor.Q4_K)],
            bytes(144),
        ),
        "general.quantization_version: must be 2, not 1",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_refused(case, tmp_path):
    path = tmp_path / "bad.gguf"
    path.write_bytes(case.data)
    with pytest.raises(jq.GGUFError) as caught:
        jq.gguf.read(path)
    error = caught.value
    assert error.file == str(path) and str(error) == f"{path}: {error.field}: {error.problem}"
    assert re.search(case.message, f"{error.field}: {error.problem}"), str(error)


def test_the_sound_files_that_the_cases_start_from_load(tmp_path):
    for i, data in enumerate((one_tensor(), build(), vocabulary(), one_tensor(dims=[]))):
        path = tmp_path / f"{i}.gguf"
        path.write_bytes(data)
        jq.gguf.read(path)


def test_texts_that_are_not_utf8_are_read_with_a_warning():
    entries = [
        text_entry("a", b"ab\xc3"),
        array_entry("b", Value.STRING, [string("x"), string(b"\x80y")]),
    ]
    with pytest.warns(UserWarning, match=r"2 texts are not UTF-8; invalid bytes .*: a, b\[1\]$"):
        metadata = parse(build(entries)).metadata
    assert metadata == {"a": r"ab\xc3", "b": ["x", r"\x80y"]}


def test_limits_of_strings():
    with pytest.raises(jq.GGUFError, match="a: length 16777217 must be at most 16777216 bytes"):
        parse(build([text_entry("a", "x" * ((1 << 24) + 1))]))
    count = (1 << 22) + 1
    with pytest.raises(jq.GGUFError, match="a: 4194305 strings: an array may hold at most 4194304"):
        parse(build([array_entry("a", Value.STRING, [bytes(8 * count)], count=count)]))


def test_truncated_at_every_byte(tmp_path):
    path = write_sample(tmp_path / "sample.gguf", tokens=20)
    data = path.read_bytes()
    header = parse(data)
    end = header.data_start + max(info.offset + info.nbytes for info in header.tensors.values())
    assert parse(data[:end]).tensors.keys() == header.tensors.keys()
    for size in [*range(header.data_start + 1), *range(header.data_start, end, 61), end - 1]:
        with pytest.raises(jq.GGUFError):
            parse(data[:size])


@pytest.mark.slow(
    "repeats for each format what others do for all of them",
    quick=["*Q4_K*", "*Q6_K*", "*MXFP4*", "*-F16*"],
)
@pytest.mark.parametrize("name", ["F32", "F16", "BF16", *formats.names()])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scales_that_are_not_finite(name, value, tmp_path, monkeypatch):
    monkeypatch.setattr(
        jq.gguf.tensor_reader, "CHUNK", 1024
    )  # the bad block is not in the first chunk
    sample = write_sample(tmp_path / "sample.gguf")
    kind = "plain" if name in ("F32", "F16", "BF16") else "packed"
    header = jq.gguf.read_header(sample)
    info = header.tensors[f"{kind}.{name}"]
    data = bytearray(sample.read_bytes())
    if kind == "plain":
        places = {"F32": (4, "<f4"), "F16": (2, "<f2"), "BF16": (4, "<f4")}
        size, code = places[name]
        bad = np.array(value, code).tobytes()[-2 if name == "BF16" else 0 :]
        fields, stride, index, what = [0], 2 if name == "BF16" else size, 5, "element 5"
    else:
        block = formats.get(name)
        stride = block.block_bytes
        index = info.nbytes // stride - 2
        fields, what = block.scale_fields, f"a scale of block {index}"
    for field in fields:
        changed = data.copy()
        at = header.data_start + info.offset + index * stride
        if kind == "plain":
            changed[at : at + len(bad)] = bad
        else:
            changed_block = np.frombuffer(changed, np.uint8)[at : at + stride]
            block.store_scale(changed_block, field, value)
        path = tmp_path / "bad.gguf"
        path.write_bytes(changed)
        with pytest.raises(jq.GGUFError, match=rf"tensor '{info.name}': {what} is NaN or infinite"):
            jq.gguf.read(path)
        loaded = jq.gguf.read(path, check_scales=False).tensors[info.name]
        weights = loaded.dequantize() if isinstance(loaded, jq.QuantizedArray) else loaded
        assert not np.isfinite(np.asarray(weights, np.float32)).all()


def test_a_file_that_shrinks_while_tensors_are_read(tmp_path):
    path = write_sample(tmp_path / "sample.gguf")
    header = jq.gguf.read_header(path)

    def shrink(done: int, total: int) -> None:
        os.truncate(path, header.data_start + 100)

    with pytest.raises(
        jq.GGUFError, match=r"tensor 'packed.\w+': the file shrank while it was read: expected"
    ):
        jq.gguf.read(path, progress=shrink)


def test_a_file_that_shrinks_while_its_header_is_read(tmp_path):
    path = write_sample(tmp_path / "sample.gguf")
    with open(path, "rb", buffering=0) as file:
        source = jq.gguf.source.Source(file, "sample")
        os.truncate(path, 50)
        with pytest.raises(
            jq.GGUFError, match="the file shrank while it was read: expected .* got 50"
        ):
            jq.gguf.header.parse_source(source)


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(jq.GGUFError, match="path: must be a regular file"):
            jq.gguf.read(path)
    with pytest.raises(FileNotFoundError):
        jq.gguf.read(tmp_path / "absent.gguf")
