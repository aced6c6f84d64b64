"""The chat page in a browser: streams, stops, history, settings, searches beside answers, hostile and narrow ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import browser_kit
import pytest
from server_kit import CHAT, Running, idle, running, until
from tilebeam import LM

# What the page asks the server is kept in `window.asked`.
WATCH = """(() => { const real = window.fetch; window.asked = [];
  window.fetch = (to, given) => { if (given.body) asked.push(JSON.parse(given.body)); return real(to, given); }; })()"""
HOSTILE = r"""<script>window.ran = 1</script> <img src=x onerror="window.ran = 1"> <b onclick="window.ran = 1">b</b>
[a](javascript:window.ran=1) [b](JaVaScRiPt&colon;window.ran=1) <javascript:window.ran=1> [c](data:text/html,x)
![d](http://127.0.0.1:1/x.png) [e](https://example.org "x\" onmouseover=\"window.ran=1")
<svg onload=window.ran=1><style>*{display:none}</style><iframe srcdoc="<script>window.ran=1</script>"></iframe>

\[ \href{javascript:window.ran=1}{x} \] \( \text{</code><img src=x onerror=window.ran=1>} \) $\class{a}{x}$

```"><script>window.ran=1</script>
</code><script>window.ran = 1</script>
```
"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser_kit.Tab]:
    with browser_kit.tab(tmp_path_factory.mktemp("browser")) as it:
        yield it


def fresh(tab: browser_kit.Tab, server: Running, **values: str) -> None:
    """Open the page without a history, and fill fields."""
    tab.open(f"{server.url}/")
    tab.run("localStorage.clear()")
    tab.open(f"{server.url}/")
    tab.run(WATCH)
    put(tab, **values)


def put(tab: browser_kit.Tab, **values: str) -> None:
    for name, value in values.items():
        tab.run(f"client.at[{name!r}].value = {json.dumps(value)}")
        tab.run(f"client.at[{name!r}].dispatchEvent(new Event('change', {{ bubbles: true }}))")


def ask(tab: browser_kit.Tab, question: str, *, wait: bool = True) -> None:
    """Type a question and press Enter."""
    put(tab, question=question)
    tab.run("document.getElementById('question').focus()")
    tab.press("Enter")
    if wait:
        tab.until("document.getElementById('stop').hidden")
        tab.until("!document.querySelector('[aria-busy]')")


def said(tab: browser_kit.Tab) -> list[str]:
    """What the messages show."""
    return list(tab.run("[...document.querySelectorAll('.turn > .said')].map(e => e.textContent)"))


def kept(tab: browser_kit.Tab) -> list[dict[str, Any]]:
    """Messages of the conversation that changed last, as the browser keeps them."""
    return list(tab.run("conversations.all()[0].messages"))


def click(tab: browser_kit.Tab, selector: str) -> None:
    tab.run(f"document.querySelector({selector!r}).click()")


def stub(tab: browser_kit.Tab, *deltas: dict[str, str]) -> None:
    """Let the page get these pieces of an answer; each comes when `window.next` is called, the end after them."""
    chunks = [json.dumps({"choices": [{"index": 0, "delta": d, "finish_reason": None}]}) for d in deltas]
    tab.run(
        f"""(() => {{ const chunks = {json.dumps(chunks)}; window.fetch = async () => new Response(new ReadableStream({{
        start(to) {{ window.next = () => chunks.length
          ? to.enqueue(new TextEncoder().encode('data: ' + chunks.shift() + '\\n\\n')) : to.close(); }} }})); }})()"""
    )


def answered(tab: browser_kit.Tab, text: str, **more: str) -> None:
    """A question whose answer is this text."""
    stub(tab, {"content": text, **more})
    ask(tab, "?", wait=False)
    tab.run("(async () => { while (!window.next) await 0; next(); next(); })()")
    tab.until("document.getElementById('stop').hidden")


def test_a_conversation(tab: browser_kit.Tab, server: Running) -> None:
    fresh(tab, server, temperature="0", max_tokens="12", system="be brief")
    ask(tab, "how many")
    first = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "how many"}]
    (asked,) = tab.run("asked")
    assert (asked["messages"], asked["temperature"], asked["max_tokens"]) == (first, 0, 12)
    assert "search" not in asked
    body = {"messages": first, "temperature": 0, "max_tokens": 12}
    text = server.post(CHAT, body).json()["choices"][0]["message"]["content"]
    assert [m["content"] for m in kept(tab)] == ["how many", text]
    assert kept(tab)[1]["note"].startswith("12 tokens, ")
    assert "tokens/s, cut: " in tab.run("document.querySelector('.turn.assistant .note').textContent")
    ask(tab, "and then")
    assert [m["content"] for m in tab.run("asked[1].messages")] == ["be brief", "how many", text, "and then"]
    before = said(tab)
    assert len(before) == 4
    tab.open(f"{server.url}/")  # everything is still there
    assert said(tab) == before
    assert tab.run("document.getElementById('system').value") == "be brief"
    tab.run(WATCH)
    click(tab, ".regenerate")
    tab.until("document.getElementById('stop').hidden && document.querySelectorAll('.turn').length === 4")
    assert tab.run("asked[0].messages.length") == 4
    assert said(tab) == before  # the model is sure at temperature 0
    tab.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    click(tab, ".assistant .copy")
    assert tab.run("copied") == text
    click(tab, ".edit")
    tab.press("Escape")
    assert tab.run("document.getElementById('question').value") == ""
    assert said(tab) == before
    click(tab, ".edit")
    assert tab.run("document.getElementById('question').value") == "and then"
    ask(tab, "and now")
    assert [m["content"] for m in kept(tab)][:3] == ["how many", text, "and now"]
    assert len(kept(tab)) == 4
    assert tab.problems == []
    assert {url.split("/")[2] for url in tab.requests if url.startswith("http")} == {server.url.split("/")[2]}


