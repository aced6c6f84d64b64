"""Grammars of clients: those that can be read in too many ways end their own request and nobody else's."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from grammars_kit import HOSTILE_AT_ONCE, HOSTILE_SOON
from server_kit import LONG, PROMPT, Running, idle, until
from tilebeam import LM


@pytest.mark.parametrize("grammar", [*HOSTILE_AT_ONCE.values(), *HOSTILE_SOON.values()])
def test_others_go_on_while_a_grammar_explodes(server: Running, client: Any, lm: LM, grammar: str) -> None:
    vocab = lm.engine.vocab
    ends = {str(t): -100 for t in range(vocab.size) if vocab.is_end(t)}  # a text that ends soon meets no explosion
    ask: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 500, "logit_bias": ends}
    ask["extra_body"] = {"grammar": grammar}
    with client.completions.create(**LONG, stream=True) as other:
        next(iter(other))
        with pytest.raises(openai.BadRequestError, match="can be read in too many ways") as caught:
            client.completions.create(**ask)
        assert caught.value.code == "grammar_too_complex"
        with pytest.raises(openai.APIError, match="can be read in too many ways"):
            list(client.completions.create(**ask, stream=True))
        assert next(iter(other)).choices
    until(lambda: idle(server))
