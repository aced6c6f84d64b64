"""The tiny world's task: expressions worked out one operation per line, and an exact checker of every line.

    9-4+7*3-8     the problem
    9-4+21-8      each line does one operation of the line before
    5+21-8
    26-8
    18            a line without operations is the answer

Multiplications go before additions and subtractions, and those go from left to right; every order that ordinary
arithmetic allows is right. Everything is drawn from a seed. Which of three sets an expression belongs to (to learn
from, to decide by when to stop, to test on) a hash of the expression itself says, so the sets never meet.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Mapping
from typing import Any, Literal

Split = Literal["train", "validation", "test"]

LARGEST = 99  # of all numbers on the way, in absolute value
TERMS = (3, 6)  # numbers in a problem
_OPERANDS = (0, 29)
_FACTORS = (2, 9)  # behind a multiplication sign

_NUMBER = r"\d{1,3}"
_LINE = re.compile(rf"-?{_NUMBER}([-+*]{_NUMBER})*")
_PART = re.compile(r"\d+|[-+*]")
_ANSWER = re.compile(rf"-?{_NUMBER}")


def split_of(problem: str) -> Split:
    """Return the set an expression belongs to: 14 of 16 are for training."""
    part = hashlib.sha256(problem.encode()).digest()[0] % 16
    return "test" if part == 0 else "validation" if part == 1 else "train"


def draw(rng: random.Random, split: Split, terms: tuple[int, int] = TERMS) -> str:
    """Draw a random expression of a set, with `terms[0]` to `terms[1]` numbers, all on the way within `LARGEST`."""
    while True:
        text = str(rng.randint(*_OPERANDS))
        for _ in range(rng.randint(*terms) - 1):
            operation = rng.choice("+-*")
            text += operation + str(rng.randint(*(_FACTORS if operation == "*" else _OPERANDS)))
        if split_of(text) == split and solution(text) is not None:
            return text


def draw_many(seed: int, split: Split, count: int, terms: tuple[int, int] = TERMS) -> list[str]:
    rng = random.Random(f"{split} {seed}")
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw(rng, split, terms)] = None
    return list(found)


def parts_of(line: str) -> list[str] | None:
    """Numbers and operations of a line in turn, a leading minus joined to its number; None if it is no expression."""
    if not _LINE.fullmatch(line):
        return None
    parts = _PART.findall(line)
    if parts[0] == "-":
        parts[:2] = ["-" + parts[1]]
    return parts


def value(line: str) -> int | None:
    """Return what a line is worth; None if it is no expression."""
    parts = parts_of(line)
    if parts is None:
        return None
    total, sign, product = 0, 1, int(parts[0])
    for operation, number in zip(parts[1::2], parts[2::2], strict=True):
        if operation == "*":
            product *= int(number)
        else:
            total, sign, product = total + sign * product, 1 if operation == "+" else -1, int(number)
    return total + sign * product


def successors(line: str) -> list[str]:
    """Every line that one operation makes of a line; the first is the one `solution` takes."""
    parts = parts_of(line) or []
    operations = parts[1::2]
    order = sorted(range(len(operations)), key=lambda i: operations[i] != "*")
    found = (_reduced(parts, i) for i in order if _may_go_first(operations, i))
    return [text for text in found if text is not None]


def _may_go_first(operations: list[str], i: int) -> bool:
    """Return whether doing operation i keeps the value: no sum beside a product, nothing taken from behind a minus."""
    if operations[i] == "*":
        return True
    behind_plus = i == 0 or operations[i - 1] == "+"
    return behind_plus and (i + 1 == len(operations) or operations[i + 1] != "*")


def _reduced(parts: list[str], i: int) -> str | None:
    """Return the line after operation i; None if the result is too large, or negative with an operation before it."""
    a, operation, b = int(parts[2 * i]), parts[2 * i + 1], int(parts[2 * i + 2])
    result = a * b if operation == "*" else a + b if operation == "+" else a - b
    if abs(result) > LARGEST or (i > 0 and result < 0):
        return None
    return "".join([*parts[: 2 * i], str(result), *parts[2 * i + 3 :]])


def solution(problem: str) -> list[str] | None:
    """Work a problem out line by line, products first, from left to right; None if a number leaves the range."""
    if value(problem) is None or problem.lstrip("-").isdigit():
        return None
    lines: list[str] = []
    parts = parts_of(problem) or []
    while len(parts) > 1:
        line = _reduced(parts, parts[1::2].index("*") if "*" in parts else 0)
        if line is None:
            return None
        lines.append(line)
        parts = parts_of(line) or []
    return lines


def check_lines(problem: str, lines: list[str]) -> list[bool]:
    """For every line: is it, and all before it, one operation done right on the line before?"""
    verdicts: list[bool] = []
    good, before = True, problem
    for line in lines:
        good = good and line in successors(before)
        verdicts.append(good)
        before = line
    return verdicts


def answer(text: str) -> str | None:
    """Return the answer of a worked solution: its last line, if that is a number."""
    last = text.rstrip("\n").rsplit("\n", 1)[-1]
    return last if _ANSWER.fullmatch(last) else None


def is_right(problem: str, text: str) -> bool:
    found = answer(text)
    return found is not None and int(found) == value(problem)


def verdict(item: Mapping[str, Any], text: str) -> bool:
    """`is_right` as a checker of `tilebeam eval`: the item's prompt is the problem and a newline."""
    return is_right(str(item["prompt"]).rstrip("\n"), text)
