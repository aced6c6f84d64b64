"""Sixteen answers in one batch, and the one that most of them agree on: python vote.py MODEL."""

import sys

import tilebeam

QUESTION = "Natalia sold 48 clips in April and half as many in May. How many clips did she sell altogether?"

with tilebeam.load(sys.argv[1], n_seq_max=16) as lm:
    prompt = lm.chat_prompt([{"role": "user", "content": f"{QUESTION} End with the number."}])
    params = tilebeam.SamplingParams(max_tokens=200, temperature=0.8, seed=1)
    vote = tilebeam.SelfConsistency(tilebeam.last_number).infer(lm, prompt, budget=16, sampling=params)
    for answer, weight in vote.votes.items():
        print(f"{answer}: {weight:g}")
    print("answer:", vote.answer)
    print(f"{vote.usage.completion_tokens} tokens in {vote.usage.seconds:.1f} s")
