"""/tokenize, /detokenize, /apply-template and /props, and texts held to vLLM's forms."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from server_kit import PATIENCE, Running
from tilebeam import LM

TEXT = "the <s>number é"


def post(server: Running, path: str, body: Any) -> Any:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_tokens_of_a_text(server: Running, lm: LM) -> None:
    assert post(server, "/tokenize", {"content": TEXT})["tokens"] == lm.tokenize(TEXT, add_special=False)
    plain = post(server, "/tokenize", {"content": TEXT, "parse_special": False, "add_special": True})["tokens"]
    assert plain == lm.tokenize(TEXT, parse_special=False)
    mixed = post(server, "/tokenize", {"content": [lm.bos, "the ", 7, "number"]})["tokens"]
    assert mixed == [lm.bos, *lm.tokenize("the ", add_special=False), 7, *lm.tokenize("number", add_special=False)]


def test_tokens_with_their_pieces(server: Running, lm: LM) -> None:
    found = post(server, "/tokenize", {"content": TEXT, "with_pieces": True})["tokens"]
    assert [entry["id"] for entry in found] == lm.tokenize(TEXT, add_special=False)
    raw = [e["piece"].encode() if isinstance(e["piece"], str) else bytes(e["piece"]) for e in found]
    assert b"".join(raw).decode().strip() == TEXT
    assert any(isinstance(e["piece"], list) for e in found)  # bytes of a character that has no token
    assert b"<s>" in raw


def test_text_of_tokens(server: Running, lm: LM) -> None:
    ids = lm.tokenize(TEXT, add_special=False)
    assert post(server, "/detokenize", {"tokens": ids})["content"].strip() == TEXT
    assert post(server, "/detokenize", {"tokens": []})["content"] == ""


def test_prompt_of_a_chat(server: Running) -> None:
    messages = [{"role": "user", "content": "the number"}]
    prompt = "<|im_start|>user\nthe number<|im_end|>\n<|im_start|>assistant\n"
    assert post(server, "/apply-template", {"messages": messages, "max_tokens": 5}) == {"prompt": prompt}
    begun = [*messages, {"role": "assistant", "content": "is"}]
    assert post(server, "/apply-template", {"messages": begun, "continue_final_message": True}) == {
        "prompt": f"{prompt}is"
    }
    wrong = server.post("/apply-template", {"messages": []})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "messages")


def test_props(server: Running, lm: LM) -> None:
    told = httpx.get(f"{server.url}/props", timeout=PATIENCE).json()
    assert told["total_slots"] == lm.n_seq_max
    settings = told["default_generation_settings"]
    assert settings["n_ctx"] == lm.n_ctx
    assert (settings["params"]["temperature"], settings["params"]["n_predict"]) == (0.8, -1)
    assert told["chat_template"] == "chatml"
    assert (told["bos_token"], told["eos_token"]) == ("<s>", "</s>")
    assert told["model_alias"] == "tiny"


def test_while_the_model_is_loaded_again(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.service.host, "state", "restarting")
    answer = httpx.get(f"{server.url}/props", timeout=PATIENCE)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_restarting")
    assert int(answer.headers["retry-after"]) > 0
