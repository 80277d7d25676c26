"""LoRA adapters over HTTP: requests name them as their model; clients load and unload them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest

from jax_q4k import models

from ..adapters import random_pairs, write_gguf, write_peft
from .running import Running, serving


class Served(NamedTuple):
    """A server with the adapter "a", from whose folder clients may load others."""

    server: Running
    engine: models.Engine
    folder: Path

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.server.client.post(path, json=body)

    def load(self, name: str, path: str) -> httpx.Response:
        return self.post("/v1/load_lora_adapter", lora_name=name, lora_path=path)

    def unload(self, name: str) -> httpx.Response:
        return self.post("/v1/unload_lora_adapter", lora_name=name)

    def names(self) -> list[str]:
        return [one["id"] for one in self.server.client.get("/v1/models").json()["data"]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("adapters") / "inside"
    folder.mkdir()
    demo = models.load("demo")
    for seed, key in enumerate("ab"):
        write_gguf(folder / f"{key}.gguf", demo, random_pairs(demo, ("attn_q", "ffn_up"), seed))
    write_peft(folder / "peft", demo, random_pairs(demo, ("attn_v",), 3))
    options: Any = {"max_rows": 4, "warm_up": False, "max_adapters": 2, "max_adapter_rank": 4}
    with models.Engine(demo, **options) as engine:
        engine.load_adapter("a", models.read_lora(folder / "a.gguf", demo.config))
        with serving(engine, queue=4, lora_folder=str(folder)) as server:
            yield Served(server, engine, folder)


HELLO = [{"role": "user", "content": "Hello"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 6, "seed": 1},
    "/v1/completions": {"prompt": "The sea", "max_tokens": 6, "seed": 1},
    "/v1/messages": {"messages": HELLO, "max_tokens": 6, "temperature": 0},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 6, "seed": 1},
}


def text_of(body: dict[str, Any]) -> str:
    if "choices" in body:
        (choice,) = body["choices"]
        return str(choice.get("text") or choice["message"]["content"])
    parts = body["output"][0]["content"] if "output" in body else body["content"]
    return str(parts[0]["text"])


@pytest.mark.slow("compiles the programs of the demo model", quick=["*/completions"])
@pytest.mark.parametrize("path", ROUTES)
def test_a_request_names_its_adapter(path: str, served: Served) -> None:
    body = ROUTES[path] | {"temperature": 0}
    of_model, of_adapter = (served.post(path, model=name, **body).json() for name in ("demo", "a"))
    assert of_model["model"] == "demo" and of_adapter["model"] == "a"
    assert text_of(of_model) == text_of(served.post(path, **body).json()) != text_of(of_adapter)
    if path == "/v1/completions":
        output = served.engine.generate("The sea", max_new_tokens=6, adapter="a")
        assert text_of(of_adapter) == output.text
    with served.server.client.stream("POST", path, json=body | {"model": "a", "stream": True}) as s:
        assert '"model":"a"' in "".join(s.iter_text())
    refused = served.post(path, model="b", **body)
    assert refused.status_code == 404
    assert "available: demo, a" in refused.json()["error"]["message"]


def test_models_are_listed(served: Served) -> None:
    assert served.names() == ["demo", "a"]
    found = served.server.client.get("/v1/models/a").json()
    assert found["id"] == "a" and found["parent"] == "demo"
    assert "parent" not in served.server.client.get("/v1/models/demo").json()
    assert served.server.client.get("/v1/models/b").status_code == 404


def test_tokens_are_counted_for_an_adapter(served: Served) -> None:
    for model, status in (("a", 200), ("b", 404)):
        body = {"messages": HELLO, "model": model}
        assert served.post("/v1/messages/count_tokens", **body).status_code == status


def test_embeddings_are_the_models(served: Served) -> None:
    refused = served.post("/v1/embeddings", input="a", model="a")
    assert refused.status_code == 400 and "not an adapter's" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", ["b.gguf", "peft", "./peft/../b.gguf"])
def test_clients_load_and_unload(path: str, served: Served) -> None:
    for name in (path.replace("./", ""), "org/b-1.0"):
        done = served.load(name, path)
        assert done.text == f"Success: LoRA adapter '{name}' added successfully."
        assert served.names() == ["demo", "a", name]
        assert served.server.client.get(f"/v1/models/{name}").json()["parent"] == "demo"
        done = served.unload(name)
        assert done.text == f"Success: LoRA adapter '{name}' removed successfully."
    assert served.load("b", str(served.folder / path)).status_code == 200
    assert served.unload("b").status_code == 200 and served.names() == ["demo", "a"]


def test_paths_outside_of_the_folder_are_refused(served: Served) -> None:
    folder, outside = served.folder, served.folder.parent / "outside"
    demo = served.engine.model
    write_peft(outside, demo, random_pairs(demo, ("attn_v",)))
    (folder / "link").symlink_to(outside)
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "half").mkdir()
    (folder / "half" / "adapter_config.json").write_text("{}")
    weights = "adapter_model.safetensors"
    (folder / "half" / weights).symlink_to(outside / weights)
    for path in ("../outside", str(outside), "link", "half", f"half/{weights}", f"link/{weights}"):
        refused = served.load("x", path)
        assert refused.status_code == 400
        assert "is outside of the server's folder" in refused.json()["error"]["message"], path
    for path in ("loop", "x" * 5000, "a\0b", "no.gguf", "no", "", "peft/adapter_config.json"):
        assert served.load("x", path).status_code == 400, path
    assert served.names() == ["demo", "a"]


def test_adapters_that_are_refused(served: Served) -> None:
    folder, demo = served.folder, served.engine.model
    (folder / "text.gguf").write_text("not an adapter")
    name = "blk.0.attn_q.weight"
    bad = np.ones((3, 8), np.float32), np.ones((8, 3), np.float32)
    write_gguf(folder / "shape.gguf", demo, {name: bad})
    wide = {n: (a.repeat(2, 0), b.repeat(2, 1)) for n, (a, b) in random_pairs(demo).items()}
    wide.pop("output.weight", None)
    write_gguf(folder / "wide.gguf", demo, wide)
    (folder / "peft-bad").mkdir()
    (folder / "peft-bad" / "adapter_config.json").write_text(json.dumps({"peft_type": "LOHA"}))
    (folder / "peft-bad" / "adapter_model.safetensors").write_bytes(b"\xff" * 40)
    for path, message in (
        ("text.gguf", "cannot be loaded"),
        ("shape.gguf", "has shape"),
        ("wide.gguf", "the adapter's rank is 6; max_adapter_rank is 4"),
        ("peft-bad", "cannot be loaded"),
    ):
        refused = served.load("x", path)
        assert refused.status_code == 400 and message in refused.json()["error"]["message"]
    for name, message in (
        ("demo", "is the name of the model"),
        ("a", "is loaded already"),
        ("", "must be 1 to 64 letters"),
        ("a b", "must be 1 to 64 letters"),
    ):
        refused = served.load(name, "b.gguf")
        assert refused.status_code == 400 and message in refused.json()["error"]["message"]
    assert served.load("b", "b.gguf").status_code == 200
    full = served.load("c", "b.gguf")
    assert full.status_code == 400 and "unload one first" in full.json()["error"]["message"]
    assert served.unload("b").status_code == 200
    missing = served.unload("b")
    assert missing.status_code == 404 and missing.json()["error"]["param"] == "lora_name"
    for body in ({}, {"lora_name": 1, "lora_path": "x"}, {"lora_name": "x", "lora_path": None}):
        assert served.post("/v1/load_lora_adapter", **body).status_code == 400


def test_without_a_folder_nothing_is_loaded(server: Running) -> None:
    for route in ("load", "unload"):
        body = {"lora_name": "a", "lora_path": "a.gguf"}
        refused = server.client.post(f"/v1/{route}_lora_adapter", json=body)
        assert refused.status_code == 403 and "--lora-folder" in refused.json()["error"]["message"]
