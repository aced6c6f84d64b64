"""Clients that share the server's batches, leave, wait in its queue, and are counted."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import tilebeam
from engine_kit import EXACT
from server_kit import LONG, PROMPT, TEXT, Running, idle, running, texts, until
from tilebeam import LM
from tilebeam.engine.speculation import StepCosts


def test_clients_share_batches(server: Running, client: Any) -> None:
    before = server.lm.figures().batches
    with client.completions.create(**LONG, stream=True) as first:
        next(iter(first))
        alone = client.completions.create(model="tiny", prompt="one two", seed=3, n=2, max_tokens=24)
    now = server.lm.figures().batches
    assert now.get(3, 0) - before.get(3, 0) >= 20  # one of the stream and two of the other
    until(lambda: idle(server))
    assert texts(
        client.completions.create(model="tiny", prompt="one two", seed=3, n=2, max_tokens=24).choices
    ) == texts(alone.choices)
    told = server.metrics()
    sizes = server.lm.figures().batches
    assert told["tilebeam_batch_samples_count"] == sum(sizes.values())
    assert told["tilebeam_batch_samples_sum"] == sum(size * count for size, count in sizes.items())


def test_a_stream_that_is_closed_frees_its_cells(server: Running, client: Any) -> None:
    until(lambda: idle(server))
    left = server.metrics().get('tilebeam_requests_total{path="/v1/completions",status="499"}', 0)
    with client.completions.create(**LONG, n=3, stream=True) as stream:
        next(iter(stream))
        assert server.metric("tilebeam_samples_running") == 3
        assert server.metric("tilebeam_kv_cells_used") > 0
    until(lambda: idle(server))
    assert server.metrics()['tilebeam_requests_total{path="/v1/completions",status="499"}'] == left + 1


@pytest.mark.parametrize("extra", [{}, {"search": {"method": "vote", "budget": 4}}], ids=["completion", "search"])
def test_a_client_that_leaves_frees_its_cells(server: Running, extra: dict[str, Any]) -> None:
    until(lambda: idle(server))
    body = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True} | extra

    content = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        head = f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        until(lambda: server.lm.figures().running > 0)
    until(lambda: idle(server))
    assert server.post(TEXT, {"prompt": PROMPT, "max_tokens": 2}).status_code == 200


def test_a_crowd(server: Running, client: Any) -> None:
    """Clients of all kinds at once, some of which leave: who stays gets what it would get alone, and nothing is left
    behind."""
    search: dict[str, Any] = {"method": "beam", "budget": 4, "beam_width": 2, "max_steps": 3, "step_stop": "e"}

    def ask(number: int) -> str | None:
        options: dict[str, Any] = {"model": "tiny", "prompt": f"{PROMPT} {number % 5}", "seed": number}
        match number % 6:
            case 0 | 1:
                return "|".join(texts(client.completions.create(**options, n=3, max_tokens=20).choices))
            case 2:
                chunks = client.completions.create(**options, stream=True, max_tokens=30, logprobs=1)
                return "".join(c.choices[0].text for c in chunks)
            case 3:
                with client.completions.create(**options, stream=True, max_tokens=400) as stream:
                    for _, _chunk in zip(range(number % 4), stream, strict=False):
                        pass
                return None
            case 4:
                found = client.completions.create(**options, max_tokens=16, extra_body={"search": search})
                return str(found.choices[0].text)
            case _:
                with pytest.raises(openai.BadRequestError):
                    client.completions.create(**options, extra_body={"grammar": "root ::= ["})
                return None

    with ThreadPoolExecutor(24) as pool:
        together = list(pool.map(ask, range(36)))
    until(lambda: idle(server))
    assert [ask(number) for number in range(36)] == together
    until(lambda: idle(server))


def test_a_full_queue_says_so(lm: LM) -> None:
    with running(lm, max_waiting=1) as server:
        client = server.client()
        with client.completions.create(**LONG, n=4, stream=True) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(model="tiny", prompt="a", n=2)
            assert caught.value.code == "queue_full"
            assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
            with pytest.raises(openai.RateLimitError):
                client.completions.create(model="tiny", prompt="a", n=2, stream=True)
            with ThreadPoolExecutor(1) as pool:
                waits = pool.submit(client.completions.create, model="tiny", prompt="a", max_tokens=2)
                until(lambda: server.metric("tilebeam_samples_waiting") == 1)
                with pytest.raises(openai.RateLimitError):
                    client.completions.create(model="tiny", prompt="a")
                stream.close()
                assert waits.result().choices
        until(lambda: idle(server))
        # An idle server takes a request of any size that it takes at all.
        assert len(client.completions.create(model="tiny", prompt="a", n=9, max_tokens=1).choices) == 9
        assert server.metric("tilebeam_requests_refused_total") == 3


def test_figures_of_requests(lm: LM) -> None:
    with running(lm) as server:
        client = server.client()
        client.completions.create(model="tiny", prompt=PROMPT, n=2, max_tokens=5, extra_body={"ignore_eos": True})
        for _ in client.completions.create(model="tiny", prompt=PROMPT, max_tokens=5, stream=True):
            pass
        server.post(TEXT, {"prompt": "a", "n": 0})
        told = server.metrics()
        assert told['tilebeam_requests_total{path="/v1/completions",status="200"}'] == 2
        assert told['tilebeam_requests_total{path="/v1/completions",status="400"}'] == 1
        assert told["tilebeam_prompt_tokens_total"] == 2 * len(lm.tokenize(PROMPT))
        assert 11 <= told["tilebeam_generated_tokens_total"] <= 15
        assert told["tilebeam_first_token_seconds_count"] == 1
        assert told['tilebeam_request_seconds_count{path="/v1/completions"}'] == 3
        assert told["tilebeam_slots"] == 4
        assert told["tilebeam_kv_cells"] == 1024
        assert told["tilebeam_ready"] == 1
        assert told['tilebeam_seconds_total{kind="decode"}'] > 0


def test_guessed_tokens_are_counted(path: Path, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepCosts, "of", lambda *_: 1.0)  # a row more never costs time: guesses are always worth it
    ask = {"model": "tiny", "prompt": "one two one two one", "max_tokens": 32, "temperature": 0}
    plain = client.completions.create(**ask, extra_body={"ignore_eos": True})
    with (
        tilebeam.load(path, "cpu", n_ctx=256, n_seq_max=2, threads=1, lookup=True, **EXACT) as lm,
        running(lm) as server,
    ):
        answers = [server.client().completions.create(**ask, extra_body={"ignore_eos": True}) for _ in range(2)]
        told = server.metrics()
    assert [texts(a.choices) for a in answers] == [texts(plain.choices)] * 2
    details = [a.usage.completion_tokens_details for a in answers]
    right = sum(d.accepted_prediction_tokens for d in details)
    wrong = sum(d.rejected_prediction_tokens for d in details)
    assert details[1].accepted_prediction_tokens > 0  # the second text is what the first request wrote
    assert told["tilebeam_drafted_tokens_total"] == right + wrong
    assert told["tilebeam_accepted_tokens_total"] == right
