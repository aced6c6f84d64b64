"""Tool-integrated reasoning against a model that follows a script: where outputs stand, what is counted and read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from tilebeam import CompletionOutput, SamplingParams, TilebeamError, ToolReasoning
from tilebeam.errors import SearchCancelled
from tilebeam.search.tool_forms import MARK, beginning, conversation
from tilebeam.search.tool_reasoning import MOST_OUTPUT, ToolGenerator, confined, shown
from tools_kit import HERMES, MISTRAL
from typed_kit import TypedLM

SUM = "I add.\n```python\nprint(1 + 1)\n```\n"


def computes(so_far: str, _: int) -> str:
    """Writes a program, then what its output says."""
    if MARK not in so_far:
        return f"{SUM}{MARK}\n99\n```\nSo it is \\boxed{{99}}."
    return f"So it is \\boxed{{{so_far.split(MARK)[-1].split()[0]}}}."


def sampled(lm: TypedLM, run: Callable[[Sequence[str]], str], n: int = 1, **fields) -> list[CompletionOutput]:
    return ToolGenerator(lm, run).generate(["Q: "], SamplingParams(n=n, seed=5, **fields))[0].outputs


def test_the_real_output_takes_the_place_of_the_invented_one() -> None:
    lm = TypedLM(computes)
    (sample,) = sampled(lm, lambda programs: f"{2 * len(programs)}\n")
    assert sample.text == f"{SUM}{MARK}\n2\n```\nSo it is \\boxed{{2}}."
    assert lm.detokenize(sample.token_ids) == sample.text
    assert (sample.finish_reason, sample.stop_reason) == ("stop", None)
    assert lm.kept == 0


def test_a_text_that_ends_with_its_program_goes_on_behind_the_output() -> None:
    def shy(so_far: str, _: int) -> str:
        return SUM + " \n" if MARK not in so_far else computes(so_far, 0)

    lm = TypedLM(shy)
    (sample,) = sampled(lm, lambda _: "2")
    assert sample.text == f"{SUM}{MARK}\n2\n```\nSo it is \\boxed{{2}}."
    assert lm.detokenize(lm.asked[1]) == f"Q: {SUM}{MARK}\n2\n```\n"


class Marked(TypedLM):
    """Has a control token, which is seen where it is asked for alone."""

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        written = text if parse_special else text.replace("§", "?")
        return super().tokenize(written, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int]) -> str:
        return super().detokenize(tokens).replace("§", "")

    def spelling(self, token: int) -> bytes:
        return super().detokenize([token]).encode()


def test_control_tokens_that_are_shown_stay_what_they_are() -> None:
    lm = Marked(lambda so_far, _: f"§{SUM}" if MARK not in so_far else "Done.")
    (mark,) = lm.tokenize("§")
    (sample,) = sampled(lm, lambda _: "2", shown_tokens=[mark])
    assert sample.text == f"§{SUM}{MARK}\n2\n```\nDone."
    assert b"".join(map(lm.spelling, sample.token_ids)).decode() == sample.text


def test_what_is_read_again_begins_with_what_was_written() -> None:
    lm = TypedLM(computes)
    sampled(lm, lambda _: "2")
    first, second = lm.asked
    assert lm.detokenize(second) == f"Q: {SUM}{MARK}\n2\n```\n"
    assert second[: len(first)] == first
    assert lm.continued == [0, len(second) - len(first)]


def test_a_token_that_holds_more_than_the_mark_is_replaced() -> None:
    def split(text: str) -> list[str]:
        parts = text.split("output\n")
        return [c for i, part in enumerate(parts) for c in (["output\n"] * (i > 0) + list(part))]

    lm = TypedLM(computes, split)
    (sample,) = sampled(lm, lambda _: "2")
    assert sample.text == f"{SUM}{MARK}\n2\n```\nSo it is \\boxed{{2}}."
    assert lm.detokenize(sample.token_ids) == sample.text


def test_max_tokens_counts_what_the_model_writes() -> None:
    lm = TypedLM(computes)
    written = len(SUM + MARK)
    (sample,) = sampled(lm, lambda _: "x" * 500, max_tokens=written + 8)
    assert lm.limits == [written + 8, 8]
    assert sample.finish_reason == "length"
    assert sample.text.endswith("```\nSo it is")
    (cut,) = sampled(TypedLM(computes), lambda _: "2", max_tokens=written)
    assert (cut.finish_reason, cut.text) == ("length", SUM)


def test_a_sample_may_compute_again_with_what_it_defined_and_is_cut_in_the_end() -> None:
    def again(so_far: str, _: int) -> str:
        return f"```python\nx{so_far.count(MARK)}\n```\n{MARK}\n"

    seen: list[list[str]] = []
    (sample,) = sampled(TypedLM(again), lambda programs: seen.append(list(programs)) or "1")
    assert seen == [["x0\n"], ["x0\n", "x1\n"], ["x0\n", "x1\n", "x2\n"]]
    assert sample.finish_reason == "length"
    assert sample.text.count(MARK) == 3


def test_a_mark_without_a_program_is_told() -> None:
    (sample,) = sampled(TypedLM(lambda so_far, _: f"{MARK}" if MARK not in so_far else "Done."), pytest.fail)
    assert sample.text == f"{MARK}\nThere is no block of Python above.\n```\nDone."


def test_log_probabilities_are_of_what_the_model_wrote() -> None:
    (sample,) = sampled(TypedLM(computes), lambda _: "2", logprobs=True, top_logprobs=1)
    written = len(SUM + MARK) + len("So it is \\boxed{2}.")
    assert len(sample.logprobs) == len(sample.top_logprobs) == written
    assert sample.cumulative_logprob == -written


def test_what_a_call_decodes_again_is_counted() -> None:
    counts = []
    for recomputed in (0, 5):
        lm = TypedLM(computes)
        lm.recomputed = recomputed
        output = ToolGenerator(lm, lambda _: "2").generate(["Q: "], SamplingParams(seed=5))[0]
        counts.append(output.usage.recomputed_tokens)
    assert counts[1] - counts[0] == 2 * 5


def test_samples_of_several_prompts_keep_their_places() -> None:
    def odd(so_far: str, seed: int) -> str:
        return computes(so_far, seed) if seed % 2 or MARK in so_far else f"\\boxed{{{seed}}}"

    ended: list[tuple[int, int]] = []
    outputs = ToolGenerator(TypedLM(odd), lambda _: "2").generate(
        ["a", "b", "c"], SamplingParams(n=4, seed=0), on_sample=lambda p, c: ended.append((p, c.index))
    )
    for output in outputs:
        assert [c.index for c in output.outputs] == [0, 1, 2, 3]
        assert [MARK in c.text for c in output.outputs] == [False, True, False, True]
    assert sorted(ended) == [(p, i) for p in range(3) for i in range(4)]


def test_answers_vote() -> None:
    def split(so_far: str, seed: int) -> str:
        return computes(so_far, seed) if seed == 0 or MARK in so_far else "\\boxed{7}"

    plain = ToolReasoning(run=lambda _: "2").infer(TypedLM(split), "Q", 3, sampling=SamplingParams(seed=0))
    assert (plain.answer, plain.votes) == ("7", {"7": 2.0, "2": 1.0})


def test_the_extractor_chooses_the_winner_if_it_has_a_way_of_its_own() -> None:
    """Each answer is another object: their fields vote."""
    texts = ['{"a": 1, "b": 5}', '{"a": 2, "b": 3}', '{"a": 2, "b": 4}']
    found = ToolReasoning("json", run=lambda _: "").infer(
        TypedLM(lambda _, seed: texts[seed]), "Q", 3, sampling=SamplingParams(seed=0)
    )
    assert found.answer == texts[1]


def test_how_programs_are_asked_for() -> None:
    """Qwen's models by the system prompt, all others in the first message, which every template takes."""
    assert [m["role"] for m in conversation("Q")] == ["system", "user"]
    assert [m["role"] for m in conversation("Q", example=True)] == ["system", "user", "assistant", "user"]
    assert [m["role"] for m in conversation("Q", words=True)] == ["user", "assistant", "user"]
    (alone,) = conversation("Q", example=False, words=True)
    assert alone["content"].startswith("Solve problems")
    assert alone["content"].endswith("\n\nQ")
    assert beginning(f"<|im_start|>{HERMES}")[0]["role"] == "system"
    for template in (MISTRAL, None):
        assert [m["role"] for m in beginning(template)] == ["user", "assistant"]


