"""`tilebeam serve` as a process: its options, signals, and what happens when its NPU dies."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tilebeam import TilebeamError, server
from tilebeam.cli import main as cli
from tilebeam.cli import serve as serve_cli
from typer.testing import CliRunner

openai = pytest.importorskip("openai", reason="the openai client is not installed (extra test)")
httpx = pytest.importorskip("httpx", reason="httpx is not installed (extra test)")
pytest.importorskip("fastapi", reason="the server's packages are not installed (extra server)")

from process_kit import children  # noqa: E402
from server_kit import until  # noqa: E402

from bench.lib.synth import preset, write_model  # noqa: E402

LONG: dict[str, Any] = {"prompt": "the question is", "max_tokens": 240, "ignore_eos": True, "n": 4}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("serve") / "tiny.gguf", preset("tiny", type="q8_0"))


class Process:
    """`tilebeam serve` in a process of its own."""

    def __init__(
        self, path: Path, log: Path, *options: str, program: Sequence[str] = ("-m", "tilebeam"), **environment: str
    ) -> None:
        self._log = log
        command = [sys.executable, *program, "serve", "-m", str(path), "--port", "0"]
        command += ["-c", "1024", "-np", "4", "-t", "1", *options]
        # A server that is started by a shell with & has interrupts ignored; this one must not inherit that.
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=file, env=os.environ | environment, restore_signals=True
            )
        until(lambda: "/v1" in self.log() or self.process.poll() is not None)
        found = re.search(r"(?:API: |\"api\": \")(http://\S+)/v1", self.log())
        assert found, self.log()
        self.url = found[1]

    def log(self) -> str:
        return self._log.read_text()

    def client(self, **options: Any) -> Any:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, "timeout": 60} | options
        )

    def running(self) -> bool:
        return "tilebeam_samples_running 0.0" not in httpx.get(f"{self.url}/metrics", timeout=60).text

    def end(self, *signals: int) -> int:
        """Send signals; the exit code."""
        for number in signals:
            self.process.send_signal(number)
            time.sleep(0.05)
        return self.process.wait(60)


@pytest.fixture
def start(path: Path, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def make(*options: str, **environment: Any) -> Process:
        started.append(Process(path, tmp_path / f"log{len(started)}", *options, **environment))
        return started[-1]

    yield make
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait(60)


@contextmanager
def asking(one: Process, **body: Any) -> Iterator[Any]:
    """A request that is under way."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.post, f"{one.url}/v1/completions", json=LONG | body, timeout=60)
        until(one.running)
        yield answer


def test_a_signal_lets_requests_end(start: Callable[..., Process]) -> None:
    one = start("--device", "cpu", "-c", "4096")
    with asking(one, max_tokens=500) as answer:
        assert one.end(signal.SIGINT) == 0, one.log()
        assert answer.result().status_code == 200
        assert answer.result().json()["usage"]["completion_tokens"] == 2000
    assert "INFO waiting for 1 request, at most 30 s" in one.log()
    assert one.log().splitlines()[-1].endswith("INFO stopped")
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{one.url}/health")


def test_after_the_deadline_requests_are_told(start: Callable[..., Process]) -> None:
    one = start("--device", "cpu", "--shutdown-timeout", "0", "-c", "32768")
    with asking(one, max_tokens=8000, n=2) as answer:
        streamed = one.client().completions.create(
            model="tiny", prompt="a", stream=True, max_tokens=8000, extra_body={"ignore_eos": True}
        )
        next(iter(streamed))
        assert one.end(signal.SIGTERM) == 0, one.log()
        assert answer.result().status_code == 503
        assert answer.result().json()["error"]["code"] == "shutting_down"
        with pytest.raises(openai.APIError, match="shutting down"):
            list(streamed)


def test_a_second_signal_does_not_wait(start: Callable[..., Process]) -> None:
    one = start("--device", "cpu", "--shutdown-timeout", "600", "-c", "32768")
    with asking(one, max_tokens=8000) as answer:
        assert one.end(signal.SIGTERM, signal.SIGTERM) == 0, one.log()
        assert answer.result().status_code == 503


# A server whose chats never come out of their thread.
STUCK = """
import sys
from tilebeam.cli.main import main
from tilebeam.server import main as process
from tilebeam.server.openai import chat_completions as chat

def stuck(*_):
    print("stuck", flush=True)
    while True:
        pass

chat.prepared = stuck
process._LAST_WORDS = process._CLOSING = 1
sys.exit(main())
"""


