"""LoRA adapters by request: llama-server's `lora`, and an adapter's name as the model."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tilebeam
from engine_kit import EXACT
from server_kit import ANSWER, HI, PATIENCE, PROMPT, TEXT, Running, running
from tilebeam import LM

from bench.lib.adapters import write_adapter

BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
# What requests say, and the adapters that a model is loaded with for the same.
ASKED: list[tuple[dict[str, Any], list[tuple[int, float]]]] = [
    ({}, [(0, 0.5)]),
    ({"lora": []}, []),
    ({"lora": [{"id": 1, "scale": 1.0}]}, [(1, 1.0)]),
    ({"lora": [{"id": 0, "scale": -1.0}, {"id": 1, "scale": 0.25}]}, [(0, -1.0), (1, 0.25)]),
    ({"model": "first"}, [(0, 0.5)]),
    ({"model": "second"}, [(1, 1.0)]),
]


@pytest.fixture(scope="module")
def adapters(path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / f"{name}.gguf", path, seed=i) for i, name in enumerate(("first", "second", "tiny"))]


def load(path: Path, lora: Any) -> LM:
    return tilebeam.load(path, "cpu", n_ctx=1024, n_seq_max=4, threads=1, lookup=False, lora=lora, **EXACT)


@pytest.fixture(scope="module")
def server(path: Path, adapters: list[Path]) -> Iterator[Running]:
    scaled = list(zip(adapters, (0.5, 0.0, 0.0), strict=True))
    with load(path, scaled) as lm, lm.keep_prefixes(), running(lm, max_samples=64) as it:
        yield it


def drawn(server: Running, **more: Any) -> str:
    answer = server.post(TEXT, BODY | more)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


@pytest.fixture(scope="module")
def expected(path: Path, adapters: list[Path]) -> list[str]:
    """What servers say that have just these adapters."""
    found = []
    for _, chosen in ASKED:
        with load(path, [(adapters[i], scale) for i, scale in chosen]) as lm, running(lm) as alone:
            found.append(drawn(alone))
    assert len(set(found)) == 4
    return found


def test_each_request_has_its_adapters(server: Running, expected: list[str]) -> None:
    for _ in range(2):
        assert [drawn(server, **asked) for asked, _ in ASKED] == expected
    streamed = server.client().completions.create(
        model="second", stream=True, prompt=PROMPT, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    chunks = list(streamed)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected[5]
    assert chunks[0].model == "second"


def test_many_clients_with_different_adapters(server: Running, expected: list[str]) -> None:
    with ThreadPoolExecutor(12) as pool:
        asked = [(i, pool.submit(drawn, server, **ASKED[i][0])) for _ in range(4) for i in range(len(ASKED))]
        assert all(future.result(PATIENCE) == expected[i] for i, future in asked)


def test_an_adapter_is_a_model(server: Running) -> None:
    client = server.client()
    listed = {m.id: getattr(m, "parent", None) for m in client.models.list().data}
    # The third adapter's file is called as the model is: the name means the model.
    adapters = {"first": "tiny", "second": "tiny", "tiny-2": "tiny"}
    assert listed == {"tiny": None, "other": None, "model": None} | adapters
    assert client.chat.completions.create(model="second", messages=HI, max_tokens=2).model == "second"
    assert server.post(ANSWER, {"model": "second", "input": "a", "max_output_tokens": 2}).json()["model"] == "second"
    assert drawn(server, model="tiny") == drawn(server)


def test_a_search_with_adapters(server: Running, expected: list[str]) -> None:
    search = {"method": "vote", "budget": 2, "extract": "text"}
    assert drawn(server, lora=[{"id": 1, "scale": 1.0}], search=search) == expected[2]


@pytest.mark.parametrize(
    ("lora", "code"),
    [
        ([{"id": 3, "scale": 1.0}], "no_such_adapter"),
        ([{"id": -1, "scale": 1.0}], "invalid_value"),
        ([{"id": 0, "scale": 1e9}], "invalid_value"),
        ([{"id": 0}], "missing_required_parameter"),
        ([{"id": 0, "scale": 1.0}] * 2000, "invalid_value"),
        ("first", "invalid_value"),
    ],
)
def test_what_is_no_adapter(server: Running, lora: Any, code: str) -> None:
    answer = server.post(TEXT, BODY | {"lora": lora})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
