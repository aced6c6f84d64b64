"""Tasks: items with prompts and right answers, how a text's answer is found, and who says whether it is right.

    reasoning-gym:NAME[?option=value&..]     a generator of reasoning-gym, its configuration and seeds frozen
    jsonl:FILE                               own items, one JSON object a line: prompt, answer, and optional id, checker

A task is made from `TaskOptions` alone, so every process of an evaluation makes the same one; `Task.digest` proves it.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus

from tilebeam.answers.extract import Extractor, equality_of
from tilebeam.answers.normalize import normalize_answer
from tilebeam.answers.registry import extractor
from tilebeam.errors import TilebeamError
from tilebeam.evaluation.functions import is_function_name, load_function, source_digest
from tilebeam.evaluation.options import TaskOptions
from tilebeam.text_files import json_lines

Checker = Callable[[Mapping[str, Any], str], "float | bool"]

_GYM_TEMPLATE = "Question: {question}\nAnswer:"


@dataclass(frozen=True)
class Item:
    """One problem.

    Attributes:
        id: unique in its task.
        question: what is asked, without examples and template.
        answer: the right one.
        body: the question in its template.
        prompt: what the model reads: prefix and examples, then the body (a chat template may come around).
        data: all that is known of it, for checkers.
    """

    id: str
    question: str
    answer: str
    body: str
    prompt: str
    data: Mapping[str, Any] = field(repr=False, default_factory=dict)


class Task(ABC):
    """Items, extraction and verdicts."""

    def __init__(self, options: TaskOptions) -> None:
        self.options = options
        self.template = self._template()
        self.head = options.prefix + "".join(self._shot(entry) for entry in self._shots())
        self.extract, self._extract_source = _extractor(options.extract or self._default_extract())
        self.equal = equality_of(self.extract)
        self._check = load_function(options.checker, "--checker") if options.checker else None
        self.items = list(self._items())
        if not self.items:
            raise TilebeamError(f"{options.spec} has no items.")

    @property
    def name(self) -> str:
        """For reports."""
        return self.options.spec

    @property
    def digest(self) -> str:
        """SHA-256 over all prompts and answers and the source of what judges them."""
        content = [[i.id, i.prompt, i.answer] for i in self.items]
        judges = [self._extract_source, source_digest(self._check) if self._check else "", *self._sources()]
        return hashlib.sha256(json.dumps([content, judges]).encode()).hexdigest()

    def verdict(self, item: Item, text: str) -> float:
        """How right a text is, 0 to 1.

        Raises:
            TilebeamError: the checker failed, or returned something else.
        """
        try:
            value = float(self._check(item.data, text) if self._check else self._judge(item, text))
        except Exception as error:  # foreign code
            raise TilebeamError(f"The checker failed on item {item.id}: {type(error).__name__}: {error}.") from error
        if not 0 <= value <= 1:
            raise TilebeamError(f"The checker must return 0 to 1, not {value} (item {item.id}).")
        return value

    @abstractmethod
    def _items(self) -> Iterator[Item]: ...

    @abstractmethod
    def _shots(self) -> Sequence[Mapping[str, Any]]:
        """The examples, as fields of the template and "answer"."""

    @abstractmethod
    def _template(self) -> str: ...

    @abstractmethod
    def _default_extract(self) -> str: ...

    @abstractmethod
    def _judge(self, item: Item, text: str) -> float | bool:
        """Without a checker of the user's."""

    def _sources(self) -> list[str]:
        return []

    def _item(self, key: str, fields: Mapping[str, Any], data: Mapping[str, Any]) -> Item:
        body = self._filled(fields)
        return Item(key, fields["question"], fields["answer"], body, self.head + body, data)

    def _filled(self, fields: Mapping[str, Any]) -> str:
        try:
            return self.template.format_map(fields)
        except (KeyError, IndexError, ValueError) as error:
            known = ", ".join("{" + name + "}" for name in fields)
            raise TilebeamError(
                f"--template {self.template!r} does not fit: {error!r}; its fields are {known}."
            ) from None

    def _shot(self, fields: Mapping[str, Any]) -> str:
        try:
            return self._filled(fields) + self.options.shot_answer.format_map(fields)
        except (KeyError, IndexError, ValueError) as error:
            raise TilebeamError(f"--shot-answer {self.options.shot_answer!r} does not fit: {error!r}.") from None


def open_task(options: TaskOptions) -> Task:
    """The task.

    Raises:
        TilebeamError: there is no such task, or it cannot be made; says why.
    """
    kind, _, rest = options.spec.partition(":")
    for name, value, least in (("items", options.items, 1), ("shots", options.shots, 0)):
        if value is not None and value < least:
            raise TilebeamError(f"--{name} must be at least {least}, not {value}.")
    if kind == "reasoning-gym" and rest:
        return GymTask(options)
    if kind == "jsonl" and rest:
        return FileTask(options)
    raise TilebeamError(f"--task {options.spec!r}: write reasoning-gym:NAME[?option=value&..] or jsonl:FILE.")


