"""bfcl:FILE, calls of functions in the lines of BFCL's simple_python and multiple, whose right calls are in the file of
the same name in the folder possible_answer beside it: {"id": .., "question": [[message, ..]], "function": [..]} and
{"id": .., "ground_truth": [{name: {parameter: [value, ..]}}]}. "ground_truth" may also stand in the line itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

from tilebeam.chat.prepared import PreparedChat
from tilebeam.errors import TilebeamError
from tilebeam.evaluation.task_options import TaskOptions
from tilebeam.evaluation.tasks.task import Defaults, Item, Task
from tilebeam.model.lm import LM
from tilebeam.prompt import Prompt
from tilebeam.search.chats import ChatGenerator
from tilebeam.search.contract import StepGenerator
from tilebeam.text_files import json_lines

# What BFCL calls the types of JSON schemas, and what values of them are in Python.
_TYPES = {"dict": "object", "float": "number", "tuple": "array"}
_KINDS = {
    "string": str,
    "any": str,
    "integer": int,
    "float": float,
    "boolean": bool,
    "array": list,
    "tuple": list,
    "dict": dict,
}


class BfclTask(Task):
    """One call of one of the functions that an item offers, right if each argument is one of those that the benchmark's
    authors accept. Texts are the calls that a model writes, as JSON."""

    chats: ClassVar[bool] = True

    def __init__(self, options: TaskOptions) -> None:
        if options.shots or options.shots_file or options.tir or options.chat is False or options.field:
            raise TilebeamError(
                "bfcl asks through the chat template, with functions: no --shots, --tir, --no-chat or --field."
            )
        self._chats: dict[str, PreparedChat] = {}
        super().__init__(options)

    def _defaults(self) -> Defaults:
        return Defaults("{question}", "json", max_tokens=256)

    def _lines(self, path: Path) -> Iterator[tuple[str, dict[str, Any], tuple[Mapping[str, Any], ...]]]:
        answers = path.parent / "possible_answer" / path.name
        known: dict[str, Any] = {}
        if answers.is_file():
            try:
                known = {line["id"]: line["ground_truth"] for _, line in json_lines(answers)}
            except (LookupError, TypeError):
                raise TilebeamError(f'{answers} needs an "id" and a "ground_truth" in each line.') from None
        for number, line in json_lines(path):
            where = f"{path} line {number}"
            try:
                ((*before, asked),) = line["question"]
                truth = line.get("ground_truth") or known[line["id"]]
                (right,) = truth
                ((name, accepted),) = right.items()
                function = next(f for f in line["function"] if f["name"] == name)
                for parameter, values in accepted.items():
                    _KINDS[function["parameters"]["properties"][parameter]["type"]]
                    if not isinstance(values, list):
                        raise TypeError
                content = asked["content"]
                if not isinstance(content, str) or not all(isinstance(turn, Mapping) for turn in before):
                    raise TypeError
                fields = self._fields(line | {"ground_truth": truth}, content, where)
            except (LookupError, TypeError, ValueError, AttributeError, StopIteration):
                raise TilebeamError(
                    f"{where} is no question of BFCL's simple_python or multiple with one right call, which is in the "
                    f"line or in {answers}."
                ) from None
            yield where, fields, tuple(before)

    def _fields(self, line: Mapping[str, Any], asked: str, where: str) -> dict[str, Any]:  # noqa: ARG002
        return {**line, "question": asked, "answer": json.dumps(line["ground_truth"])}

    def _sources(self) -> list[str]:
        offered = json.dumps([item.data["function"] for item in self.items])
        return [offered, *(["free"] if not self.options.tools_grammar else [])]

    def judges(self, item: Item) -> list[str]:
        """Return the digest of a checker of the user's, or the right call."""
        return super().judges(item) or [str(item.answer)]

    def prompt(self, item: Item, lm: LM) -> Prompt:
        """Return what a model reads: the template tells it of the functions."""
        tools = [{"type": "function", "function": _schema(f)} for f in item.data["function"]]
        forced = self.options.tools_grammar
        chat = lm.prepare_chat(self.messages(item), tools=tools, tool_choice="required" if forced else None)
        if not forced:
            chat = replace(chat, params=replace(chat.params, grammar=None))
        self._chats[chat.prompt.text] = chat
        return replace(chat.prompt, question=item.question)

    def source(self, lm: StepGenerator) -> StepGenerator:
        """Return what samples are drawn from."""
        return cast(StepGenerator, ChatGenerator(lm, lambda prompt: self._chats.get(prompt.text)))

    def _judge(self, item: Item, text: str) -> bool:
        try:
            calls = json.loads(self.extract(text) or "")
            call = calls if isinstance(calls, dict) else calls[0]
            name, arguments = call["name"], call["arguments"]
        except (ValueError, LookupError, TypeError):
            return False
        ((wanted, accepted),) = item.data["ground_truth"][0].items()
        function = next(f for f in item.data["function"] if f["name"] == wanted)
        single = isinstance(calls, dict) or len(calls) == 1
        return single and name == wanted and _accepts(function["parameters"], accepted, arguments)


