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

    def _judge(self, item: Item, text: str) -> bool:
        answer = self.extract(text)
        assert item.answer is not None  # `verdict` asked
        return answer is not None and (answer == item.answer or self.equal(answer, item.answer))
