"""Reads valid files: the same content as `gguf`'s reader, packed, in about the file's memory."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Tensor
from gguf.constants import GGUFValueType as Value
from support.gguf_bytes import (
    array_entry,
    assert_same_as_ggufs_reader,
    build,
    entry,
    parse,
    string,
    tensor,
    text_entry,
    u32,
    write_sample,
)
from support.paths import GOLDEN

import jax_q4k as jq
from jax_q4k.gguf.source import Source
from jax_q4k.gguf.tensor_reader import Blocks
from ptx_kernels import formats

MODELS = sorted(GOLDEN.glob("*.gguf"))


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> Path:
    return write_sample(tmp_path_factory.mktemp("gguf") / "sample.gguf")


@pytest.mark.slow("compiles a program for each case", quick=["qwen2-fused"])
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.name.split(".")[0])
def test_golden_files_equal_ggufs_reader(path):
    assert_same_as_ggufs_reader(jq.gguf.read(path), path)


def test_every_type_equals_ggufs_reader(sample):
    file = jq.gguf.read(sample)
    assert_same_as_ggufs_reader(file, sample)
    assert {w.format for w in file.tensors.values() if isinstance(w, jq.QuantizedArray)} == set(
        formats.names()
    )
    assert {str(w.dtype) for w in file.tensors.values() if isinstance(w, jax.Array)} == {
        "float32",
        "float16",
        "bfloat16",
    }


def test_tensors_of_many_chunks(sample, monkeypatch):
    monkeypatch.setattr(jq.gguf.tensor_reader, "CHUNK", 512)
    assert_same_as_ggufs_reader(jq.gguf.read(sample), sample)


def test_planes_are_split_off_a_chunk_at_a_time(sample, monkeypatch):
    """Extra memory for a tensor of several planes is one chunk, however large the tensor."""
    monkeypatch.setattr(jq.gguf.tensor_reader, "CHUNK", 500)
    sizes, read_into = [], Source.read_into

    def counted(self, offset, target, field):
        sizes.append(target.nbytes)
        read_into(self, offset, target, field)

    with jq.gguf.TensorFile(sample) as file:
        monkeypatch.setattr(Source, "read_into", counted)
        reader = file._reader
        blocks = Blocks.of(file.header.tensors["packed.Q6_K"])
        reader.boxes(blocks, [((0, 2), (0, 3), (0, 2))])
    assert sum(sizes) == 2 * 3 * 2 * 210 and max(sizes) == 420


def test_rows_are_those_of_the_tensor(sample):
    """Each read overwrites the rows of the one before, so they are compared at once."""
    with jq.gguf.TensorFile(sample) as file:
        for name, info in file.header.tensors.items():
            whole = file.read(name)
            for first, stop in [(0, 1), (0, info.shape[0]), (info.shape[0] - 1, info.shape[0])]:
                if len(info.shape) > 1:
                    got = file.read_rows(name, first, stop)
                    jax.tree.map(np.testing.assert_array_equal, got, whole[first:stop])


def test_a_part_of_a_part(sample):
    info = jq.gguf.read_header(sample).tensors["packed.Q4_K"]  # (2, 3, 512)
    part = info.part("part", 1, 2, 1)
    assert part.part("rows", 1, 1, 1) == info.part("rows", 2, 1, 1)
    with pytest.raises(ValueError, match="axis=0 must be 1"):
        part.part("matrix", 0, 1, 0)


@pytest.mark.parametrize("threads", [1, 5])
def test_tensors_read_by_several_threads(sample, monkeypatch, threads):
    monkeypatch.setattr(jq.gguf.tensor_reader, "CHUNK", 512)
    monkeypatch.setattr(jq.gguf.load, "THREADS", threads)
    assert_same_as_ggufs_reader(jq.gguf.read(sample), sample)


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 1), (1, 3), (0, 2)), ((1, 2), (0, 1), (0, 2))],  # rows of two matrices
        [((0, 2), (0, 3), (0, 1)), ((0, 2), (0, 3), (1, 2))],  # columns that cover all of them
        [((0, 2), (1, 2), (1, 2))],  # a column of one row, twice
    ],
)
def test_boxes_are_parts_of_the_tensor(sample, monkeypatch, boxes):
    monkeypatch.setattr(jq.gguf.tensor_reader, "CHUNK", 500)
    whole = jq.gguf.read(sample).tensors
    with jq.gguf.TensorFile(sample) as file:
        reader = file._reader
        for name in ("packed.Q4_K", "packed.Q5_0", "packed.Q6_K", "packed.Q8_0"):
            read = reader.boxes(Blocks.of(file.header.tensors[name]), boxes)
            for box, parts in zip(boxes, read, strict=True):
                index = tuple(slice(*side) for side in box)
                for part, plane in zip(parts, whole[name].planes, strict=True):
                    np.testing.assert_array_equal(part, plane[index])


def test_a_source_without_preadv(sample, monkeypatch):
    monkeypatch.delattr(os, "preadv", raising=False)
    monkeypatch.setattr(jq.gguf.tensor_reader, "CHUNK", 512)
    assert_same_as_ggufs_reader(jq.gguf.read(sample), sample)


def test_a_header_longer_than_the_window(tmp_path, monkeypatch):
    monkeypatch.setattr(jq.gguf.source, "WINDOW", 100)
    path = write_sample(tmp_path / "sample.gguf")
    assert_same_as_ggufs_reader(jq.gguf.read(path), path)


def test_metadata_types(sample):
    metadata = jq.gguf.read_header(sample).metadata
    assert metadata["text"] == "größe 木"
    assert metadata["scalar.BOOL"] is True
    assert metadata["array.UINT16"].dtype == np.uint16
    assert metadata["array.BOOL"].dtype == np.bool_
    assert isinstance(metadata["tokenizer.ggml.tokens"], list)


def test_empty_strings_and_arrays():
    kinds = [Value.STRING, Value.FLOAT32]
    data = build(
        [text_entry("text", ""), *(array_entry(f"array.{kind.name}", kind, []) for kind in kinds)]
    )
    metadata = parse(data).metadata
    assert metadata["text"] == "" and metadata["array.STRING"] == []
    assert metadata["array.FLOAT32"].shape == (0,)


def test_header_lists_tensors_without_loading_them(sample):
    header = jq.gguf.read_header(sample)
    assert header.version == 3 and header.alignment == 32
    assert header.file_size == sample.stat().st_size
    info = header.tensors["packed.Q6_K"]
    assert (info.type, info.shape, info.nbytes) == (Tensor.Q6_K, (2, 3, 512), 2 * 3 * 2 * 210)
    start = header.data_start + info.offset
    raw = sample.read_bytes()[start : start + info.nbytes]
    assert jq.gguf.read(sample).tensors["packed.Q6_K"].to_gguf_bytes() == raw


def test_a_source_may_lie_in_memory(sample):
    assert parse(sample.read_bytes()).tensors == jq.gguf.read_header(sample).tensors


def test_version_2_and_another_alignment(tmp_path):
    align = entry("general.alignment", Value.UINT32, u32(8))
    header = build([align], [tensor("a", [3]), tensor("b", [2], offset=16)], version=u32(2))
    header = header.rstrip(b"\0") + bytes(8)  # up to the offset of b, 16
    header += bytes(-len(header) % 8)
    path = tmp_path / "v2.gguf"
    path.write_bytes(header + np.arange(6, dtype=np.float32).tobytes())
    assert_same_as_ggufs_reader(jq.gguf.read(path), path)


def test_a_file_without_tensors(tmp_path):
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(build([text_entry("general.architecture", "llama")]).rstrip(b"\0"))
    assert jq.gguf.read(path).tensors == {}


def test_progress_reaches_the_total(sample):
    calls: list[tuple[int, int]] = []
    jq.gguf.read(sample, progress=lambda done, total: calls.append((done, total)))
    totals = {total for _, total in calls}
    assert totals == {sum(info.nbytes for info in jq.gguf.read_header(sample).tensors.values())}
    done = [count for count, _ in calls]
    assert done == sorted(done) and done[0] == 0 and done[-1] == totals.pop()


def test_loaded_arrays_run_under_jit(sample):
    w = jq.gguf.read(sample).tensors["packed.Q4_K"]
    total = jax.jit(lambda w: w.dequantize().sum())(w)
    np.testing.assert_allclose(total, jnp.sum(w.dequantize()), rtol=1e-5)


def test_a_large_vocabulary_parses_in_well_under_a_second():
    tokens = [string(f"token number {i}") for i in range(150_000)]
    merges = [string(f"merge {i}") for i in range(280_000)]
    scores = np.zeros(150_000, np.float32).tobytes()
    data = build(
        [
            array_entry("tokenizer.ggml.tokens", Value.STRING, tokens),
            array_entry("tokenizer.ggml.scores", Value.FLOAT32, [scores], count=150_000),
            array_entry("tokenizer.ggml.merges", Value.STRING, merges),
        ]
    )
    start = time.process_time()
    metadata = parse(data).metadata
    assert time.process_time() - start < 1
    assert metadata["tokenizer.ggml.tokens"][149_999] == "token number 149999"
    assert metadata["tokenizer.ggml.merges"][-1] == "merge 279999"


def test_errors_can_be_pickled():
    error = jq.GGUFError("a.gguf", "magic", "expected b'GGUF'")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) == "a.gguf: magic: expected b'GGUF'"
    assert isinstance(copy, ValueError)


MEASURE = """
import sys, jax, jax_q4k as jq

