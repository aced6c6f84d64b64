"""A server of a deterministic model, and the command line: what a seed gives is the same alone and in a crowd."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tilebeam
from server_kit import TEXT, running
from tilebeam.cli.main import app
from typer.testing import CliRunner

MODEL = Path(__file__).resolve().parents[2] / "bench" / "tiny" / "models" / "0.5m-q4_0.gguf"
PROMPT = "12+34="


def test_a_seed_gives_the_same_answer_in_any_company() -> None:
    with tilebeam.load(MODEL, n_ctx=1024, n_seq_max=16, threads=2, deterministic=True) as lm, running(lm) as server:

        def answers(prompt: str = PROMPT, **options: Any) -> list[Any]:
            body = {"prompt": prompt, "max_tokens": 12, "temperature": 0.9, "logprobs": 2, "ignore_eos": True}
            answer = server.post(TEXT, body | options)
            assert answer.status_code == 200, answer.text
            return [(c["text"], c["logprobs"]) for c in answer.json()["choices"]]

        alone = [answers(seed=seed)[0] for seed in range(1, 5)]
        assert len({text for text, _ in alone}) > 1
        assert answers(seed=1, n=4) == alone
        assert answers(seed=1, n=16)[:4] == alone
        with ThreadPoolExecutor(12) as pool:
            others = [pool.submit(answers, "9+" * i, seed=i, n=1 + i % 3, max_tokens=3 * i) for i in range(1, 9)]
            crowd = [pool.submit(answers, seed=1 + i % 4) for i in range(8)]
            assert [answer.result()[0] for answer in crowd] == alone * 2
            assert all(answer.result() for answer in others)


def test_the_command_line_gives_it_too() -> None:
    def told(*options: object) -> list[Any]:
        command = ["generate", "-m", MODEL, "-p", PROMPT, "-n", 12, "--deterministic", "-t", 2, "--json", *options]
        ran = CliRunner().invoke(app, [str(word) for word in command])
        assert ran.exit_code == 0, ran.output
        return [(o["text"], o["token_ids"]) for o in json.loads(ran.stdout)["outputs"]]

    alone = [told("--seed", seed)[0] for seed in (3, 4)]
    assert told("--seed", 3, "-N", 4)[:2] == told("--seed", 3, "-N", 16)[:2] == alone


def test_it_is_for_tilebeam_only() -> None:
    command = ["generate", "-m", str(MODEL), "-p", PROMPT, "--deterministic", "--device", "cpu"]
    ran = CliRunner().invoke(app, command)
    assert ran.exit_code == 1
    assert "--deterministic: for Tilebeam only" in ran.stderr
