"""Written files, and the state after a failure. tests/models/files/test_gguf.py has models."""

import errno
import functools
import os
import subprocess
import sys
import threading
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from gguf.constants import GGUFValueType as Value
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gguf_bytes import assert_same_as_ggufs_reader, write_sample

import jax_q4k as jq
from jax_q4k import cpus


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> Path:
    return write_sample(tmp_path_factory.mktemp("sample") / "sample.gguf")


def test_every_value_and_tensor_type(sample, tmp_path):
    read, target = jq.gguf.read(sample), tmp_path / "t.gguf"
    jq.gguf.write(target, read.metadata, read.tensors)
    again = jq.gguf.read(target)
    assert again.metadata.types == read.metadata.types and again.header.alignment == 32
    np.testing.assert_equal(dict(again.metadata), dict(read.metadata))
    for name, tensor in read.tensors.items():
        assert jax.tree.structure(again.tensors[name]) == jax.tree.structure(tensor), name
        jax.tree.map(np.testing.assert_array_equal, again.tensors[name], tensor)
    assert_same_as_ggufs_reader(again, target)


def test_one_tensor_at_a_time(sample):
    """`TensorFile` reads the same tensors as `read`, but into host memory."""
    whole = jq.gguf.read(sample)
    with jq.gguf.TensorFile(sample) as file:
        assert file.header.tensors == whole.header.tensors
        for name, tensor in whole.tensors.items():
            got = file.read(name)
            assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(got)), name
            jax.tree.map(np.testing.assert_array_equal, got, tensor)
    with pytest.raises(ValueError, match="closed"):
        file.read("plain.F32")


def test_a_header_can_be_refused_before_tensors_are_read(sample, monkeypatch):
    class Refused(Exception):
        pass

    def check(header):
        assert header.tensors == expected.tensors
        raise Refused

    expected = jq.gguf.read_header(sample)
    monkeypatch.setattr(jq.gguf.load, "TensorReader", lambda *_: pytest.fail("read a tensor"))
    with pytest.raises(Refused):
        jq.gguf.read(sample, check=check)


scalars = (
    st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(width=32)
    | st.floats()
    | st.text()
)
# without keys that `write` interprets; hypothesis takes strings from the tested code
keys = st.text(min_size=1).filter(
    lambda key: key not in ("general.architecture", "general.alignment")
)
lists = (
    st.lists(st.integers(-(1 << 31), (1 << 31) - 1)) | st.lists(st.text()) | st.lists(st.booleans())
)


@pytest.mark.slow("compiles a program for each case")
@settings(max_examples=100, deadline=None)
@given(st.dictionaries(keys, scalars | lists), st.text())
def test_any_metadata(tmp_path_factory, values, architecture):
    target = tmp_path_factory.getbasetemp() / "any.gguf"
    metadata = {"general.architecture": architecture, **values}
    jq.gguf.write(target, metadata, {})
    read = jq.gguf.read_header(target).metadata
    assert list(read) == list(metadata)
    for key, value in metadata.items():
        if isinstance(value, float) and read.types[key] is Value.FLOAT32:
            value = float(np.float32(value))
        got = read[key].tolist() if isinstance(read[key], np.ndarray) else read[key]
        np.testing.assert_equal(got, value)
        assert type(got) is type(value)


