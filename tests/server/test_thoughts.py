"""Thoughts of a model: apart from the text of its answer, whole and streamed, or in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from server_kit import CHAT, HI, Running, running
from tilebeam import LM, SamplingParams

PLAIN = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>a:"
OPENING = PLAIN + "{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
THOUGHT = {"grammar": 'root ::= "\\n<think>\\n" [a-c]{4} "\\n</think>\\n\\nok"', "max_tokens": 60}
REST = {"grammar": 'root ::= [a-c]{4} "</think>ok"', "max_tokens": 60}


@pytest.fixture(scope="module")
def opening(lm: LM) -> Iterator[Running]:
    """A server whose template begins thoughts in the prompt."""
    with running(lm, chat_template=OPENING) as server:
        yield server


def message(server: Running, **fields: Any) -> dict[str, Any]:
    """The whole answer, of which the streamed one has the same parts."""
    body = {"messages": HI, "seed": 1} | fields
    found: dict[str, Any] = server.post(CHAT, body).json()["choices"][0]["message"]
    streamed = {"content": "", "reasoning_content": ""}
    for chunk in server.client().chat.completions.create(model="tiny", stream=True, extra_body=body, messages=HI):
        for name in streamed:
            streamed[name] += getattr(chunk.choices[0].delta, name, None) or ""
    assert (streamed["content"], streamed["reasoning_content"]) == (
        found["content"],
        found.get("reasoning_content", ""),
    )
    return found


def test_thoughts_are_apart(server: Running) -> None:
    said = message(server, **THOUGHT)
    assert said["content"] == "ok"
    assert len(said["reasoning_content"]) == 4
    kept = message(server, **THOUGHT, reasoning_format="none")
    assert kept["content"] == f"\n<think>\n{said['reasoning_content']}\n</think>\n\nok"
    assert "reasoning_content" not in kept
    cut = message(server, **THOUGHT | {"max_tokens": 9})
    assert cut["content"] == ""
    assert "reasoning_content" not in message(server, max_tokens=9)


def test_tokens_of_thoughts_are_counted(server: Running, lm: LM) -> None:
    """Those of each choice; one that does not think has none."""
    body = {"messages": HI, "seed": 1, "n": 2} | THOUGHT
    whole = server.post(CHAT, body).json()
    thoughts = [choice["message"]["reasoning_content"] for choice in whole["choices"]]
    first, second = (len(lm.tokenize(thought, add_special=False)) for thought in thoughts)
    told = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert first < told == first + second
    *_, last = server.client().chat.completions.create(
        model="tiny", stream=True, extra_body=body, messages=HI, stream_options={"include_usage": True}
    )
    assert last.usage.completion_tokens_details.reasoning_tokens == told
    plain = server.post(CHAT, body | {"reasoning_format": "none"}).json()["usage"]
    assert plain["completion_tokens_details"]["reasoning_tokens"] == 0


def test_tokens_of_thoughts_are_told(server: Running) -> None:
    body = {"messages": HI, "seed": 1, "logprobs": True} | THOUGHT
    whole = server.post(CHAT, body).json()["choices"][0]
    tokens: list[Any] = []
    for chunk in server.client().chat.completions.create(model="tiny", stream=True, extra_body=body, messages=HI):
        tokens += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert [t.token for t in tokens] == [t["token"] for t in whole["logprobs"]["content"]]


def test_the_prompt_may_open_thoughts(opening: Running) -> None:
    said = message(opening, **REST)
    assert said["content"] == "ok"
    assert len(said["reasoning_content"]) == 4
    free = message(opening, max_tokens=5)
    assert free["content"] == ""
    assert free["reasoning_content"]
    off = message(opening, max_tokens=5, chat_template_kwargs={"enable_thinking": False})
    assert "reasoning_content" not in off
    # A form that knows no thoughts leaves no room for them.
    bound = message(opening, response_format={"type": "json_schema", "json_schema": {"schema": {"enum": ["yes"]}}})
    assert bound["content"] == '"yes"'
    assert "reasoning_content" not in bound
    begun = [*HI, {"role": "assistant", "content": "I think "}]
    more = message(opening, messages=begun, continue_final_message=True, **REST)
    assert (more["content"], len(more["reasoning_content"])) == ("ok", 4)
    done = [*HI, {"role": "assistant", "content": "I think</think>so "}]
    assert "reasoning_content" not in message(opening, messages=done, continue_final_message=True, max_tokens=5)


def test_a_server_may_leave_thoughts_in_the_text(lm: LM) -> None:
    with running(lm, reasoning_format="none") as server:
        assert message(server, **THOUGHT)["content"].startswith("\n<think>")
        assert message(server, **THOUGHT, reasoning_format="deepseek")["content"] == "ok"


def test_responses_have_them_as_an_item(opening: Running) -> None:
    options: Any = {"model": "tiny", "input": "hi", "max_output_tokens": 6, "extra_body": {"seed": 1}}
    client = opening.client()
    answer = client.responses.create(**options)
    (item,) = answer.output
    assert item.type == "reasoning"
    assert answer.usage is not None
    events = list(client.responses.create(**options, stream=True))
    for usage in (answer.usage, events[-1].response.usage):
        assert 4 <= usage.output_tokens_details.reasoning_tokens <= usage.output_tokens == 6
    assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == item.content[0].text
    assert [e.text for e in events if e.type == "response.reasoning_text.done"] == [item.content[0].text]
    sent: Any = [
        {"role": "user", "content": "hi"},
        item.model_dump(exclude_none=True),
        {"role": "user", "content": "so?"},
    ]
    assert client.responses.create(**options | {"input": sent}).output


MESSAGE = "\nTime is up.\n"
LIMITED: dict[str, Any] = {"max_tokens": 40, "reasoning_budget_message": MESSAGE, "ignore_eos": True}


def thought(told: dict[str, Any]) -> str:
    """What a budget left of a thought, the same with any: its beginning."""
    text: str = told.get("reasoning_content", "")
    assert text.count(MESSAGE.strip()) == 1
    assert MESSAGE.strip() not in told["content"]
    assert told["content"]
    return text.removesuffix(MESSAGE.strip()).rstrip()


def test_thoughts_have_a_budget(opening: Running) -> None:
    free = message(opening, **LIMITED)
    assert free == message(opening, **LIMITED, thinking_budget_tokens=-1)
    assert free == message(opening, **LIMITED, thinking_token_budget=500)
    assert MESSAGE.strip() not in free["reasoning_content"]
    schema = {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes"]}}}
    formed = message(opening, response_format=schema, thinking_budget_tokens=5, max_tokens=40)
    assert formed["content"] == '"yes"'
    assert formed["reasoning_content"]
    for fields, param in (
        ({"thinking_budget_tokens": -2}, "thinking_budget_tokens"),
        ({"thinking_budget_tokens": 1.5}, "thinking_budget_tokens"),
        ({"reasoning_budget_message": 3}, "reasoning_budget_message"),
    ):
        refused = opening.post(CHAT, {"messages": HI} | fields)
        assert refused.status_code == 400
        assert param in refused.text


def test_an_effort_is_a_share_of_the_servers_budget(lm: LM, opening: Running) -> None:
    budget = SamplingParams(thinking_budget=16, budget_message=MESSAGE)
    asked: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    shares = {"none": 0, "minimal": 1, "low": 4, "medium": 8, "high": 16, "xhigh": 16}
    by_effort = {
        effort: thought(message(opening, **asked | LIMITED, thinking_budget_tokens=tokens))
        for effort, tokens in shares.items()
    }
    with running(lm, chat_template=OPENING.replace("{% if enable_thinking %}", "{% if true %}"), sampling=budget) as it:
        for effort, text in by_effort.items():
            assert thought(message(it, **asked, reasoning_effort=effort)) == text
        assert thought(message(it, **asked)) == by_effort["high"]
        assert thought(message(it, **asked, reasoning_effort="high", thinking_budget_tokens=4)) == by_effort["low"]
        # Other APIs.
        body = {"model": "tiny", "max_tokens": 40, "messages": HI, "seed": 1}
        kinds = [{"type": "enabled", "budget_tokens": 4}, {"type": "adaptive"}, {"type": "disabled"}]
        for kind, effort in zip(kinds, ("low", "high", "none"), strict=True):
            (thinks, *_) = it.post("/v1/messages", body | {"thinking": kind}).json()["content"]
            assert thought({"reasoning_content": thinks["thinking"], "content": "."}) == by_effort[effort]
        asks = {"model": "tiny", "input": "hi", "seed": 1, "max_output_tokens": 40, "reasoning": {"effort": "low"}}
        (thinks, *_) = it.post("/v1/responses", asks).json()["output"]
        assert thought({"reasoning_content": thinks["content"][0]["text"], "content": "."}) == by_effort["low"]
        votes = {"search": {"method": "vote", "budget": 3, "extract": "text", "candidates": True}}
        (choice,) = it.post(CHAT, {"messages": HI, "seed": 1} | asked | votes).json()["choices"]
        assert [MESSAGE in one["text"] for one in choice["search"]["candidates"]] == [True] * 3