def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))

jax.device_put(jax.numpy.zeros(4)).block_until_ready()
before = status("VmRSS")
tensors = jq.gguf.read(sys.argv[1]).tensors
jax.block_until_ready(tensors)
print(status("VmHWM") - before, sum(w.nbytes for w in tensors.values()))
"""


@pytest.mark.slow("compiles a program for each case")
@pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="peak memory is read from /proc"
)
def test_peak_memory_is_the_file_and_little_more(tmp_path):
    """Scales down the limit of 300 MB extra for a file of 640 MB."""
    # the largest tensor is the second to last
    kinds = [
        ("Q4_K", 1 << 27),
        ("Q6_K", 1 << 27),
        ("F32", 1 << 23),
    ]
    infos, offset = [], 0
    for kind, count in kinds:
        nbytes = count // 256 * formats.get(kind).block_bytes if kind != "F32" else 4 * count
        infos.append(tensor(kind, [1 << 14, count >> 14], Tensor[kind], offset))
        offset += nbytes
    path = tmp_path / "large.gguf"
    path.write_bytes(build(tensors=infos))
    header = path.stat().st_size
    os.truncate(path, header + offset)  # zeros that use no disk space
    assert offset > 200e6

    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    peak, loaded = map(int, done.stdout.split())
    assert loaded == offset
    assert offset * 0.9 < peak <= offset * (1 + 300 / 640)
