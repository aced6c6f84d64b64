"""bench/peers.py asks every engine for the same work; one that fails is named, and the others are measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import peers
from bench.lib import engines, rounds, synth
from bench.lib.engines import Work

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ["--quick", "-t", "1", "-r", "1", "-npl", "1,2", "-p", "4", "--shared", "6", "-n", "3", "--json"]
# What llama-batched-bench prints; here prompts take 2 s and decoding 4 s.
TABLE = "| PP | TG | B | N_KV | T_PP | S_PP | T_TG | S_TG | T | S |\n|  4 | 2 | 1 | 6 | 2.0 | 1 | 4.0 | 1 | 6.0 | 1 |"


# Stands in for llama-cpp-python's batched server: it answers as many tokens as it is asked for, unless control tokens
# may end a text.
BATCHED = """\
import http.server, json, sys, time

with open(sys.argv[sys.argv.index("-C") + 1]) as file:
    config = json.load(file)
assert config["model"]["n_seq_max"] == 2 and config["model"]["threads"] == 1

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass
    def answer(self, status, body):
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
    def do_GET(self):
        self.answer(200 if self.path == "/healthz" else 404, {})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        time.sleep(0.1 * asked["max_tokens"])  # more tokens take longer, whatever else runs
        long_enough = set(asked["logit_bias"].values()) == {-100}
        self.answer(200, {"usage": {"completion_tokens": asked["max_tokens"] if long_enough else 0}})

http.server.ThreadingHTTPServer(("127.0.0.1", config["server"]["port"]), Handler).serve_forever()
"""


def program(path: Path, text: str) -> Path:
    """Stands in for another engine's."""
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth.write_model(tmp_path_factory.mktemp("peers") / "tiny.gguf", synth.preset("tiny", arch="qwen2"))