BAD = [
    ({}, {}, ValueError, "'general.architecture' is None, expected the architecture's name"),
    ({"k": None}, {}, TypeError, "metadata 'k' is None, expected a boolean, text, a number"),
    ({"k": 1 << 64}, {}, TypeError, "metadata 'k' is 18446744073709551616, expected"),
    ({"k": "\ud800"}, {}, TypeError, "metadata 'k' is .*, expected"),
    ({"": 1}, {}, ValueError, "metadata key '' must be text of 1 to 65535 bytes"),
    (
        {"k": ["a", 1]},
        {},
        TypeError,
        "metadata 'k' must hold only texts, only booleans or only numbers",
    ),
    # floats cannot represent all integers from 2^53 on
    (
        {"k": [1 << 60, 0.5]},
        {},
        TypeError,
        "metadata 'k' must hold only texts",
    ),
    ({"ö" * 40000: 1}, {}, ValueError, "must be text of 1 to 65535 bytes"),
    ({"k": [[1], [2]]}, {}, TypeError, "metadata 'k' must hold only texts"),
    (
        {"k": np.zeros((2, 2))},
        {},
        ValueError,
        r"metadata 'k' has shape \(2, 2\); GGUF's arrays have one axis",
    ),
    ({"k": np.zeros(2, complex)}, {}, TypeError, "metadata 'k' has dtype complex128"),
    (
        {"general.alignment": 48},
        {},
        ValueError,
        "'general.alignment' is 48; it must be a power of two",
    ),
    (
        {"general.alignment": 0},
        {},
        ValueError,
        "'general.alignment' is 0; it must be a power of two",
    ),
    (
        {"general.alignment": 1 << 21},
        {},
        ValueError,
        "'general.alignment' is 2097152; it must be a power of two",
    ),
    ({"general.alignment": np.uint64(32)}, {}, ValueError, "'general.alignment' is 32; it must be"),
    ({}, {"": np.zeros(1, np.float32)}, ValueError, "tensor name '' must be text of 1 to 63 bytes"),
    ({}, {"x" * 64: np.zeros(1, np.float32)}, ValueError, "must be text of 1 to 63 bytes"),
    ({}, {"ö" * 32: np.zeros(1, np.float32)}, ValueError, "must be text of 1 to 63 bytes"),
    (
        {},
        {"t": np.zeros(1)},
        TypeError,
        "tensor 't' has dtype float64; it must be a QuantizedArray or of float32",
    ),
    (
        {},
        {"t": np.float32(1)},
        ValueError,
        r"tensor 't' has shape \(\); it must have 1 to 4 axes of at least 1",
    ),
    ({}, {"t": np.zeros((1,) * 5, np.float32)}, ValueError, "it must have 1 to 4 axes"),
    ({}, {"t": np.zeros((0, 2), np.float32)}, ValueError, "it must have 1 to 4 axes of at least 1"),
    (
        {},
        {"t": jq.gguf.TensorPieces("Q8_K", (256,), list)},
        ValueError,
        "type 'Q8_K'; it must be one of F32, F16",
    ),
    (
        {},
        {"t": jq.gguf.TensorPieces("Q4_K", (8, 128), list)},
        ValueError,
        "a multiple of 256, the block of Q4_K",
    ),
    (
        {},
        {"t": jq.gguf.TensorPieces("F32", (4,), lambda: [bytes(12)])},
        ValueError,
        "has 12 bytes; F32 .* takes 16",
    ),
    (
        {},
        {"t": jq.gguf.TensorPieces("F32", (4,), lambda: [bytes(17)])},
        ValueError,
        "more than 16 bytes",
    ),
]


@pytest.mark.parametrize(("metadata", "tensors", "error", "message"), BAD)
def test_values_that_gguf_does_not_hold_are_named(metadata, tensors, error, message, tmp_path):
    target = tmp_path / "old.gguf"
    target.write_bytes(b"old")
    architecture = {} if "architecture" in message else {"general.architecture": "llama"}
    with pytest.raises(error, match=message):
        jq.gguf.write(target, {**architecture, **metadata}, tensors)
    assert target.read_bytes() == b"old" and os.listdir(tmp_path) == ["old.gguf"]


