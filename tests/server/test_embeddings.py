"""/v1/embeddings, /v1/rerank and /v1/score: what the library gives, in the forms that clients know."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tilebeam
from encoder_kit import ENCODERS, write_encoder
from tilebeam import LM, TokenReward

pytest.importorskip("openai", reason="the openai client is not installed (extra test)")
pytest.importorskip("httpx", reason="httpx is not installed (extra test)")
pytest.importorskip("fastapi", reason="the server's packages are not installed (extra server)")

import openai
from server_kit import HI, Running, idle, running, until
from tilebeam.native.llama import Vocab
from tilebeam.server.admission import ClientGone
from tilebeam.server.model_host import LoadedModel
from tilebeam.server.openai import embedding_routes as module
from tilebeam.server.other.rerank import ranked

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


def test_embeddings_beside_generation(server: Running, client: openai.OpenAI, lm: LM) -> None:
    """Both get their turn, and neither changes the other, but for the order of sums over cells that lie elsewhere."""
    want_text = client.completions.create(model="tiny", prompt="the", max_tokens=40, seed=1).choices[0].text
    want = lm.embed(TEXTS)
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(client.embeddings.create(model="tiny", input=TEXTS)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    text = client.completions.create(model="tiny", prompt="the", max_tokens=40, seed=1).choices[0].text
    for thread in threads:
        thread.join()
    assert text == want_text
    assert len(found) == 3
    for f in found:
        cosines = np.sum(np.array([d.embedding for d in f.data], np.float32) * want, axis=1)
        assert cosines.min() > 0.9999, cosines
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
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        told = ranker.post(path, body).json()
        assert [r["index"] for r in told["results"]] == np.argsort(-want).tolist()
        assert np.allclose([r["relevance_score"] for r in told["results"]], np.sort(want)[::-1], rtol=1e-6)
        assert told["usage"]["total_tokens"] == sum(map(len, ranker.lm.rerank_prompts("the cat", documents)))
    told = ranker.post("/v1/rerank", body | {"top_n": 1, "return_documents": True}).json()
    best = int(want.argmax())
    (result,) = told["results"]
    assert (result["index"], result["document"]) == (best, {"text": documents[best]})


def test_reranking_in_the_form_of_text_embeddings_inference(ranker: Running) -> None:
    texts = ["the cat sat on the mat", "two and three is five", "the old tree"]
    plain = ranker.post("/v1/rerank", {"query": "the cat", "documents": texts}).json()["results"]
    told = ranker.post("/rerank", {"query": "the cat", "texts": texts}).json()
    assert told == [{"index": r["index"], "score": r["relevance_score"]} for r in plain]
    told = ranker.post("/rerank", {"query": "the cat", "texts": texts, "return_text": True, "top_n": 2}).json()
    assert [one["text"] for one in told] == [texts[r["index"]] for r in plain[:2]]
    long = ranker.post("/rerank", {"query": "the cat", "texts": ["a", "the old tree " * 400]})
    assert "texts[1], with the query, has" in long.text


def test_scores_of_pairs_as_vllm_asks(ranker: Running) -> None:
    texts = ["the cat sat on the mat", "the old tree"]
    want = ranker.lm.rerank("the cat", texts)
    told = ranker.post("/v1/score", {"model": "tiny", "text_1": "the cat", "text_2": texts}).json()
    assert np.allclose([one["score"] for one in told["data"]], want, rtol=1e-6)
    assert [one["index"] for one in told["data"]] == [0, 1]
    assert told["usage"]["total_tokens"] == sum(map(len, ranker.lm.rerank_prompts("the cat", texts)))
    told = ranker.post("/v1/score", {"text_1": ["the cat", "two"], "text_2": texts}).json()
    pairs = [want[0], ranker.lm.rerank("two", texts[1:])[0]]
    assert np.allclose([one["score"] for one in told["data"]], pairs, rtol=1e-6)
    one = ranker.post("/v1/score", {"text_1": "the cat", "text_2": texts[1]}).json()
    assert np.allclose([one["data"][0]["score"]], want[1], rtol=1e-6)


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
    asked = [("the cat", ["the old tree " * 40] * 60)]
    with pytest.raises(ClientGone):
        ranked(LoadedModel(ranker.lm, None), asked, stopped, ("query", "documents"))
    assert len(groups) == 1
    assert groups[0] < 60


def test_embeddings_are_written_by_the_thread_that_reads(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer may be 100 MB: written on the event loop, everybody's streams would stand still."""
    threads: list[str] = []
    encoded = module._encoded

    def watched(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return encoded(*given)

    monkeypatch.setattr(module, "_encoded", watched)
    for form in ("float", "base64"):
        assert server.post("/v1/embeddings", {"input": TEXTS, "encoding_format": form}).status_code == 200
    assert threads
    assert all(name.startswith("tilebeam-read") for name in threads)


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


@pytest.mark.parametrize(
    ("to", "body", "code", "said"),
    [
        ("/v1/embeddings", {"input": []}, "invalid_value", "input"),
        ("/v1/embeddings", {"input": [[]]}, "invalid_value", "no tokens"),
        ("/v1/embeddings", {"input": [1, "a"]}, "invalid_value", "input"),
        ("/v1/embeddings", {"input": [99999]}, None, "99999"),
        ("/v1/embeddings", {"input": "two " * 2000}, "context_length_exceeded", "at most 1023"),
        ("/v1/embeddings", {"input": "a", "dimensions": 64}, "invalid_value", "256 elements"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "invalid_value", "encoding_format"),
        ("/v1/embeddings", {"input": "a", "truncate": True}, "unknown_parameter", "truncate"),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, "no_rerank_model", "no rerank model"),
        ("/v1/rerank", {"query": "a", "documents": []}, "invalid_value", "documents"),
        ("/v1/rerank", {"query": "a"}, None, "documents is required"),
        ("/v1/rerank", {"query": "a", "texts": ["b"], "documents": ["b"]}, None, "not both"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "return_text": True}, None, "return_documents"),
        ("/v1/score", {"prompt": "a", "texts": []}, "invalid_value", "texts"),
        ("/v1/score", {"prompt": "a"}, None, "text_1 and text_2"),
        ("/v1/score", {"prompt": "a", "texts": "b", "text_1": "a"}, None, "text_1 and text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"]}, None, "as many"),
        ("/v1/score", {"text_1": "a", "text_2": ["b"]}, "no_rerank_model", "no rerank model"),
        ("/v1/score", {"prompt": "a", "texts": "two " * 2000}, "invalid_value", "context has 1024"),
    ],
)
def test_what_is_wrong_is_said(server: Running, to: str, body: Any, code: str | None, said: str) -> None:
    answer = server.post(to, body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == code
    assert said in answer.json()["error"]["message"]


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