# --- reasoning-gym ----------------------------------------------------------------------------------------------------


class GymTask(Task):
    """Items of a reasoning-gym generator, all different, none of them an example; judged by its own verifier."""

    def __init__(self, options: TaskOptions) -> None:
        try:
            import reasoning_gym
        except ImportError:
            raise TilebeamError(
                "reasoning-gym is missing: pip install reasoning-gym, or tilebeam with the extra demo."
            ) from None
        self._gym = reasoning_gym
        rest = options.spec.partition(":")[2]
        self._dataset_name, _, query = rest.partition("?")
        self._config = _gym_config(self._dataset_name, query)
        self._pattern = _pattern(options.question)
        self._verifier = self._dataset(1, 0)
        super().__init__(options)

    def _template(self) -> str:
        return _GYM_TEMPLATE if self.options.template is None else self.options.template

    def _default_extract(self) -> str:
        return "line"

    def _sources(self) -> list[str]:
        return [f"reasoning-gym {getattr(self._gym, '__version__', '')}"]

    def _dataset(self, size: int, seed: int) -> Any:
        """Entry i of a dataset is drawn from seed + i: seeds are spread, neighbours would share their entries."""
        try:
            return self._gym.create_dataset(
                self._dataset_name, size=size, seed=random.Random(seed).randrange(2**31), **self._config
            )
        except Exception as error:  # its checks are assertions
            raise TilebeamError(f"reasoning-gym does not take this configuration: {error}.") from None

    def _fields(self, entry: Mapping[str, Any]) -> dict[str, str]:
        question = str(entry["question"])
        if self._pattern is not None:
            match = self._pattern.search(question)
            if match is None:
                raise TilebeamError(f"--question {self._pattern.pattern!r} is not in {question!r}.")
            parts = match.groups("") if self._pattern.groups else (match.group(),)
            question = " ".join(part.strip() for part in parts)
        return {"question": question, "prompt": question, "answer": str(entry["answer"])}

    def _shots(self) -> list[dict[str, str]]:
        if self.options.shots_file is not None:
            raise TilebeamError("--shots-file is for jsonl tasks; reasoning-gym generates its examples (--shots).")
        found = [fields for _, fields, _ in self._different(self.options.shot_seed, self.options.shots, frozenset())]
        self._shown = {fields["question"] for fields in found}
        return found

    def _items(self) -> Iterator[Item]:
        o = self.options
        pilot = () if o.pilot_seed is None else self._different(o.pilot_seed, o.pilot_items, self._shown)
        known = self._shown | {fields["question"] for _, fields, _ in pilot}
        for number, fields, entry in self._different(o.item_seed, 100 if o.items is None else o.items, known):
            yield self._item(str(number), fields, entry)

    def _different(
        self, seed: int, wanted: int, known: Set[str]
    ) -> Iterator[tuple[int, dict[str, str], Mapping[str, Any]]]:
        """Number, fields and entry of so many entries whose questions differ from each other and from known ones."""
        seen: set[str] = set()
        for number, entry in enumerate(self._dataset(max(1, wanted) * 20, seed)):
            if len(seen) == wanted:
                return
            fields = self._fields(entry)
            if fields["question"] not in seen and fields["question"] not in known:
                seen.add(fields["question"])
                yield number, fields, entry
        if len(seen) < wanted:
            raise TilebeamError(f"{self.name} has only {len(seen)} different items; ask for fewer.")

    def _judge(self, item: Item, text: str) -> bool:
        """Full marks only: some verifiers give part of them for a right answer within more text."""
        answer = self.extract(text)
        return answer is not None and self._verifier.score_answer(answer, dict(item.data)) == 1.0


def _gym_config(name: str, query: str) -> dict[str, Any]:
    """The options of "a=1&b=x,y", in the types of the configuration's defaults."""
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise TilebeamError(f"reasoning-gym has no task {name!r}: choose from {', '.join(sorted(DATASETS))}.")
    defaults = {f.name: f for f in dataclasses.fields(DATASETS[name][1])}
    config: dict[str, Any] = {}
    for part in filter(None, query.split("&")):
        key, equals, text = part.partition("=")
        if not equals or key not in defaults or key in ("seed", "size"):
            options = ", ".join(k for k in defaults if k not in ("seed", "size"))
            raise TilebeamError(f"{name} has no option {part!r}: choose from {options} (seeds and sizes have flags).")
        config[key] = _typed(unquote_plus(text), _default(defaults[key]), key)
    return config


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _typed(text: str, default: Any, key: str) -> Any:
    if isinstance(default, enum.Enum):
        for member in type(default):
            if text in (member.name, str(member.value)):
                return member
        raise TilebeamError(f"{key} must be one of {', '.join(str(m.value) for m in type(default))}, not {text!r}.")
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if isinstance(default, (list, tuple)):
        parts = value if isinstance(value, list) else [_typed(p, None, key) for p in text.split(",")]
        return type(default)(parts)
    if isinstance(default, str) and not isinstance(value, str):
        return text
    if isinstance(default, (bool, int, float)) and not isinstance(value, (bool, int, float)):
        raise TilebeamError(f"{key} must be like {default!r}, not {text!r}.")
    return value


