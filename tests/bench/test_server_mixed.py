"""bench/server_mixed.py: a short storm in which every answer is right, and checks that tell an answer that is not."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.lib.mixed_requests import Offer, Questions

pytest.importorskip("fastapi", reason="the server's packages are not installed (extra server)")

ROOT = Path(__file__).resolve().parents[2]


def test_a_storm_with_every_answer_checked() -> None:
    """All kinds of requests and few cells; failures would end the program with status 1."""
    options = ["--storm", "--quick", "-t", "1", "--minutes", "0.1", "-c", "1024", "--json"]
    command = [sys.executable, "-m", "bench.server_mixed", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    storm, _ = json.loads(done.stdout)["rows"]
    assert storm["requests"] == storm["value"] == storm["baseline"] > 0
    assert storm["failed"] == 0


class _Answers:
    """Stands for a server: numbers that depend on what is asked."""

    def __call__(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/embeddings":
            return {"data": [{"embedding": self._unit(text)} for text in body["input"]]}
        if path == "/v1/rerank":
            scores = [float(self._unit(text)[0]) for text in body["documents"]]
            return {"results": [{"index": i, "relevance_score": s} for i, s in enumerate(scores)]}
        count = body["max_tokens"]
        rng = np.random.default_rng([*body["prompt"], *(one["id"] + 1 for one in body.get("lora", []))])
        told = {"tokens": ["x"] * count, "token_logprobs": (-5 * rng.random(count)).tolist()}
        return {"choices": [{"text": "x", "logprobs": told}], "usage": {"completion_tokens": body["max_tokens"]}}

    def _unit(self, text: str) -> list[float]:
        vector = np.random.default_rng(list(text.encode())).standard_normal(32)
        return (vector / np.linalg.norm(vector)).tolist()  # type: ignore[no-any-return]


def test_right_answers_pass_and_those_of_another_request_do_not() -> None:
    post = _Answers()
    kinds = Questions(post, Offer(1000, adapters=2, ranks=True), 160).kinds()
    for name in ("plain", "one token", "forced", "embeddings", "rerank"):
        rng, noticed = np.random.default_rng(1), 0
        asked = [kinds[name](rng) for _ in range(20)]
        answers = [post(one.path, one.body) for one in asked]
        assert [one.wrong(answer) for one, answer in zip(asked, answers, strict=True)] == [None] * 20
        for one, other in zip(asked, [*answers[1:], answers[0]], strict=True):
            try:
                noticed += one.wrong(copy.deepcopy(other)) is not None
            except (KeyError, IndexError):  # another number of texts: the program counts it as a failure
                noticed += 1
        # Equal by chance: the same pool question twice, or answers of one length.
        assert noticed >= (0 if name == "one token" else 12), name


def test_a_constant_of_another_request_is_told() -> None:
    asked = [Questions(_Answers(), Offer(1000), 160).own_constant(np.random.default_rng(i)) for i in (1, 2)]
    texts = []
    for one in asked:
        own, rest = one.body["structured_outputs"]["regex"].split("[a-z]{")
        texts.append(own + "b" * int(rest.split("}")[0]) + own)
    for one, text in zip(asked, texts, strict=True):
        assert one.wrong({"choices": [{"text": text}] * one.body["n"]}) is None
    wrong = asked[0].wrong({"choices": [{"text": texts[1]}] * asked[0].body["n"]})
    assert wrong is not None
    assert texts[1] in wrong
