"""Searches over a server: Tilebeam's own, and one that knows little."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

pytest.importorskip("openai")
pytest.importorskip("fastapi")

import tilebeam
from tilebeam import LM, Adaptive, BestOfN, LLMJudge, RemoteLM, SelfConsistency, TilebeamError, connect

if TYPE_CHECKING:
    from server_kit import Running

HI: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "weather?"}]
SHORT: Any = {"max_tokens": 6, "seed": 3, "temperature": 0.9}


@pytest.fixture
def remote(server: Running) -> Iterator[RemoteLM]:
    with connect(f"{server.url}/v1", model="tiny") as lm:
        yield lm


def test_texts_are_those_of_the_model(remote: RemoteLM, lm: LM) -> None:
    here = lm.chat(HI, n=3, template="chatml", logprobs=True, **SHORT)
    there = remote.generate(HI, n=3, logprobs=True, **SHORT)[0]
    assert [c.text for c in there.outputs] == [c.text for c in here.outputs]
    assert [c.finish_reason for c in there.outputs] == [c.finish_reason for c in here.outputs]
    assert [c.seed for c in there.outputs] == [c.seed for c in here.outputs]
    for a, b in zip(there.outputs, here.outputs, strict=True):
        assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-3)
        assert a.logprobs is not None
        assert len(a.token_ids) == len(a.logprobs)
    assert there.usage.completion_tokens == here.usage.completion_tokens
    assert remote.chat(HI, **SHORT).text == here.outputs[0].text


@pytest.mark.parametrize(
    "algorithm",
    [
        SelfConsistency("text"),
        BestOfN("logprob"),
        SelfConsistency("text", weighting="logprob"),
        Adaptive("text", confidence=1),
    ],
)
def test_searches(remote: RemoteLM, lm: LM, algorithm: Any) -> None:
    here = algorithm.infer(lm, lm.chat_prompt(HI, template="chatml"), 4, **SHORT)
    there = algorithm.infer(remote, HI, 4, **SHORT)
    assert there.text == here.text
    assert there.scores == pytest.approx(here.scores, abs=1e-3)
    assert (there.usage.prompt_tokens, there.usage.completion_tokens) == (
        here.usage.prompt_tokens,
        here.usage.completion_tokens,
    )
    both = algorithm.infer(remote, [HI, "a text"], 2, **SHORT)
    assert both[0].text in [c.text for c in there.candidates]


def test_many_conversations_and_classes(remote: RemoteLM, lm: LM) -> None:
    first, second = remote.chat([HI, HI[1:]], **SHORT)
    assert first.text == remote.chat(HI, **SHORT).text
    assert second.text == lm.chat(HI[1:], template="chatml", **SHORT).text
    whole = {"max_tokens": 60, "seed": 2, "json_schema": Word}
    output = remote.chat(HI, **whole)  # type: ignore[arg-type]
    assert output.outputs[0].parsed.word == json.loads(output.text)
    assert remote.chat(HI, **whole | {"max_tokens": 1}).outputs[0].parsed is None  # type: ignore[arg-type]
    params = tilebeam.SamplingParams(json_schema=Word)
    assert asdict(params)["json_schema"] == Word.model_json_schema()


class Word:
    """What pydantic's classes have."""

    def __init__(self, word: str) -> None:
        self.word = word

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {"enum": ["rain", "sun"]}

    @classmethod
    def model_validate_json(cls, text: str) -> Word:
        return cls(json.loads(text))


def test_a_judge_and_events(remote: RemoteLM) -> None:
    judge = LLMJudge(remote, verdict="number", chat=True)
    seen: list[Any] = []
    best = BestOfN(judge).infer(remote, HI, 3, events=seen.append, **SHORT)
    assert len(best.scores) == 3
    assert sum(e.event == "candidate" for e in seen) == 3


