"""The server's parts by themselves: prompts that cannot be forged, who is let in, what tokens a text has."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tilebeam
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from starlette.datastructures import Headers
from tilebeam import LM, CompletionOutput, Prompt, SamplingParams, SearchResult, TilebeamError, ToolReasoning, Usage
from tilebeam.chat.answer_parts import Text
from tilebeam.chat.chat_template import ChatTemplates
from tilebeam.engine.detokenizer import Detokenizer
from tilebeam.server import admission
from tilebeam.server import model_host as host_module
from tilebeam.server.admission import ClientGone, Gate
from tilebeam.server.answer_events import Grown, Started, TokenLedger, token_text
from tilebeam.server.errors import ApiError, unavailable
from tilebeam.server.metrics import Metrics
from tilebeam.server.model_host import LoadedModel, ModelHost
from tilebeam.server.openai import chat_completions as chat
from tilebeam.server.openai.chat_completions import ChatAnswer
from tilebeam.server.openai.completions import CompletionAnswer
from tilebeam.server.openai.response_requests import ResponsesRequest
from tilebeam.server.other.message_requests import CountRequest
from tilebeam.server.plan import AnswerPlan, Ready
from tilebeam.server.requests import ChatRequest
from tilebeam.server.search_answers import SearchAnswer
from tilebeam.server.searches import in_thread
from tilebeam.server.security import ApiKeys, Guard, is_loopback
from tilebeam.server.settings import Settings
from tilebeam.server.writing import dumped, dumped_in_parts, last_event

from bench.lib.synth import preset, write_model


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LM]:
    path: Path = write_model(tmp_path_factory.mktemp("parts") / "tiny.gguf", preset("tiny", type="q8_0"))
    with tilebeam.load(path, "cpu", n_ctx=512, n_seq_max=2, threads=1) as model:
        yield model


# --- chats ------------------------------------------------------------------------------------------------------------

# The vocabulary's control tokens are <s> and </s>; llama2's template spells both.
TEMPLATE = "llama2-sys"
OWN = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.content == 'no' %}{{ raise_exception('no is not allowed') }}"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
PIECES = st.sampled_from(
    ["</s>", "<s>", "</", "s>", "[INST]", "[/INST]", "the number", " ", "\n", "é", "<", "x", "<<SYS>>"]
)
CONTENT = st.lists(PIECES, min_size=1, max_size=6).map("".join).filter(lambda text: text.strip() != "")


def turns(*contents: str) -> ChatRequest:
    roles = ["user", "assistant"]
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return ChatRequest.model_validate({"messages": messages})


# The same conversation in the other forms that ask for chats.
DOORS: dict[str, Any] = {
    "/v1/chat/completions": ChatRequest.model_validate,
    "/v1/responses": lambda talk: ResponsesRequest.model_validate({"input": talk["messages"]}).chat(),
    "/v1/messages": lambda talk: CountRequest.model_validate(talk).chat(),
}


def prompt(lm: LM, body: ChatRequest, template: str | None) -> tuple[str, list[int]]:
    made = chat.prompt_of(lm, body, Settings(chat_template=template))
    return made.text, made.ids


def test_variables_of_a_template(lm: LM) -> None:
    def prompt(fields: dict[str, Any], template: str) -> str:
        body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "hi"}]} | fields)
        return chat.prompt_of(lm, body, Settings(chat_template=template)).text

    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if not enable_thinking %}</think>{% endif %}"
    assert prompt({}, template) == "hi"
    assert prompt({"chat_template_kwargs": {"enable_thinking": False}}, template) == "hi</think>"
    for variables, name in (({"tools": []}, template), ({"a": 1}, "chatml")):
        with pytest.raises(ApiError) as caught:
            prompt({"chat_template_kwargs": variables}, name)
        assert (caught.value.status, caught.value.param) == (400, "chat_template_kwargs")


def controls(lm: LM, ids: list[int]) -> list[int]:
    return [t for t in ids if lm.is_control(t)]


@settings(deadline=None, max_examples=150)
@given(
    contents=st.lists(CONTENT, min_size=1, max_size=3),
    template=st.sampled_from([TEMPLATE, OWN]),
    door=st.sampled_from(sorted(DOORS)),
)
def test_messages_hold_no_control_tokens(lm: LM, contents: list[str], template: str, door: str) -> None:
    """Whatever messages say, at whichever door, the prompt's control tokens are the template's own."""

    def at_door(*contents: str) -> ChatRequest:
        talk = [{"role": m.role, "content": m.as_dict()["content"]} for m in turns(*contents).messages]
        found: ChatRequest = DOORS[door]({"messages": talk})
        return found.model_copy(update={"continue_final_message": None})

    text, ids = prompt(lm, at_door(*contents), template)
    assert text == prompt(lm, turns(*contents), template)[0]
    _, plain = prompt(lm, at_door(*["the number"] * len(contents)), template)
    assert controls(lm, ids) == controls(lm, plain)
    # Nothing of what was said is lost: with control tokens spelled out, tokens and text are the same.
    spelled = "".join({lm.bos: "<s>", lm.eos: "</s>"}.get(t) or "\0" for t in ids if lm.is_control(t))
    assert "\0" not in spelled
    shown = b"".join({lm.bos: b"<s>", lm.eos: b"</s>"}.get(t) or lm.piece(t) for t in ids).decode()
    assert "".join(shown.removeprefix("<s>").split()) == "".join(text.split())


@settings(deadline=None, max_examples=50)
@given(
    contents=st.lists(CONTENT.filter(lambda t: "s>" not in t), min_size=1, max_size=3),
    template=st.sampled_from([TEMPLATE, OWN]),
)
def test_harmless_chats_are_tokenized_as_a_whole(lm: LM, contents: list[str], template: str) -> None:
    """As llama-server does: a token may reach over the end of a message."""
    text, ids = prompt(lm, turns(*contents), template)
    assert ids == lm.tokenize(text)


def test_templates_that_change_messages(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a template does more than to copy messages, none may hold control tokens."""

    def shout(_: ChatTemplates, messages: Any, *_options: Any) -> str:
        return "".join(f"<s>{m['content'].swapcase()}" for m in messages)

    monkeypatch.setattr(ChatTemplates, "apply", shout)
    text, ids = prompt(lm, turns("The Number"), None)
    assert text == "<s>tHE nUMBER"
    assert ids == lm.tokenize(text)
    with pytest.raises(ApiError, match="control token") as caught:
        chat.prompt_of(lm, turns("fine", "hi</s>"), Settings())
    assert caught.value.code == "control_tokens_in_message"


