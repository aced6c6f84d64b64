"""A server of `tilebeam.server` in a thread of the test process, and what tests ask it."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import openai
from tilebeam import LM, RewardModel
from tilebeam.server.app import create_app
from tilebeam.server.main import Server, listen
from tilebeam.server.model_host import Entry, LoadedModel
from tilebeam.server.models import Models
from tilebeam.server.settings import Settings

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
ANSWER = "/v1/responses"
PROMPT = "the question is how many"
HI: Any = [{"role": "user", "content": "hi"}]
MESSAGES: Any = [{"role": "system", "content": "answer"}, {"role": "user", "content": "how many"}]
LONG: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 900, "extra_body": {"ignore_eos": True}}

PATIENCE = 180.0  # seconds for what takes a fraction of one on an idle machine


class Running:
    """A server that runs, and clients for it."""

    def __init__(self, port: int, models: Models) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.models = models
        self.service = models.services[0]

    @property
    def lm(self) -> LM:
        """The first model, which is loaded."""
        lm = self.service.host.newest
        assert lm is not None
        return lm

    def client(self, **changes: Any) -> openai.OpenAI:
        """OpenAI's own client; it does not try again by itself."""
        options: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE} | changes
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """A request that no client library would send."""
        return httpx.post(f"{self.url}{path}", json=body, timeout=PATIENCE, **options)

    def metrics(self) -> dict[str, float]:
        """All figures of /metrics by name and labels."""
        return parse_metrics(httpx.get(f"{self.url}/metrics", timeout=PATIENCE).text)

    def metric(self, name: str) -> float:
        """One of them."""
        return self.metrics()[name]


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus' text format."""
    return {m[1]: float(m[2]) for m in re.finditer(r"^(tilebeam_\S+) (\S+)$", text, re.MULTILINE)}


@contextmanager
def running(lm: LM, *, reward: RewardModel | None = None, **settings: Any) -> Iterator[Running]:
    """A server for a model that outlives it."""
    loaded = LoadedModel(lm, reward)
    entry = Entry(("tiny", "other", "model"), lm.n_seq_max, lambda: loaded, loaded)
    with serving([entry], rates_steps=reward is not None, **settings) as server:
        yield server


@contextmanager
def serving(entries: Sequence[Entry], *, rates_steps: bool = False, **settings: Any) -> Iterator[Running]:
    """A server for models that it loads."""
    chosen = Settings(**{"port": 0, "chat_template": "chatml"} | settings)
    models = Models(entries, chosen, rates_steps=rates_steps)
    listener = listen(chosen.host, chosen.port)
    server = Server(create_app(models))
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            asyncio.run(server.serve(sockets=[listener]))
            ended.append(None)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run, name="server")
    thread.start()
    try:
        until(lambda: server.started or bool(ended))
        yield Running(listener.getsockname()[1], models)
    finally:
        server.handle_exit(2, None)
        thread.join(PATIENCE)
        listener.close()
    assert ended == [None], ended


def until(true: Callable[[], bool]) -> None:
    """Wait for a condition that comes."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


def idle(server: Running) -> bool:
    """Whether nobody's samples or cells are left."""
    now = server.metrics()
    return now["tilebeam_samples_admitted"] == now["tilebeam_kv_cells_used"] == now["tilebeam_samples_running"] == 0


def texts(choices: Any) -> list[str]:
    """Texts of an answer, in the order of their indices."""
    return [c.text for c in sorted(choices, key=lambda c: c.index)]