def test_what_needs_the_model_here_says_so(small: str) -> None:
    remote = connect(small, model="a")
    asked: dict[str, Any] = {
        "save_state": lambda: remote.save_state("x", "y"),  # type: ignore[attr-defined]
        "tokenize": lambda: LLMJudge(remote),
        "tokeniz[e]": lambda: tilebeam.PTrue(remote),
        "statistics": lambda: BestOfN("self-certainty").infer(remote, "a", 4),
        "hidden": lambda: BestOfN(OfStates()).infer(remote, "a", 4),
        "n_ctx|tokenize": lambda: tilebeam.BeamSearch(Steps()).infer(remote, "a", 4),
        "lora": lambda: remote.generate("a", lora=[1.0]),
    }
    for said, ask in asked.items():
        with pytest.raises(TilebeamError, match=f"^({said}) needs the model in this process"):
            ask()
    for wrong, said in ((tilebeam.Prompt("a", [1, 2]), "token ids"), ({"role": "user"}, "messages"), ([3], "int")):
        with pytest.raises(TilebeamError, match=said):
            remote.generate(wrong)  # type: ignore[arg-type]
    with pytest.raises(TilebeamError, match="list of messages"):
        remote.chat("hi")  # type: ignore[call-overload]
    assert not hasattr(remote, "embed")
    assert Small.asked == []


class OfStates(tilebeam.Scorer):
    needs_hidden = True

    def score(self, *_: Any) -> list[float]:
        raise AssertionError


class Steps(tilebeam.StepScorer):
    def score(self, *_: Any) -> list[float]:
        raise AssertionError

    score_steps = score  # type: ignore[assignment]


def test_a_hook_cancels(server: Running) -> None:
    remote = connect(f"{server.url}/v1", model="tiny", at_once=1)
    output = remote.generate(["a", "b", "c", "d"], n=2, progress=lambda _: False, **SHORT)
    assert {c.finish_reason for o in output for c in o.outputs} >= {"aborted"}
    with pytest.raises(tilebeam.SearchCancelled):
        SelfConsistency("text").infer(remote, ["a", "b", "c", "d"], 2, progress=lambda _: False, **SHORT)
    unwanted = remote.generate(["a", "b", "c"], n=2, on_sample=lambda *_: [2], **SHORT)
    assert [{c.finish_reason == "aborted" for c in o.outputs} for o in unwanted] == [{False}, {False}, {True}]


