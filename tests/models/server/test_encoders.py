"""Embeddings and rankings of an encoder over HTTP."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import encoder_folders, encoders
from support.helpers import nmse
from support.paths import DATA

from jax_q4k import models
from jax_q4k.models.cli.commands.serve import check_encoder
from jax_q4k.models.server.run import described

from .running import Running, serving

QUERY, DOCUMENTS = "the sea", ["a word", "the sea was calm .", "nobody said a word"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[models.EncoderEngine]:
    path: Path = tmp_path_factory.mktemp("encoder") / "bert.gguf"
    encoders.write(path, "bert", labels=1)
    given = models.load(path)
    given.metadata["bert.pooling_type"] = 2  # so that it also has embeddings
    with models.EncoderEngine(given) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: models.EncoderEngine) -> Iterator[Running]:
    with serving(engine, queue=1) as server:  # type: ignore[arg-type]
        yield server
        assert server.service.places.taken == 0


def test_embeddings(engine: models.EncoderEngine, server: Running) -> None:
    found = server.client.post("/v1/embeddings", json={"input": DOCUMENTS}).json()
    want = models.embed(engine.model, DOCUMENTS, normalize=True)
    got = np.array([one["embedding"] for one in found["data"]])
    assert nmse(got, want) <= 1e-11
    ids = engine.model.tokenizer.encode(DOCUMENTS[0])  # type: ignore[union-attr]
    body = {"input": ids, "encoding_format": "base64", "dimensions": 4}
    (one,) = server.client.post("/v1/embeddings", json=body).json()["data"]
    short = np.frombuffer(base64.b64decode(one["embedding"]), "<f4")
    assert nmse(short, want[0, :4] / np.linalg.norm(want[0, :4])) <= 1e-11
    assert found["usage"]["prompt_tokens"] == sum(
        len(engine.model.tokenizer.encode(text))  # type: ignore[union-attr]
        for text in DOCUMENTS
    )


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
def test_rankings(engine: models.EncoderEngine, server: Running, path: str) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS, "top_n": 2, "return_documents": True}
    found = server.client.post(path, json=body).json()
    want = models.rerank(engine.model, QUERY, DOCUMENTS)[:2]
    assert [one["index"] for one in found["results"]] == [one.index for one in want]
    texts = [one["document"]["text"] for one in found["results"]]
    assert texts == [DOCUMENTS[one.index] for one in want]
    scores = np.array([one["relevance_score"] for one in found["results"]])
    assert nmse(scores, np.array([one.score for one in want])) <= 1e-10
    assert found["usage"]["total_tokens"] > 0 and found["object"] == "list"


@pytest.mark.slow("compiles the programs of an engine")
def test_rankings_of_a_folder_of_a_decoder() -> None:
    folder = DATA / "encoders/qwen3-reranker"
    expected = json.loads((folder / "expected.json").read_text())
    model = models.load(folder)
    with (
        models.Engine(model, max_rows=1, warm_up=False) as engine,
        serving(engine) as server,
    ):
        body = {"query": expected["query"], "documents": expected["documents"]}
        found = server.client.post("/v1/rerank", json=body).json()["results"]
    scores = {one["index"]: one["relevance_score"] for one in found}
    assert [*scores] == np.argsort(expected["scores"])[::-1].tolist()
    got = np.array([scores[i] for i in range(len(scores))])
    assert nmse(got, np.array(expected["scores"])) <= 1e-10


def test_documents_as_objects_and_logits(engine: models.EncoderEngine, server: Running) -> None:
    documents = [{"text": text} for text in DOCUMENTS]
    body = {"query": QUERY, "documents": documents, "normalize": False}
    found = server.client.post("/v1/rerank", json=body).json()["results"]
    want = models.rerank(engine.model, QUERY, DOCUMENTS, normalize=False)
    got = np.array([one["relevance_score"] for one in found])
    assert nmse(got, np.array([one.score for one in want])) <= 1e-10
    assert "document" not in found[0]


@pytest.mark.parametrize(
    "change, param",
    [
        ({"documents": []}, "documents"),
        ({"documents": ["a " * 700]}, "documents"),
        ({"documents": "a"}, "documents"),
        ({"top_n": 0}, "top_n"),
        ({"query": None}, "query"),
        ({"model": "other"}, "model"),
    ],
)
def test_wrong_rankings(server: Running, change: dict[str, object], param: str) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS, **change}
    answer = server.client.post("/v1/rerank", json=body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


def test_no_text(server: Running) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
    ):
        answer = server.client.post(path, json=body)
        assert answer.status_code == 400, path
        assert "the model is an encoder" in answer.text
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/health?generate=1").status_code == 400
    (model,) = server.client.get("/v1/models").json()["data"]
    assert model["meta"]["architecture"] == "bert"
    assert "jax_q4k:prompt_tokens" in server.client.get("/metrics").text


def test_a_full_server(engine: models.EncoderEngine) -> None:
    with serving(engine, queue=0) as server:  # type: ignore[arg-type]
        server.service.places.taken = server.service.places.count
        for path, body in (
            ("/v1/embeddings", {"input": "a"}),
            ("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS}),
        ):
            assert server.client.post(path, json=body).status_code == 429
        server.service.places.taken = 0


def test_a_decoder_ranks_nothing() -> None:
    with (
        models.Engine(models.load("demo"), max_rows=1, warm_up=False) as engine,
        serving(engine) as server,
    ):
        body = {"query": QUERY, "documents": DOCUMENTS}
        answer = server.client.post("/v1/rerank", json=body)
        assert answer.status_code == 400
        assert "has no classification head" in answer.json()["error"]["message"]


def test_lines_of_the_command(engine: models.EncoderEngine) -> None:
    first, example = described(engine, "bert", "127.0.0.1", 8080)
    assert first == "bert at http://127.0.0.1:8080: embeddings and rankings, context 640"
    assert "/v1/embeddings" in example


def test_options_of_decoders() -> None:
    import argparse

    from jax_q4k.models.cli.output import UsageError

    names = "chat_template_file", "deterministic", "lora", "max_adapters", "pages"
    options = argparse.Namespace(**dict.fromkeys(names))
    check_encoder(options)
    options.pages = 3
    with pytest.raises(UsageError, match="--pages is for decoders, but the model is an encoder"):
        check_encoder(options)


def test_embeddings_of_a_task(tmp_path: Path) -> None:
    """The adapter and prompt of the task, and an error that names the field."""
    encoder_folders.write_with_tasks(tmp_path, {"retrieval.query": "query : ", "separation": ""})
    given = models.load(tmp_path)
    with models.EncoderEngine(given) as engine, serving(engine) as server:  # type: ignore[arg-type]
        for task in ("retrieval.query", "separation", None):
            body = {"input": DOCUMENTS, "task": task}
            found = server.client.post("/v1/embeddings", json=body).json()
            got = np.array([one["embedding"] for one in found["data"]])
            want = models.embed(given, DOCUMENTS, normalize=True, task=task)
            assert nmse(got, want) <= 1e-11, task
        body = {"input": DOCUMENTS, "task": "retrieval"}
        answer = server.client.post("/v1/embeddings", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "task"
    assert "must be one of retrieval.query, separation" in error["message"]
