"""Several texts that grow side by side in one event loop: python streams.py MODEL."""

import asyncio
import sys

import tilebeam

QUESTIONS = ["What is a fjord?", "Name three rivers.", "Why is the sky blue?"]


async def answer(lm: tilebeam.LM, number: int, question: str) -> str:
    """Return the whole answer; each piece is shown as it comes."""
    text = ""
    prompt = lm.chat_prompt([{"role": "user", "content": question}])
    async with lm.astream(prompt, max_tokens=64, seed=number) as stream:
        async for delta in stream:
            text += delta.text
            print(f"[{number}] {delta.text!r}")
    return text


async def main() -> None:
    """All questions share the batches of one model."""
    with tilebeam.load(sys.argv[1]) as lm:
        answers = await asyncio.gather(*(answer(lm, i, question) for i, question in enumerate(QUESTIONS)))
        print(*answers, sep="\n---\n")


asyncio.run(main())
