"""The tasks of `tilebeam eval` by name, and the one way to open one.

    kinds        the table: what --task takes, in words, and the class behind it. Importing this imports none of them.
    task         a task: the lines of a file, prompts, how a text's answer is found and who judges it
    questions    the kinds whose answers are compared; programs (humaneval) and calls (bfcl) have modules of their own

A task is made from `TaskOptions` alone, so every process of an evaluation makes the same one; `Task.digest` proves it.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from tilebeam.errors import TilebeamError
from tilebeam.evaluation.task_options import TaskOptions

if TYPE_CHECKING:
    from tilebeam.evaluation.tasks.task import Task


# Of each kind the benchmark's name in reports ("" if each file is another one), module and class.
KINDS = {
    "jsonl": ("", "questions", "JsonlTask"),
    "gsm8k": ("GSM8K", "questions", "Gsm8kTask"),
    "math": ("MATH", "questions", "MathTask"),
    "humaneval": ("HumanEval", "humaneval", "HumanEvalTask"),
    "bfcl": ("BFCL", "bfcl", "BfclTask"),
}


def title_of(spec: str) -> str:
    """Name the task of --task as people do: the benchmark's name, else the file's."""
    kind, _, file = spec.partition(":")
    return KINDS[kind][0] or Path(file).stem


def open_task(options: TaskOptions) -> Task:
    """Open the task that options name.

    Raises:
        TilebeamError: there is no such task, or it cannot be made; says why.
    """
    name, _, rest = options.spec.partition(":")
    for option, value, least in (("items", options.items, 1), ("shots", options.shots, 0)):
        if value is not None and value < least:
            raise TilebeamError(f"--{option} must be at least {least}, not {value}.")
    if name not in KINDS or not rest:
        raise TilebeamError(
            f"--task {options.spec!r}: write KIND:FILE with {', '.join(KINDS)}. Choices by likelihood, as mmlu has "
            "them: LM.loglikelihoods, in docs/evaluation.md."
        )
    if not options.tools_grammar and name != "bfcl":
        raise TilebeamError(f"--no-tools-grammar is for bfcl: items of {name} offer no functions.")
    _, module, cls = KINDS[name]
    task: Task = getattr(importlib.import_module(f"{__name__}.{module}"), cls)(options)
    return task
