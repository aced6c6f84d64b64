"""Eight programs, and the one that passes the examples in the docstring: python code_examples.py MODEL."""

import sys

import tilebeam

FUNCTION = '''
def roman(n: int) -> str:
    """Write a number from 1 to 3999 in Roman numerals.

    >>> roman(9)
    'IX'
    >>> roman(44)
    'XLIV'
    """
'''
REQUEST = f"Write this Python function. Answer with the code alone, in one block.\n```python{FUNCTION}```"

with tilebeam.load(sys.argv[1], n_seq_max=8) as lm:
    prompt = lm.chat_prompt([{"role": "user", "content": REQUEST}])
    params = tilebeam.SamplingParams(max_tokens=400, seed=1)
    # Programs run confined: without files, without a network, for seconds.
    found = tilebeam.BestOfN(tilebeam.CodeExamples()).infer(lm, prompt, budget=8, sampling=params)
    print(found.best.text)
    print("share of the examples that each passes:", *found.scores)
