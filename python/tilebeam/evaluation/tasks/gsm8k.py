"""gsm8k:FILE, grade-school word problems in GSM8K's own lines: {"question": .., "answer": "reasoning\\n#### 18"}."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from tilebeam.answers.normalize import normalize_answer
from tilebeam.errors import TilebeamError
from tilebeam.evaluation.tasks.file_task import FileTask, text_of
from tilebeam.evaluation.tasks.task import Defaults

# What instruct models were trained on; with examples, what the examples do.
_ASK = "{question}\n\nPlease reason step by step, and put your final answer, a number, within \\boxed{{}}."
_ASK_AGAIN = "{question}\n\nReason step by step, and end with #### and the final number."
_CALCULATION = re.compile(r"<<[^<>]*>>")  # what the data set adds for calculators


class Gsm8kTask(FileTask):
    """The answer is the number behind the last ####, else that in the last \\boxed{}, else the last number of all."""

    chats: ClassVar[bool] = True
    file_shots: ClassVar[int | None] = 8

    def _defaults(self) -> Defaults:
        if self.chat:
            ask = _ASK_AGAIN if self.options.shots or self.options.shots_file else _ASK
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
