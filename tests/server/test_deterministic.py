"""A deterministic model on the command line: what a seed gives is the same alone and among others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tilebeam.cli.main import app
from typer.testing import CliRunner

MODEL = Path(__file__).resolve().parents[2] / "bench" / "tiny" / "models" / "0.5m-q4_0.gguf"
PROMPT = "12+34="


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