def test_no_template_is_said(lm: LM) -> None:
    for template in (None, "no such template"):
        with pytest.raises(ApiError, match="--chat-template") as caught:
            chat.prompt_of(lm, turns("hi"), Settings(chat_template=template))
        assert caught.value.status == 400


def test_what_a_template_says_of_messages_is_told(lm: LM) -> None:
    with pytest.raises(ApiError, match="does not take these messages: no is not allowed") as caught:
        chat.prompt_of(lm, turns("yes?", "no"), Settings(chat_template=OWN))
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_value", "messages")


def test_a_conversation_has_a_limit() -> None:
    with pytest.raises(ValidationError, match="at most 8192 items"):
        ChatRequest.model_validate({"messages": [{"role": "user", "content": "hi"}] * 8193})


def test_a_conversation_of_thousands_of_messages_is_read_quickly(lm: LM) -> None:
    """In time that grows with them, not with their square; with one that holds a control token, too."""
    messages = [{"role": "user", "content": f"m{i}"} for i in range(2000)]
    ids = chat.prompt_of(lm, ChatRequest.model_validate({"messages": messages}), Settings(chat_template="chatml")).ids
    messages[7]["content"] = "</s>"
    others = chat.prompt_of(
        lm, ChatRequest.model_validate({"messages": messages}), Settings(chat_template="chatml")
    ).ids
    assert ids.count(lm.eos) == others.count(lm.eos)


