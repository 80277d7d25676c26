"""Models in several files: `NAME-00001-of-00003.gguf`, ..."""

import os
import re
import shutil

import gguf
import numpy as np
import pytest
from gguf.constants import GGUFValueType as Value
from support.gguf_bytes import entry, rewritten, string, write_sample, write_tensors

import jax_q4k as jq

U16, I32 = Value.UINT16, Value.INT32


def contents(file):
    """Maps names of a loaded file's tensors to (type, shape, bytes)."""
    return {
        name: (
            (t.format, t.shape, t.to_gguf_bytes())
            if isinstance(t, jq.QuantizedArray)
            else (str(t.dtype), t.shape, np.asarray(t).tobytes())
        )
        for name, t in file.tensors.items()
    }


@pytest.fixture
def whole(tmp_path):
    return jq.gguf.read(write_sample(tmp_path / "whole.gguf"))


@pytest.fixture
def split(whole, tmp_path):
    """Parts of a sample with at most 8000 bytes of tensors each."""
    paths = jq.gguf.write(tmp_path / "m.gguf", whole.metadata, whole.tensors, max_bytes=8000)
    assert len(paths) > 2
    return paths


def test_parts_are_read_as_one(whole, split):
    read = jq.gguf.read(split[0])
    assert contents(read) == contents(whole) and list(read.tensors) == list(whole.tensors)
    assert read.metadata.keys() == whole.metadata.keys()
    np.testing.assert_equal(dict(read.metadata), dict(whole.metadata))
    assert read.metadata.types == whole.metadata.types
    header = jq.gguf.read_header(split[0])
    assert header.tensors == read.header.tensors
    assert header.parts == tuple(map(str, split)) == tuple(map(str, jq.gguf.part_names(split[0])))
    assert header.file_size == sum(os.path.getsize(path) for path in split)