def test_a_thread_that_never_ends_does_not_keep_the_process(start: Callable[..., Process]) -> None:
    one = start("--device", "cpu", "--shutdown-timeout", "0", program=("-c", STUCK))
    with ThreadPoolExecutor(1) as pool:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        answer = pool.submit(httpx.post, f"{one.url}/v1/chat/completions", json=body, timeout=60)
        until(lambda: "stuck" in one.log())
        assert one.end(signal.SIGTERM) == 1, one.log()
        answer.exception(60)  # 503, or cut off
    assert re.search(r"most recent call first.*in stuck", one.log(), re.DOTALL), one.log()


def test_a_dead_npu_is_said_and_replaced(start: Callable[..., Process]) -> None:
    one = start("--executor", "process", "-v", "-c", "16384")
    client = one.client()
    before = client.completions.create(model="tiny", prompt="a", seed=1, max_tokens=8).choices[0].text
    for round_ in (1, 2):
        (npu,) = children(one.process.pid)
        with asking(one, max_tokens=4000) as answer:
            os.kill(npu, signal.SIGKILL)
            assert answer.result().status_code == 503
            assert answer.result().json()["error"]["code"] in ("npu_failed", "model_failed")
            assert int(answer.result().headers["retry-after"]) >= 1

        def healthy(restarts: int = round_) -> bool:
            health = httpx.get(f"{one.url}/health", timeout=60)
            assert health.status_code in (200, 503)
            assert health.json()["status"] == ("ok" if health.status_code == 200 else "restarting")
            return bool(health.status_code == 200 and health.json()["restarts"] == restarts)

        until(healthy)
        after = one.client(max_retries=5).completions.create(model="tiny", prompt="a", seed=1, max_tokens=8)
        assert after.choices[0].text == before
    # Nobody has to ask for an answer for it to be noticed.
    os.kill(children(one.process.pid)[0], signal.SIGKILL)
    patient = one.client(max_retries=20)
    assert patient.completions.create(model="tiny", prompt="a", seed=1, max_tokens=8).choices[0].text == before
    assert one.end(signal.SIGTERM) == 0, one.log()


def test_a_dead_npu_of_several_models(start: Callable[..., Process], path: Path) -> None:
    """Both models had been loaded onto it: each is loaded again when it is asked for."""
    one = start("--executor", "process", "-m", f"second={path}")
    assert "models: tiny, second; each is loaded when it is asked for" in one.log()
    patient = one.client(max_retries=20)

    def texts() -> list[str]:
        asked = [patient.completions.create(model=m, prompt="a", seed=1, max_tokens=8) for m in ("tiny", "second")]
        return [answer.choices[0].text for answer in asked]

    before = texts()
    os.kill(children(one.process.pid)[0], signal.SIGKILL)
    assert texts() == before
    assert httpx.get(f"{one.url}/health", timeout=60).json()["restarts"] == 2
    assert one.end(signal.SIGTERM) == 0, one.log()


def test_options_reach_the_server(start: Callable[..., Process], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\n\n two \n")
    template = "{% for m in messages %}{{ m.content }}{% endfor %} {{ tone }}"
    one = start(
        *("--device", "cpu", "--alias", "first, second", "--api-key", "three", "--api-key-file", str(keys), "-n", "3"),
        *("--temp", "0", "--chat-template", template, "--chat-template-kwargs", '{"tone": "is"}'),
        *("--max-samples", "2", "--max-body", "1000"),
        TILEBEAM_API_KEY="four",
    )
    first_turn: Any = [{"role": "user", "content": "the question is how many"}]
    cached = [
        one.client(api_key="one").chat.completions.create(model="first", messages=first_turn).usage for _ in range(2)
    ]
    assert [u.prompt_tokens_details.cached_tokens for u in cached] == [0, cached[0].prompt_tokens - 1]
    for key in ("one", "two", "three", "four"):
        assert [m.id for m in one.client(api_key=key).models.list().data] == ["first", "second"]
    client = one.client(api_key="one")
    for own, tone in (({}, "is"), ({"chat_template_kwargs": {"tone": "was"}}, "was")):
        made = client.chat.completions.create(
            model="first", messages=first_turn, max_tokens=12, extra_body={"ignore_eos": True} | own
        )
        same = client.completions.create(
            model="first", prompt=f"the question is how many {tone}", max_tokens=12, extra_body={"ignore_eos": True}
        )
        assert made.usage.prompt_tokens == same.usage.prompt_tokens
        assert made.choices[0].message.content == same.choices[0].text
    with pytest.raises(openai.AuthenticationError):
        one.client(api_key="five").models.list()
    messages: Any = [{"role": "user", "content": "how many"}]
    first = client.chat.completions.create(model="second", messages=messages, extra_body={"ignore_eos": True})
    assert first.usage.completion_tokens == 3
    again = client.chat.completions.create(model="second", messages=messages, extra_body={"ignore_eos": True})
    assert again.choices[0].message.content == first.choices[0].message.content  # --temp 0 is greedy
    with pytest.raises(openai.BadRequestError, match="at most 2"):
        client.chat.completions.create(model="first", messages=messages, n=3)
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model="first", prompt="a" * 1000)
    assert caught.value.status_code == 413
    assert "four" not in one.log()