def _schema(part: Any) -> Any:
    """Return a function, or a part of one, with the names that JSON schemas have for types."""
    if isinstance(part, list):
        return [_schema(one) for one in part]
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if not isinstance(kind, str):
        return {key: _schema(value) for key, value in part.items()}
    told = {key: _schema(value) for key, value in part.items() if key not in ("type", "optional")}
    return told if kind == "any" else {"type": _TYPES.get(kind, kind)} | told


# --- verdicts, as BFCL's own checker has them -------------------------------------------------------------------------


def _accepts(parameters: Mapping[str, Any], accepted: Mapping[str, Sequence[Any]], arguments: Any) -> bool:
    """Tell whether arguments are right: none is missing or unexpected, each has its type and one of its values."""
    if not isinstance(arguments, dict) or not arguments.keys() <= accepted.keys():
        return False
    missing = [name for name in accepted if name not in arguments]
    if any("" not in accepted[name] or name in parameters.get("required", ()) for name in missing):
        return False
    return all(_is_right(value, parameters["properties"][n], accepted[n]) for n, value in arguments.items())


def _is_right(value: Any, schema: Mapping[str, Any], accepted: Sequence[Any]) -> bool:
    kind, wanted = schema["type"], [one for one in accepted if one != ""]
    if kind == "float" and type(value) is int:
        value = float(value)
    if wanted and type(wanted[0]) is not _KINDS[kind]:  # the name of a variable, say
        return type(value) in (_KINDS[kind], type(wanted[0])) and value in accepted
    if type(value) is not _KINDS[kind]:
        return False
    if isinstance(value, dict):
        return any(_has_right_members(value, one) for one in wanted)
    if not isinstance(value, list):
        return _plain(value) in map(_plain, accepted)
    inner = schema.get("items", {}).get("type")
    if inner == "dict":
        return any(len(value) == len(one) and all(map(_has_right_members, value, one)) for one in wanted)
    typed = inner is None or any({*map(type, value)} <= {_KINDS[inner], *map(type, one[:1])} for one in wanted)
    return typed and [*map(_plain, value)] in [[*map(_plain, one)] for one in wanted]


def _has_right_members(value: Any, accepted: Any) -> bool:
    """Tell whether an object within an argument has the members that it must have, with values among those accepted."""
    if not isinstance(value, dict) or not isinstance(accepted, dict) or not value.keys() <= accepted.keys():
        return False
    given = all(_plain(part) in map(_plain, accepted[name]) for name, part in value.items())
    return given and all("" in accepted[name] for name in accepted.keys() - value.keys())


def _plain(value: Any) -> Any:
    """Return what right values have in common: texts but for case, blanks and some punctuation."""
    return re.sub(r"[ ,./\-_*^]", "", value).lower().replace("'", '"') if isinstance(value, str) else value
