"""The tasks of `tilebeam eval` by name, and the one way to open one.

    kinds        the table: what --task takes, in words, and the class behind it. Importing this imports none of them.
    task         a task: items, prompts, how a text's answer is found and who judges it
    file_task    a task whose items are the lines of a file
    gym, jsonl, gsm8k ..   one module per kind

A task is made from `TaskOptions` alone, so every process of an evaluation makes the same one; `Task.digest` proves it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tilebeam.errors import TilebeamError
from tilebeam.evaluation.task_options import TaskOptions

if TYPE_CHECKING:
    from tilebeam.evaluation.tasks.task import Task


@dataclass(frozen=True)
class TaskKind:
    """A kind of task.

    Attributes:
        usage: what --task takes.
        title: the benchmark's name in reports, "" if each file is another one.
        where: module in this package and class.
    """

    usage: str
    title: str
    where: tuple[str, str]


KINDS = {
    "jsonl": TaskKind("jsonl:FILE", "", ("jsonl", "JsonlTask")),
    "gsm8k": TaskKind("gsm8k:FILE", "GSM8K", ("gsm8k", "Gsm8kTask")),
    "humaneval": TaskKind("humaneval:FILE", "HumanEval", ("humaneval", "HumanEvalTask")),
    "bfcl": TaskKind("bfcl:FILE", "BFCL", ("bfcl", "BfclTask")),
    "math": TaskKind("math:FILE", "MATH", ("competition_math", "MathTask")),
    "reasoning-gym": TaskKind("reasoning-gym:NAME[?option=value&..]", "", ("gym", "GymTask")),
}
# Data sets of multiple choice, and what lm-evaluation-harness calls them.
_HARNESS = {"mmlu": "mmlu", "hellaswag": "hellaswag", "winogrande": "winogrande", "choice": "hellaswag,winogrande"}


def title_of(spec: str) -> str:
    """Name the task of --task as people do: the benchmark's name, else the file's or the generator's."""
    kind, _, rest = spec.partition(":")
    return KINDS[kind].title or Path(rest.partition("?")[0]).stem


def open_task(options: TaskOptions) -> Task:
    """Open the task that options name.

    Raises:
        TilebeamError: there is no such task, or it cannot be made; says why.
    """
    name, _, rest = options.spec.partition(":")
    for option, value, least in (("items", options.items, 1), ("shots", options.shots, 0)):
        if value is not None and value < least:
            raise TilebeamError(f"--{option} must be at least {least}, not {value}.")
    if name in _HARNESS:
        raise TilebeamError(
            f"--task {name}: tilebeam eval scores no multiple choice; lm-evaluation-harness does: tilebeam-lm-eval "
            f"--model tilebeam --model_args path=MODEL.gguf --tasks {_HARNESS[name]}"
        )
    if name not in KINDS or not rest:
        raise TilebeamError(f"--task {options.spec!r}: write {', or '.join(k.usage for k in KINDS.values())}.")
    module, cls = KINDS[name].where
    task: Task = getattr(importlib.import_module(f"{__name__}.{module}"), cls)(options)
    return task