def test_parts_are_what_llama_gguf_split_makes(whole, split):
    """Checks keys, value types and sizes of each part with the `gguf` package's reader."""
    names = []
    for number, path in enumerate(split):
        reader = gguf.GGUFReader(path)
        said = {
            key: (field.types, field.contents())
            for key, field in reader.fields.items()
            if key.startswith("split.")
        }
        assert said == {
            "split.no": ([U16], number),
            "split.count": ([U16], len(split)),
            "split.tensors.count": ([I32], len(whole.tensors)),
        }
        others = [k for k in reader.fields if not k.startswith(("split.", "GGUF."))]
        assert others == (list(whole.metadata) if number == 0 else [])
        padded = sum(-(-t.n_bytes // 32) * 32 for t in reader.tensors)
        assert padded <= 8000 or len(reader.tensors) == 1
        names += [t.name for t in reader.tensors]
    assert names == list(whole.tensors)
    assert [path.name for path in split] == [
        f"m-{i + 1:05d}-of-{len(split):05d}.gguf" for i in range(len(split))
    ]


def test_parts_of_the_gguf_packages_writer_are_read(tmp_path):
    """Also reads files whose first part has no tensors."""
    rng = np.random.default_rng(0)
    arrays = {f"t{i}": rng.normal(size=(7, 64)).astype(np.float32) for i in range(9)}
    options = {"split_max_tensors": 4, "small_first_shard": True}
    writer = gguf.GGUFWriter(tmp_path / "g.gguf", "llama", **options)
    write_tensors(writer, arrays)
    read = jq.gguf.read(tmp_path / "g-00001-of-00004.gguf")
    assert read.header.parts[3].endswith("g-00004-of-00004.gguf")
    assert read.metadata == {"general.architecture": "llama"}
    for name, array in arrays.items():
        np.testing.assert_array_equal(read.tensors[name], array)


def test_links_to_parts_are_followed_by_their_own_names(split, tmp_path):
    """The Hugging Face hub's cache contains such links."""
    for i, path in enumerate(split):
        path.rename(tmp_path / f"blob{i}")
        path.symlink_to(f"blob{i}")
    assert len(jq.gguf.read(split[0]).header.parts) == len(split)


def test_tensors_are_read_one_at_a_time(whole, split):
    with jq.gguf.TensorFile(split[0]) as file:
        read = {name: file.read(name) for name in reversed(file.header.tensors)}
        for name, tensor in read.items():
            assert tensor.shape == whole.tensors[name].shape
    with pytest.raises(ValueError, match="closed"):
        os.fstat(file._reader.source.sources[-1]._file.fileno())


def test_an_alignment_of_the_files_own(whole, tmp_path):
    metadata = dict(whole.metadata) | {"general.alignment": 256}
    paths = jq.gguf.write(tmp_path / "m.gguf", metadata, whole.tensors, max_bytes=8000)
    assert contents(jq.gguf.read(paths[0])) == contents(whole)
    assert {reader.alignment for reader in map(gguf.GGUFReader, paths)} == {256}


def test_tensors_that_fit_into_one_file_are_one(whole, tmp_path):
    [path] = jq.gguf.write(tmp_path / "m.gguf", whole.metadata, whole.tensors, max_bytes=10**9)
    assert path == tmp_path / "m.gguf" and "split.count" not in jq.gguf.read(path).metadata


def test_parts_are_merged_and_split_anew(whole, split, tmp_path):
    read = jq.gguf.read(split[0])
    [merged] = jq.gguf.write(tmp_path / "merged.gguf", read.metadata, read.tensors)
    assert merged.read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    again = jq.gguf.write(tmp_path / "again.gguf", read.metadata, read.tensors, max_bytes=20000)
    assert 1 < len(again) < len(split)
    assert contents(jq.gguf.read(again[0])) == contents(whole)


def changed(path, **entries):
    """Rewrites a part's `split.*` values; "tensors" stands for split.tensors.count."""
    names = {"no": "split.no", "count": "split.count", "tensors": "split.tensors.count"}
    packed = {
        names[key]: entry(names[key], I32, int(value).to_bytes(4, "little", signed=True))
        for key, value in entries.items()
    }
    path.write_bytes(rewritten(path, packed))


def refused(path, message, file=None):
    """Checks that both readers refuse the file with the same error."""
    for read in (jq.gguf.read, jq.gguf.read_header):
        with pytest.raises(jq.GGUFError) as caught:
            read(path)
        assert caught.value.file == str(file or path)
        assert re.search(message, f"{caught.value.field}: {caught.value.problem}"), caught.value


def test_a_later_part_names_the_first(split):
    refused(split[1], f"split.no: is 1: this is part 2 of .*; give '{split[0]}'")


def test_missing_parts_are_named(split):
    split[2].unlink()
    refused(split[0], rf"split.count: is \d+ parts, but one of them is missing .*: {split[2].name}")
    for path in split[1:]:
        path.unlink(missing_ok=True)
    refused(split[0], rf"{len(split) - 1} of them are missing .*: {split[1].name}, .*, \.\.\.")


def test_the_name_of_the_first_part_must_lead_to_the_others(split, tmp_path):
    shutil.copy(split[0], tmp_path / "renamed.gguf")
    refused(tmp_path / "renamed.gguf", "the file is not named NAME-00001-of-")
    other = tmp_path / "m-00001-of-00002.gguf"
    shutil.copy(split[0], other)
    refused(other, "the file is not named NAME-00001-of-")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"count": 2}, "split.count: differs from that of 'm-00001-of-.*': .* of different models"),
        ({"tensors": 3}, "split.tensors.count: differs from that of .*: .* of different models"),
        ({"no": 2}, "split.no: is 2, expected 1 for part 2: misnamed file"),
        ({"no": -1}, "split.no: is -1, expected 1"),
    ],
)
def test_a_part_of_another_model(split, entries, message):
    changed(split[1], **entries)
    refused(split[0], message, file=split[1])


