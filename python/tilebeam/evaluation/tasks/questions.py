"""Tasks whose texts hold an answer that is compared with the right one: a user's own items, GSM8K, MATH."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from tilebeam.answers.extract import framed
from tilebeam.answers.normalize import faithful_math, normalize_answer
from tilebeam.errors import TilebeamError
from tilebeam.evaluation.tasks.task import Defaults, Task, text_of

# What instruct models were trained on; with examples, what the examples do.
_ASK_NUMBER = "{question}\n\nPlease reason step by step, and put your final answer, a number, within \\boxed{{}}."
_ASK_NUMBER_AGAIN = "{question}\n\nReason step by step, and end with #### and the final number."
_ASK = "{question}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_CALCULATION = re.compile(r"<<[^<>]*>>")  # what GSM8K adds for calculators


class JsonlTask(Task):
    """jsonl:FILE, a user's own items: {"prompt": .., "answer": .., "id": .., ..}. Prompts are as they are."""

    asked: ClassVar[str] = "prompt"

    def _defaults(self) -> Defaults:
        return Defaults(template="{question}", extract="last-number")

    def _fields(self, line: Mapping[str, Any], asked: str, where: str) -> dict[str, Any]:
        answer = line.get("answer", "")
        if not isinstance(answer, (str, int, float)) or isinstance(answer, bool):
            raise TilebeamError(f'{where}: "answer" must be a text or a number.')
        if "checker" in line and self.options.checker is None:
            raise TilebeamError(
                f"{where}: an item has no checker of its own. Name one for all: --checker FILE.py:function"
            )
        return {"prompt": asked, **line, "question": asked, "answer": str(answer) if "answer" in line else None}


class Gsm8kTask(Task):
    """gsm8k:FILE, grade-school word problems in GSM8K's own lines: {"question": .., "answer": "reasoning\\n#### 18"}.
    A text's answer is the number behind the last ####, else that in the last \\boxed{}, else the last number of all."""

    chats: ClassVar[bool] = True
    file_shots: ClassVar[int | None] = 8

    def _defaults(self) -> Defaults:
        if self.chat:
            ask = _ASK_NUMBER_AGAIN if self.options.shots or self.options.shots_file else _ASK_NUMBER
            return Defaults(ask, "gsm8k", "{solution}", max_tokens=512)
        return Defaults(
            "Question: {question}\nAnswer:", "gsm8k", " {solution}\n\n", max_tokens=512, stop=("\nQuestion:",)
        )

    def _fields(self, line: Mapping[str, Any], asked: str, where: str) -> dict[str, Any]:
        if "answer" not in line:
            return {**line, "question": asked.strip(), "answer": None}
        solution, mark, answer = _CALCULATION.sub("", text_of(line, "answer", where)).rpartition("####")
        if not mark or not answer.strip():
            raise TilebeamError(f'{where}: the text under "answer" does not end in #### and a number.')
        return {
            **line,
            "question": asked.strip(),
            "solution": f"{solution.rstrip()}\n#### {answer.strip()}".lstrip(),
            "answer": normalize_answer(answer),
        }


class MathTask(Task):
    """math:FILE, competition problems in the lines of MATH's splits in PRM800K: {"problem": .., "solution": ..,
    "answer": .., "unique_id": ..}. A text's answer is what its last \\boxed{} holds, equal as mathematics."""

    chats: ClassVar[bool] = True
    file_shots: ClassVar[int | None] = 4
    asked: ClassVar[str] = "problem"

    def _defaults(self) -> Defaults:
        if self.chat:
            return Defaults(_ASK, "math", "{solution}", max_tokens=1024)
        return Defaults(
            "Problem:\n{question}\n\nSolution:", "math", "\n{solution}\n\n", max_tokens=1024, stop=("\nProblem:",)
        )

    def _fields(self, line: Mapping[str, Any], asked: str, where: str) -> dict[str, Any]:
        named = {"id": str(line["unique_id"])} if "unique_id" in line else {}
        if "solution" not in line and "answer" not in line:
            return {**line, **named, "question": asked, "answer": None}
        solution = text_of(line, "solution", where)
        answer = line.get("answer") or framed(solution)
        if not isinstance(answer, str):
            raise TilebeamError(f'{where} has no text under "answer", and no box in its solution.')
        return {**line, **named, "question": asked, "answer": faithful_math(answer)}
