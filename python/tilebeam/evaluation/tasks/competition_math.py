"""math:FILE, competition problems in the lines of MATH's splits in PRM800K: {"problem": .., "solution": ..,
"answer": .., "subject": .., "level": .., "unique_id": ..}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tilebeam.answers.extract import framed
from tilebeam.answers.normalize import faithful_math
from tilebeam.errors import TilebeamError
from tilebeam.evaluation.tasks.file_task import FileTask, text_of
from tilebeam.evaluation.tasks.task import Defaults, Item

_ASK = "{question}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."


class MathTask(FileTask):
    """The answer is what the last \\boxed{} holds, equal as mathematics (math-verify)."""

    chats: ClassVar[bool] = True
    file_shots: ClassVar[int | None] = 4

    def _defaults(self) -> Defaults:
        if self.chat:
            return Defaults(_ASK, "math", "{solution}", max_tokens=1024)
        return Defaults(
            "Problem:\n{question}\n\nSolution:", "math", "\n{solution}\n\n", max_tokens=1024, stop=("\nProblem:",)
        )

    def _fields(self, line: Mapping[str, Any], where: str) -> dict[str, Any]:
        solution = text_of(line, "solution", where)
        answer = line.get("answer") or framed(solution)
        if not isinstance(answer, str):
            raise TilebeamError(f'{where} has no text under "answer", and no box in its solution.')
        named = {"id": str(line["unique_id"])} if "unique_id" in line else {}
        return {**line, **named, "question": text_of(line, "problem", where), "answer": faithful_math(answer)}

    def _judge(self, item: Item, text: str) -> bool:
        answer = self.extract(text)
        return answer is not None and (answer == item.answer or self.equal(answer, item.answer))
