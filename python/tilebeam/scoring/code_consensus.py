"""A scorer of programs that asks what they do: programs that behave alike are right together more often than alone.

Candidates run on the inputs of the question's examples and on variations of them. Nobody says what should come out; the
examples' own values count first. (Clusters by behaviour: AlphaCode, Li et al. 2022, section 4.5.)
"""

from __future__ import annotations

import ast
import hashlib
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tilebeam.answers.code import Question, program_of
from tilebeam.answers.example_forms import examples_of
from tilebeam.outputs import CompletionOutput
from tilebeam.prompt import Prompt
from tilebeam.sandbox import run
from tilebeam.scoring.code_examples import CodeExamples, question_in
from tilebeam.scoring.scorers import Scorer, log_probability

INPUTS = 40  # calls of each program
SECONDS = 2  # of CPU time for all of them
MOST = 24  # characters of a line that says what a call gave
# Runs behind the program. An input is written anew for each call, since the function may change it.
_ASK = """
import hashlib as _hashlib, io as _io, sys as _sys
_here, _sys.stdout = _sys.stdout, _io.StringIO()  # what the program prints is no answer
def _told(value):
    if isinstance(value, float):
        return format(value, ".9g")
    if isinstance(value, (list, tuple)):
        return type(value).__name__ + "(" + ",".join(map(_told, value)) + ")"
    if isinstance(value, (set, frozenset)):
        return "set(" + ",".join(sorted(map(_told, value))) + ")"
    if isinstance(value, dict):
        return "dict(" + ",".join(sorted(_told(k) + ":" + _told(v) for k, v in value.items())) + ")"
    said = repr(value)
    if " at 0x" in said and not isinstance(value, str):
        raise TypeError  # an address: a generator or function says nothing about its values
    return said
for _call in {calls!r}:
    try:
        _said = _told(eval(_call))
    except Exception as _error:
        _said = "!" + type(_error).__name__
    _here.write(_said[0] + _hashlib.blake2b(_said.encode("utf-8", "replace"), digest_size=8).hexdigest() + "\\n")
"""


class CodeConsensus(Scorer):
    """Which program does what most others do, of those that pass most of the question's examples.

    A candidate's agreement is the share of candidates that give the same value for a call, in the mean over about 40
    calls. Candidates that agree alike are told apart by the model's mean probability per token.

    A program shares its process with what notes its values, and may write others. It wins nothing so: what the others
    gave it does not see, and a value that it could write to agree with them it could return as well.

    Args:
        examples: let the examples' expected values decide first; without them only their inputs are used.
        unsafe: run programs even where they cannot be confined.
    """

    needs_logprobs = True
    knows = True

    def __init__(self, *, examples: bool = True, unsafe: bool = False) -> None:
        self._examples = CodeExamples(unsafe=unsafe) if examples else None
        self._unsafe = unsafe

    def score(self, prompt: str | Prompt, candidates: Sequence[CompletionOutput]) -> list[float]:
        """Return a number of 0 to 2 per candidate.

        Raises:
            TilebeamError: the prompt holds no Python function to complete, or programs cannot be confined here.
        """
        question = question_in(prompt, "behavior")
        calls = calls_of(question)
        programs = [program_of(question, c.text) for c in candidates]
        told = {p: behaviour(p, calls, unsafe=self._unsafe) if calls else [] for p in dict.fromkeys(programs)}
        agreed = agreement([told[p] for p in programs], len(calls))
        likely = [math.exp(log_probability(c, per_token=True)) for c in candidates]
        scores = [(2 * a + p) / 3 for a, p in zip(agreed, likely, strict=True)]
        if self._examples is None:
            return scores
        passed = self._examples.score(prompt, candidates)
        # Less than what one example more is worth.
        small = 1 / (1 + len(examples_of(question.source, question.function)))
        return [e + small * s for e, s in zip(passed, scores, strict=True)]