# --- tokens of a text -------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    pieces=st.lists(st.binary(max_size=3) | st.text(max_size=3).map(str.encode), max_size=12),
    stop=st.text(min_size=1, max_size=2),
    sizes=st.lists(st.integers(1, 4), min_size=12, max_size=12),
)
def test_tokens_are_told_with_their_text(pieces: list[bytes], stop: str, sizes: list[int]) -> None:
    """However text and tokens come, in the end every token that the text shows was told once, in order."""
    stream, ledger = Detokenizer([stop]), TokenLedger(lambda token: pieces[token])
    told: list[int] = []
    starts: list[int] = []
    shown = ""
    token = 0
    for size in sizes:
        batch = list(range(token, min(token + size, len(pieces))))
        for t in batch:
            token = t + 1
            if stream.feed(pieces[t]):
                break
        ledger.feed(range(batch[0], token) if batch else [], [0.5] * (token - batch[0]) if batch else [], None)
        text = stream.text[len(shown) : stream.stable_length()]
        shown += text
        for start, t, _, _ in ledger.take(text):
            told.append(t)
            starts.append(start)
        if stream.stopped:
            break
    rest = stream.text[len(shown) :]
    for start, t, _, _ in ledger.take(rest):
        told.append(t)
        starts.append(start)
    assert told == list(range(len(told)))
    assert starts == sorted(starts)
    assert all(start < len(stream.text) for start in starts)
    if not stream.stopped and all(_is_text(p) for p in pieces):
        assert "".join(pieces[t].decode() for t in told) == stream.text


def _is_text(piece: bytes) -> bool:
    return token_text(piece).encode() == piece


def test_tokens_that_are_no_text() -> None:
    assert token_text("é".encode()) == "é"
    assert token_text(b"\xc3") == r"bytes:\xc3"


@pytest.mark.parametrize("answer", [CompletionAnswer, ChatAnswer])
def test_a_model_may_be_called_null(answer: Any) -> None:
    """Chunks are written around what all of them share, and a name is no place to cut it at."""
    for name in ("null", '"choices":[null]', "[DONE]"):
        body = turns("hi")
        plan = AnswerPlan(body, answer, False, SamplingParams(), 1, name, lambda _, params: Ready([], params))
        written = answer(plan, lambda _: b"")
        written.add(Started(0))
        chunk = json.loads(written.add(Grown(0, [Text("null")], finish="stop")).removeprefix(b"data: "))
        assert (chunk["model"], chunk["choices"][0]["finish_reason"]) == (name, "stop")


# --- who is let in ----------------------------------------------------------------------------------------------------


async def never() -> Any:
    await asyncio.Event().wait()


def test_the_gate_counts_samples() -> None:
    gate = Gate(slots=4, waiting=2, most=10, metrics=Metrics(["tiny"]).of("tiny"))
    with pytest.raises(ApiError, match="at most 10"), gate.enter(11):
        pass
    with gate.enter(10):  # larger than the queue, but nobody else is there
        assert gate.load == 10
        with pytest.raises(ApiError) as caught, gate.enter(1):
            pass
        assert caught.value.status == 429
        assert int(caught.value.headers()["retry-after"]) >= 1
    assert gate.load == 0
    with gate.enter(3), gate.enter(3):
        with pytest.raises(ApiError), gate.enter(1):
            pass
        assert gate.load == 6
    gate.close()
    with pytest.raises(ApiError) as caught, gate.enter(1):
        pass
    assert (caught.value.status, caught.value.code) == (503, "shutting_down")


def test_loading_does_not_count_for_when_to_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(admission.time, "monotonic", lambda: now)
    gate = Gate(slots=1, waiting=0, most=10, metrics=Metrics(["tiny"]).of("tiny"))
    for _ in range(20):
        with gate.enter(1) as job:
            now += 50  # until the model is there
            job.began = now
            now += 2
    with gate.enter(1):
        now += 50  # the load failed
    with gate.enter(1), pytest.raises(ApiError) as caught, gate.enter(1):
        pass
    assert caught.value.headers()["retry-after"] == "2"