def test_a_hook_cancels_all_of_it() -> None:
    with pytest.raises(SearchCancelled):
        ToolReasoning(run=lambda _: "2").infer(TypedLM(computes), "Q", 2, progress=lambda _: False)


def test_what_fails_in_a_program_s_runner_ends_the_call() -> None:
    def broken(_: Sequence[str]) -> str:
        raise TilebeamError("The sandbox is gone.")

    with pytest.raises(TilebeamError, match="The sandbox is gone"):
        ToolReasoning(run=broken).infer(TypedLM(computes), "Q", 2)


def test_no_grammar() -> None:
    with pytest.raises(TilebeamError, match="cannot be held to a grammar"):
        sampled(TypedLM(computes), lambda _: "2", regex="a*")


def test_an_output_is_cut_and_closes_no_block() -> None:
    assert shown("\n1\n") == "1"
    assert "```" not in shown("```output\n```")
    assert len(shown("x" * 10**6)) < MOST_OUTPUT + 20


def test_earlier_programs_of_a_sample_leave_their_variables_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilebeam.sandbox.SECONDS", 1)
    run, first = confined(), "x = 1\nprint('first')"
    blocks = [first, "y = 2\nz = x / 0", "while True: pass", "import os\nos._exit(0)", "print(x + y)"]
    told = [run(blocks[: i + 1]) for i in range(5)]
    assert told[0] == "first"
    assert told[1].endswith("ZeroDivisionError: division by zero")
    assert told[2].startswith("TimeoutError: the program took more than ")
    assert told[3] == "RuntimeError: the program ended its process"
    assert told[4] == "3"
    slow = "import time\nbegan = time.process_time()\nwhile time.process_time() < began + 0.7: pass\nprint('done')"
    assert run([first, slow, slow]).split()[-1] == "done"  # each has its own seconds


@pytest.mark.parametrize("program", ["print('x' * 10**8)", "while True: print('y' * 999)", "print('z' * 10**10)"])
def test_of_a_gigabyte_a_sample_reads_the_beginning_and_the_end(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilebeam.sandbox.SECONDS", 1)
    (sample,) = sampled(TypedLM(computes), lambda _: confined()([program]), max_tokens=200)
    assert len(sample.text.split(MARK)[1].split("\n```")[0]) < MOST_OUTPUT + 20
