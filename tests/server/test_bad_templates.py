"""A server with a model whose own chat template does not end: its chats are told so, everybody else is served."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tilebeam
from gguf_kit import with_metadata
from server_kit import CHAT, HI, TEXT, Running, running, until
from tilebeam.chat import rendering
from tilebeam.gguf import gguf_write

CHATS = 8  # more than the event loop has threads on a small machine
ENDLESS = "{% set n = range(99999) %}" + "{% for i in n %}" * 3 + "{% endfor %}" * 3


@pytest.fixture
def bad(path: Path, tmp_path: Path) -> Iterator[Running]:
    record = gguf_write.kv_text("tokenizer.chat_template", ENDLESS)
    model = with_metadata(path, tmp_path / "bad.gguf", {"tokenizer.chat_template": record})
    with tilebeam.load(model, "cpu", n_ctx=512, n_seq_max=2, threads=1) as lm, running(lm, chat_template=None) as it:
        yield it
    rendering._STOPPED.clear()


def test_a_template_that_does_not_end_holds_up_nobody_else(bad: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rendering.render("{{ 1 }}", {}) == {"text": "1"}  # the process is there
    monkeypatch.setattr(rendering, "SECONDS", 600)
    with ThreadPoolExecutor(CHATS) as pool:
        chats = [pool.submit(bad.post, CHAT, {"messages": HI, "max_tokens": 1}) for _ in range(CHATS)]
        until(lambda: bad.metric("tilebeam_samples_admitted") == CHATS)
        answer = bad.post(TEXT, {"prompt": "x", "max_tokens": 2})
        assert answer.json()["usage"]["completion_tokens"] == 2
        assert not any(chat.done() for chat in chats)
        monkeypatch.setattr(rendering, "SECONDS", 0.1)
        process = rendering._USUAL._process.process
        assert process is not None
        process.kill()
    for chat in chats:
        assert chat.result().status_code == 400
        error = chat.result().json()["error"]
        assert error["code"] == "no_chat_template"
        assert error["message"].startswith("The chat template of bad.gguf cannot be run: it does not come to an end")