def agreement(behaviours: Sequence[Sequence[str]], calls: int) -> list[float]:
    """Return for each program the share of programs that give the same value, in the mean over calls; a call that
    raises or gives nothing agrees with none."""
    votes = [Counter(b[i] for b in behaviours if i < len(b)) for i in range(calls)]
    return [
        sum(votes[i][value] for i, value in enumerate(told) if value[0] != "!") / max(1, calls * len(behaviours))
        for told in behaviours
    ]


def behaviour(program: str, calls: Sequence[str], *, unsafe: bool = False) -> list[str]:
    """Run a program, and make calls of its function.

    Returns:
        For each call a digest of its value, or "!.." if it raises; fewer than calls where one does not end.
    """
    asks = _ASK.replace("{calls!r}", repr(list(calls)))
    said = run(asks, before=[program], max_output=MOST * len(calls), timeout=SECONDS, unsafe=unsafe)
    return said.output.split()[: len(calls)]


def calls_of(question: Question) -> list[str]:
    """Write calls of a question's function: those of its examples, and variations of their arguments."""
    tests = [test.source for test in examples_of(question.source, question.function)]
    found = [call for test in tests if (call := _call(test, question.function))]
    calls = list(dict.fromkeys(_written(question.function, *call) for call in found))
    # The same calls for the same question.
    rng = random.Random(hashlib.sha256(question.source.encode(errors="surrogatepass")).digest())
    for _ in range(4 * INPUTS if any(p or n for p, n in found) else 0):
        positional, named = rng.choice(found)
        values = [*positional, *named.values()]
        if len(calls) >= INPUTS or not values:
            continue
        place = rng.randrange(len(values))
        values[place] = _varied(values[place], rng)
        names = dict(zip(named, values[len(positional) :], strict=True))
        calls.append(_written(question.function, values[: len(positional)], names))
    return list(dict.fromkeys(calls))[:INPUTS]


def _call(source: str, function: str) -> tuple[list[Any], dict[str, Any]] | None:
    """Find a call of plain data in an example, which may be a part of a longer expression."""
    try:
        for node in ast.walk(ast.parse(source, mode="eval")):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function:
                named = {k.arg: ast.literal_eval(k.value) for k in node.keywords if k.arg is not None}
                return [ast.literal_eval(a) for a in node.args], named
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        pass
    return None


def _written(function: str, positional: Sequence[Any], named: dict[str, Any]) -> str:
    return f"{function}({', '.join([*map(repr, positional), *(f'{k}={v!r}' for k, v in named.items())])})"


def _varied(value: Any, rng: random.Random) -> Any:
    """Change a value a little: its type stays."""
    match value:
        case bool():
            return not value
        case int():
            return rng.choice(
                [value + 1, value - 1, 2 * value, 2 * value + 1, value // 2, 0, 1, rng.randint(0, abs(value) + 9)]
            )
        case float():
            return rng.choice([value + 1, value - 0.5, -value, value / 2, 0.0, round(value * rng.random(), 2)])
        case str():
            return "".join(_rearranged(list(value), rng))
        case list() | tuple():
            items = list(value)
            if items and rng.random() < 0.4:
                place = rng.randrange(len(items))
                items[place] = _varied(items[place], rng)
            else:
                items = _rearranged(items, rng)
            return type(value)(items)
        case dict():
            items = list(value.items())
            if items and rng.random() < 0.5:
                place = rng.randrange(len(items))
                items[place] = (items[place][0], _varied(items[place][1], rng))
            elif items:
                items.pop(rng.randrange(len(items)))
            return dict(items)
        case set() | frozenset():
            return type(value)(_rearranged(sorted(value, key=repr), rng))
    return value


def _rearranged(items: list[Any], rng: random.Random) -> list[Any]:
    """Drop, repeat, exchange or shuffle items of a list."""
    if not items:
        return items
    place, other = rng.randrange(len(items)), rng.randrange(len(items))
    match rng.randrange(6):
        case 0:
            return [*items[:place], *items[place + 1 :]]
        case 1:
            return [*items[:place], items[other], *items[place:]]
        case 2:
            return items[::-1]
        case 3:
            return items[: max(1, place)]
        case 4:
            return [*items, *items[place:]]
    return rng.sample(items, len(items))
