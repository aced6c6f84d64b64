"""humaneval:FILE, programs in HumanEval's own lines: {"task_id": .., "prompt": .., "entry_point": ..,
"canonical_solution": .., "test": ..}.

The tests judge and are hidden: nothing that chooses among candidates sees them but the scorer "verifier", which is a
bound. The examples in the docstrings are part of the question; the scorer "examples" checks them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from tilebeam.answers.code import Question, program_of
from tilebeam.errors import TilebeamError
from tilebeam.evaluation.task_options import TaskOptions
from tilebeam.evaluation.tasks.task import Defaults, Item, Task, text_of
from tilebeam.sandbox import Test, need_confinement, run_tests

_ASK = (
    "Complete this Python function. Reply with the complete function in one code block.\n\n```python\n{question}\n```"
)
# What begins at the margin is no longer the function.
_ENDS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n```", "\n@")


class HumanEvalTask(Task):
    """Programs, right if they pass all tests; they run confined, see `tilebeam.sandbox`."""

    chats: ClassVar[bool] = True
    file_shots: ClassVar[int | None] = 2
    asked: ClassVar[str] = "prompt"

    def __init__(self, options: TaskOptions) -> None:
        if options.tir or options.programs:
            option = "--tir" if options.tir else "--programs"
            raise TilebeamError(f"{option} is for problems that have an answer; humaneval asks for the program itself.")
        self._judged: dict[tuple[str, str], bool] = {}  # several scorers ask about one text
        super().__init__(options)
        if self._check is None:
            need_confinement(unsafe=options.unsafe_code)

    def _defaults(self) -> Defaults:
        scorers = ("logprob", "examples")
        if self.chat:
            answer = "```python\n{solution}\n```"
            return Defaults(_ASK, "code", answer, max_tokens=768, stop=("\n```\n\n",), scorers=scorers)
        continued = "{canonical_solution}\n\n"
        return Defaults("{prompt}", "code", continued, max_tokens=512, stop=_ENDS, scorers=scorers)

    def _fields(self, line: Mapping[str, Any], asked: str, where: str) -> dict[str, Any]:
        solution = text_of(line, "canonical_solution", where)
        function = text_of(line, "entry_point", where)
        text_of(line, "test", where)
        if f"def {function}(" not in asked:
            raise TilebeamError(f"{where}: the prompt does not define {function}.")
        return {
            **line,
            "prompt": asked,
            "id": text_of(line, "task_id", where),
            "question": asked.strip("\n"),
            "solution": (asked + solution).strip("\n"),
            "answer": solution,
        }

    def _sources(self) -> list[str]:
        """Name the hidden tests, which judge."""
        return [json.dumps([[i.data["test"], i.data["entry_point"]] for i in self.items])]

    def judges(self, item: Item) -> list[str]:
        """Return the digest of a checker of the user's, or the hidden tests."""
        return super().judges(item) or [item.data["test"]]

    def _judge(self, item: Item, text: str) -> bool:
        question = Question(item.data["prompt"], item.data["entry_point"])
        program = program_of(question, text)
        if (item.id, program) not in self._judged:
            test = Test(f"{item.data['test']}\n\ncheck({question.function})")
            unsafe = self.options.unsafe_code
            said = run_tests(program, question.function, [test], setup=question.source, unsafe=unsafe)
            self._judged[item.id, program] = all(said.passed)
        return self._judged[item.id, program]