class Small(BaseHTTPRequestHandler):
    """A server that gives one choice, whatever is asked, and tells nothing else."""

    asked: ClassVar[list[dict[str, Any]]] = []
    status = 200
    models = ("a", "b")

    def do_GET(self) -> None:
        self._say({"data": [{"id": m, "object": "model"} for m in self.models], "object": "list"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Small.asked.append(body)
        if body["messages"][0]["content"] == "slow":
            Small.late = not self.gate.wait(20)
        message = {"role": "assistant", "content": f"It is {body['seed'] % 2}."}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self._say({"id": "x", "object": "chat.completion", "created": 0, "model": "a", "choices": [choice]})

    page: bytes | None = None
    gate = threading.Event()
    late = False
    kind = "application/json"

    def _say(self, told: Any) -> None:
        raw = self.page or json.dumps(told if self.status == 200 else {"error": {"message": "no such thing"}}).encode()
        self.send_response(self.status)
        self.send_header("Content-Type", self.kind)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Small, "asked", [])
    http = ThreadingHTTPServer(("127.0.0.1", 0), Small)
    thread = threading.Thread(target=http.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}/v1"
    http.shutdown()
    http.server_close()
    thread.join()


def test_a_server_that_knows_no_n_is_asked_again(small: str) -> None:
    vote = SelfConsistency("last-number").infer(connect(small, model="a"), "weather?", 5, seed=10, top_k=7)
    assert vote.votes == {"0": 3, "1": 2}
    assert vote.answer == 0
    assert [b.get("n", 1) for b in Small.asked] == [5, 1, 1, 1, 1]
    assert sorted(b["seed"] for b in Small.asked) == [10, 11, 12, 13, 14]
    assert Small.asked[0]["messages"] == [{"role": "user", "content": "weather?"}]
    assert Small.asked[0]["top_k"] == 7
    assert "min_p" not in Small.asked[0]


CHOICE: Any = {"message": {"content": "hi"}, "finish_reason": "stop"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"message": None},
        {"message": {"content": [1]}},
        {"logprobs": [1]},
        {"logprobs": {"content": [{"logprob": None}]}},
        {"logprobs": {"content": [{"logprob": float("nan")}]}},
    ],
)
def test_nonsense_is_refused_in_a_sentence(small: str, monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    monkeypatch.setattr(Small, "page", json.dumps({"choices": [CHOICE | wrong]}).encode())
    with pytest.raises(TilebeamError, match="does not answer as OpenAI's API does"):
        connect(small, model="a").generate(["a", "b"], n=2)


def test_what_little_a_server_tells_is_enough(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    empty, half = (CHOICE | {"message": {"content": text}, "logprobs": {"content": []}} for text in (None, "\ud800"))
    told: Any = {"choices": [empty, half, CHOICE | {"finish_reason": "content_filter"}, CHOICE, CHOICE], "usage": {}}
    monkeypatch.setattr(Small, "page", json.dumps(told).encode())
    found = connect(small, model="a").generate("a", n=4)[0]
    assert [c.text for c in found.outputs] == ["", "?", "hi", "hi"]
    assert [c.finish_reason for c in found.outputs] == ["stop", "stop", "length", "stop"]
    told["choices"] = [empty, CHOICE | {"logprobs": {"content": [{"logprob": -2.0}]}}]
    monkeypatch.setattr(Small, "page", json.dumps(told).encode())
    assert BestOfN("logprob").infer(connect(small, model="a"), "a", 2).text == "hi"  # not the one without any


@pytest.mark.parametrize("error", [False, True])
def test_nobody_waits_for_answers_that_nobody_wants(small: str, error: bool) -> None:
    def stop(_: Any) -> bool:
        if error:
            raise RuntimeError
        return False

    Small.gate.clear()
    lm = connect(small, model="a", max_retries=0)
    try:
        found = lm.generate(["slow", "a"], progress=stop)
        assert [o.outputs[0].finish_reason for o in found] == ["aborted", "stop"]
    except RuntimeError:
        assert error
    assert not Small.late
    Small.gate.set()


def test_errors_are_sentences(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TilebeamError, match="has a, b: connect"):
        connect(small)
    with pytest.raises(TilebeamError, match="at_once"):
        connect(small, model="a", at_once=0)
    lm = connect(small, model="a", max_retries=0)
    with pytest.raises(TilebeamError, match="tells no log-probabilities"):
        BestOfN("logprob").infer(lm, "a", 2)
    monkeypatch.setattr(Small, "status", 404)
    with pytest.raises(TilebeamError, match=r"refused the request \(404\)"):
        lm.chat(HI)
    with pytest.raises(TilebeamError, match="No server can be reached"):
        connect("http://127.0.0.1:9/v1", model="a", max_retries=0).chat(HI)


@pytest.mark.parametrize(
    "page", [b"<html></html>", b'{"a": ', b"null", b"[]", b'{"choices": [{"index": 0}]}', b'"\xff"', b"[" * 100_000]
)
def test_what_is_no_such_api_is_said_to_be_none(small: str, monkeypatch: pytest.MonkeyPatch, page: bytes) -> None:
    monkeypatch.setattr(Small, "page", page)
    monkeypatch.setattr(Small, "kind", "text/html" if page.startswith(b"<") else "application/json")
    with pytest.raises(TilebeamError, match="does its address end in /v1"):
        connect(small)
    with pytest.raises(TilebeamError, match="does its address end in /v1"):
        connect(small, model="a").generate("x")
