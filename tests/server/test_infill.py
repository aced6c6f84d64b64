"""Texts between two others: the suffix of completions, and /infill."""

from __future__ import annotations

from typing import Any

import pytest
from tilebeam import LM, SamplingParams

pytest.importorskip("openai", reason="the openai client is not installed (extra test)")
pytest.importorskip("httpx", reason="httpx is not installed (extra test)")
pytest.importorskip("fastapi", reason="the server's packages are not installed (extra server)")

from server_kit import Running

PARTS = (11, 12, 13)


@pytest.fixture
def fills(lm: LM, monkeypatch: pytest.MonkeyPatch) -> LM:
    """The model, as if its file named tokens for the parts."""
    monkeypatch.setattr(lm._model.vocab, "fim", PARTS)
    return lm


def test_a_prompt_has_its_parts_in_order(fills: LM) -> None:
    def plain(text: str) -> list[int]:
        return fills.tokenize(text, add_special=False, parse_special=False)

    bos = [fills.bos] if fills.adds_bos else []
    wanted = [*bos, 11, *plain("the </s>"), 12, *plain("people"), 13]
    assert fills.infill_prompt("the </s>", "people") == wanted
    assert fills.eos not in wanted


def test_a_suffix_is_read(fills: LM, client: Any) -> None:
    ids = fills.infill_prompt("the number", " of the people")
    wanted = fills.generate([ids], SamplingParams(seed=5, max_tokens=9, n=2))[0]
    options: dict[str, Any] = {"model": "tiny", "suffix": " of the people", "seed": 5, "max_tokens": 9, "n": 2}
    given = fills.tokenize("the number", add_special=False, parse_special=False)
    for prompt in ("the number", given):
        got = client.completions.create(**options, prompt=prompt)
        assert [c.text for c in got.choices] == [s.text for s in wanted.outputs]
        assert got.usage.prompt_tokens == len(ids)
    pieces = client.completions.create(**options | {"n": 1}, prompt="the number", stream=True)
    assert "".join(c.choices[0].text for c in pieces) == wanted.outputs[0].text


def test_infill_answers_as_llama_server(fills: LM, server: Running) -> None:
    ids = fills.infill_prompt("the number one", " of the people")
    wanted = fills.generate([ids], SamplingParams(seed=5, max_tokens=9, ignore_eos=True))[0]
    body = {"input_prefix": "the number", "prompt": " one", "input_suffix": " of the people", "seed": 5}
    told = server.post("/infill", body | {"n_predict": 9, "ignore_eos": True}).json()
    assert told["content"] == wanted.outputs[0].text
    assert (told["stop"], told["stop_type"], told["tokens_predicted"]) == (True, "limit", 9)
    assert told["tokens_evaluated"] == len(ids)
    word = wanted.outputs[0].text[3:5]
    ended = server.post("/infill", body | {"n_predict": 9, "ignore_eos": True, "stop": [word]}).json()
    assert (ended["stop_type"], ended["stopping_word"]) == ("word", word)
    assert ended["content"] == told["content"][: told["content"].index(word)]
    assert told["stopping_word"] == ""
    whole = server.post("/infill", body | {"ignore_eos": True}).json()  # until the context is full
    assert whole["tokens_predicted"] == fills.n_ctx - len(ids)