def test_jobs_end_with_their_clients_and_with_the_server() -> None:
    async def scenario() -> None:
        gate = Gate(slots=4, waiting=2, most=10, metrics=Metrics(["tiny"]).of("tiny"))
        gone: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        cleaned = []

        async def work() -> None:
            try:
                await never()
            finally:
                cleaned.append(1)

        with gate.enter(1) as job:
            gone.put_nowait({"type": "http.disconnect"})
            with pytest.raises(ClientGone):
                await job.run(work(), gone.get)
        with gate.enter(1) as job:
            draining = asyncio.ensure_future(gate.drain(0.01))
            with pytest.raises(ApiError, match="shutting down"):
                await job.run(work(), never)
            with pytest.raises(ApiError, match="shutting down"):  # nothing new begins either
                await job.run(work(), never)
        await draining
        assert len(cleaned) == 1 + 1

        async def answer() -> int:
            return 7

        with gate.enter(1) as job:
            assert await job.run(answer(), never) == 7
            outer = asyncio.ensure_future(job.run(work(), never))
            await asyncio.sleep(0.01)
            outer.cancel()
            with pytest.raises(asyncio.CancelledError):
                await outer
            assert len(cleaned) == 3

    asyncio.run(scenario())


# --- a model that fails -----------------------------------------------------------------------------------------------


class FakeLM:
    """As much of a model as its host sees."""

    failure: TilebeamError | None = None


def loaded() -> LoadedModel:
    return LoadedModel(FakeLM())  # type: ignore[arg-type]


def broken(host: ModelHost) -> None:
    assert host.newest is not None
    host.newest.failure = TilebeamError("it broke")  # type: ignore[misc]


def test_a_lost_model_is_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "_PAUSES", (0.0, 0.0, 0.0))
    closed: list[LoadedModel] = []
    trouble = ["no memory", "still none"]

    def load() -> LoadedModel:
        if trouble:
            raise TilebeamError(trouble.pop())
        return loaded()

    async def scenario() -> None:
        first = loaded()
        first.resources.callback(closed.append, first)
        host = ModelHost(load, first)
        async with host.using() as model:
            assert model is first
            broken(host)
            status, body = host.health()
            assert (status, body["status"], body["reason"]) == (503, "restarting", "it broke")
            await asyncio.sleep(0.01)
            assert not closed  # it is still used
            with pytest.raises(ApiError) as caught:
                async with host.using():
                    pass
            assert (caught.value.status, caught.value.code) == (503, "model_restarting")
            assert caught.value.retry_after
        while host.state == "restarting":
            await asyncio.sleep(0.01)
        assert closed == [first]
        assert host.health() == (200, {"status": "ok", "restarts": 1})
        async with host.using() as model:
            assert model is not first
        await host.close()
        assert host.health()[0] == 503

    asyncio.run(scenario())


def test_a_model_that_fails_again_and_again_stays_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "_PAUSES", (0.0,))

    async def scenario() -> None:
        host = ModelHost(loaded, loaded())
        for restarts in (1, 2, 3):
            broken(host)
            host.look()
            while host.state == "restarting":
                await asyncio.sleep(0.01)
            assert (host.state, host.restarts) == ("ready", restarts)
        broken(host)
        status, body = host.health()
        assert (status, body["status"]) == (503, "failed")
        assert "4 times" in body["reason"]
        with pytest.raises(ApiError, match="not available"):
            async with host.using():
                pass
        await host.close()

    asyncio.run(scenario())


def test_a_model_that_cannot_be_loaded_again_stays_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "_PAUSES", (0.0, 0.0))
    tries = []

    def load() -> LoadedModel:
        tries.append(1)
        raise TilebeamError("no memory")

    async def scenario() -> None:
        host = ModelHost(load, loaded())
        broken(host)
        host.look()
        while host.state == "restarting":
            await asyncio.sleep(0.01)
        assert host.health() == (503, {"status": "failed", "reason": "no memory", "restarts": 0})
        assert len(tries) == 2
        await host.close()

    asyncio.run(scenario())


