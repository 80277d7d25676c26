"""Downloads models from the Hugging Face hub by name, or finds them in the cache of the hub.

Only weights and their descriptions are fetched, never code or pickles.
"""

from __future__ import annotations

import errno
import functools
import importlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, NoReturn

from jax_q4k import gguf

DEFAULT = "Q4_K_M"
#: Seconds in which the hub must answer.
TIMEOUT = 10
#: Files of a checkpoint that `from_pretrained` reads.
CHECKPOINT = (
    "config.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "modules.json",
    "*_Pooling/config.json",
    "*_Dense/config.json",
    "*_Dense/model.safetensors",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
)

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?"
_NAME = re.compile(rf"(?P<repository>{_PART}/{_PART})(?::(?P<kind>\w+)|/(?P<file>[^:]+\.gguf))?")
NO_MODELS = re.compile(r"(mmproj|imatrix)", re.IGNORECASE)
_FILES = (".gguf", ".safetensors", ".json", ".bin")
_OF_PARTS = re.compile(r"-(\d{5})-of-(\d{5})$")
#: Exceptions with which the hub refuses a request, by class name; the cache is not used after them.
_REFUSED = {
    "RepositoryNotFoundError": "there is no such model on the Hugging Face hub, or it is private",
    "GatedRepoError": "it is gated: accept its terms on the model's page, then run `hf auth login`",
    "RemoteEntryNotFoundError": "the model has no such file on the Hugging Face hub",
    "EntryNotFoundError": "the model has no such file on the Hugging Face hub",
}


class Name(NamedTuple):
    """Parsed name of a model on the hub.

    Attributes:
      text: the name before parsing.
      repository: ORGANIZATION/NAME.
      kind: type of a GGUF file, such as Q4_K_M; None if the name has none.
      file: file in the repository; None if the name has none.
    """

    text: str
    repository: str
    kind: str | None
    file: str | None


def named(path: str | os.PathLike[str]) -> Name | None:
    """Parses the name of a model on the hub; None for the path of a file, which may be missing.

    Names are ORG/NAME, ORG/NAME:TYPE and ORG/NAME/FILE.gguf. They are paths instead if such a file
    or a folder ORG exists.
    """
    text = os.fsdecode(path)
    match = _NAME.fullmatch(text)
    if match is None or os.path.lexists(text) or os.path.lexists(text.partition("/")[0]):
        return None
    repository, kind, file = match["repository"], match["kind"], match["file"]
    if file is None and repository.endswith(_FILES):
        return None
    if file is not None and ".." in PurePosixPath(file).parts:
        return None
    return Name(text, repository, kind, file)


def fetched(name: Name) -> Path:
    """Downloads a model; returns the path of its GGUF file (the first of several), or its folder.

    Chooses the repository's GGUF file of the named type, or of type DEFAULT, or its only GGUF file;
    without GGUF files, the checkpoint.

    Raises OSError, whose message tells what to do: the hub cannot be reached and its cache lacks
    the model, or the model or file does not exist.
    """
    hub = importlib.import_module("huggingface_hub")  # takes 0.25 s, so only when needed
    # a single request; those for files are repeated for half a minute if there is no network
    described = _asked(name, lambda: hub.model_info(name.repository, timeout=TIMEOUT))
    if isinstance(described, Exception):
        return _cached(hub, name, described)
    listed = (str(entry.rfilename) for entry in described.siblings or ())
    names = [file for file in listed if ".." not in PurePosixPath(file).parts]
    chosen = _chosen(name, names) if name.file is None else _parts_of(name.file)
    if chosen is not None:
        return _files(hub, name, chosen)
    folder = _asked(
        name, lambda: hub.snapshot_download(name.repository, allow_patterns=list(CHECKPOINT))
    )
    return Path(_result_of(name, folder))


