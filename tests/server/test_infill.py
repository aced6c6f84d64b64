"""Texts between two others: the suffix of completions, and /infill."""

from __future__ import annotations

from typing import Any

import pytest
from tilebeam import LM, SamplingParams

pytest.importorskip("openai", reason="the openai client is not installed (extra test)")
pytest.importorskip("httpx", reason="httpx is not installed (extra test)")
pytest.importorskip("fastapi", reason="the server's packages are not installed (extra server)")

from server_kit import Running
from tilebeam.server.other.infill import InfillRequest

PARTS = (11, 12, 13)


@pytest.fixture
def fills(lm: LM, monkeypatch: pytest.MonkeyPatch) -> LM:
    """The model, as if its file named tokens for the parts."""
    monkeypatch.setattr(lm.engine.vocab, "fim", PARTS)
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


def test_editors_are_answered(fills: LM, server: Running) -> None:
    """The request that plug-ins for editors send."""
    chunks = [{"text": "def other():\n    return 1\n", "filename": "other.py", "time": 12.5}]
    body = {
        "id_slot": 0,
        "input_prefix": "the number\n",
        "input_suffix": " of\n",
        "input_extra": chunks,
        "seed": 5,
        "prompt": " one",
        "n_predict": 9,
        "stop": [],
        "n_indent": 0,
        "top_k": 40,
        "top_p": 0.9,
        "stream": False,
        "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": True,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 100000,
        "response_fields": ["content", "timings/prompt_n", "truncated"],
    }
    told = server.post("/infill", body).json()
    assert set(told) == {"content", "truncated"}
    ids = fills.infill_prompt("the number\n one", " of\n", extra=[(chunks[0]["filename"], chunks[0]["text"])])
    assert len(ids) > len(fills.infill_prompt("the number\n one", " of\n"))
    drawn = SamplingParams(seed=5, max_tokens=9, top_k=40, top_p=0.9, temperature=1)
    assert told["content"] == fills.generate([ids], drawn)[0].outputs[0].text
    warm = body | {"input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0, "samplers": []}
    assert server.post("/infill", warm | {"temperature": 0.0, "response_fields": [""]}).json() == {}
    assert server.post("/infill", body | {"samplers": ["infill", "top_k"]}).status_code == 400


def test_other_files_have_their_tokens(fills: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(text: str) -> list[int]:
        return fills.tokenize(text, add_special=False, parse_special=False)

    bos = [fills.bos] if fills.adds_bos else []
    gap = fills.infill_prompt("a", "b")[len(bos) :]
    files = [("x.py", "one"), ("y.py", "two")]
    assert fills.infill_prompt("a", "b", extra=files) == [*bos, *plain("one\n\n"), *plain("two\n\n"), *gap]
    monkeypatch.setattr(fills.engine.vocab, "fim_repository", 14)
    monkeypatch.setattr(fills.engine.vocab, "fim_file", 15)
    head, tail = [14, *plain("project\n")], [15, *plain("file\n")]
    both = [*head, 15, *plain("x.py\none"), 15, *plain("y.py\ntwo"), *tail]
    assert fills.infill_prompt("a", "b", extra=files) == [*bos, *both, *gap]
    room = fills.n_ctx - len(bos) - len(gap) - len(both) + 1  # too little for both
    last = [*head, 15, *plain("y.py\ntwo"), *tail]
    assert fills.infill_prompt("a", "b", extra=files, leave=room) == [*bos, *last, *gap]
    assert fills.infill_prompt("a", "b", extra=[("z", "the " * 3000)]) == [*bos, *gap]


def test_lines_that_are_indented_less_end_the_text() -> None:
    body = InfillRequest(input_prefix="", input_suffix="", n_indent=2)
    assert body.indented("x = 1\n  y\n z\n") == "x = 1\n  y\n "
    assert body.indented("x = 1\n  y\n\tq\n") == "x = 1\n  y\n\t"
    assert body.indented("x = 1") == "x = 1"
    assert body.indented("x = 1\n  y\n") == "x = 1\n  y\n"
    assert InfillRequest(input_prefix="", input_suffix="").indented("a\nb") == "a\nb"


def test_late_lines_are_not_written(fills: LM, server: Running) -> None:
    newline = fills.tokenize("\n", add_special=False)[-1]
    body = {"input_prefix": "the", "input_suffix": " of", "ignore_eos": True, "temperature": 0.0}
    body |= {"logit_bias": {str(newline): 100}, "n_predict": 400}
    told = server.post("/infill", body | {"t_max_predict_ms": 1}).json()
    assert told["stop_type"] == "limit"
    assert 0 < told["tokens_predicted"] < 400
    assert told["content"].endswith("\n")
    for limit in (0, -1, None):
        assert server.post("/infill", body | {"t_max_predict_ms": limit}).json()["tokens_predicted"] == 400
