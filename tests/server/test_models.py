"""Several models behind one server: which one is asked, and when each is loaded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tilebeam
from engine_kit import EXACT
from server_kit import CHAT, HI, PATIENCE, PROMPT, TEXT, Running, parse_metrics, serving, until
from tilebeam import TilebeamError
from tilebeam.server.errors import ApiError
from tilebeam.server.model_host import Entry, LoadedModel, ModelHost
from tilebeam.server.models import check_names

from bench.lib.synth import preset, write_model

NAMES = ("one", "two", "three")


# --- hosts, without models --------------------------------------------------------------------------------------------


class FakeLM:
    """As much of a model as its host sees."""

    failure: TilebeamError | None = None


@dataclass
class Made:
    """A host of a fake model, and what became of it."""

    host: ModelHost
    loads: list[int] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)


def made(trouble: list[str] | None = None, held: threading.Event | None = None) -> Made:
    def load() -> LoadedModel:
        if held is not None:
            held.wait(PATIENCE)
        if trouble:
            raise TilebeamError(trouble.pop())
        one.loads.append(1)
        resources = ExitStack()
        resources.callback(one.closed.append, 1)
        return LoadedModel(FakeLM(), resources=resources)  # type: ignore[arg-type]

    one = Made(ModelHost(load))
    return one


async def touch(host: ModelHost) -> None:
    async with host.using():
        pass


async def come(true: Any) -> None:
    for _ in range(2000):
        if true():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come")


def test_a_load_goes_on_when_nobody_waits_for_it() -> None:
    """Whoever comes meanwhile waits for the same load; a server that ends frees what came of it."""

    async def scenario() -> None:
        held = threading.Event()
        one = made(held=held)
        first = asyncio.ensure_future(touch(one.host))
        await come(lambda: one.host.state == "loading")
        assert one.host.waits
        first.cancel()
        await asyncio.wait([first])
        later = [asyncio.ensure_future(touch(one.host)) for _ in range(2)]
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in later)
        held.set()
        await asyncio.gather(*later)
        assert (one.host.state, one.host.waits, one.loads) == ("ready", False, [1])
        await one.host.close()

        held.clear()
        two = made(held=held)
        left = asyncio.ensure_future(touch(two.host))
        await come(lambda: two.host.state == "loading")
        left.cancel()
        closing = asyncio.ensure_future(two.host.close())
        await asyncio.sleep(0.01)
        held.set()
        await closing
        assert (two.host.state, two.loads, two.closed) == ("stopped", [1], [1])

    asyncio.run(scenario())


def test_a_load_that_fails_is_tried_again_by_the_next_request() -> None:
    async def scenario() -> None:
        a = made(["no memory"])
        waiting = [asyncio.ensure_future(touch(a.host)) for _ in range(3)]
        for failed in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(failed, ApiError)
            assert (failed.status, failed.code) == (503, "model_load_failed")
            assert "no memory" in failed.message
        assert a.host.status() == {"value": "unloaded", "reason": "no memory"}
        assert a.host.health()[0] == 200
        await touch(a.host)
        assert a.host.status() == {"value": "loaded"}
        await a.host.close()

    asyncio.run(scenario())


def test_a_model_that_does_not_close_well_does_not_block_its_host() -> None:
    async def scenario() -> None:
        one = made()
        async with one.host.using() as loaded:
            loaded.resources.callback(lambda: 1 / 0)
            loaded.lm.failure = TilebeamError("it broke")  # type: ignore[misc]
        await come(lambda: one.host.state == "ready")
        await touch(one.host)
        await one.host.close()
        assert (len(one.loads), len(one.closed)) == (2, 2)

    asyncio.run(scenario())


def test_names_are_told_apart() -> None:
    with pytest.raises(TilebeamError, match="Two models are called 'a': give them names with -m NAME=FILE"):
        check_names([("a", "b"), ("c", "a")])
    with pytest.raises(TilebeamError, match="needs a name"):
        check_names([("a",), ()])


# --- a server with real models ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: write_model(folder / f"{name}.gguf", preset("tiny", type="f32", seed=i)) for i, name in enumerate(NAMES)
    }


@dataclass
class Shelf:
    """What loads the models of a server; tests hold loads up and look at what was loaded."""

    paths: dict[str, Path]
    device: Any = "cpu"
    made: list[str] = field(default_factory=list)
    held: dict[str, threading.Event] = field(default_factory=dict)
    trouble: list[str] = field(default_factory=list)

    def entry(self, name: str) -> Entry:
        def load() -> LoadedModel:
            if name in self.held:
                assert self.held[name].wait(PATIENCE)
            if self.trouble:
                raise TilebeamError(self.trouble.pop())
            lm = tilebeam.load(self.paths[name], self.device, n_ctx=512, n_seq_max=2, threads=1, **EXACT)
            self.made.append(name)
            resources = ExitStack()
            resources.callback(lm.close)
            return LoadedModel(lm, resources=resources)

        return Entry((name,), 2, load)

    def entries(self) -> list[Entry]:
        return [self.entry(name) for name in NAMES]


@pytest.fixture(scope="module")
def expected(paths: dict[str, Path]) -> dict[str, str]:
    """What each model says."""
    found = {}
    for name, path in paths.items():
        with tilebeam.load(path, "cpu", n_ctx=512, n_seq_max=2, threads=1, **EXACT) as lm:
            found[name] = lm.generate(PROMPT, max_tokens=8, temperature=0)[0].outputs[0].text
    assert len(set(found.values())) == 3
    return found


@pytest.fixture
def shelf(paths: dict[str, Path]) -> Shelf:
    return Shelf(paths)


def said(server: Running, **more: Any) -> Any:
    answer = server.client().completions.create(
        **{"model": "one", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **more}
    )
    return answer.choices[0].text


def states(server: Running) -> dict[str, str]:
    return {m.id: m.status["value"] for m in server.client().models.list().data}


@pytest.fixture
def server(shelf: Shelf) -> Iterator[Running]:
    with serving(shelf.entries()) as it:
        yield it


def test_requests_choose_their_model(server: Running, expected: dict[str, str]) -> None:
    client = server.client()
    assert states(server) == dict.fromkeys(NAMES, "unloaded")
    assert not hasattr(client.models.retrieve("one"), "meta")
    assert said(server, model="two") == expected["two"]
    assert states(server) == {"one": "unloaded", "two": "loaded", "three": "unloaded"}
    assert client.models.retrieve("two").meta["n_ctx"] == 512
    figures = server.metrics()
    assert figures['tilebeam_model_loaded{model="one"}'] == figures['tilebeam_kv_cells{model="one"}'] == 0
    assert figures['tilebeam_ready{model="one"}'] == 1
    # Whoever names none gets the first.
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    answer = server.post(TEXT, body).json()
    assert (answer["model"], answer["choices"][0]["text"]) == ("one", expected["one"])
    for path, asked in ((TEXT, {"prompt": "a"}), (CHAT, {"messages": HI})):
        refused = server.post(path, asked | {"model": "four"})
        assert refused.status_code == 404
        assert refused.json()["error"]["code"] == "model_not_found"
        assert "'four' is not served here; this server serves 'one', 'two', 'three'" in refused.text
    with pytest.raises(openai.NotFoundError, match="four"):
        client.models.retrieve("four")
    # Streams and chats load, too.
    chunks = client.completions.create(model="three", prompt=PROMPT, max_tokens=8, temperature=0, stream=True)
    assert "".join(c.choices[0].text for c in chunks) == expected["three"]
    assert states(server) == dict.fromkeys(NAMES, "loaded")
    answer = client.chat.completions.create(model="two", messages=HI, max_tokens=2)
    assert answer.model == "two"
    health = httpx.get(f"{server.url}/health", timeout=PATIENCE)
    assert (health.status_code, health.json()["status"]) == (200, "ok")
    assert health.json()["models"]["two"] == {"value": "loaded"}
    page = httpx.get(f"{server.url}/", timeout=PATIENCE).text
    assert '<select id="model">' in page
    assert all(f'value="{name}"' in page for name in NAMES)
    figures = server.metrics()
    assert figures['tilebeam_model_loaded{model="two"}'] == 1
    assert figures['tilebeam_generated_tokens_total{model="three"}'] == 8
    assert figures['tilebeam_batch_samples_count{model="two"}'] > 0
    assert figures['tilebeam_requests_total{path="/v1/chat/completions",status="200"}'] == 1


def test_the_others_answer_while_one_loads(server: Running, expected: dict[str, str], shelf: Shelf) -> None:
    assert said(server) == expected["one"]
    shelf.held["two"] = threading.Event()
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(said, server, model="two") for _ in range(3)]
        until(lambda: states(server)["two"] == "loading")
        until(lambda: server.metric('tilebeam_samples_admitted{model="two"}') == 3)
        assert said(server) == expected["one"]
        assert httpx.get(f"{server.url}/health", timeout=PATIENCE).status_code == 200
        shelf.held["two"].set()
        assert [one.result(PATIENCE) for one in asked] == [expected["two"]] * 3
    assert shelf.made == ["one", "two"]  # one load for all of them


def test_who_waits_for_a_model_waits_in_its_queue(shelf: Shelf, expected: dict[str, str]) -> None:
    shelf.held["two"] = threading.Event()
    with serving(shelf.entries(), max_waiting=1) as server, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(said, server, model="two") for _ in range(3)]
        until(lambda: server.metric('tilebeam_samples_admitted{model="two"}') == 3)
        refused = server.post(TEXT, {"prompt": "a", "model": "two"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        # What does not wait for others waits for the model.
        counted = server.post("/v1/messages/count_tokens", {"messages": HI, "model": "two"})
        assert (counted.status_code, counted.json()["error"]["type"]) == (429, "rate_limit_error")
        assert server.metric('tilebeam_requests_refused_total{model="two"}') == 2
        # Who leaves is not waited for; the load goes on.
        shelf.held["one"] = threading.Event()
        with pytest.raises(openai.APITimeoutError):
            server.client(timeout=0.2).completions.create(model="one", prompt=PROMPT, max_tokens=1)
        until(lambda: server.metric('tilebeam_samples_admitted{model="one"}') == 0)
        shelf.held["one"].set()
        shelf.held["two"].set()
        assert [one.result(PATIENCE) for one in asked] == [expected["two"]] * 3
        until(lambda: states(server)["one"] == "loaded")


def test_figures_of_a_single_model_have_no_label(paths: dict[str, Path]) -> None:
    shelf = Shelf(paths)
    with serving([shelf.entry("one")]) as server:
        assert 'model="' not in httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text
        assert parse_metrics(httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text)["tilebeam_slots"] == 2
