"""Models by Hugging Face hub names, with a fake `huggingface_hub`.

The real package, if installed, is tested without a network.
"""

import os
import re
import shutil
import subprocess
import sys
import types

import pytest

import jax_q4k as jq
from jax_q4k import models
from jax_q4k.models import cli
from jax_q4k.models.files import hub

from ..golden_files import model, path


class GatedRepoError(Exception):
    pass


class RepositoryNotFoundError(Exception):
    pass


class Hub(types.ModuleType):
    """Repositories in folders; records requests in `asked`."""

    def __init__(self, remote, cache):
        super().__init__("huggingface_hub")
        self.remote, self.cache, self.asked, self.error = remote, cache, [], None

    def _reach(self, repository):
        if self.error is not None:
            raise self.error
        if not (self.remote / repository).is_dir():
            raise RepositoryNotFoundError("404 Client Error\nRepository Not Found")
        return self.remote / repository

    def model_info(self, repository, timeout):
        self.asked.append(("list", repository))
        root = self._reach(repository)
        return listing(f.relative_to(root).as_posix() for f in root.rglob("*") if f.is_file())

    def hf_hub_download(self, repository, file, local_files_only=False):
        self.asked.append(("file", repository, file))
        target = self.cache / repository / file
        if local_files_only:
            if not target.exists():
                raise FileNotFoundError("not in the cache")
            return str(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self._reach(repository) / file, target)
        return str(target)

    def snapshot_download(self, repository, allow_patterns=None, local_files_only=False):
        self.asked.append(("snapshot", repository, allow_patterns))
        if local_files_only:
            if not (self.cache / repository).is_dir():
                raise FileNotFoundError("not in the cache")
            return str(self.cache / repository)
        for file in self._reach(repository).iterdir():
            if any(file.match(pattern) for pattern in allow_patterns):
                (self.cache / repository).mkdir(parents=True, exist_ok=True)
                shutil.copy(file, self.cache / repository)
        return str(self.cache / repository)


