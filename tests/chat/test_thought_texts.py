"""Thoughts read out of texts, however these are cut into pieces, and thoughts of earlier turns."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tilebeam.chat.answer_parts import reasoning_in, text_in
from tilebeam.chat.answer_reader import AnswerReader
from tilebeam.chat.chat_turns import turns_of
from tilebeam.chat.thoughts import CHANNELS, THINK, Marks, Thinking, is_open, marks_of, texts_of
from tilebeam.chat.tool_families import FAMILIES
from tilebeam.chat.tools import Tool, ToolUse

HI: Any = {"role": "user", "content": "hi"}


def test_thoughts_that_are_sent_back_are_told_to_the_template() -> None:
    call = {"id": "a", "function": {"name": "now", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}
    messages = [HI, said]
    turns, _ = turns_of(messages, [], "{{ tools }}")
    assert turns[1]["reasoning_content"] == "hm"
    turns, _ = turns_of(messages, [], '{{ tools }}{% if "thinking" in message %}')
    assert "reasoning_content" not in turns[1]
    assert turns[1]["thinking"] == "hm"


def test_a_result_alone_has_the_name_of_a_function() -> None:
    call = {"function": {"name": "now"}}  # without an id
    result = {"role": "tool", "content": "noon"}
    turns, _ = turns_of([HI, {"role": "assistant", "tool_calls": [call]}, result], [], "{{ tools }}")
    assert [turn.get("name") for turn in turns] == [None, None, "now"]


NOW = ToolUse(FAMILIES["hermes"], [Tool("now")], False, True)
CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
CASES: list[tuple[Marks, bool, str, str, str, int]] = [
    (THINK, False, "<think>\nhm\n</think>\n\nYes.", "hm", "Yes.", 0),
    (THINK, True, "hm</think>Yes.", "hm", "Yes.", 0),
    (THINK, True, "hm, no end ", "hm, no end", "", 0),
    (THINK, False, "<think></think> Yes.", "", "Yes.", 0),
    (THINK, False, "  Yes.", "", "  Yes.", 0),
    (THINK, False, "The mark <think> begins </think> a thought.", "", "The mark <think> begins </think> a thought.", 0),
    (THINK, False, f"<think>{CALL}</think>{CALL}", CALL, "", 1),
    (THINK, True, f"{CALL}</think>No.", CALL, "No.", 0),
    (THINK, False, "<thi", "", "<thi", 0),
    # A mark again where it stands already.
    (THINK, True, "a</think>\n\n</think>\n\nb", "a", "b", 0),
    (THINK, False, "<think>a</think></think> </think>b", "a", "b", 0),
    (THINK, True, "\n<think>\na</think>b", "a", "b", 0),
    (THINK, False, "<think> <think>a</think>b", "a", "b", 0),
    (THINK, True, "a</think></think><think>b</think></think>c", "ab", "c", 0),
    (THINK, True, "a</think> </thi", "a", "</thi", 0),
    (THINK, False, "</think>a", "", "</think>a", 0),
    (THINK, True, "a</think>b</think>c", "a", "b</think>c", 0),
    (Marks("[THINK]", "[/THINK]"), False, "[THINK]a [b] c[/THINK]d", "a [b] c", "d", 0),
    (CHANNELS, False, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.", "hm",
     "Yes.", 0),
    (CHANNELS, False, "<|channel|>commentary<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Y", "",
     "So.Y", 0),
    (CHANNELS, False, "Yes.", "", "Yes.", 0),
    (CHANNELS, False, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant", "hm", "", 0),  # cut in a header
    (CHANNELS, False, "Yes<|channel|>final<|message|>, no.", "", "Yes, no.", 0),
]  # fmt: skip


def read(
    marks: Marks, opened: bool, pieces: list[str], separate: bool = True, cut: bool = False
) -> tuple[str, str, int]:
    reader = AnswerReader(NOW, Thinking(marks, opened, separate))
    parts = [part for piece in pieces for part in reader.feed(piece)] + reader.end(cut)
    return reasoning_in(parts), text_in(parts), reader.calls


@pytest.mark.parametrize(("marks", "opened", "text", "thoughts", "said", "calls"), CASES)
def test_thoughts_in_a_text(marks: Marks, opened: bool, text: str, thoughts: str, said: str, calls: int) -> None:
    for size in (1, 2, 3, 7, 1000):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert read(marks, opened, pieces) == (thoughts, said, calls)
    kept = read(marks, opened, [text], separate=False)
    assert (kept[0], kept[2]) == ("", calls)
    if marks != CHANNELS and not calls:
        assert kept[1] == text


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(["<think>", "</think>", " ", "\n", "a", "<", CALL]), max_size=8),
    st.lists(st.sampled_from([*texts_of(CHANNELS), "assistant", "analysis", " ", "to=functions.now", "a"]), max_size=8),
    st.booleans(),
)
def test_pieces_make_no_difference(parts: list[str], others: list[str], opened: bool) -> None:
    for marks, text in ((THINK, "".join(parts)), (CHANNELS, "".join(others))):
        for cut in (False, True):
            assert read(marks, opened, list(text), cut=cut) == read(marks, opened, [text], cut=cut)


def test_marks_of_templates() -> None:
    assert marks_of("chatml") == marks_of("{% if '</think>' in content %}") == THINK
    assert marks_of("x[/THINK]").opens == "[THINK]"
    assert marks_of("<|channel|>analysis<|message|>") == CHANNELS
    assert is_open("<a><think>\n", None, THINK)
    assert not is_open("<a><think>\n\n</think>\n\n", None, THINK)
    assert is_open("<a><think>\nI", "<think>\nI", THINK)
    assert not is_open("<think> is a mark", " is a mark", Marks("<t>", "</t>"))
