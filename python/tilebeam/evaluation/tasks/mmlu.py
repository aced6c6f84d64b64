"""mmlu:FILE, MMLU as JSON lines: {"question": .., "choices": [..], "answer": "B", "subject": ..}. The letters are
scored, behind the choices and examples of the same subject (--shots-file with MMLU's dev split: five)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from tilebeam.errors import TilebeamError
from tilebeam.evaluation.tasks.base import Defaults, Item
from tilebeam.evaluation.tasks.choice import ChoiceTask
from tilebeam.evaluation.tasks.file_task import text_of

_SHOTS = 5


class MmluTask(ChoiceTask):
    """The prompt is the one of the paper ("Measuring Massive Multitask Language Understanding", Hendrycks et al.)."""

    def _defaults(self) -> Defaults:
        return Defaults("{question}\n{options}\nAnswer:", "choice", "{letter}" if self.chat else " {letter}\n\n")

    def scored(self, item: Item) -> list[str]:
        """The letters."""
        return list(ascii_uppercase[: len(item.data["choices"])])

    def _fields(self, line: Mapping[str, Any], where: str) -> dict[str, Any]:
        subject, letter = text_of(line, "subject", where), text_of(line, "answer", where)
        choices = line.get("choices")
        letters = ascii_uppercase[: len(choices)] if isinstance(choices, list) else ""
        if len(letter) != 1 or letter not in letters:
            raise TilebeamError(f'{where}: "answer" must be the letter of one of the choices, not {letter!r}.')
        fields = super()._fields({**line, "answer": letters.index(letter)}, where)
        return {**fields, "question": fields["question"].strip(), "subject": subject, "letter": letter}

    def _shots(self) -> list[dict[str, Any]]:
        """None for all items; each subject has its own."""
        self._of_subject: dict[str, list[tuple[str, str]]] = {}
        if self.options.shots_file is None:
            return super()._shots()
        for _, fields in self._lines(Path(self.options.shots_file)):
            self._of_subject.setdefault(fields["subject"], []).append(self._shot(fields))
        return []

    def _examples(self, fields: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
        if self.options.shots_file is None:
            return []
        wanted = self.options.shots or _SHOTS
        found = self._of_subject.get(fields["subject"], [])
        if len(found) < wanted:
            raise TilebeamError(
                f"{self.options.shots_file} has {len(found)} examples of {fields['subject']}, not {wanted}."
            )
        return found[:wanted]

    def _prefix(self, fields: Mapping[str, Any]) -> str:
        subject = fields["subject"].replace("_", " ")
        own = f"The following are multiple choice questions (with answers) about {subject}.\n\n"
        return self.options.prefix or own