def run(model: Path, *options: str | Path) -> tuple[dict[str, Any], str]:
    """The bench's object, and what it said besides."""
    command = [sys.executable, "-m", "bench.peers", "-m", str(model), *OPTIONS, *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    # But for its progress, and what it says of a machine that runs other tests.
    said = [line for line in done.stderr.splitlines(True) if not line.startswith(("peers ", "Other programs "))]
    return found, "".join(said)


def test_all_engines_get_the_same_work(model: Path, tmp_path: Path) -> None:
    said = tmp_path / "asked.jsonl"
    ik = program(tmp_path / "ik", f"print('''{TABLE}''')\n")
    # A server of another kind that takes llama-server's options: Tilebeam's own, on the stock backend.
    server = program(
        tmp_path / "server",
        "import os, sys\n"
        "value = lambda name: sys.argv[sys.argv.index(name) + 1]\n"
        "mine = [part for name in ('-m', '-c', '-np', '-t', '--port') for part in (name, value(name))]\n"
        f"os.execv({sys.executable!r}, [{sys.executable!r}, '-m', 'tilebeam', 'serve', '--device', 'cpu', *mine])\n",
    )
    # What answers as lib/openvino_worker.py does, of which only the model's loading needs OpenVINO.
    worker = program(
        tmp_path / "python",
        "import json, sys\n"
        "print('a line of its log')\n"
        "print(json.dumps({'version': '1'}), flush=True)\n"
        "for line in sys.stdin:\n"
        f"    open({str(said)!r}, 'a').write(line)\n"
        "    asked = json.loads(line)\n"
        "    count = asked['samples'] * len(asked['prompts']) * asked['max_tokens']\n"
        "    print(json.dumps({'seconds': float(asked['max_tokens']), 'tokens': count}), flush=True)\n",
    )
    batched = tmp_path / "server.py"
    batched.write_text(BATCHED)
    others = ["--llama-server", server, "--llama-cpp-server", batched]
    report, errors = run(model, "--ik-llama", ik, "--openvino", worker, *others)
    assert not errors
    rows = {row["name"]: row for row in report["rows"]}
    cases = ["1 x (4 tokens)", "2 x (4 tokens)", "1 x (6 tokens)", "2 x (6 tokens, shared)"]
    pairs = ["Tilebeam to stock", "Tilebeam to ik_llama.cpp", "Tilebeam to OpenVINO GenAI"]
    pairs += ["tilebeam serve to llama-server", "tilebeam serve to llama-cpp-python's server"]
    assert set(rows) == {f"tiny, {c}, 1 thread, {p}: {w}" for c in cases for p in peers.PHASES for w in pairs}
    read, decode = (rows[f"tiny, 2 x (4 tokens), 1 thread, {p}: Tilebeam to OpenVINO GenAI"] for p in peers.PHASES)
    assert (read["baseline"], decode["baseline"]) == (8 / 1.0, 2 * 2 / (3.0 - 1.0))
    read, decode = (
        rows[f"tiny, 2 x (6 tokens, shared), 1 thread, {p}: Tilebeam to ik_llama.cpp"] for p in peers.PHASES
    )
    assert (read["baseline"], decode["baseline"]) == (6 / 2.0, 2 * 2 / 4.0)
    asked = [json.loads(line) for line in said.read_text().splitlines()]
    shapes = [(len(a["prompts"]), len(a["prompts"][0]), a["samples"], a["max_tokens"]) for a in asked[2:]]
    assert shapes[:4] == [(1, 4, 1, 1), (1, 4, 1, 3), (2, 4, 1, 1), (2, 4, 1, 3)]
    assert (1, 6, 2, 3) in shapes
    assert len({json.dumps(a["prompts"]) for a in asked}) == len(asked)  # nothing that a cache could know


def test_engines_that_fail_are_named_and_left_out(model: Path, tmp_path: Path) -> None:
    ik = program(tmp_path / "ik", "raise SystemExit('no such option')\n")
    server = program(tmp_path / "server", "raise SystemExit('bad model')\n")
    worker = program(tmp_path / "python", 'print(\'{"error": "unknown type"}\')\n')
    report, errors = run(model, "--ik-llama", ik, "--llama-server", server, "--openvino", worker)
    assert {row["peer"] for row in report["rows"]} == {"stock"}
    assert len(report["rows"]) == 4 * 2
    told = errors.splitlines()
    assert [line.split(": ")[0] for line in sorted(told)] == [
        "tiny.gguf, OpenVINO GenAI",
        "tiny.gguf, ik_llama.cpp",
        "tiny.gguf, llama-server",
    ]
    assert "unknown type" in errors
    assert "no such option" in errors
    assert "bad model" in errors


def test_noise_that_turns_two_runs_round_is_measured_on() -> None:
    took = iter([0.3, 0.1, 0.1, 0.4])  # the first time one token takes longer than all of them
    assert engines._in_two(lambda *_: next(took), Work(1, 4, 3), 0) == pytest.approx((0.2, 0.05))
    assert next(took, None) is None
    assert engines._in_two(lambda *_: 0.5, Work(1, 4, 3), 0) == (0.5, 0.0)  # and it gives up


def test_a_round_whose_difference_is_noise_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_LONG", 1e9)
    work = Work(2, 10, 6)
    group = peers.Group(Path("a.gguf"), 2, (work,))
    log = rounds.Rounds(None, {})
    figures = {"Tilebeam, read": 2.0, "Tilebeam, decode": 1.0, "stock, read": 4.0}
    for decode in ({"stock, decode": 5.0}, {}, {"stock, decode": 3.0}):
        assert log.begin(group.label(work))
        log.end(**figures, **decode)
    read, decoded = peers.rows_of([group], log, peers.Peers())
    assert (read["rounds"], read["ratio"], read["value"]) == (3, 2.0, 10.0)
    assert (decoded["rounds"], decoded["ratio"], decoded["value"], decoded["baseline"]) == (2, 4.0, 10.0, 2.5)