# A random model ends its text when it likes.
ENDLESS = """(() => {
  const before = window.fetch;
  window.fetch = (url, sent) =>
    before(url, sent?.body ? { ...sent, body: JSON.stringify({ ...JSON.parse(sent.body), ignore_eos: true }) } : sent);
})()"""


def test_an_answer_is_shown_as_it_comes_and_can_be_stopped(tab: browser_kit.Tab, server: Running) -> None:
    fresh(tab, server)
    stub(tab, {"reasoning_content": "hm"}, {"content": "**one**"}, {"content": " two"})
    ask(tab, "?", wait=False)
    tab.until("Boolean(window.next)")
    assert said(tab) == ["?", ""]
    tab.run("next()")
    tab.until("document.querySelector('.assistant .thoughts pre').textContent === 'hm'")
    assert not tab.run("document.querySelector('.assistant .thoughts').open")
    tab.run("next()")
    tab.until("document.querySelector('.assistant .said strong')?.textContent === 'one'")
    assert not tab.run("document.getElementById('stop').hidden")
    tab.run("next() || next()")
    tab.until("document.getElementById('stop').hidden")
    assert said(tab)[1].strip() == "one two"
    assert {"thoughts": "hm", "content": "**one** two"}.items() <= kept(tab)[1].items()
    fresh(tab, server, max_tokens="900", temperature="0.8")
    tab.run(ENDLESS)
    ask(tab, "how many", wait=False)
    tab.until("document.querySelectorAll('.assistant .said')[0]?.textContent.length > 8")
    click(tab, "#stop")
    tab.until("document.getElementById('stop').hidden")
    until(lambda: idle(server))
    assert kept(tab)[1]["note"] == "stopped"
    assert kept(tab)[1]["content"]
    assert tab.run("document.getElementById('news').textContent") == "Stopped."


@pytest.mark.parametrize(("question", "method"), [("How many are 2 + 2?", "vote"), ("Why?", "best-of-n")])
def test_how_one_of_several_answers_is_chosen_follows_the_question(
    tab: browser_kit.Tab, server: Running, question: str, method: str
) -> None:
    fresh(tab, server, answers="4", max_tokens="2")
    ask(tab, question)
    assert tab.run("asked[0].search.method") == method
    assert tab.problems == []


def test_programs_run_in_answers_of_a_server_that_runs_them(tab: browser_kit.Tab, lm: LM) -> None:
    with running(lm, programs=True) as server:
        fresh(tab, server, answers="4", max_tokens="2")
        ask(tab, "How many are 2 + 2?")
        assert tab.run("asked[0].search.method") == "tir"
        assert len(kept(tab)[1]["search"]["candidates"]) == 4
        assert tab.problems == []