# --- own items --------------------------------------------------------------------------------------------------------


class FileTask(Task):
    """Items of a JSONL file: {"prompt": .., "answer": .., "id": .., "checker": "module:function", ..}."""

    def __init__(self, options: TaskOptions) -> None:
        self._path = Path(options.spec.partition(":")[2])
        self._checkers: dict[str, Checker] = {}
        if options.question is not None:
            raise TilebeamError("--question is for reasoning-gym tasks; a file's prompts are what they are.")
        if options.pilot_seed is not None:
            raise TilebeamError("--pilot-seed is for reasoning-gym tasks; leave the items out of the file.")
        super().__init__(options)

    @property
    def name(self) -> str:
        """The file's name; where it lies does not matter."""
        return f"jsonl:{self._path.name}"

    def _template(self) -> str:
        return "{prompt}" if self.options.template is None else self.options.template

    def _default_extract(self) -> str:
        return "last-number"

    def _sources(self) -> list[str]:
        return [source_digest(self._checkers[name]) for name in sorted(self._checkers)]

    def _shots(self) -> list[dict[str, Any]]:
        if self.options.shots_file is None:
            if self.options.shots:
                raise TilebeamError("Examples for a jsonl task come from a file of their own: --shots-file.")
            return []
        shots = [fields for _, fields in _objects(Path(self.options.shots_file))]
        wanted = self.options.shots or len(shots)
        if len(shots) < wanted:
            raise TilebeamError(f"{self.options.shots_file} has {len(shots)} examples, not {wanted}.")
        return [s | {"question": s["prompt"]} for s in shots[:wanted]]

    def _items(self) -> Iterator[Item]:
        seen: set[str] = set()
        for number, (line, fields) in enumerate(_objects(self._path)):
            if number == self.options.items:
                return
            key = str(fields.get("id", number))
            if key in seen:
                raise TilebeamError(f"{self._path} line {line}: the id {key!r} comes twice.")
            seen.add(key)
            checker = fields.get("checker")
            if checker is not None and self._check is None and checker not in self._checkers:
                if not isinstance(checker, str):
                    raise TilebeamError(f'{self._path} line {line}: checker must be "module:function".')
                self._checkers[checker] = load_function(checker, f"{self._path} line {line}: checker")
            yield self._item(key, fields | {"question": fields["prompt"]}, fields)
        if self.options.items is not None and len(seen) < self.options.items:
            raise TilebeamError(f"{self._path} has {len(seen)} items, not {self.options.items}.")

    def _judge(self, item: Item, text: str) -> float | bool:
        if (checker := item.data.get("checker")) is not None:
            return self._checkers[checker](item.data, text)
        answer = self.extract(text)
        return answer is not None and (answer == item.answer or self.equal(answer, normalize_answer(item.answer)))


def _objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and objects, prompt and answer being texts."""
    for number, fields in json_lines(path):
        if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str) or not fields["prompt"]:
            raise TilebeamError(f'{path} line {number} has no text under "prompt".')
        answer = fields.get("answer", "")
        if not isinstance(answer, (str, int, float)) or isinstance(answer, bool):
            raise TilebeamError(f'{path} line {number}: "answer" must be a text or a number.')
        if "answer" not in fields and "checker" not in fields:
            raise TilebeamError(f'{path} line {number} has neither "answer" nor "checker".')
        yield number, fields | {"answer": str(answer)}


# --- extraction -------------------------------------------------------------------------------------------------------


def first_line(text: str) -> str | None:
    """The first line that is not empty, as it is."""
    return next((line.strip() for line in text.splitlines() if line.strip()), None)


def _extractor(name: str) -> tuple[Extractor, str]:
    """The extractor of that name, and what its code was if it is the user's."""
    if name == "line":
        return first_line, ""
    if is_function_name(name):
        function = load_function(name, "--extract")
        return function, source_digest(function)
    return extractor(name), ""


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text, re.DOTALL)
    except re.error as error:
        raise TilebeamError(f"--question {text!r} is not a regular expression: {error}.") from None
