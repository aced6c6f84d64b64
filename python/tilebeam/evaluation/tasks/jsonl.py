"""jsonl:FILE, a user's own items: {"prompt": .., "answer": .., "id": .., "checker": "module:function", ..}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tilebeam.errors import TilebeamError
from tilebeam.evaluation.functions import load_function, source_digest
from tilebeam.evaluation.task_options import TaskOptions
from tilebeam.evaluation.tasks.file_task import FileTask
from tilebeam.evaluation.tasks.task import Checker, Defaults, Item


class JsonlTask(FileTask):
    """Prompts as they are; answers compared, or judged by a function that the item names."""

    asked: ClassVar[str] = "prompt"

    def __init__(self, options: TaskOptions) -> None:
        self._checkers: dict[str, Checker] = {}
        super().__init__(options)

    def _defaults(self) -> Defaults:
        return Defaults(template="{question}", extract="last-number")

    def _sources(self) -> list[str]:
        return [source_digest(self._checkers[name]) for name in sorted(self._checkers)]

    def _fields(self, line: Mapping[str, Any], asked: str, where: str) -> dict[str, Any]:
        answer = line.get("answer", "")
        if not isinstance(answer, (str, int, float)) or isinstance(answer, bool):
            raise TilebeamError(f'{where}: "answer" must be a text or a number.')
        self._load_checker(line.get("checker"), where)
        known = "answer" in line or "checker" in line
        return {"prompt": asked, **line, "question": asked, "answer": str(answer) if known else None}

    def _load_checker(self, name: Any, where: str) -> None:
        if name is None or self.options.checker or name in self._checkers:
            return
        if not isinstance(name, str):
            raise TilebeamError(f'{where}: checker must be "module:function".')
        self._checkers[name] = load_function(name, f"{where}: checker")

    def judges(self, item: Item) -> list[str]:
        """List the digests, the item's own checker's included."""
        own = self._checkers.get(item.data.get("checker", ""))
        return [*super().judges(item), *([source_digest(own)] if own else [])]

    def _judge(self, item: Item, text: str) -> float | bool:
        checker = item.data.get("checker")
        return super()._judge(item, text) if checker is None else self._checkers[checker](item.data, text)
