"""A search by steps under a process reward model: python beam.py MODEL PRM (docs/reward-models.md: which, and how)."""

import sys

import tilebeam

QUESTION = "Weng earns $12 an hour for babysitting. Yesterday, she did 50 minutes of it. How much did she earn?"

with tilebeam.load(sys.argv[1], n_seq_max=16) as lm, tilebeam.load_reward_model(sys.argv[2]) as prm:
    prompt = lm.chat_prompt([{"role": "user", "content": QUESTION}])
    params = tilebeam.SamplingParams(max_tokens=300, temperature=0.8, seed=1)
    # Of 16 partial texts the 4 that the reward model likes best are continued, each in 4 ways.
    search = tilebeam.BeamSearch(prm, beam_width=4, max_steps=12)
    found = search.infer(lm, prompt, budget=16, sampling=params)
    path = found.trajectories[found.best_index]
    for step, score in zip(path.steps, path.scores, strict=True):
        print(f"{score:.3f}  {step.strip()}")
    print(f"{len(found.pruned)} beginnings dropped, {found.usage.scored_tokens} tokens rated")