def _files(hub: Any, name: Name, files: list[str], error: Exception | None = None) -> Path:
    """Downloads files into one folder; returns the first.

    error: exception of an earlier request, after which only files in the cache are used.
    """
    offline = {} if error is None else {"local_files_only": True}
    paths = []
    for file in files:
        download = functools.partial(hub.hf_hub_download, name.repository, file, **offline)
        found = _asked(name, download)
        if isinstance(found, Exception):
            found = error or found
        paths.append(Path(_result_of(name, found)))
    return paths[0]


def _cached(hub: Any, name: Name, error: Exception) -> Path:
    """Returns the path of an earlier download, for use without a connection to the hub."""
    if name.file is not None:
        return _files(hub, name, _parts_of(name.file), error)
    folder = _asked(name, lambda: hub.snapshot_download(name.repository, local_files_only=True))
    if isinstance(folder, Exception):
        _result_of(name, error)
    root = Path(folder)
    files = [file.relative_to(root).as_posix() for file in root.rglob("*") if file.is_file()]
    chosen = _chosen(name, sorted(files), all_of_them=False)
    return root if chosen is None else root / chosen[0]


def _chosen(name: Name, files: list[str], *, all_of_them: bool = True) -> list[str] | None:
    """Chooses the GGUF file to download from a repository; returns its name, or all parts' names.

    None means to download the repository's checkpoint.

    all_of_them: whether `files` lists the whole repository.
    """
    wanted = name.kind or DEFAULT
    models = [f for f in files if f.endswith(".gguf") and not NO_MODELS.search(f)]
    firsts = [f for f in models if (match := _part(f)) is None or int(match[1]) == 1]
    if not firsts:
        if name.kind is not None:
            _fail(name, f"{name.repository} has no GGUF files")
        if "config.json" in files and any(f.endswith(".safetensors") for f in files):
            return None
        _fail(name, f"{name.repository} has neither GGUF files nor a checkpoint of safetensors")
    of_kind = re.compile(rf"(?<![A-Za-z0-9]){re.escape(wanted)}(?![A-Za-z0-9_])", re.IGNORECASE)
    found = [f for f in firsts if of_kind.search(f.removesuffix(".gguf"))]
    if not found and name.kind is None and len(firsts) == 1 and all_of_them:
        found = firsts
    if len(found) != 1:
        what = f"{len(found)} GGUF files of type {wanted}" if found else f"no {wanted} GGUF file"
        _fail(name, f"{name.repository} has {what}; give one: {_some(name, found or firsts)}")
    parts = _parts_of(found[0])
    if missing := set(parts) - set(files):
        _fail(name, f"{name.repository} is missing a part of the model, {min(missing)}")
    return parts


def _some(name: Name, files: Iterable[str]) -> str:
    shown = [f"{name.repository}/{file}" for file in files]
    return ", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "")


def _part(file: str) -> re.Match[str] | None:
    return _OF_PARTS.search(file.removesuffix(".gguf"))


def _parts_of(file: str) -> list[str]:
    return [path.as_posix() for path in gguf.part_names(file)]


def _asked(name: Name, call: Callable[[], Any]) -> Any:
    """Calls the hub; returns its result, or the exception if the hub cannot be reached.

    Raises OSError if the hub refuses the request.
    """
    try:
        return call()
    except Exception as error:  # includes errors of HTTP libraries, which differ between versions
        problem = _REFUSED.get(type(error).__name__)
        if problem is not None:
            _fail(name, problem, error)
        return error


def _result_of(name: Name, found: Any) -> Any:
    """Returns the result of `_asked`; raises OSError if it is an exception."""
    if not isinstance(found, Exception):
        return found
    said = next(iter(str(found).splitlines()), "") or type(found).__name__
    kind = name.file or f"*{name.kind or DEFAULT}*"
    problem = (
        f"the Hugging Face hub cannot be reached, and its cache does not hold the model ({said}); "
        f"with a network: hf download {name.repository} --include '{kind}'"
    )
    raise ConnectionError(errno.EHOSTUNREACH, problem, name.text) from found


def _fail(name: Name, problem: str, cause: Exception | None = None) -> NoReturn:
    raise FileNotFoundError(errno.ENOENT, problem, name.text) from cause