def test_a_part_with_other_metadata_than_the_first(split):
    key = "general.architecture"
    split[1].write_bytes(rewritten(split[1], {key: entry(key, Value.STRING, string("qwen2"))}))
    refused(split[0], f"{key}: differs from that of .*different models", file=split[1])


def test_an_ordinary_file_in_a_parts_place(split, tmp_path):
    shutil.copy(tmp_path / "whole.gguf", split[1])
    refused(split[0], "split.no: is missing", file=split[1])


def test_a_malformed_part(split):
    split[1].write_bytes(split[1].read_bytes()[:100])
    refused(split[0], "truncated|bytes left", file=split[1])
    split[1].write_bytes(b"")
    refused(split[0], "magic: truncated", file=split[1])
    split[1].unlink()
    os.mkfifo(split[1])
    refused(split[0], "path: must be a regular file", file=split[1])


def test_a_tensor_that_is_in_two_parts(split):
    """Part 3 is a copy of part 2 with its own number."""
    shutil.copy(split[1], split[2])
    changed(split[2], no=2)
    refused(split[0], "tensor 'packed.*': is also in an earlier part", file=split[2])


def test_tensors_that_no_part_has(whole, split):
    for path in split:
        changed(path, tensors=len(whole.tensors) + 1)
    count = len(whole.tensors)
    refused(split[0], f"tensors.count: is {count + 1}, but the .* parts hold {count}")


def test_a_scale_that_is_not_finite_names_its_part(whole, tmp_path):
    tensors = {"a": np.zeros(64, np.float32), "b": np.full(64, np.nan, np.float32)}
    metadata = {"general.architecture": "llama"}
    paths = jq.gguf.write(tmp_path / "m.gguf", metadata, tensors, max_bytes=256)
    with pytest.raises(jq.GGUFError, match="tensor 'b': element 0 is NaN") as caught:
        jq.gguf.read(paths[0])
    assert caught.value.file == str(paths[1])


@pytest.mark.parametrize("max_bytes", [0, -1, 1.5, True, "1G"])
def test_max_bytes_that_is_no_size(max_bytes, tmp_path):
    with pytest.raises(ValueError, match=r"max_bytes=.* must be a positive integer"):
        jq.gguf.write(tmp_path / "m.gguf", {"general.architecture": "a"}, {}, max_bytes=max_bytes)
    assert os.listdir(tmp_path) == []


def test_more_parts_than_are_read(tmp_path):
    tensors = {f"t{i}": np.zeros(1, np.float32) for i in range(513)}
    with pytest.raises(ValueError, match="max_bytes=1 makes 513 parts; the maximum is 512"):
        jq.gguf.write(tmp_path / "m.gguf", {"general.architecture": "a"}, tensors, max_bytes=1)


def test_a_failure_leaves_no_part(whole, tmp_path):
    def fails():
        yield b"\0" * 64
        raise RuntimeError("no more")

    (tmp_path / "m-00001-of-00002.gguf").write_bytes(b"old")
    pieces = jq.gguf.TensorPieces("F32", (64,), fails)
    tensors = {"a": np.zeros(64, np.float32), "b": pieces}
    with pytest.raises(RuntimeError, match="no more"):
        jq.gguf.write(tmp_path / "m.gguf", {"general.architecture": "a"}, tensors, max_bytes=256)
    assert sorted(os.listdir(tmp_path)) == ["m-00001-of-00002.gguf", "whole.gguf"]
    assert (tmp_path / "m-00001-of-00002.gguf").read_bytes() == b"old"


def test_progress_counts_all_parts(whole, tmp_path):
    seen = []
    jq.gguf.write(
        tmp_path / "m.gguf",
        whole.metadata,
        whole.tensors,
        max_bytes=8000,
        progress=lambda done, total: seen.append((done, total)),
    )
    total = sum(info.nbytes for info in whole.header.tensors.values())
    assert seen[0] == (0, total) and seen[-1] == (total, total) and seen == sorted(seen)
