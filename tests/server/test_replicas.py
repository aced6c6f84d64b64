"""`tilebeam serve --ray`: two replicas of a random model on a local Ray.

`make test-replicas` installs what it needs and runs it; elsewhere it is skipped where Ray Serve is not installed. Ray
and two replicas take half a minute of two cores to start.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray_kit
from tilebeam.cli import main as cli
from typer.testing import CliRunner

pytest.importorskip(
    "ray.serve", reason="Ray Serve is not installed (pip install tilebeam[replicas])", exc_type=ImportError
)

from server_kit import until

from bench.lib.synth import preset, write_model

TEXT = "/v1/completions"
SYSTEM = "answer the question with a number and nothing else. " * 20  # a thousand characters
NAME = "x-tilebeam-replica"


class Fleet:
    """`tilebeam serve --ray` in a process of its own."""

    def __init__(self, url: str, process: subprocess.Popen[bytes]) -> None:
        self.url = url
        self.process = process

    def post(self, body: dict[str, Any], **options: Any) -> Any:
        return httpx.post(f"{self.url}{TEXT}", json=body, timeout=120, **options)

    @contextmanager
    def stream(self, body: dict[str, Any]) -> Iterator[Any]:
        with httpx.stream("POST", f"{self.url}{TEXT}", json=body | {"stream": True}, timeout=120) as answer:
            assert answer.status_code == 200, answer.read()
            yield answer

    def replicas(self) -> set[str]:
        """Names of those that answer."""
        return set(httpx.get(f"{self.url}/health", timeout=60).json()["replicas"])

    def requests(self) -> int:
        """Of all replicas together, those that are not done."""
        told = httpx.get(f"{self.url}/health", timeout=60).json()["replicas"]
        return sum(body["requests"] for body in told.values())


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def command(path: Path, address: str, port: int, *options: str) -> list[str]:
    model = ["-m", str(path), "-c", "2048", "-np", "4", "-t", "1", "--device", "cpu", "--no-speculation"]
    return [sys.executable, "-m", "tilebeam", "serve", *model, "--port", str(port), "--ray", address, *options]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, env=ray_kit.environment(), timeout=200)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("replicas") / "tiny.gguf", preset("tiny", type="q8_0"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with ray_kit.cluster() as address:
        yield address


@pytest.fixture(scope="module")
def fleet(cluster: str, path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    log = tmp_path_factory.mktemp("fleet") / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command(path, cluster, free_port(), "--replicas", "2", "--shutdown-timeout", "1"),
            stdout=file,
            stderr=file,
            env=ray_kit.environment(),
            restore_signals=True,
        )
    try:
        until(lambda: "API: " in log.read_text() or process.poll() is not None)
        found = re.search(r"API: (http://\S+)/v1", log.read_text())
        assert found, log.read_text()
        yield Fleet(found[1], process)
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(120)
    assert code == 0, log.read_text()
    assert "Traceback" not in log.read_text()


def test_a_model_that_cannot_be_loaded_is_said(cluster: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF and no more")
    done = run(command(tmp_path / "m.gguf", cluster, free_port()))
    assert done.returncode == 1
    assert "cannot be loaded" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_prompts_that_begin_alike_go_to_one_replica(fleet: Fleet) -> None:
    cached, names = [], []
    for end in ("one", "two", "three", "four"):
        answer = fleet.post({"prompt": SYSTEM + end, "max_tokens": 2})
        assert answer.status_code == 200, answer.text
        names.append(answer.headers[NAME])
        cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert len(set(names)) == 1
    assert cached[0] == 0
    assert all(count > 100 for count in cached[1:]), cached


def test_a_client_that_leaves_ends_its_request(fleet: Fleet) -> None:
    with fleet.stream({"prompt": "how many", "max_tokens": 1500, "ignore_eos": True, "n": 4}) as answer:
        next(answer.iter_lines())
    until(lambda: fleet.requests() == 0)


def test_a_replica_that_dies_costs_its_own_requests_an_error_and_comes_back(fleet: Fleet) -> None:
    before = fleet.replicas()
    long = {"max_tokens": 1500, "ignore_eos": True}
    told: dict[str, list[str]] = {}
    began = threading.Barrier(4)

    def stream(i: int) -> None:
        with fleet.stream(long | {"prompt": f"{i} how many"}) as answer:
            lines = answer.iter_lines()
            next(lines)
            began.wait(120)
            told[f"{answer.headers[NAME]} {i}"] = [line for line in lines if line]

    def whole(i: int) -> Any:
        began.wait(120)
        return fleet.post(long | {"prompt": f"{i} how many"})

    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(stream, i) for i in range(2)]
        answers = [pool.submit(whole, i) for i in range(2, 4)]
        until(lambda: fleet.requests() == 4)
        os.kill(ray_kit.processes("ray::ServeReplica:tilebeam:Replica")[0], signal.SIGKILL)
        other = fleet.post({"prompt": "where", "max_tokens": 1})
        for done in streams:
            done.result()
        wholes = [answer.result() for answer in answers]

    assert other.status_code == 200, other.text
    ends = {
        name: json.loads(lines[-1].removeprefix("data: ")) if "DONE" not in lines[-1] else None
        for name, lines in told.items()
    }
    [lost] = [name for name, end in ends.items() if end is not None]
    assert ends[lost]["error"]["code"] == "replica_lost"
    good, bad = sorted(wholes, key=lambda answer: answer.status_code)
    assert (good.status_code, bad.status_code, bad.json()["error"]["code"]) == (200, 503, "replica_lost")
    assert good.json()["usage"]["completion_tokens"] == 1500
    assert good.headers[NAME] == other.headers[NAME] != lost.split()[0]
    until(lambda: len(fleet.replicas()) == 2)
    assert len(fleet.replicas() & before) == 1
    names = {fleet.post({"prompt": f"{i} {SYSTEM}?", "max_tokens": 1}).headers[NAME] for i in range(4)}
    assert names == fleet.replicas()


def test_a_replica_that_hangs_does_not_take_the_others_down(fleet: Fleet) -> None:
    before = fleet.replicas()
    hung = ray_kit.processes("ray::ServeReplica:tilebeam:Replica")[0]
    os.kill(hung, signal.SIGSTOP)
    try:
        answer = httpx.get(f"{fleet.url}/health", timeout=60)
        assert answer.status_code == 200, answer.text
        assert len(set(answer.json()["replicas"]) & before) == 1
    finally:
        os.kill(hung, signal.SIGCONT)
    until(lambda: len(fleet.replicas()) == 2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--replicas", "3"), "has 2 CPUs"),
        (("--replicas", "1"), "already"),
    ],
)
def test_what_cannot_be_served_is_said(
    fleet: Fleet, cluster: str, path: Path, options: tuple[str, ...], said: str
) -> None:
    done = run(command(path, cluster, free_port(), *options))
    assert done.returncode == 1
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert len(fleet.replicas()) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--ray", "auto", "--port", "0"), "cannot choose a port"),
        (("--replicas", "2"), "give its address with --ray"),
        (("--ray", "auto", "-v"), "leave them out"),
    ],
)
def test_options_that_do_not_go_together(path: Path, options: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(cli.app, ["serve", "-m", str(path), *options])
    assert done.exit_code == 1
    assert said in " ".join(done.stderr.split())


def test_without_a_cluster_it_says_so(path: Path) -> None:
    done = run(command(path, "127.0.0.1:1", 8080))
    assert done.returncode == 1
    assert "ray start --head" in " ".join(done.stderr.split())


def test_on_a_signal_running_requests_end(fleet: Fleet) -> None:
    """The last test: it ends the server."""
    fleet.process.send_signal(signal.SIGTERM)
    assert fleet.process.wait(120) == 0
    assert not ray_kit.processes("ray::ServeReplica")
