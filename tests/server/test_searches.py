"""Searches over HTTP are the algorithms; the examples of the manual run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import tilebeam
import tilebeam.search.algorithms
from server_kit import CHAT, HI, MESSAGES, PROMPT, TEXT, Running, idle, running, until
from tilebeam import LM, BeamSearch, BestOfN, LogProb, SamplingParams, SelfConsistency, TokenReward
from tilebeam.answers.extract import whole_text


def test_searches_are_the_algorithms(client: Any, lm: LM, reward: TokenReward) -> None:
    params = SamplingParams(seed=6, max_tokens=24)

    def ask(**search: Any) -> Any:
        extra = {"search": search | {"candidates": True}}
        return client.completions.create(model="tiny", prompt=PROMPT, seed=6, max_tokens=24, extra_body=extra).choices[
            0
        ]

    told = ask(method="best-of-n", budget=6, scorer="logprob")
    direct = BestOfN(LogProb()).infer(lm, PROMPT, 6, sampling=params)
    assert told.text == direct.best.text
    assert told.search["scores"] == pytest.approx(direct.scores, abs=1e-4)
    assert [c["text"] for c in told.search["candidates"]] == [c.text for c in direct.candidates]
    told = ask(method="best-of-n", budget=6)  # there is a reward model
    rated = BestOfN(reward).infer(lm, PROMPT, 6, sampling=params)
    assert told.text == rated.best.text
    assert told.search["scores"] == pytest.approx(rated.scores, abs=1e-4)
    told = ask(method="vote", budget=8, extract="text")
    voted = SelfConsistency(whole_text).infer(lm, PROMPT, 8, sampling=params)
    assert (told.text, told.search["answer"]) == (voted.best.text, voted.answer)
    told = ask(method="beam", budget=8, beam_width=2, max_steps=3, step_stop="e")
    grown = BeamSearch(reward, 2, 3, "e").infer(lm, PROMPT, 8, sampling=params)
    assert told.text == grown.best.text
    assert told.search["budget"] == 8
    told = ask(method="adaptive", budget=6, extract="text")
    options: dict[str, Any] = {"scorer": reward, "extract": "text"}
    settled = tilebeam.search.algorithms.create("adaptive", **options).infer(lm, PROMPT, 6, sampling=params)
    assert (told.text, told.search["votes"]) == (settled.best.text, settled.votes)  # type: ignore[attr-defined]


def test_programs_run_only_where_the_server_was_told_so(server: Running, lm: LM) -> None:
    def ask(at: Running, **search: Any) -> Any:
        body = {"model": "tiny", "messages": HI, "max_tokens": 8, "seed": 1, "search": search}
        return httpx.post(f"{at.url}/v1/chat/completions", json=body, timeout=60)

    refused = ask(server, method="tir", budget=2)
    assert refused.status_code == 400
    assert "--programs" in refused.json()["error"]["message"]
    refused = ask(server, method="vote", budget=2, programs=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "search.programs")
    plain = ask(server, method="vote", budget=2, extract="text").json()
    assert ask(server, method="vote", budget=2, extract="text", programs=False).json()["usage"] == plain["usage"]
    with running(lm, programs=True) as other:
        answer = ask(other, method="tir", budget=2, extract="text")
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["choices"][0]["search"]["scores"]) == 2
        assert answer.json()["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"] + 50  # asks for programs
        assert ask(other, method="tir", budget=2, unsafe_code=True).status_code == 400
        for method, status in (("vote", 200), ("adaptive", 200), ("best-of-n", 400)):
            answer = ask(other, method=method, budget=2, programs=True)
            assert answer.status_code == status, answer.text
        assert "no option 'programs'" in answer.text
        assert "true or false" in ask(other, method="vote", budget=2, programs="yes").text


def test_a_search_in_a_chat_counts_what_it_cost(server: Running, client: Any) -> None:
    before = server.metrics().get('tilebeam_searches_total{method="dvts"}', 0)
    answer = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=16,
        seed=1,
        extra_body={"search": {"method": "dvts", "budget": 4, "beam_width": 2, "max_steps": 2, "step_stop": "e"}},
    )
    assert answer.choices[0].message.role == "assistant"
    assert "candidates" not in answer.choices[0].search
    assert answer.tilebeam["scored_tokens"] > 0
    assert answer.usage.completion_tokens > 0
    assert server.metrics()['tilebeam_searches_total{method="dvts"}'] == before + 1
    without = {"messages": HI, "search": {"method": "best-of-n", "scorer": "reward", "budget": 2}, "max_tokens": 4}
    assert server.post(CHAT, without).status_code == 200


@pytest.mark.parametrize("method", ["best-of-n", "vote", "beam", "dvts", "adaptive"])
def test_searches_without_a_limit_end(server: Running, method: str) -> None:
    """A chat may go on until the context is full; logits forced to the end of text keep that short here."""
    sent: Any = [*MESSAGES, {"role": "assistant", "content": "so", "refusal": None, "tool_calls": None}, *MESSAGES[1:]]
    body = {
        "messages": sent,
        "search": {"method": method, "budget": 4},
        "seed": 1,
        "logit_bias": {str(server.lm.eos): 8},
    }
    answer = server.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    assert len(answer.json()["choices"][0]["search"]["scores"]) <= 4
    until(lambda: idle(server))


def test_a_search_without_a_limit_has_the_room_that_there_is(server: Running) -> None:
    """Of a model that never stops: candidates get equal shares of the context, so that the search ends."""
    lm = server.lm
    text = lm.chat_prompt(HI, template="chatml").text
    share = (lm.n_ctx - len(lm.tokenize(text))) // lm.n_seq_max
    body = {"messages": HI, "ignore_eos": True, "search": {"method": "vote", "budget": 6, "candidates": True}}
    answer = server.post(CHAT, body).json()
    found = answer["choices"][0]["search"]["candidates"]
    assert [len(c["token_ids"]) for c in found] == [share] * 6
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 6 * share
    body["search"] = {"method": "vote", "budget": 2}
    assert server.post(CHAT, body | {"max_tokens": 9}).json()["usage"]["completion_tokens"] == 18
    until(lambda: idle(server))


def test_examples_of_the_manual(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/server.md: its Python and its curl, as pasted but for the port and fewer tokens."""
    manual = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    all_examples = re.findall(r"```python\n(.*?)```", manual, re.DOTALL)
    examples = [e for e in all_examples if "tools=" not in e]  # test_tools.py
    assert len(examples) == 2
    for example in examples:
        code = example.replace("http://localhost:8080", server.url).replace(
            'model="model",', 'model="model", max_tokens=9,'
        )
        exec(code.replace("max_tokens=512,", ""), names)
    assert len(names["answer"].choices) == 4
    assert str(names["found"].tilebeam["scored_tokens"]) in capsys.readouterr().out
    every = re.findall(r"curl localhost:8080(/\S+)[\s\\]* -d '(.*?)'", manual, re.DOTALL)
    assert [where for where, _ in every] == [
        TEXT,
        "/v1/messages",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/score",
        CHAT,
        CHAT,
    ]
    typed = {"content-type": "application/x-www-form-urlencoded"}  # as curl -d says
    for where, body in every:
        limited = json.dumps(json.loads(body) | ({"max_tokens": 5} if where in (TEXT, CHAT) else {}))
        answer = httpx.post(server.url + where, content=limited, headers=typed, timeout=60)
        if where == "/v1/rerank":
            assert answer.json()["error"]["code"] == "no_rerank_model"  # but the request is fine
        else:
            assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["search"]["page"].startswith("<!doctype html>")  # of the last example


def test_null_is_an_option_that_is_left_out(server: Running) -> None:
    search = {"method": "vote", "budget": 2, "extract": "text", "weighting": None, "sharpness": None, "scorer": None}
    body = {"prompt": "a", "seed": 1, "max_tokens": 4}
    answers = [server.post(TEXT, body | {"search": told | search}) for told in ({}, {"candidates": None, "page": None})]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    assert answers[0].json()["choices"] == answers[1].json()["choices"]


def test_a_beam_needs_a_reward_model(lm: LM) -> None:
    with running(lm) as server:
        for scorer in ({}, {"scorer": "reward"}):
            answer = server.post(TEXT, {"prompt": "a", "search": {"method": "beam"} | scorer})
            assert answer.status_code == 400
            assert "reward model" in answer.json()["error"]["message"]
