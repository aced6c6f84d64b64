"""A task whose items are the lines of a file, its examples those of another one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from tilebeam.errors import TilebeamError
from tilebeam.evaluation.question_files import question_of
from tilebeam.evaluation.task_options import TaskOptions
from tilebeam.evaluation.tasks.task import Item, Task
from tilebeam.text_files import json_lines


class FileTask(Task):
    """Items of a file of JSON lines (.gz: compressed). A kind says what fields a line has.

    Attributes:
        file_shots: examples taken of --shots-file where --shots does not say; None: all of them.
        asked: what its lines usually call the question.
    """

    file_shots: ClassVar[int | None] = None
    asked: ClassVar[str] = "question"

    def __init__(self, options: TaskOptions) -> None:
        self.path = Path(options.spec.partition(":")[2])
        if options.question is not None:
            raise TilebeamError("--question is for reasoning-gym tasks; a file's questions are what they are.")
        if options.pilot_seed is not None:
            raise TilebeamError("--pilot-seed is for reasoning-gym tasks; leave the items out of the file.")
        super().__init__(options)

    @property
    def name(self) -> str:
        """Kind and file name; its folder does not matter."""
        return f"{self.options.spec.partition(':')[0]}:{self.path.name}"

    @abstractmethod
    def _fields(self, line: Mapping[str, Any], asked: str, where: str) -> dict[str, Any]:
        """Read a line's fields for templates and checkers: "question" and "answer" are texts (the answer None where the
        line has none), "id" names the item.

        Args:
            asked: the question.
            where: file and number of the line, for errors.
        """

    def _shots(self) -> list[dict[str, Any]]:
        if self.options.shots_file is None:
            if self.options.shots:
                kind = self.options.spec.partition(":")[0]
                raise TilebeamError(f"Examples for a {kind} task come from a file of their own: --shots-file.")
            return []
        wanted = self.options.shots or self.file_shots
        shots = [fields for _, fields, _ in islice(self._lines(Path(self.options.shots_file)), wanted)]
        if any(fields["answer"] is None for fields in shots):
            raise TilebeamError(f"{self.options.shots_file}: an example needs an answer.")
        if len(shots) < (wanted or 1):
            raise TilebeamError(f"{self.options.shots_file} has {len(shots)} examples, not {wanted or 'any'}.")
        return shots

    def _items(self) -> Iterator[Item]:
        shown = {question for question, _ in self.shots}
        seen: set[str] = set()
        for number, (where, fields, before) in enumerate(islice(self._lines(self.path), self.options.items)):
            key = str(fields.get("id", number))
            if key in seen:
                raise TilebeamError(f"{where}: the id {key!r} comes twice.")
            seen.add(key)
            item = replace(self._item(key, fields), before=before)
            if before and not self.chat:
                raise TilebeamError(f"{where} is a conversation, which needs the chat template: --chat.")
            if item.body in shown:
                raise TilebeamError(f"{where} is one of the examples: take them from a file that holds no items.")
            yield item
        if self.options.items is not None and len(seen) < self.options.items:
            raise TilebeamError(f"{self.path} has {len(seen)} items, not {self.options.items}.")

    def _lines(self, path: Path) -> Iterator[tuple[str, dict[str, Any], tuple[Mapping[str, Any], ...]]]:
        """Yield where each line is, its fields, and the turns before its question."""
        for number, line in json_lines(path):
            where = f"{path} line {number}"
            if not isinstance(line, dict):
                raise TilebeamError(f"{where} is not a JSON object.")
            question = question_of(line, where, number, self.options.field, self.asked)
            yield where, self._fields(line, question.text, where), question.before


def text_of(line: Mapping[str, Any], name: str, where: str) -> str:
    """Read a field that must be a text and not empty.

    Raises:
        TilebeamError: it is not.
    """
    value = line.get(name)
    if not isinstance(value, str) or not value:
        raise TilebeamError(f'{where} has no text under "{name}".')
    return value