def test_value_types_without_a_file(tmp_path):
    values = {
        "u32": 7,
        "i32": -7,
        "u64": 1 << 40,
        "i64": -(1 << 40),
        "f32": 0.5,
        "f64": 1e300,
        "bool": True,
        "text": "ö",
        "token_types": [1, 3],
        "u32s": [1 << 31],
        "scores": [0, -1.5],
        "flags": [True],
        "u8": np.uint8(3),
        "u16s": np.zeros(2, np.uint16),
        "nan": float("nan"),
    }
    target = tmp_path / "t.gguf"
    jq.gguf.write(target, {"general.architecture": "llama", **values}, {})
    fields = gguf.GGUFReader(target).fields
    kinds = {key: "/".join(kind.name for kind in fields[key].types) for key in values}
    assert kinds == {
        "u32": "UINT32",
        "i32": "INT32",
        "u64": "UINT64",
        "i64": "INT64",
        "f32": "FLOAT32",
        "f64": "FLOAT64",
        "bool": "BOOL",
        "text": "STRING",
        "token_types": "ARRAY/INT32",
        "u32s": "ARRAY/UINT32",
        "scores": "ARRAY/FLOAT32",
        "flags": "ARRAY/BOOL",
        "u8": "UINT8",
        "u16s": "ARRAY/UINT16",
        "nan": "FLOAT32",
    }


def test_arrays_that_are_not_contiguous(tmp_path):
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    tensors = {"columns": np.asfortranarray(x), "every second": x[:, ::2], "reversed": x[::-1]}
    jq.gguf.write(tmp_path / "t.gguf", {"general.architecture": "llama"}, tensors)
    for name, got in jq.gguf.read(tmp_path / "t.gguf").tensors.items():
        np.testing.assert_array_equal(got, tensors[name])


def test_two_files_of_a_folder_at_once(tmp_path):
    small = {"general.architecture": "llama"}

    def pieces():
        yield bytes(8)
        jq.gguf.write(tmp_path / "inner.gguf", small, {"t": np.ones(2, np.float32)})
        yield bytes(8)

    jq.gguf.write(tmp_path / "outer.gguf", small, {"t": jq.gguf.TensorPieces("F32", (4,), pieces)})
    np.testing.assert_array_equal(jq.gguf.read(tmp_path / "inner.gguf").tensors["t"], np.ones(2))
    np.testing.assert_array_equal(jq.gguf.read(tmp_path / "outer.gguf").tensors["t"], np.zeros(4))


def test_a_changed_value_that_its_old_type_does_not_hold(tmp_path):
    metadata = jq.gguf.Metadata({"general.architecture": "llama", "k": 300})
    metadata.types["k"] = Value.UINT8
    jq.gguf.write(tmp_path / "t.gguf", metadata, {})
    assert jq.gguf.read_header(tmp_path / "t.gguf").metadata.types["k"] is Value.UINT32


def test_unwritable_targets(tmp_path):
    small = {"general.architecture": "llama"}
    with pytest.raises(FileNotFoundError, match="none/t.gguf"):
        jq.gguf.write(tmp_path / "none" / "t.gguf", small, {})
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        jq.gguf.write(tmp_path, small, {})
    with pytest.raises(OSError, match="not a regular file: '/dev/null'"):
        jq.gguf.write("/dev/null", small, {})
    assert os.listdir(tmp_path) == []


def test_a_link_stays_one(tmp_path):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target.gguf", tmp_path / "link.gguf"
    link.symlink_to(target)
    jq.gguf.write(link, {"general.architecture": "llama"}, {})
    assert (
        link.is_symlink()
        and jq.gguf.read_header(target).metadata["general.architecture"] == "llama"
    )


def test_a_full_disk_leaves_the_old_file(tmp_path):
    """A file size limit simulates a full disk: the call fails, with EFBIG instead of ENOSPC."""
    program = """
import resource, signal, numpy as np, jax_q4k as jq
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
try:
    jq.gguf.write("t.gguf", {"general.architecture": "llama"}, {"t": np.ones(1 << 16, np.float32)})
except OSError as error:
    print(error.errno, error.filename)
"""
    (tmp_path / "t.gguf").write_bytes(b"old")
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{errno.EFBIG} t.gguf\n"
    assert (tmp_path / "t.gguf").read_bytes() == b"old" and os.listdir(tmp_path) == ["t.gguf"]


