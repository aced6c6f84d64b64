"""/v1/embeddings, /v1/rerank and /v1/score: what the library gives, in the forms that clients know."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tilebeam
from encoder_kit import ENCODERS, write_encoder
from server_kit import HI, Running, idle, running, until
from tilebeam import LM, TokenReward
from tilebeam.native.llama import Vocab
from tilebeam.server import reading_routes as module
from tilebeam.server.admission import ClientGone

TEXTS = ["the number of two", "how many", "question answer step result"]


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("encoders")
    wanted = [e for e in ENCODERS if e.name in ("bert-mean", "bert-rank")]
    return {e.name: write_encoder(folder / f"{e.name}.gguf", e) for e in wanted}


@pytest.fixture(scope="module")
def embedder(encoders: dict[str, Path]) -> Iterator[Running]:
    with tilebeam.load(encoders["bert-mean"], "cpu", n_ctx=256, threads=1) as lm, running(lm) as server:
        yield server


@pytest.fixture(scope="module")
def ranker(encoders: dict[str, Path]) -> Iterator[Running]:
    with tilebeam.load(encoders["bert-rank"], "cpu", n_ctx=256, threads=1) as lm, running(lm) as server:
        yield server


def test_embeddings_with_openais_client(server: Running, client: openai.OpenAI, lm: LM) -> None:
    want = lm.embed(TEXTS)
    ids = [lm.tokenize(text) for text in TEXTS]
    for given in (TEXTS, ids):
        found = client.embeddings.create(model="tiny", input=given)  # which asks for base64
        assert np.array_equal(np.array([d.embedding for d in found.data], np.float32), want)
        assert [d.index for d in found.data] == [0, 1, 2]
        assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, ids))
    for one in (TEXTS[1], ids[1]):
        (datum,) = client.embeddings.create(model="tiny", input=one, encoding_format="float", dimensions=256).data
        assert np.allclose(datum.embedding, want[1], atol=1e-6)
    raw = server.post("/v1/embeddings", {"input": TEXTS[1], "encoding_format": "base64"}).json()["data"][0]
    assert np.allclose(np.frombuffer(base64.b64decode(raw["embedding"]), "<f4"), want[1], atol=1e-6)
    until(lambda: idle(server))


def test_an_embedding_model_behind_the_server(embedder: Running) -> None:
    texts = ["the cat", "two and three"] * 20
    found = embedder.client().embeddings.create(model="tiny", input=texts)
    assert np.allclose([d.embedding for d in found.data], embedder.lm.embed(texts))
    answer = embedder.post("/v1/completions", {"prompt": "the", "max_tokens": 4})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_generation")
    assert "/v1/embeddings" in answer.text


def test_reranking(ranker: Running) -> None:
    documents = ["the cat sat on the mat", "two and three is five", "the old tree"]
    want = ranker.lm.rerank("the cat", documents)
    body = {"model": "tiny", "query": "the cat", "documents": [documents[0], {"text": documents[1]}, documents[2]]}
    for path in ("/v1/rerank", "/rerank"):
        told = ranker.post(path, body).json()
        assert [r["index"] for r in told["results"]] == np.argsort(-want).tolist()
        assert np.allclose([r["relevance_score"] for r in told["results"]], np.sort(want)[::-1], rtol=1e-6)
        assert told["usage"]["total_tokens"] == sum(map(len, ranker.lm.rerank_prompts("the cat", documents)))
    told = ranker.post("/v1/rerank", body | {"top_n": 1, "return_documents": True}).json()
    best = int(want.argmax())
    (result,) = told["results"]
    assert (result["index"], result["document"]) == (best, {"text": documents[best]})


def test_a_long_query_is_refused_before_documents_are_looked_at(
    ranker: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every document is read with the query: together they may be much longer than the request."""
    seen: list[str] = []
    tokenize = Vocab.tokenize
    monkeypatch.setattr(Vocab, "tokenize", lambda vocab, text, *how: seen.append(text) or tokenize(vocab, text, *how))
    answer = ranker.post("/v1/rerank", {"query": "the cat " * 2000, "documents": ["a"] * 50})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "query")
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert len(seen) == 1
    seen.clear()
    assert ranker.post("/v1/rerank", {"query": "the cat", "documents": ["a"] * 50}).status_code == 200
    assert seen.count("the cat") <= 3  # and not with each document
    answer = ranker.post("/v1/rerank", {"query": "the cat", "documents": ["a", "the old tree " * 400]})
    assert "documents[1], with the query, has" in answer.text


def test_a_client_that_leaves_ends_the_ranking(ranker: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = threading.Event()
    rank = ranker.lm.rank
    groups: list[int] = []

    def leave(prompts: Any) -> Any:
        groups.append(len(prompts))
        stopped.set()
        return rank(prompts)

    monkeypatch.setattr(ranker.lm, "rank", leave)
    asked = module.RerankRequest(query="the cat", documents=["the old tree " * 40] * 60)
    with pytest.raises(ClientGone):
        module.ranked(ranker.lm, asked, stopped)
    assert len(groups) == 1
    assert groups[0] < 60


@pytest.mark.parametrize("form", ["float", "base64"])
def test_an_answers_elements_are_limited(server: Running, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    width = server.lm.embedding_size
    monkeypatch.setitem(module._MOST_ELEMENTS, form, 2 * width)
    assert server.post("/v1/embeddings", {"input": TEXTS[:2], "encoding_format": form}).status_code == 200
    answer = server.post("/v1/embeddings", {"input": TEXTS, "encoding_format": form})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_elements")
    assert f"input has 3 texts, each of which makes {width} elements" in answer.text


def test_scores_by_the_reward_model(server: Running, reward: TokenReward) -> None:
    texts = ["the number\n\nis two", "one step"]
    for given in (texts, texts[1]):
        told = server.post("/v1/score", {"model": "tiny", "prompt": "how many", "texts": given}).json()
        rated = [reward.rate_text("how many", t) for t in (texts if given is texts else texts[1:])]
        assert [d["steps"] for d in told["data"]] == [r.steps for r in rated]
        for datum, r in zip(told["data"], rated, strict=True):
            assert np.allclose([*datum["scores"], datum["score"]], [*r.scores, r.score], rtol=1e-4)
        assert told["usage"]["scored_tokens"] > 0


def test_other_models_names_and_missing_models(server: Running, embedder: Running, ranker: Running) -> None:
    body: dict[str, Any]
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/score", {"prompt": "a", "texts": "b"}),
    ):
        assert server.post(path, body | {"model": "gpt-9"}).status_code == 404
    assert ranker.post("/v1/embeddings", {"input": "a"}).json()["error"]["code"] == "no_embeddings"
    assert embedder.post("/v1/score", {"prompt": "a", "texts": "b"}).json()["error"]["code"] == "no_reward_model"
    assert "/v1/rerank" in ranker.post("/v1/chat/completions", {"messages": HI}).json()["error"]["message"]
