"""The examples of docs/server.md with other libraries for test-time scaling, as they stand there, where these are
installed: their extras are too heavy for the project's own."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from tilebeam import LM

pytest.importorskip("fastapi", reason="the server's packages are not installed (extra server)")
pytest.importorskip("openai", reason="the openai client is not installed (extra test)")

from server_kit import Running

DOC = Path(__file__).parents[2] / "docs/server.md"


def example(library: str, server: Running, limit: int = 16) -> dict[str, Any]:
    """Run a library's example against a server, with short texts; the names that it leaves."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    (code,) = re.findall(rf"```python\n(# {library}\n.*?)```", DOC.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    code = code.replace("http://localhost:8080", server.url).replace("256", str(limit))
    exec(compile(code, f"{DOC}: {library}", "exec"), names)
    return names


def test_its_hub_votes(server: Running, lm: LM) -> None:
    before = sum(size * count for size, count in lm.figures().batches.items())
    found = example("its_hub", server)["found"]
    assert len(found.responses) == 8
    assert found.usage.completion_tokens == 8 * 16
    assert sum(found.response_counts.values()) == 8
    assert sum(size * count for size, count in lm.figures().batches.items()) - before == 8 * 16


def test_its_hub_takes_steps(server: Running) -> None:
    """Its searches by steps continue the assistant's message, and keep the string that ends a step."""
    if importlib.util.find_spec("its_hub") is None:
        pytest.skip("its_hub is not installed")
    from its_hub import OpenAICompatibleLanguageModel, StepGeneration

    lm = OpenAICompatibleLanguageModel(f"{server.url}/v1", api_key="none", model_name="model", max_completion_tokens=12)
    steps = StepGeneration(max_steps=3, step_token=["e", " "], include_stop_str_in_output=True)
    first, stopped = steps.forward(lm, "how many", [])
    second, _ = steps.forward(lm, "how many", [first])
    assert (bool(first), bool(second), stopped) == (True, True, False)


def test_optillm_asks_for_all_candidates_at_once(server: Running) -> None:
    before = server.metrics()
    names = example("optillm", server)
    now = server.metrics()
    asked = 'tilebeam_requests_total{path="/v1/chat/completions",status="200"}'
    assert now[asked] - before.get(asked, 0) == 1 + 4  # four candidates in one request, and a rating of each
    assert names["tokens"] > 0
    assert isinstance(names["text"], str)
