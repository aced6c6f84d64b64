"""reasoning-gym:NAME[?option=value&..], a generator of reasoning-gym, its configuration and seeds frozen."""

from __future__ import annotations

import dataclasses
import enum
import json
import random
import re
from collections.abc import Iterator, Mapping, Set
from typing import Any
from urllib.parse import unquote_plus

from tilebeam.errors import TilebeamError
from tilebeam.evaluation.task_options import TaskOptions
from tilebeam.evaluation.tasks.task import Defaults, Item, Task


class GymTask(Task):
    """Items of a reasoning-gym generator, all different, none of them an example; judged by its own verifier."""

    def __init__(self, options: TaskOptions) -> None:
        try:
            import reasoning_gym
        except ImportError:
            raise TilebeamError(
                "reasoning-gym is missing: pip install reasoning-gym, or tilebeam with the extra demo."
            ) from None
        if options.field is not None:
            raise TilebeamError("--field is for tasks of files; reasoning-gym generates its questions.")
        self._gym = reasoning_gym
        rest = options.spec.partition(":")[2]
        self._dataset_name, _, query = rest.partition("?")
        self._config = _gym_config(self._dataset_name, query)
        self._pattern = _pattern(options.question)
        self._verifier = self._dataset(1, 0)
        super().__init__(options)

    def _defaults(self) -> Defaults:
        return Defaults(template="Question: {question}\nAnswer:", extract="line")

    def _sources(self) -> list[str]:
        return [f"reasoning-gym {getattr(self._gym, '__version__', '')}"]

    def _dataset(self, size: int, seed: int) -> Any:
        """Make a dataset, whose entry i is drawn from seed + i: seeds are spread, neighbours would share entries."""
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
            raise TilebeamError("--shots-file is for tasks of files; reasoning-gym generates its examples (--shots).")
        found = [fields for _, fields, _ in self._different(self.options.shot_seed, self.options.shots, frozenset())]
        self._shown = {fields["question"] for fields in found}
        return found

    def _items(self) -> Iterator[Item]:
        o = self.options
        pilot = () if o.pilot_seed is None else self._different(o.pilot_seed, o.pilot_items, self._shown)
        known = self._shown | {fields["question"] for _, fields, _ in pilot}
        for number, fields, entry in self._different(o.item_seed, 100 if o.items is None else o.items, known):
            yield dataclasses.replace(self._item(str(number), fields), data=entry)

    def _different(
        self, seed: int, wanted: int, known: Set[str]
    ) -> Iterator[tuple[int, dict[str, str], Mapping[str, Any]]]:
        """Yield number, fields and entry of so many whose questions differ from each other and from known ones."""
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
        """Accept full marks only: some verifiers give part of them for a right answer within more text."""
        answer = self.extract(text)
        return answer is not None and self._verifier.score_answer(answer, dict(item.data)) == 1.0


def _gym_config(name: str, query: str) -> dict[str, Any]:
    """Parse the options of "a=1&b=x,y" into the types of the configuration's defaults."""
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


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text, re.DOTALL)
    except re.error as error:
        raise TilebeamError(f"--question {text!r} is not a regular expression: {error}.") from None
