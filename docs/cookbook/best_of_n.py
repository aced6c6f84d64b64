"""The best of sixteen answers by a reward head on the model's own hidden states: python best_of_n.py MODEL HEAD.

bench/real/heads has those of two models; `tilebeam reward train -m MODEL --task gsm8k:train.jsonl -o HEAD` makes one.
"""

import sys

import tilebeam

QUESTION = "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total?"

head = tilebeam.load_head(sys.argv[2])
with tilebeam.load(sys.argv[1], n_seq_max=16, hidden_layer=head.layer) as lm:
    prompt = lm.chat_prompt([{"role": "user", "content": QUESTION}])
    params = tilebeam.SamplingParams(max_tokens=200, temperature=0.8, seed=1)
    found = tilebeam.BestOfN(tilebeam.OwnReward(lm, head)).infer(lm, prompt, budget=16, sampling=params)
    print(found.best.text)
    print("scores:", " ".join(f"{score:.2f}" for score in sorted(found.scores, reverse=True)))
    print("tokens decoded to rate them:", found.usage.scored_tokens)
