"""A program of a user's: type checkers accept all of it. Never run; see test_types.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tilebeam
from tilebeam import CompletionOutput, Prompt, SamplingParams


class Person:
    """A class of pydantic's has these."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {"type": "object"}


class Shortest(tilebeam.Scorer):
    def score(self, prompt: str | Prompt, candidates: Sequence[CompletionOutput]) -> list[float]:  # noqa: ARG002
        return [-float(len(c.text)) for c in candidates]


def texts(lm: tilebeam.LM) -> list[str]:
    params = SamplingParams(n=2, max_tokens=8)
    output = lm.generate("a", params, temperature=0.5, stop=["\n"])[0]
    for delta in lm.stream("a", max_tokens=3):
        print(delta.text, delta.finish_reason)
    for i, found in lm.completed(["a", "b"], seed=1):
        print(i, found.text)
    return [sample.text for sample in output.outputs]


def chats(lm: tilebeam.LM) -> str:
    talk = [{"role": "user", "content": "Hi!"}]
    one = lm.chat(talk, max_tokens=5, tools=[{"type": "function", "function": {"name": "now"}}], tool_choice="auto")
    many = lm.chat([talk, talk], temperature=0)
    for delta in lm.stream_chat(talk, reasoning="text"):
        print(delta.text)
    person = lm.chat(talk, json_schema=Person).outputs[0].parsed
    return one.text + many[0].text + str(person)


async def later(lm: tilebeam.LM) -> None:
    (output,) = await lm.agenerate("a", top_k=1)
    answer = await lm.achat([{"role": "user", "content": "Hi!"}], max_tokens=5)
    async for delta in lm.astream_chat([{"role": "user", "content": output.text + answer.text}]):
        print(delta.text)


def searches(lm: tilebeam.LM) -> None:
    talk = [{"role": "user", "content": "What is 17 + 25?"}]
    vote = tilebeam.SelfConsistency("last-number").infer(lm, talk, 16, max_tokens=512, temperature=0.7)
    print(vote.answer, vote.votes, vote.text, vote.answer == 42)
    both = tilebeam.BestOfN(Shortest()).infer(lm, ["a", "b"], budget=4, sampling=SamplingParams(seed=1))
    print([result.best.text for result in both], tilebeam.BestOfN("logprob"), tilebeam.BestOfN(tilebeam.CodeExamples()))
    judge = tilebeam.LLMJudge(lm, verdict="number", chat=True)
    print(tilebeam.Adaptive("boxed").infer(lm, talk, 8).confidence, tilebeam.BestOfN(judge).infer(lm, talk, 4).scores)
    for i, found in tilebeam.Adaptive().completed(lm, [talk, "a"], 8, max_tokens=9):
        print(i, found.votes)


if __name__ == "__main__":
    with tilebeam.load("model.gguf", n_ctx=4096) as model:
        print(texts(model), chats(model))
        searches(model)
