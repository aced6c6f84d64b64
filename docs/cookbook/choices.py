"""Which answer a model finds likeliest, without generating: python choices.py MODEL."""

import sys

import tilebeam

QUESTIONS = [
    ("The capital of France is", [" Paris", " Lyon", " Berlin"]),
    ("Water boils at a temperature of", [" 100 degrees Celsius", " 10 degrees Celsius"]),
]

with tilebeam.load(sys.argv[1]) as lm:
    # One call: what texts have in common is decoded once, and all of them share batches.
    for (question, choices), found in zip(QUESTIONS, lm.loglikelihoods(QUESTIONS), strict=True):
        best = max(range(len(choices)), key=lambda i: found[i].per_character)
        print(question + choices[best])
        for choice, likelihood in zip(choices, found, strict=True):
            print(f"  {likelihood.logprob:8.2f} {likelihood.per_character:8.3f} {choice}")
