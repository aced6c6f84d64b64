"""What can be said of an evaluation, and the defaults. Importing this needs no numpy."""

from __future__ import annotations

from dataclasses import dataclass

SEEDS = (1, 2, 3)  # every item runs once with each
UNIT_ITEMS = 8  # items that run together


@dataclass(frozen=True)
class TaskOptions:
    """What makes a task.

    Attributes:
        spec: "reasoning-gym:NAME[?config]" or "jsonl:FILE".
        items: how many; None: 100 generated ones, or all of a file.
        item_seed: of generated items.
        pilot_seed: the first `pilot_items` items that this seed gives are left out: on them prompts were tuned.
        shots: solved examples in front of every prompt; generated with `shot_seed`, or from `shots_file`.
        shots_file: JSONL of examples: prompt, answer.
        prefix: text in front of all (before the examples).
        template: of one question; "{question}" and "{prompt}" are its text, other fields of an item by their names.
            None: 'Question: {question}\\nAnswer:' for generated tasks, '{prompt}' for files.
        shot_answer: what follows the template in an example.
        question: regular expression; its groups (without any, all of it) in the generated text are the question.
        extract: last-number, text, line, a regular expression, or a function (module:function, FILE.py:function).
            None: line for generated tasks, last-number for files.
        checker: function of item and text (module:function, FILE.py:function); None: reasoning-gym's own verifier,
            or the item's answer.
    """

    spec: str
    items: int | None = None
    item_seed: int = 1
    pilot_seed: int | None = None
    pilot_items: int = 100
    shots: int = 0
    shot_seed: int = 777
    shots_file: str | None = None
    prefix: str = ""
    template: str | None = None
    shot_answer: str = " {answer}\n\n"
    question: str | None = None
    extract: str | None = None
    checker: str | None = None
