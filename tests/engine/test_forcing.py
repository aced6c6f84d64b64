"""Budgets of thoughts and forced answers: what becomes of texts by a script, and that no way of drawing samples changes
it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
import tilebeam
from engine_kit import ScriptedDrafter, equal_logits, separate_logits
from tilebeam import LM, SamplingParams, TilebeamError
from tilebeam.chat.thoughts import CHANNELS, THINK, Marks
from tilebeam.engine.forcing import Forcer, Forcing
from tilebeam.engine.sampler import Banned, Sampler
from tilebeam.native.llama import Vocab

ANSWER = "\n\nThe answer is \\boxed{"
TALL = Marks("<reasoning>", "</reasoning>")


class Letters:
    """A vocabulary of single bytes and of marks, which are control tokens."""

    def __init__(self, marks: Sequence[str]) -> None:
        self.marks = marks

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        assert not add_special
        for i, mark in enumerate(self.marks):
            before, found, behind = text.partition(mark)
            if found and parse_special:
                return [*self.tokenize(before, False, True), 256 + i, *self.tokenize(behind, False, True)]
        return list(text.encode())

    def piece(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def spelling(self, token: int) -> str:
        return chr(token) if token < 128 else "" if token < 256 else self.marks[token - 256]


@dataclass
class Steered:
    """A sampler that draws what a script says, as far as it may."""

    script: list[int]
    closers: list[int]
    forced: int | None = None
    banned: Banned = Banned.NOTHING
    free: bool = False

    def steer(self, forced: int | None, banned: Banned, *, free: bool = False) -> None:
        self.forced, self.banned, self.free = forced, banned, free

    def draw(self) -> int:
        if self.forced is not None:
            return self.forced
        token = self.script.pop(0)
        return self.draw() if self.banned is Banned.CLOSING and token in self.closers else token


def written(
    script: str, params: SamplingParams, marks: Marks = THINK, opened: bool = False, single: bool = True
) -> str:
    """The text that comes of a script: whatever is forced comes between two of its tokens."""
    vocab = cast(Vocab, Letters(marks if single else ()))
    forcing = Forcing.of(params, vocab, marks, opened=opened, anywhere=marks == CHANNELS)
    sampler = Steered(vocab.tokenize(script, False, True), forcing.closers)
    forcer = Forcer(forcing, vocab, cast(Sampler, sampler), [], params.max_tokens or 10**6)
    text = b""
    for _ in range(params.max_tokens or 10**6):
        if sampler.forced is None and not sampler.script:
            break
        token = sampler.draw()
        text += vocab.piece(token) or vocab.spelling(token).encode()
        forcer.take(token)
    return text.decode()


@pytest.mark.parametrize("single", [True, False], ids=["tokens", "letters"])
@pytest.mark.parametrize(
    ("script", "budget", "text"),
    [
        ("<think>abcdef", 3, "<think>abc</think>def"),
        (" \n<think>abcdef", 3, " \n<think>abc</think>def"),
        ("<think>abc", 0, "<think></think>abc"),
        ("<think>abc", 99, "<think>abc"),  # above what it may have at all
        ("<think>a</think>bcdef", 3, "<think>a</think>bcdef"),
        ("abcdef", 3, "abcdef"),  # it never thinks
        ("I know <think>abcdef", 3, "I know <think>abcdef"),  # a mark that is text
        ("<think>abcd</think></think>ef", 2, "<think>ab</think>cd</think></think>ef"),  # the model closes, too
        ("<think>a\u00e9\u20acbc", 2, "<think>a\u00e9</think>\u20acbc"),  # characters are whole
    ],
)
def test_thoughts_have_a_budget(script: str, budget: int, text: str, single: bool) -> None:
    assert written(script, SamplingParams(thinking_budget=budget), single=single) == text
    tall = script.replace("think>", "reasoning>"), text.replace("think>", "reasoning>")
    assert written(tall[0], SamplingParams(thinking_budget=budget), TALL, single=single) == tall[1]
    if script.startswith("<think>"):  # by the template
        rest = script.removeprefix("<think>")
        got = written(rest, SamplingParams(thinking_budget=budget), opened=True, single=single)
        assert got == text.removeprefix("<think>")


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("\nEnough.\n", "ab\nEnough.\n</think>cd"),
        ("\nEnough.\n</think>\n\nSo ", "ab\nEnough.\n</think>\n\nSo cd"),  # it closes by itself
        ("<think>", "ab<think></think>cd"),
    ],
)
def test_a_message_comes_before_the_mark(message: str, text: str) -> None:
    params = SamplingParams(thinking_budget=2, budget_message=message)
    assert written("abcd", params, opened=True) == text


def test_a_mark_that_has_begun_may_end() -> None:
    assert written("ab</think>cd", SamplingParams(thinking_budget=4), opened=True, single=False) == "ab</think>cd"
    assert written("ab</x>cd", SamplingParams(thinking_budget=4), opened=True, single=False) == "ab</x</think>>cd"


def test_all_thoughts_of_a_text_have_one_budget() -> None:
    text = written("<think>ab</think>\n<think>cdef", SamplingParams(thinking_budget=3))
    assert text == "<think>ab</think>\n<think>c</think>def"


def test_thoughts_of_channels() -> None:
    opens, final = CHANNELS.opens, "<|start|>assistant<|channel|>final<|message|>"
    params = SamplingParams(thinking_budget=2)
    assert written(f"{opens}abcd{final}e", params, CHANNELS) == f"{opens}ab<|end|>cd{final}e"
    again = f"{opens}a<|end|><|start|>assistant{opens}"
    assert written(f"{again}bcd", params, CHANNELS) == f"{again}b<|end|>cd"


def test_what_a_grammar_refuses_is_begun_anew() -> None:
    vocab, params = cast(Vocab, Letters(())), SamplingParams(thinking_budget=1)
    forcing = Forcing.of(params, vocab, THINK, opened=True, anywhere=False)
    forcer = Forcer(forcing, vocab, cast(Sampler, Steered([], [])), [], 99)
    for token in b"a</x":
        forcer.take(token)
    assert bytes(forcer.coming) == b"</think>"


@pytest.mark.parametrize("single", [True, False], ids=["tokens", "letters"])
def test_thoughts_have_a_least_length(single: bool) -> None:
    script, params = "a</think>bc</think>d", SamplingParams(min_thinking=3)
    wanted = "abc</think>d" if single else "a/think>bc</think>d"  # the mark's beginning is left out
    assert written(script, params, opened=True, single=single) == wanted
    assert written("a</think>b", SamplingParams(min_thinking=0, thinking_budget=9), opened=True) == "a</think>b"


@pytest.mark.parametrize(
    ("script", "opened", "at", "text"),
    [
        ("abcdefgh", False, 4, f"abcd{ANSWER}ef"),
        ("a \\boxed{1} bcdefghijklmnopqrstuvwxyzabcdefghijk", False, 12, None),
        ("abcdefgh", True, 4, f"abcd</think>{ANSWER}e"),
        ("\\boxed{1}</think>fghijklm", True, 10, f"\\boxed{{1}}</think>{ANSWER}fg"),  # the box was a thought
        ("a\u20acb", False, 2, f"a\u20ac{ANSWER}"),
    ],
)
def test_an_answer_is_forced_near_the_end(script: str, opened: bool, at: int, text: str | None) -> None:
    params = SamplingParams(force_answer=ANSWER, answer_tokens=len(ANSWER) + 2, max_tokens=at + len(ANSWER) + 2)
    assert written(script, params, opened=opened) == (script[: params.max_tokens] if text is None else text)
    assert written("abc", SamplingParams(force_answer=ANSWER), opened=opened) == "abc"  # there is room


@pytest.mark.parametrize(("lead", "text"), [("The result: ", "The answer: 12"), ("#### ", "#### 1"), ("So: ", "So: 1")])
def test_what_has_an_answer(lead: str, text: str) -> None:
    params = SamplingParams(force_answer=lead, answer_tokens=20, max_tokens=40)
    got = written(text + " it is, yes it is so, so it is, yes", params)
    assert (lead in got[20:]) == (not text.startswith(lead))


# --- in an engine -----------------------------------------------------------------------------------------------------

MESSAGE = "\nTime is up.\n"
BUDGET: dict[str, Any] = {"thinking_budget": 6, "budget_message": MESSAGE, "force_answer": ANSWER, "answer_tokens": 40}
DRAWN: dict[str, Any] = {"max_tokens": 80, "seed": 4, "temperature": 1, "top_k": 0, "top_p": 1, "ignore_eos": True}


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LM]:
    """Draws depend on seeds alone; marks are control tokens; few cells."""
    path = equal_logits(tmp_path_factory.mktemp("models") / "equal.gguf", controls=("<think>", "</think>"))
    with tilebeam.load(path, "cpu", n_ctx=256, n_seq_max=4, threads=1, n_batch=64, lookup=False) as model:
        yield model


@pytest.fixture(scope="module")
def one_way(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LM]:
    """One token follows each; marks are texts."""
    path = separate_logits(tmp_path_factory.mktemp("models") / "one.gguf")
    with tilebeam.load(path, "cpu", n_ctx=512, n_seq_max=4, threads=1, lookup=False) as model:
        yield model


def asked(lm: LM, text: str = "the question <think>\n") -> list[int]:
    return lm.tokenize(text)


def closing(lm: LM) -> list[int]:
    return lm.tokenize(MESSAGE, add_special=False) + lm.tokenize("</think>", add_special=False)


def test_however_samples_are_drawn(equal: LM) -> None:
    """More samples than slots and cells, drafts of all kinds, streams, statistics."""
    params, prompt = SamplingParams(n=6, logprobs=True, **BUDGET, **DRAWN), asked(equal)
    free = [s.token_ids for s in equal.generate([prompt], SamplingParams(n=6, **DRAWN))[0].outputs]
    output = equal.generate([prompt], params)[0]
    answer = equal.tokenize(ANSWER, add_special=False)
    for sample, unforced in zip(output.outputs, free, strict=True):
        tokens, end = sample.token_ids, 6 + len(closing(equal))
        assert len(tokens) == 80
        assert tokens[:6] == unforced[:6]
        assert tokens[6:end] == closing(equal)
        assert tokens[40 : 40 + len(answer)] == answer
        assert sample.text.count(ANSWER) == 1
        assert sample.logprobs is not None
        assert all(math.isclose(x, -math.log(equal.engine.vocab.size), rel_tol=1e-5) for x in sample.logprobs)
    assert len({tuple(s.token_ids) for s in output.outputs}) == 6
    told = [(s.token_ids, s.text, s.logprobs) for s in output.outputs]
    streamed: list[list[int]] = [[] for _ in told]
    for delta in equal.stream(prompt, params):
        streamed[delta.index] += delta.token_ids
    assert streamed == [s.token_ids for s in output.outputs]
    hidden = equal.generate([prompt], SamplingParams(n=6, hidden=True, **BUDGET, **DRAWN))[0]
    assert [s.token_ids for s in hidden.outputs] == [s.token_ids for s in output.outputs]
    for mode in ("wrong", "partly", "empty", "turns", "long"):
        equal.use_drafter(ScriptedDrafter([output], mode))
        drafted = equal.generate([prompt], params)[0]
        equal.use_drafter(None)
        assert [(s.token_ids, s.text, s.logprobs) for s in drafted.outputs] == told
        # What is forced is a draft by itself.
        assert drafted.usage.accepted_tokens >= 6 * (len(closing(equal)) + len(answer) - 2)


def test_a_text_that_grows_call_by_call(one_way: LM) -> None:
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True, **BUDGET)
    for prompt in (asked(one_way), asked(one_way, "the question")):
        whole = one_way.generate([prompt], params)[0].outputs[0].token_ids
        splits = [n for n in range(1, 70) if n % 3 == 1]
        parts = one_way.generate(
            [prompt + whole[:n] for n in splits],
            [SamplingParams(temperature=0, max_tokens=70 - n, ignore_eos=True, continues=n, **BUDGET) for n in splits],
        )
        assert [whole[:n] + p.outputs[0].token_ids for n, p in zip(splits, parts, strict=True)] == [whole] * len(splits)
        thinks = len(prompt) == len(asked(one_way))
        assert (MESSAGE in one_way.detokenize(whole)) == thinks


def test_ends_wait_for_thoughts(equal: LM) -> None:
    eos = equal.engine.vocab.eos
    close = equal.tokenize("</think>", add_special=False)[0]
    wants: dict[str, Any] = {"logit_bias": {close: 50.0, eos: 50.0}, "seed": 2, "max_tokens": 40}
    for sample in equal.generate([asked(equal)], SamplingParams(n=8, min_thinking=7, **wants))[0].outputs:
        assert not {close, eos} & {*sample.token_ids[:7]}
        assert sample.token_ids[7] in (close, eos)


def test_a_grammar_begins_behind_the_thoughts(equal: LM) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    ends = {equal.engine.vocab.eos: 9.0}  # which a text that has to match does not within a thought
    params = SamplingParams(n=5, json_schema=schema, seed=3, max_tokens=80, thinking_budget=9, logit_bias=ends)
    for sample in equal.generate([asked(equal)], params)[0].outputs:
        assert len(sample.token_ids) > 10
        thought = sample.token_ids.index(equal.tokenize("</think>", add_special=False)[0])
        assert thought <= 9
        assert json.loads(equal.detokenize(sample.token_ids[thought + 1 :]))["n"] in (1, 2)
    # Without thoughts, and with some that are not limited, it holds from the beginning.
    for prompt, budget in (("the question", 9), ("the question <think>", None)):
        changes: dict[str, Any] = {"json_schema": schema, "max_tokens": 80, "thinking_budget": budget}
        assert json.loads(equal.generate([asked(equal, prompt)], SamplingParams(**changes))[0].outputs[0].text)
    # What the grammar does not allow is not forced upon it.
    spelled = equal.generate("hi", regex="<[a-z]{5}>[ab]{12}</think>ok", thinking_budget=3, max_tokens=80)
    assert spelled[0].outputs[0].text.endswith("</think>ok")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"thinking_budget": -1}, "thinking_budget must be a whole number of tokens, or None"),
        ({"min_thinking": 5, "thinking_budget": 4}, "min_thinking must be a whole number up to thinking_budget"),
        ({"budget_message": None}, "budget_message must be a string"),
        ({"thinking_marks": "<think>"}, "thinking_marks must be two strings"),
        ({"thinking_marks": ("<think>", " ")}, "thinking_marks must be two strings that are not blank"),
        ({"force_answer": "x", "regex": "a"}, "force_answer with a grammar"),
        ({"continues": 1000, "force_answer": "x"}, "continues: the prompt has"),
    ],
)
def test_what_is_refused(equal: LM, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TilebeamError, match=sentence):
        equal.generate("hi", **fields)