def test_every_line_of_the_log_is_an_object(start: Callable[..., Process], path: Path) -> None:
    one = start("--device", "cpu", "-m", f"second={path}", "--log-format", "json")
    for model in ("tiny", "second"):
        one.client().completions.create(model=model, prompt="a", max_tokens=2)
    httpx.get(f"{one.url}/health", timeout=60)
    assert one.end(signal.SIGTERM) == 0, one.log()
    lines = [json.loads(line) for line in one.log().splitlines()]
    told = [(line["message"], line.get("model", line.get("models"))) for line in lines]
    assert told[:2] == [("listening", ["tiny", "second"]), ("loading", "tiny")]
    assert [event for event in told if event[1] == "second"] == [
        ("loading", "second"),
        ("loaded", "second"),
        ("request", "second"),
    ]
    assert [line["message"] for line in lines[-2:]] == ["stopping", "stopped"]
    assert all(line["seconds"] >= 0 for line in lines if line["message"] in ("loaded", "request"))


def failing(*options: str) -> str:
    done = CliRunner().invoke(cli.app, ["serve", *options])
    assert done.exit_code == 1, done
    return " ".join(done.stderr.split())


def test_what_cannot_be_served_is_one_sentence(path: Path, tmp_path: Path) -> None:
    assert "does not exist" in failing("-m", str(tmp_path / "none.gguf"), "--port", "0")
    assert "Cannot listen on 192.0.2.1" in failing("-m", str(path), "--host", "192.0.2.1", "--port", "0")
    assert "'nosuch'" in (said := failing("-m", str(path), "--port", "0", "--chat-template", "nosuch"))
    assert "chatml, " in said
    for variables in ("{", "[1]", "1"):
        assert "must be a JSON object" in failing("-m", str(path), "--port", "0", "--chat-template-kwargs", variables)
    taken = ("-m", str(path), "--port", "0", "--chat-template", "chatml", "--chat-template-kwargs", '{"a": 1}')
    assert "'chatml' has no variables" in failing(*taken)
    assert "--devices: for Tilebeam only" in failing("-m", str(path), "--device", "cpu", "--devices", "2")
    assert "use --prm or --orm" in failing("-m", str(path), "--reward-tag", "x")
    (tmp_path / "keys").write_text("\n")
    several = ("-m", str(path), "--port", "0", "-m")
    assert "Two models are called 'tiny'" in failing(*several, str(path))
    assert "--alias ' ,' is no name" in failing("-m", str(path), "--alias", " ,")
    assert "--alias names one model" in failing(*several, f"b={path}", "--alias", "c")
    assert "--draft are made for one model" in failing(*several, f"b={path}", "--draft", str(path))
    assert f"{tmp_path / 'keys'} cannot be served" in failing(*several, f"b={tmp_path / 'keys'}")
    assert "holds no API key" in failing("-m", str(path), "--api-key-file", str(tmp_path / "keys"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "Try another --port" in failing("-m", str(path), "--port", str(taken.getsockname()[1]))


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "find_spec", lambda name: None if name == "uvicorn" else object())
    with pytest.raises(TilebeamError, match=r"missing: uvicorn\. Install them with: pip install 'fastapi"):
        server.check_packages()


def test_an_empty_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEBEAM_API_KEY", "")
    with pytest.raises(TilebeamError, match="is empty"):
        serve_cli.AccessOptions().settings()