@pytest.mark.parametrize("judge", ["vote text", "best-of-n"])
def test_four_answers_and_their_tally(tab: browser_kit.Tab, server: Running, judge: str) -> None:
    fresh(tab, server, answers="4", max_tokens="6", judge=judge)
    ask(tab, "how many")
    assert tab.run("asked[0].search.budget") == 4
    search = kept(tab)[1]["search"]
    assert len(search["candidates"]) == tab.run("document.querySelectorAll('.votes details').length") == 4
    assert tab.run("document.querySelector('.votes details.best .tag').textContent").startswith(f"#{search['best']}")
    (best,) = (c["text"] for c in search["candidates"] if c["index"] == search["best"])
    assert kept(tab)[1]["content"] == best
    rows = tab.run("[...document.querySelectorAll('.votes tr')].map(r => [...r.children].map(c => c.textContent))")
    assert sorted(row[0] for row in rows) == sorted(search.get("votes", {}))
    if judge != "best-of-n":
        assert rows[0][0] == search["answer"]
        assert sum(int(row[1]) for row in rows) == 4
    assert tab.run("document.querySelector('.votes p').textContent").startswith("4 of 4 answers")
    shown = tab.run("document.querySelector('.votes').textContent")
    tab.open(f"{server.url}/", width=400)
    assert tab.run("document.querySelector('.votes').textContent") == shown
    assert tab.problems == []


def test_a_search_by_steps_and_its_page(tab: browser_kit.Tab, server: Running) -> None:
    fresh(tab, server, answers="4", max_tokens="12", judge="beam")
    ask(tab, "how many")
    assert tab.run("asked[0].search.method") == "beam"
    assert tab.run("document.querySelectorAll('.votes details').length") >= 1
    assert "page" not in kept(tab)[1]["search"]
    tab.run("window.open = (url) => { window.opened = url; }")
    click(tab, ".details")
    tab.follow("window.opened")
    assert tab.run("document.title") == "Beam search - how many"
    assert tab.run("document.querySelectorAll('.step').length") >= 1
    assert tab.problems == []
    assert {url.split("/")[2] for url in tab.requests if url.startswith("http")} == {server.url.split("/")[2]}


def test_several_conversations(tab: browser_kit.Tab, server: Running) -> None:
    fresh(tab, server, max_tokens="4")
    ask(tab, "one")
    click(tab, "#new")
    assert said(tab) == []
    ask(tab, "two")
    titles = "[...document.querySelectorAll('#list .open')].map(e => e.textContent)"
    assert tab.run(titles) == ["two", "one"]
    click(tab, "#list li:nth-child(2) .open")
    assert said(tab)[0] == "one"
    tab.run("URL.createObjectURL = (blob) => { window.saved = blob.text(); return '#'; }")
    click(tab, "#export")
    assert json.loads(tab.run("saved"))["messages"][0]["content"] == "one"
    tab.run("window.confirm = () => true")
    click(tab, "#list li:nth-child(2) [aria-label]")
    assert tab.run(titles) == ["two"]
    assert said(tab) == []
    assert tab.run("Object.keys(localStorage).filter(k => k.startsWith('tilebeam.chat.')).length") == 1


def test_hostile_answers_run_nothing(tab: browser_kit.Tab, server: Running) -> None:
    fresh(tab, server)
    answered(tab, HOSTILE, reasoning_content=HOSTILE)
    assert "<script>window.ran = 1</script>" in said(tab)[1]  # as a text
    tab.run(
        "document.querySelectorAll('.said *').forEach((e) => e.closest('a') || e.dispatchEvent(new Event('click')))"
    )
    names = tab.run("[...new Set([...document.querySelectorAll('.assistant .said *')].map(e => e.localName))]")
    assert not set(names) & {"script", "img", "svg", "style", "iframe", "b", "object", "input", "form"}
    links = tab.run("[...document.querySelectorAll('.assistant .said a')].map(e => e.getAttribute('href'))")
    assert {link for link in links if link} == {"http://127.0.0.1:1/x.png", "https://example.org"}
    attributes = tab.run(
        "[...new Set([...document.querySelectorAll('.assistant .said *')].flatMap(e => e.getAttributeNames()))]"
    )
    assert not [name for name in attributes if name.startswith("on") or name in ("src", "id", "name")]
    assert tab.run("window.ran === undefined")
    assert tab.problems == []
    tab.open(f"{server.url}/")  # nor from the history
    assert tab.run("window.ran === undefined && document.querySelectorAll('.assistant').length") == 1
    assert tab.problems == []
    assert tab.requests == [f"{server.url}/"]


