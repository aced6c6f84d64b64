"""Budgets of thoughts in chats: by the templates of models that think, with functions and forms of answers, and in
searches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import tilebeam
from engine_kit import EXACT, equal_logits
from tilebeam import LM, BeamSearch, BestOfN, CompletionOutput, StepScorer

HI: Any = [{"role": "user", "content": "weather?"}]
TOOLS: Any = [{"type": "function", "function": {"name": "weather"}}]
PLAIN = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>a:"
OPENS = PLAIN + "<think>\n{% endif %}"  # as DeepSeek-R1's
KNOWS = PLAIN + "{% endif %}{# <think></think> #}"  # as Qwen3's: the model opens its thoughts
MESSAGE = "\nTime is up.\n"
BUDGET: dict[str, Any] = {"thinking_budget": 7, "budget_message": MESSAGE, "max_tokens": 60, "seed": 3, "top_k": 0}
FREE: dict[str, Any] = BUDGET | {"ignore_eos": True}
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LM]:
    """Draws depend on seeds alone."""
    path = equal_logits(tmp_path_factory.mktemp("models") / "equal.gguf", controls=("<think>", "</think>"))
    with tilebeam.load(path, "cpu", n_ctx=1024, n_seq_max=4, threads=1, lookup=False, **EXACT) as model:
        yield model


def told(answer: CompletionOutput) -> tuple[Any, ...]:
    return answer.token_ids, answer.text, answer.reasoning, answer.finish_reason


def test_thoughts_that_the_prompt_opened(lm: LM) -> None:
    free = lm.chat(HI, template=OPENS, **FREE | {"thinking_budget": None}).outputs[0]
    for budget in (0, 7, 60, 500):
        options = FREE | {"thinking_budget": budget, "n": 3}
        answers = lm.chat(HI, template=OPENS, **options).outputs
        texts, thoughts = [""] * 3, [""] * 3
        for delta in lm.stream_chat(HI, template=OPENS, **options):
            texts[delta.index] += delta.text
            thoughts[delta.index] += delta.reasoning
        assert (texts, thoughts) == ([a.text for a in answers], [a.reasoning or "" for a in answers])
        if budget >= 60:
            assert told(answers[0]) == told(free)
            continue
        assert all((a.reasoning or "").endswith(MESSAGE.strip()) for a in answers)
        assert all(a.text and MESSAGE not in a.text for a in answers)
        assert answers[0].token_ids[:budget] == free.token_ids[:budget]


def test_a_template_without_thoughts_has_no_use_for_a_budget(lm: LM) -> None:
    for template in ("chatml", PLAIN + "{% endif %}"):
        free, limited = (
            lm.chat(HI, template=template, **FREE | {"thinking_budget": budget}).outputs[0] for budget in (None, 3)
        )
        assert told(free) == told(limited)
        assert json.loads(lm.chat(HI, template=template, json_schema=SCHEMA, **BUDGET).text)["n"] in (1, 2)


@pytest.mark.parametrize("template", [OPENS, KNOWS])
def test_a_form_holds_behind_the_thoughts(lm: LM, template: str) -> None:
    answer = lm.chat(HI, template=template, json_schema=SCHEMA, **BUDGET).outputs[0]
    assert answer.reasoning is not None
    assert json.loads(answer.text)["n"] in (1, 2)
    assert answer.finish_reason == "stop"
    at_once = lm.chat(HI, template=template, json_schema=SCHEMA, **BUDGET | {"thinking_budget": 0}).outputs[0]
    assert json.loads(at_once.text)["n"] in (1, 2)
    assert at_once.reasoning == (MESSAGE.strip() if template is OPENS else None)
    calls: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}
    called = lm.chat(HI, template=template, **calls, **BUDGET | {"max_tokens": 300}).outputs[0]
    assert called.finish_reason == "tool_calls"
    assert called.reasoning
    assert called.tool_calls[0].name == "weather"
    without = lm.chat(HI, template=template, json_schema=SCHEMA, max_tokens=60).outputs[0]
    assert (without.reasoning, json.loads(without.text)["n"] in (1, 2)) == (None, True)


def test_a_message_that_is_continued(lm: LM) -> None:
    """Tokens of a thought that has begun count."""
    for template, lead in ((OPENS, ""), (KNOWS, "<think>")):
        begun = [*HI, {"role": "assistant", "content": f"{lead}the number is"}]
        continued = {"template": template, "continue_final_message": True}
        answer = lm.chat(begun, **continued, **FREE).outputs[0]
        had = len(lm.tokenize("the number is", add_special=False))
        assert lm.detokenize(answer.token_ids[7 - had :]).startswith(MESSAGE)
        done = [*HI, {"role": "assistant", "content": f"{lead}so</think>it is"}]
        assert MESSAGE not in lm.chat(done, **continued, **FREE).text


class _Length(StepScorer):
    def score_steps(self, prompts: Any, solutions: Any) -> list[list[float]]:
        assert len(prompts) == len(solutions)
        return [[1 / (1 + len(s)) for s in steps] for steps in solutions]


def test_searches_have_budgets_for_each_candidate(lm: LM) -> None:
    prompt, options = lm.chat_prompt(HI, template=OPENS), FREE | {"force_answer": "#### ", "answer_tokens": 12}
    ends = [t for part in (MESSAGE, "</think>") for t in lm.tokenize(part, add_special=False)]
    found = [
        BestOfN("logprob").infer(lm, prompt, 4, **options),
        BeamSearch(_Length(), 2, step_stop="e", max_step_tokens=5).infer(lm, prompt, 4, **options),
        BeamSearch(_Length(), 2, step_stop="\n").infer(lm, prompt, 4, **options),  # which the message holds
    ]
    for result in found:
        assert len(result.candidates) >= 4
        for candidate in result.candidates:
            tokens = candidate.token_ids
            places = [at for at in range(len(tokens)) if tokens[at : at + len(ends)] == ends]
            assert len(places) == 1
            assert 7 <= places[0] < 11  # a character that has begun ends before
            assert len(tokens) == 60
            assert candidate.text.count("#### ") == 1
