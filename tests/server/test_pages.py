"""The server's pages: what they hold, what a browser may do on them, who may load them, and a search in a browser.

Conversations in a browser are in test_chat_page.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser_kit
import pytest
from html_kit import Page
from tilebeam import LM, TokenReward

pytest.importorskip("openai", reason="the openai client is not installed (extra test)")
httpx = pytest.importorskip("httpx", reason="httpx is not installed (extra test)")
pytest.importorskip("fastapi", reason="the server's packages are not installed (extra server)")

from server_kit import CHAT, MESSAGES, PATIENCE, Running, idle, running, serving, until  # noqa: E402
from tilebeam.server.model_host import LoadedModel  # noqa: E402
from tilebeam.server.models import Entry  # noqa: E402

VOTE: dict[str, Any] = {"method": "vote", "budget": 4, "extract": "text", "candidates": True}


def test_the_pages(server: Running) -> None:
    for path in ("/search", "/", "/ui"):
        answer = httpx.get(f"{server.url}{path}", timeout=PATIENCE)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        rules = answer.headers["content-security-policy"]
        assert rules.startswith("default-src 'none'; script-src 'sha256-")
        assert "connect-src 'self'" in rules
        assert "unsafe" not in rules
        assert "http" not in rules
        assert answer.headers["x-content-type-options"] == "nosniff"
        page = Page(answer.text)
        assert {"/", "/search"} & {a["href"] for a in page.named("a") if "href" in a} == {
            "/" if path == "/search" else "/search"
        }
        labelled = {a["for"] for a in page.named("label") if "for" in a}
        controls = {a["id"] for kind in ("input", "select", "textarea") for a in page.named(kind)}
        assert controls - labelled == ({"plain"} if path == "/search" else set())  # its label is around it
        again = httpx.get(f"{server.url}{path}", headers={"if-none-match": answer.headers["etag"]}, timeout=PATIENCE)
        assert (again.status_code, again.content) == (304, b"")
    data = Page(httpx.get(f"{server.url}/search", timeout=PATIENCE).text).data
    assert data["methods"] == ["vote", "adaptive", "best-of-n", "beam", "dvts"]
    assert (data["name"], data["key"]) == ("tiny", False)


def test_a_page_needs_no_key_and_tells_nothing(lm: LM) -> None:
    with running(lm, api_keys=("secret",)) as server:
        for path in ("/", "/search"):
            page = httpx.get(f"{server.url}{path}", timeout=PATIENCE)
            assert page.status_code == 200
            assert "key" in {a["id"] for a in Page(page.text).named("input")}
            assert "tiny" not in page.text.split("<script>")[0]
            assert "secret" not in page.text
        assert Page(page.text).data["methods"] == ["vote", "adaptive", "best-of-n"]  # no reward model
        assert server.post("/", {}).status_code == 401


@pytest.mark.parametrize(
    "search",
    [VOTE, {"method": "beam", "budget": 4, "beam_width": 2, "max_steps": 2, "step_stop": "e", "candidates": True}],
)
def test_the_page_of_an_answer(server: Running, search: Any) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 8, "seed": 3, "search": search | {"page": True}}
    answer = server.post(CHAT, body).json()
    (choice,) = answer["choices"]
    page = Page(choice["search"]["page"])
    assert page.texts["pre"][0] == "how many"  # the question, not the prompt with its template
    assert len(page.named("details")) == len(choice["search"]["scores"])
    assert f"{answer['usage']['completion_tokens']:,}" in page.texts["dd"]
    assert "3" in page.texts["dd"]
    lines = httpx.post(f"{server.url}{CHAT}", json=body | {"stream": True}, timeout=PATIENCE).text.split("\n\n")
    told = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    (streamed,) = (c["search"]["page"] for chunk in told for c in chunk["choices"] if "page" in c.get("search", ()))
    assert Page(streamed).texts["pre"] == page.texts["pre"]
    assert "page" not in server.post(CHAT, body | {"search": search}).json()["choices"][0]["search"]


def test_every_prompt_has_its_page(server: Running) -> None:
    body = {"prompt": ["how <many>", "the people"], "max_tokens": 4, "seed": 3, "search": VOTE | {"page": True}}
    choices = server.post("/v1/completions", body).json()["choices"]
    assert [Page(choice["search"]["page"]).texts["pre"][0] for choice in choices] == body["prompt"]


# --- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser_kit.Tab]:
    with browser_kit.tab(tmp_path_factory.mktemp("browser")) as it:
        yield it


def fill(tab: browser_kit.Tab, **values: object) -> None:
    """Fields of the form."""
    tab.run(
        f"for (const [id, value] of Object.entries({json.dumps(values)})) {{ const field = document.getElementById(id);"
        " field.value = value; field.dispatchEvent(new Event('change')); }"
    )


def go(tab: browser_kit.Tab) -> None:
    """Search, until the answer is there."""
    tab.run("document.getElementById('go').click()")
    tab.until("document.getElementById('go').disabled === false")
    assert text(tab, "wrong") == ""
    assert not tab.run("document.getElementById('chosen').hidden")


def text(tab: browser_kit.Tab, name: str) -> str:
    """What an element shows."""
    return str(tab.run(f"document.getElementById({name!r}).textContent"))


def test_asking_in_a_browser(tab: browser_kit.Tab, server: Running) -> None:
    tab.open(f"{server.url}/search")
    fill(tab, question="how many", method="vote", budget=6, extract="text", max_tokens=8, seed=3)
    tab.run("document.getElementById('plain').checked = true")
    go(tab)
    body = {"prompt": "how many", "max_tokens": 8, "seed": 3, "temperature": 0.8, "search": VOTE | {"budget": 6}}
    found = server.post("/v1/completions", body).json()["choices"][0]["search"]
    assert text(tab, "answer") == found["answer"]
    assert tab.run("document.querySelectorAll('#candidates-rows tr').length") == 6
    assert tab.run("document.querySelector('#candidates-rows tr.best th').textContent") == str(found["best_index"])
    answers = tab.run("[...document.querySelectorAll('#votes-rows th')].map(e => e.textContent)")
    assert sorted(answers) == sorted(a[:200] for a in found["votes"])
    assert text(tab, "state").startswith("6 candidates (budget 6), ")
    assert text(tab, "wrong") == ""
    tab.run("window.open = (url) => { window.opened = url; }")
    tab.run("document.getElementById('open').click()")
    tab.until("window.opened !== undefined")
    tab.follow("window.opened")
    assert tab.run("document.title") == "Vote - how many"
    assert tab.run("document.querySelector('pre').textContent") == "how many"
    assert tab.run("document.querySelectorAll('details').length") == 6
    assert tab.problems == []
    assert {url.split("/")[2] for url in tab.requests if url.startswith("http")} == {server.url.split("/")[2]}


def test_choosing_a_model_in_a_browser(tab: browser_kit.Tab, lm: LM) -> None:
    loaded = LoadedModel(lm)
    entries = [Entry((name,), lm.n_seq_max, lambda: loaded, loaded) for name in ("first", "second")]
    with serving(entries) as server:
        tab.open(f"{server.url}/search")
        assert tab.run("[...document.querySelectorAll('#model option')].map(e => e.value)") == ["first", "second"]
        fill(tab, model="second", question="how many", method="vote", budget=2, extract="text", max_tokens=4)
        go(tab)
        assert server.metric('tilebeam_generated_tokens_total{model="second"}') == 8
        assert tab.problems == []


def test_steps_in_a_browser(tab: browser_kit.Tab, server: Running) -> None:
    tab.open(f"{server.url}/search")
    fill(tab, question="how many", method="beam", budget=4, beam_width=2, max_steps=3, max_tokens=12, seed=3)
    assert tab.run("document.getElementById('extract').closest('.field').hidden")
    go(tab)
    assert tab.run("document.querySelectorAll('#rounds-rows tr').length") >= 1
    assert tab.run("document.getElementById('answer').hidden")
    assert tab.problems == []


def test_stopping_in_a_browser(tab: browser_kit.Tab, server: Running) -> None:
    tab.open(f"{server.url}/search")
    fill(tab, question="how many", method="vote", budget=60, extract="text", max_tokens=200)
    tab.run("document.getElementById('go').click()")
    tab.until("document.querySelectorAll('#candidates-rows tr').length > 0")
    tab.run("document.getElementById('stop').click()")
    tab.until("!document.getElementById('go').disabled")
    assert text(tab, "state").endswith(", stopped")
    until(lambda: idle(server))


def test_errors_and_keys_in_a_browser(tab: browser_kit.Tab, lm: LM, reward: TokenReward) -> None:
    with running(lm, reward=reward, api_keys=("secret",)) as server:
        tab.open(f"{server.url}/search")
        fill(tab, question="how many", budget=2, max_tokens=4, key="wrong")
        tab.run("document.getElementById('go').click()")
        tab.until("document.getElementById('wrong').textContent")
        assert text(tab, "wrong") == "Invalid API key."
        fill(tab, key="secret")
        go(tab)
        assert tab.run("localStorage.length + sessionStorage.length + document.cookie.length") == 0
        tab.open(f"{server.url}/search")
        assert tab.run("document.getElementById('key').value") == ""


def test_the_page_to_ask_on_is_narrow_where_it_must(tab: browser_kit.Tab, server: Running, tmp_path: Path) -> None:
    for dark in (False, True):
        tab.open(f"{server.url}/search", width=360, dark=dark)
        assert tab.run("document.documentElement.scrollWidth") <= 360
        assert tab.problems == []
    tab.picture(tmp_path / "page.png")