def listing(files):
    siblings = [types.SimpleNamespace(rfilename=file) for file in sorted(files)]
    return types.SimpleNamespace(siblings=siblings)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A fake hub, and an empty current folder."""
    made = Hub(tmp_path / "remote", tmp_path / "cache")
    monkeypatch.setitem(sys.modules, "huggingface_hub", made)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return made


def publish(fake, repository, *files):
    for file in files:
        target = fake.remote / repository / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path("llama-gqa"), target)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("org/name", ("org/name", None, None)),
        ("Qwen/Qwen3-8B-GGUF:Q4_K_M", ("Qwen/Qwen3-8B-GGUF", "Q4_K_M", None)),
        ("a/b.c_d/x-00001-of-00002.gguf", ("a/b.c_d", None, "x-00001-of-00002.gguf")),
        ("a/b/Q8_0/x.gguf", ("a/b", None, "Q8_0/x.gguf")),
    ],
)
def test_names(name, found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub.named(name) == (name, *found)
    (tmp_path / name.partition("/")[0]).mkdir()
    assert hub.named(name) is None  # a folder with this name is meant


@pytest.mark.parametrize(
    "name",
    ["name", "/org/name", "./org/name", "../name", "org/../name", "a/b/../../c.gguf", "org//name"]
    + ["folder/file.gguf", "folder/m.safetensors", "a/b/c", "org/name:", "org/name:a b", "a/.b"]
    + ["", "demo", "org/name\n", "~/a", "a/b/c.gguf:Q4_0", "https://x/y/z.gguf"],
)
def test_strings_that_are_no_hub_names(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub.named(name) is None


def test_the_type_chooses_the_file(fake):
    publish(fake, "org/m", "m-Q4_K_M.gguf", "m.q8_0.gguf", "mmproj-Q8_0.gguf", "m-UD-Q4_K_XL.gguf")
    publish(fake, "org/m", "imatrix.Q4_K_M.gguf", "README.md")
    for name, file in (
        ("org/m", "m-Q4_K_M.gguf"),
        ("org/m:Q8_0", "m.q8_0.gguf"),
        ("org/m:q4_k_xl", "m-UD-Q4_K_XL.gguf"),
    ):
        fake.asked.clear()
        assert str(models.load(name)) == str(model("llama-gqa"))
        assert fake.asked == [("list", "org/m"), ("file", "org/m", file)]
    fake.asked.clear()
    models.load("org/m/m.q8_0.gguf")
    assert fake.asked == [("list", "org/m"), ("file", "org/m", "m.q8_0.gguf")]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/m:Q5_0", "org/m has no Q5_0 GGUF file; give one: org/m/a-Q4_K_S.gguf, org/m/a-Q8_0"),
        ("org/m", "org/m has no Q4_K_M GGUF file; give one: org/m/a-Q4_K_S.gguf"),
        ("org/m:Q4_K", "org/m has no Q4_K GGUF file"),
        ("org/m:Q8_0", "org/m has 2 GGUF files of type Q8_0; give one: .*b-Q8_0"),
        ("org/none", "there is no such model on the Hugging Face hub, or it is private"),
        ("org/pickles", "org/pickles has neither GGUF files nor a checkpoint of safetensors"),
        ("org/pickles:Q4_K_M", "org/pickles has no GGUF files"),
        ("org/parts", r"org/parts is missing a part of the model, p-Q4_K_M-00002-of-00002.gguf"),
    ],
)
def test_refused(fake, name, message):
    publish(fake, "org/m", "a-Q8_0.gguf", "b-Q8_0.gguf", "a-Q4_K_S.gguf")
    publish(fake, "org/pickles", "pytorch_model.bin", "config.json")
    publish(fake, "org/parts", "p-Q4_K_M-00001-of-00002.gguf")
    with pytest.raises(FileNotFoundError, match=re.escape(message).replace(r"\.\*", ".*")):
        models.load(name)
    assert not any(asked[0] == "file" for asked in fake.asked)


def test_the_only_file_is_taken_whatever_its_type(fake):
    publish(fake, "org/m", "m-f16.gguf", "mmproj-m.gguf")
    assert models.load("org/m").config == model("llama-gqa").config


def test_all_parts_are_fetched(fake):
    folder = fake.remote / "org/m" / "Q4_K_M"
    folder.mkdir(parents=True)
    parts = models.save_gguf(model("llama-gqa"), folder / "m-Q4_K_M.gguf", max_bytes=300_000)
    assert len(parts) > 2
    assert str(models.load("org/m")) == str(model("llama-gqa"))
    assert [asked[2] for asked in fake.asked[1:]] == [f"Q4_K_M/{part.name}" for part in parts]
    fake.asked.clear()
    models.load(f"org/m/Q4_K_M/{parts[0].name}")
    assert len(fake.asked) == 1 + len(parts)


def test_a_checkpoint_without_what_could_run(fake):
    source = path("llama-gqa").parent.parent / "checkpoints" / "llama"
    shutil.copytree(source, fake.remote / "org" / "llama")
    (fake.remote / "org/llama/pytorch_model.bin").write_bytes(b"pickle")
    (fake.remote / "org/llama/modeling_llama.py").write_text("raise SystemExit")
    loaded = models.load("org/llama")
    assert str(loaded) == str(models.load(source))
    fetched = {file.name for file in (fake.cache / "org/llama").iterdir()}
    assert "config.json" in fetched and not fetched & {"pytorch_model.bin", "modeling_llama.py"}


def test_without_a_network_the_cache_is_looked_at(fake):
    publish(fake, "org/m", "m-Q4_K_M.gguf", "m-Q8_0.gguf")
    models.load("org/m")
    fake.error = ConnectionError("no network\nfor 10 s")
    assert str(models.load("org/m")) == str(model("llama-gqa"))
    assert str(models.load("org/m/m-Q4_K_M.gguf")) == str(model("llama-gqa"))
    with pytest.raises(FileNotFoundError, match="org/m has no Q8_0 GGUF file; give one"):
        models.load("org/m:Q8_0")
    for name, include in (
        ("org/other", "*Q4_K_M*"),
        ("org/other:Q8_0", "*Q8_0*"),
        ("org/m/m-Q8_0.gguf", "m-Q8_0.gguf"),
    ):
        with pytest.raises(ConnectionError) as caught:
            models.load(name)
        said = str(caught.value)
        assert "cannot be reached, and its cache does not hold the model (no network);" in said
        repository = "/".join(name.partition(":")[0].split("/")[:2])
        assert f"with a network: hf download {repository} --include '{include}'" in said


def test_without_a_network_no_other_type_stands_in(fake):
    """The files that the repository has are unknown."""
    publish(fake, "org/m", "m-Q8_0.gguf")
    models.load("org/m:Q8_0")
    fake.error = ConnectionError("no network")
    with pytest.raises(FileNotFoundError, match="org/m has no Q4_K_M GGUF file; give one: org/m/m"):
        models.load("org/m")


def test_a_model_that_asks_for_consent(fake):
    fake.error = GatedRepoError("403 Client Error")
    publish(fake, "org/m", "m-Q4_K_M.gguf")
    with pytest.raises(FileNotFoundError, match="it is gated: .* `hf auth login`"):
        models.load("org/m")


def test_names_of_files_that_leave_the_folder(fake, monkeypatch):
    listed = ["../../x-Q4_K_M.gguf", "README.md"]
    monkeypatch.setattr(fake, "model_info", lambda repository, timeout: listing(listed))
    with pytest.raises(FileNotFoundError, match="org/m has neither GGUF files nor"):
        models.load("org/m")


def test_a_missing_file_is_not_looked_up(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # makes the import fail
    with pytest.raises(FileNotFoundError, match=r"no such file or folder.*: 'org/name\.gguf'"):
        models.load("org/name.gguf")


def test_commands_take_names(fake, capsys, tmp_path):
    publish(fake, "org/m", "m-Q4_K_M.gguf", "m-Q8_0.gguf")
    for command in (
        ["inspect", "org/m:Q8_0"],
        ["generate", "org/m", "--tokens", "1,2", "-n", "2"],
        ["quantize", "org/m:Q8_0", str(tmp_path / "out.gguf"), "--type", "Q8_0"],
    ):
        assert cli.main(command) == 0
    capsys.readouterr()
    assert jq.gguf.read_header(tmp_path / "out.gguf").tensors
    assert cli.main(["generate", "org/none", "-p", "a"]) == 2
    assert "error: org/none: there is no such model on the Hugging" in capsys.readouterr().err


def in_a_process(name, home, **environment):
    """Runs `models.load(name)` with the real package, which reads the environment at import."""
    given = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    given |= {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", **environment}
    given["PYTHONPATH"] = os.pathsep.join(sys.path)
    code = f"from jax_q4k import models; print(models.load({name!r}))"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=given, cwd=home)


@pytest.mark.slow("converts and compiles models")
def test_the_real_package_without_a_network(tmp_path):
    """Uses its cache, laid out like the package's, and its own exceptions."""
    done = in_a_process("org/name", tmp_path)
    assert "ConnectionError: [Errno 113] the Hugging Face hub cannot be reached" in done.stderr
    done = in_a_process("org/name/m.gguf", tmp_path)
    assert "hf download org/name --include 'm.gguf'" in done.stderr
    repository = tmp_path / "hub" / "models--org--name"
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = repository / "snapshots" / commit
    for folder in (repository / "refs", repository / "blobs", snapshot):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copy(path("llama-gqa"), repository / "blobs" / "abc")
    (snapshot / "m-Q4_K_M.gguf").symlink_to("../../blobs/abc")
    for name in ("org/name", "org/name:Q4_K_M", "org/name/m-Q4_K_M.gguf"):
        done = in_a_process(name, tmp_path)
        assert done.stdout == f"{model('llama-gqa')}\n", done.stderr