def test_an_interruption_leaves_the_old_file(tmp_path):
    def interrupted():
        yield bytes(8)
        raise KeyboardInterrupt

    target = tmp_path / "t.gguf"
    target.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        jq.gguf.write(
            target,
            {"general.architecture": "llama"},
            {"t": jq.gguf.TensorPieces("F32", (4,), interrupted)},
        )
    assert target.read_bytes() == b"old" and os.listdir(tmp_path) == ["t.gguf"]


def test_no_more_is_taken_than_there_is_room_for(tmp_path):
    def pieces():
        yield bytes(16)
        yield bytes(1)
        pytest.fail("asked for another piece")

    tensors = {"t": jq.gguf.TensorPieces("F32", (4,), pieces)}
    with pytest.raises(ValueError, match="more than 16 bytes"):
        jq.gguf.write(tmp_path / "t.gguf", {"general.architecture": "llama"}, tensors)


def test_the_data_are_on_disk_before_the_file_has_its_name(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda file: order.append(os.fstat(file).st_size) or fsync(file)
    )
    monkeypatch.setattr(os, "replace", lambda *paths: order.append("replace") or replace(*paths))
    target = tmp_path / "t.gguf"
    jq.gguf.write(target, {"general.architecture": "llama"}, {"t": np.ones(100, np.float32)})
    assert order == [target.stat().st_size, "replace"]


def test_functions_are_called_ahead_and_written_in_order(tmp_path, monkeypatch):
    """The first waits until others have been called; a few are, and no more."""
    monkeypatch.setattr(cpus, "available", lambda: 2)
    called, enough, limit = [], threading.Event(), 2 * 2 + 1

    def piece(i):
        called.append(i)
        if i == 0:
            assert enough.wait(60)
        if len(called) == limit:
            enough.set()
        return np.full(2, i, np.float32)

    def pieces(first, count):
        return [functools.partial(piece, i) for i in range(first, first + count)]

    def report(done, total):
        reports.append((done, len(called)))

    reports = []
    tensors = {
        name: jq.gguf.TensorPieces("F32", (2 * count,), functools.partial(pieces, first, count))
        for name, first, count in [("a", 0, 5), ("b", 5, 1), ("c", 6, 4)]
    }
    small = {"general.architecture": "llama"}
    jq.gguf.write(tmp_path / "t.gguf", small, tensors, progress=report)
    written = jq.gguf.read(tmp_path / "t.gguf").tensors
    got = np.concatenate([np.asarray(written[name]) for name in "abc"])
    np.testing.assert_array_equal(got, np.repeat(np.arange(10), 2))
    assert [done for done, _ in reports] == list(range(0, 81, 8))
    assert all(calls <= done // 8 + limit for done, calls in reports[1:])


def test_a_function_that_fails_leaves_the_old_file(tmp_path):
    def fails():
        raise OSError(errno.EIO, "broken", "source")

    target, called = tmp_path / "t.gguf", []
    target.write_bytes(b"old")
    pieces = [lambda: bytes(4), fails, *[lambda: called.append(0) or bytes(4)] * 100]
    tensors = {"t": jq.gguf.TensorPieces("F32", (102,), lambda: pieces)}
    with pytest.raises(OSError, match="broken: 'source'"):
        jq.gguf.write(target, {"general.architecture": "llama"}, tensors)
    assert target.read_bytes() == b"old" and os.listdir(tmp_path) == ["t.gguf"]
    assert len(called) < 50


def test_an_error_of_the_source_is_not_the_targets(tmp_path):
    pieces = jq.gguf.TensorPieces("F32", (4,), lambda: [open("/no/such/shard", "rb").read()])
    with pytest.raises(FileNotFoundError, match="/no/such/shard"):
        jq.gguf.write(tmp_path / "t.gguf", {"general.architecture": "llama"}, {"t": pieces})