@pytest.mark.parametrize(
    "text", [">" * 20000, "\\(" * 20000, "*a " * 20000, "[" * 20000, "\\({" + "{" * 9000 + "\\)", "$x" * 9000]
)
def test_texts_that_nest_are_shown(tab: browser_kit.Tab, server: Running, text: str) -> None:
    fresh(tab, server)
    answered(tab, text)
    assert len(said(tab)[1]) > 0
    assert tab.problems == []


def test_markdown_and_formulas(tab: browser_kit.Tab, server: Running) -> None:
    fresh(tab, server)
    answered(
        tab,
        "**bold**\n\\[ \\frac{48}{2}\n= 24 \\]\nso \\boxed{72}, $x^2$, \\(y\\), $5 to $6.\n\n| a | b |\n|--|--|\n| 1 |"
        " 2 |\n\n```python\nif a < b: pass\n```\n`\\(z\\)` \\(\\nosuchthing\\)",
    )
    inside = "[...document.querySelector('.assistant .said').querySelectorAll({})].map(e => e.textContent)"
    assert tab.run(inside.format("'strong'")) == ["bold"]
    assert len(tab.run(inside.format("'math'"))) == 4
    assert tab.run(inside.format("'math mfrac'")) == ["482"]
    assert tab.run(inside.format("'td'")) == ["1", "2"]
    assert tab.run(inside.format("'pre code'")) == ["if a < b: pass\n"]
    assert tab.run(inside.format("':not(pre) > code'")) == ["\\(z\\)", "\\nosuchthing"]
    assert "$5 to $6." in said(tab)[1]
    assert tab.problems == []


def test_keys_and_errors(tab: browser_kit.Tab, lm: LM) -> None:
    with running(lm, api_keys=("secret",)) as server:
        fresh(tab, server, key="wrong", max_tokens="4")
        ask(tab, "how many")
        assert tab.run("document.getElementById('wrong').textContent") == "Invalid API key."
        assert said(tab) == ["how many"]
        put(tab, key="secret")
        tab.until("client.at.model.options.length > 0")  # which models there are is told to those with a key only
        put(tab, model="other")
        click(tab, ".answer")  # the question again
        tab.until("document.querySelectorAll('.assistant .note').length === 1")
        tab.until("document.getElementById('stop').hidden")
        assert tab.run("document.getElementById('wrong').textContent") == ""
        assert tab.run("asked.at(-1).model") == "other"
        assert "secret" not in tab.run("JSON.stringify(localStorage) + document.cookie")


def test_phones_the_dark_and_the_keyboard(tab: browser_kit.Tab, server: Running) -> None:
    fresh(tab, server, answers="4", max_tokens="6", judge="vote text")
    ask(tab, "how many " * 30 + "w" * 300)
    answered(
        tab,
        "a" * 500 + "\n\n```\n" + "b" * 500 + "\n```\n\\[" + "c+" * 99 + "c\\]\n\n|" + "d" * 200 + "|e|\n|-|-|\n|1|2|",
    )
    for dark in (False, True):
        tab.open(f"{server.url}/", width=400, height=800, dark=dark)
        assert not tab.run("document.getElementById('history').open")
        for opened in ("false", "true"):
            tab.run(f"document.querySelectorAll('details').forEach((e) => {{ e.open = {opened}; }})")
            assert tab.run("document.documentElement.scrollWidth") <= 400
        ground = tab.run("getComputedStyle(document.documentElement).backgroundColor")
        assert (sum(map(int, ground[4:-1].split(","))) < 200) == dark
        assert tab.problems == []
    told = tab.roles()
    for role, name in (("textbox", "Message"), ("combobox", "Answers"), ("log", "Conversation"), ("button", "Send")):
        assert (role, name) in told
    shift = "new KeyboardEvent('keydown', {key: 'Enter', shiftKey: true, cancelable: true})"
    put(tab, question="a line")
    assert tab.run(f"document.getElementById('question').dispatchEvent({shift})")  # the browser's own: a new line
    assert tab.run("document.getElementById('question').value") == "a line"
