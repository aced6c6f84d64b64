"""choice:FILE, questions whose choices are scored by their likelihood; nothing is sampled. A line has one of these:

question, choices, answer                     answer: one of the choices, its letter (A ..), or its place from 0
ctx, endings, label                           HellaSwag's own lines
sentence, option1, option2, answer (1 or 2)   WinoGrande's own lines: the text behind the gap is scored
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from tilebeam.errors import TilebeamError
from tilebeam.evaluation.tasks.base import ChatModel, Defaults, Item
from tilebeam.evaluation.tasks.file_task import FileTask, text_of
from tilebeam.text_files import json_lines

_GAP = "_"


class ChoiceTask(FileTask):
    """The most likely choice is the answer. Fewer items than the file has are a draw by --item-seed, in file order."""

    def _defaults(self) -> Defaults:
        return Defaults("{question}", "text", "{answer}" if self.chat else " {answer}\n\n")

    def ways(self, item: Item, lm: ChatModel) -> list[tuple[str, str]]:
        """For each choice what the model reads, and the text behind it that is scored."""
        choices: list[str] = item.data["choices"]
        if "behind" in item.data:
            return [(item.prompt + choice, item.data["behind"]) for choice in choices]
        prompt = self.prompt(item, lm).text
        space = "" if self.chat or prompt[-1:].isspace() else " "
        return [(prompt, space + scored) for scored in self.scored(item)]

    def scored(self, item: Item) -> list[str]:
        """What of each choice is scored, without the space before it."""
        choices: list[str] = item.data["choices"]
        return [item.data["behind"].strip()] * len(choices) if "behind" in item.data else choices

    def _fields(self, line: Mapping[str, Any], where: str) -> dict[str, Any]:
        if "sentence" in line:
            fields = self._gap(line, where)
        elif "endings" in line:
            fields = _ending(line, where)
        else:
            fields = _plain(line, where)
        choices = fields["choices"]
        options = "\n".join(f"{letter}. {choice}" for letter, choice in zip(ascii_uppercase, choices, strict=False))
        return {**line, **fields, "answer": choices[fields["right"]], "options": options}

    def _gap(self, line: Mapping[str, Any], where: str) -> dict[str, Any]:
        if self.chat:
            raise TilebeamError(f"{where}: a sentence with a gap has no form as a conversation: --no-chat.")
        before, gap, behind = text_of(line, "sentence", where).partition(_GAP)
        if not gap or not behind.strip():
            raise TilebeamError(f'{where}: the text under "sentence" has no gap ({_GAP}) with text behind it.')
        if str(line.get("answer")) not in ("1", "2"):
            raise TilebeamError(f'{where}: "answer" must be 1 or 2.')
        options = [text_of(line, name, where) for name in ("option1", "option2")]
        return {"question": before, "choices": options, "right": int(line["answer"]) - 1, "behind": behind}

    def _shot(self, fields: Mapping[str, Any]) -> tuple[str, str]:
        if "behind" in fields:
            return self._filled(fields) + fields["answer"] + fields["behind"], "\n\n"
        return super()._shot(fields)

    def _chosen(self) -> Iterator[tuple[int, str, dict[str, Any]]]:
        """All lines, or a draw of them."""
        wanted = self.options.items
        if wanted is None:
            yield from super()._chosen()
            return
        size = sum(1 for _ in json_lines(self.path))
        if size < wanted:
            raise TilebeamError(f"{self.path} has {size} items, not {wanted}.")
        drawn = set(random.Random(self.options.item_seed).sample(range(size), wanted))
        for number, (where, fields) in enumerate(self._lines(self.path)):
            if number in drawn:
                yield number, where, fields

    def _sources(self) -> list[str]:
        """Choices belong to the items as prompts do."""
        return [json.dumps([[self.scored(i), i.data["right"], i.data.get("behind")] for i in self.items])]


def _plain(line: Mapping[str, Any], where: str) -> dict[str, Any]:
    choices = _texts(line, "choices", where)
    return {"question": text_of(line, "question", where), "choices": choices, "right": _right(line, choices, where)}


def _ending(line: Mapping[str, Any], where: str) -> dict[str, Any]:
    choices = [_clean(text) for text in _texts(line, "endings", where)]
    label = str(line.get("label"))
    if not label.isdecimal() or int(label) >= len(choices):
        raise TilebeamError(f'{where}: "label" must be the number of an ending, from 0.')
    context = text_of(line, "ctx", where)
    if line.get("ctx_b"):
        context = f"{text_of(line, 'ctx_a', where)} {line['ctx_b'].capitalize()}"
    activity = f"{line['activity_label']}: " if line.get("activity_label") else ""
    return {"question": _clean(activity + context), "choices": choices, "right": int(label)}


def _clean(text: str) -> str:
    """HellaSwag's texts from WikiHow carry marks such as [header] and [title]."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _texts(line: Mapping[str, Any], name: str, where: str) -> list[str]:
    values = line.get(name)
    if not isinstance(values, list) or len(values) < 2 or not all(isinstance(v, str) and v for v in values):
        raise TilebeamError(f'{where}: "{name}" must be a list of at least two texts.')
    return values


def _right(line: Mapping[str, Any], choices: Sequence[str], where: str) -> int:
    """Which of the choices "answer" names."""
    answer = line.get("answer")
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    if not isinstance(answer, str):
        raise TilebeamError(f'{where}: "answer" must be one of the choices, its letter, or its place from 0.')
    named = {i for i, choice in enumerate(choices) if choice == answer}
    named |= {i for i, letter in zip(range(len(choices)), ascii_uppercase, strict=False) if letter == answer}
    if len(named) != 1:
        raise TilebeamError(f'{where}: "answer" {answer!r} names {len(named)} of the choices, not one.')
    return named.pop()
