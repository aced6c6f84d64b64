"""Five small functions to write, each with examples in its docstring, and tests that no model is shown.

The model answers each once, greedily, and then 8 times at once; of the 8, the examples choose one. The hidden tests
judge both. These are the five of twelve functions of which samples, in pilots with other seeds, were right most nearly
one time in three; some were changed after a look at earlier answers. It shows what a search does and measures nothing:
docs/results.md does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import tilebeam
from rich.console import Console
from rich.live import Live
from rich.table import Table
from tilebeam.answers.code import program_of, question_of
from tilebeam.outputs import Progress
from tilebeam.sandbox import Test, run_tests

BUDGET = 8
MAX_TOKENS = 400
REQUEST = "Write this Python function. Answer with the code alone, in one block.\n```python\n{}```"

SOURCES = '''
def roman(n: int) -> str:
    """Write a number from 1 to 3999 in Roman numerals.

    >>> roman(9)
    'IX'
    >>> roman(44)
    'XLIV'
    """

def rle(text: str) -> str:
    """Write each run of equal characters as its length and the character.

    >>> rle('aaab')
    '3a1b'
    >>> rle('')
    \'\'
    """

def balanced(text: str) -> bool:
    """Whether every bracket of (), [] and {} is closed by its own kind in the right order; ignore other characters.

    >>> balanced('f(a[0])')
    True
    >>> balanced('(]')
    False
    """

def rpn(text: str) -> int:
    """Evaluate an expression of whole numbers and + - * in postfix order.

    >>> rpn('3 4 + 2 *')
    14
    >>> rpn('5 1 -')
    4
    """

def caesar(text: str, shift: int) -> str:
    """Shift letters along the alphabet, around its end; keep their case, and keep all else.

    >>> caesar('xyz', 3)
    'abc'
    >>> caesar('Hi, Bob!', 1)
    'Ij, Cpc!'
    """
'''
HIDDEN = {
    "roman": ("roman(1) == 'I'", "roman(40) == 'XL'", "roman(1994) == 'MCMXCIV'", "roman(3999) == 'MMMCMXCIX'"),
    "rle": ("rle('abc') == '1a1b1c'", "rle('aabbaa') == '2a2b2a'", "rle('zzzzzzzzzzzz') == '12z'"),
    "balanced": (
        *("balanced('') is True", "balanced('{[()]}') is True", "balanced('([)]') is False"),
        *("balanced('(((') is False", "balanced(')(') is False"),
    ),
    "rpn": ("rpn('7') == 7", "rpn('1 2 3 - -') == 2", "rpn('2 3 4 * +') == 14"),
    "caesar": ("caesar('abc', -1) == 'zab'", "caesar('Zoo', 27) == 'App'", "caesar('', 5) == ''"),
}
FUNCTIONS = dict(zip(HIDDEN, (f"def {source}" for source in SOURCES.split("\ndef ")[1:]), strict=True))


def passed(name: str, text: str) -> str:
    """Judge an answer by the hidden tests: "right", or how many it passes."""
    question = question_of(FUNCTIONS[name])
    assert question is not None
    tests = [Test(f"assert {equation}") for equation in HIDDEN[name]]
    right = sum(run_tests(program_of(question, text), name, tests, setup=question.source).passed)
    return "right" if right == len(tests) else f"wrong ({right} of {len(tests)} tests)"


def race(lms: Sequence[tilebeam.LM], names: Sequence[str], seed: int, screen: Console) -> None:
    """Show one greedy answer of each model, and the best of 8 of the first, in a table that grows."""
    heads = ["one answer", f"best of {BUDGET} by the examples", "larger model, one answer"][: 1 + len(lms)]
    rows = {name: [""] * len(heads) for name in names}
    right, spent = [0] * len(heads), [0.0] * len(heads)
    search = tilebeam.BestOfN(tilebeam.CodeExamples())
    greedy = tilebeam.SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    drawn = tilebeam.SamplingParams(temperature=0.8, max_tokens=MAX_TOKENS, seed=seed)

    def table() -> Table:
        shown = Table("function", *heads)
        for name, cells in rows.items():
            shown.add_row(name, *(f"[green]{c}" if c.startswith("right") else c for c in cells))
        shown.add_section()
        ends = (f"{n} right, {seconds:.0f} s" for n, seconds in zip(right, spent, strict=True))
        shown.add_row(f"of {len(names)}", *ends, style="bold")
        return shown

    with Live(table(), console=screen, auto_refresh=False) as live:

        def show(name: str, column: int, cell: str) -> bool:
            rows[name][column] = cell
            live.update(table(), refresh=screen.is_terminal)
            return True

        for name in names:
            for column in range(len(heads)):

                def writing(state: Progress, name: str = name, column: int = column) -> bool:
                    return show(name, column, f"{state.tokens} tokens ..")

                lm, began = lms[column == 2], time.monotonic()
                prompt = lm.chat_prompt([{"role": "user", "content": REQUEST.format(FUNCTIONS[name])}])
                if column == 1:
                    text = search.infer(lm, prompt, BUDGET, sampling=drawn, progress=writing).best.text
                else:
                    text = lm.generate([prompt], greedy, progress=writing)[0].outputs[0].text
                seconds = time.monotonic() - began
                verdict = passed(name, text)
                right[column], spent[column] = right[column] + (verdict == "right"), spent[column] + seconds
                show(name, column, f"{verdict}, {seconds:.1f} s")
