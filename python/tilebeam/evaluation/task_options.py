"""The options of a task, and defaults of an evaluation. Importing this needs no numpy."""

from __future__ import annotations

from dataclasses import dataclass

SEEDS = (1, 2, 3)  # every item runs once with each
UNIT_ITEMS = 8  # items that run together


@dataclass(frozen=True)
class TaskOptions:
    """What makes a task.

    Attributes:
        spec: KIND:REST, such as "gsm8k:FILE"; `tilebeam.evaluation.tasks.KINDS` has all.
        items: how many, the first of the file; None: all.
        shots: solved examples in front of every prompt, the first of `shots_file`; 0: as many as the task usually has.
        shots_file: examples, lines as the task's own.
        template: of one question; "{question}" and "{prompt}" are its text, other fields of an item by their names.
            None: the task's own.
        shot_answer: what follows the template in an example; None: the task's own.
        extract: last-number, text, line, a regular expression, or a function (module:function, FILE.py:function).
            None: the task's own.
        checker: function of item and text (module:function, FILE.py:function); None: the item's
            answer, or the task's own judge.
        chat: prompts go through the model's chat template, examples as earlier turns; None: as the task usually does.
        tir: prompts ask for programs, and those that samples write are run while they are drawn, by all methods.
        programs: a text's answer is what its program prints, where it holds one; see `tilebeam.ProgramAnswer`.
        tools_grammar: of a task with functions: samples are held to calls that are valid under their schemas; else
            models write what they want.
        unsafe_code: run programs that a model wrote even where they cannot be confined.
        field: the question's name in the lines of a file; None: as the task and `question_files` have it.
    """

    spec: str
    items: int | None = None
    shots: int = 0
    shots_file: str | None = None
    template: str | None = None
    shot_answer: str | None = None
    extract: str | None = None
    checker: str | None = None
    chat: bool | None = None
    tir: bool = False
    programs: bool = False
    tools_grammar: bool = True
    unsafe_code: bool = False
    field: str | None = None