def test_what_waits_for_a_thread_is_given_up_at_once() -> None:
    """A search whose client has left holds no place in the queue while others run."""
    free, begun = threading.Event(), threading.Event()

    def busy() -> int:
        begun.set()
        assert free.wait(60)
        return 1

    async def scenario() -> None:
        with ThreadPoolExecutor(1) as pool:
            first = asyncio.ensure_future(in_thread(pool, busy, threading.Event()))
            await asyncio.to_thread(begun.wait)
            stopped = threading.Event()
            second = asyncio.ensure_future(in_thread(pool, lambda: pytest.fail("it runs"), stopped))
            await asyncio.sleep(0)
            second.cancel()
            done, _ = await asyncio.wait([second], timeout=5)
            free.set()
            assert (done, stopped.is_set(), await first) == ({second}, True, 1)

    asyncio.run(scenario())


def test_log_probabilities_of_a_search_whose_programs_ran_are_not_told(lm: LM) -> None:
    """A text has more tokens than were drawn, where the outputs of programs stand in it."""
    body = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "Q"}], "logprobs": True, "search": {"method": "tir", "budget": 1}}
    )
    plan = AnswerPlan(body, ChatAnswer, True, SamplingParams(seed=1), 1, "tiny", lambda _, params: Ready([], params))
    drawn = CompletionOutput(0, "a b", lm.tokenize("a b", add_special=False), "stop", 1, -1.0, [-1.0])
    result = SearchResult("Q", [drawn], [1.0], 0, Usage(), 1, 1, [])
    assert body.search is not None
    ready = Ready([Prompt("Q")], SamplingParams())
    pool: Any = None
    answer = SearchAnswer(
        body.search, ToolReasoning(run=lambda _: ""), pool, LoadedModel(lm), plan, ready, Metrics(["tiny"]).of("tiny")
    )
    (grown, _) = answer._answers([result], {})
    assert isinstance(grown, Grown)
    assert (grown.parts, grown.tokens) == ([Text("a b")], None)


def test_keys_and_names() -> None:
    keys = ApiKeys(["one", "two"])
    assert keys.fits("one")
    assert keys.fits("two")
    assert not any(keys.fits(k) for k in ("", "on", "one ", "ONE", "onetwo"))
    assert not ApiKeys([])
    assert ApiKeys(["schlüssel"]).fits(Headers(raw=[(b"x-api-key", "schlüssel".encode())])["x-api-key"])
    for host, loopback in (("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("localhost", True)):
        assert is_loopback(host) == loopback
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "192.168.1.2", "example.org"))


@pytest.mark.parametrize(
    ("host", "fine"),
    [
        ("127.0.0.1:8080", True),
        ("localhost", True),
        ("LOCALHOST:80", True),
        ("localhost.", True),
        ("[::1]:8080", True),
        ("192.168.0.7", True),
        ("evil.example:8080", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example", False),
        ("[evil]", False),
        ("", False),
    ],
)
def test_who_is_meant(host: str, fine: bool) -> None:
    """A page at a name that its owner points at 127.0.0.1 does not get through."""
    seen: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        del scope, receive, send
        seen.append(200)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            seen.append(message["status"])

    guard = Guard(app, ApiKeys([]), 100, names_allowed=False)
    scope = {"type": "http", "path": "/", "method": "GET", "headers": [(b"host", host.encode())]}
    asyncio.run(guard(scope, never, send))
    assert seen == [200 if fine else 403]


# --- JSON -------------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(JSON, st.integers(0, 6))
def test_parts_of_an_answer_are_its_json(data: Any, depth: int) -> None:
    assert dumped_in_parts(data, depth) == dumped(data)


@pytest.mark.parametrize(
    ("path", "kind", "told"),
    [
        ("/v1/chat/completions", "", {"error": {"code": "npu_failed"}}),
        ("/v1/responses", "event: error\n", {"code": "npu_failed", "sequence_number": 2}),
        ("/v1/messages", "event: error\n", {"type": "error", "error": {"type": "overloaded_error"}}),
    ],
)
def test_an_error_within_a_stream_has_the_form_of_its_path(path: str, kind: str, told: dict[str, Any]) -> None:
    head, _, data = last_event(unavailable("gone", code="npu_failed"), path, 2).decode().partition("data: ")
    found = json.loads(data)
    assert (head, data[-2:]) == (kind, "\n\n")
    for name, value in told.items():
        assert value.items() <= found[name].items() if isinstance(value, dict) else found[name] == value
