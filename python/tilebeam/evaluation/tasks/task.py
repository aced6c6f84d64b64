"""What a task is: items with prompts and right answers out of a file, how a text's answer is found, and who says
whether it is right."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tilebeam.answers.extract import Extractor, equality_of
from tilebeam.answers.extractors import extractor
from tilebeam.answers.formulas import MathAnswer
from tilebeam.answers.normalize import normalize_answer
from tilebeam.answers.program_answers import ProgramAnswer
from tilebeam.errors import TilebeamError
from tilebeam.evaluation.functions import is_function_name, load_function, source_digest
from tilebeam.evaluation.question_files import Message, question_of
from tilebeam.evaluation.task_options import TaskOptions
from tilebeam.prompt import Prompt
from tilebeam.sampling_params import SamplingParams
from tilebeam.search.contract import StepGenerator
from tilebeam.search.tool_forms import conversation, needs_words
from tilebeam.text_files import json_lines

if TYPE_CHECKING:
    from tilebeam.model.lm import LM


@dataclass(frozen=True)
class Item:
    """One problem.

    Attributes:
        id: unique in its task.
        question: what is asked, without examples and template.
        answer: the right one; None if nobody told.
        body: the question in its template.
        prompt: what a model without chat template reads: the examples, then the body.
        data: all that is known of it, for checkers.
        before: turns of a conversation before the question.
    """

    id: str
    question: str
    answer: str | None
    body: str
    prompt: str
    data: Mapping[str, Any] = field(repr=False, default_factory=dict)
    before: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Defaults:
    """What a task does where its options say nothing.

    Attributes:
        template: of a question; fields of an item in braces.
        extract: name of the extractor, see `tilebeam.answers.extractors.extractor`.
        shot_answer: template of an example's answer.
        max_tokens, stop: of a sample.
        scorers: what best-of-n chooses by.
    """

    template: str
    extract: str
    shot_answer: str = " {answer}\n\n"
    max_tokens: int | None = SamplingParams.max_tokens
    stop: tuple[str, ...] = ()
    scorers: tuple[str, ...] = ("logprob",)


class Task(ABC):
    """The lines of a file of JSON objects (.gz: compressed) as items; prompts, extraction and verdicts. A kind of task
    says what fields a line has.

    Attributes:
        chats: a kind's prompts go through the chat template unless the options say otherwise.
        file_shots: examples that a kind takes of --shots-file where --shots does not say; None: all of them.
        asked: what a kind's lines usually call the question.
        path: the file.
        chat: prompts go through the model's chat template.
        defaults: of its kind, with or without chat.
        items: the problems.
        extract: a text's answer, None if it holds none.
        equal: whether two answers are the same.
        judged: whether somebody can say if a text is right: the items have answers, or there is a checker.
    """

    chats: ClassVar[bool] = False
    file_shots: ClassVar[int | None] = None
    asked: ClassVar[str] = "question"

    def __init__(self, options: TaskOptions) -> None:
        self.options = options
        kind, _, file = options.spec.partition(":")
        self.path = Path(file)
        self.name = f"{kind}:{self.path.name}"  # for reports: where the file lies does not matter
        self.chat = self.chats if options.chat is None else options.chat
        self.defaults = self._defaults()
        if options.tir and not self.chat:
            raise TilebeamError("--tir needs a chat template: the system prompt asks for programs. Use --chat.")
        own = "{question}" if options.tir else self.defaults.template
        self.template = own if options.template is None else options.template
        answer = self.defaults.shot_answer if options.shot_answer is None else options.shot_answer
        self.shots = [
            (_filled("--template", self.template, entry), _filled("--shot-answer", answer, entry))
            for entry in self._shots()
        ]
        self.extract, self._extract_source = _extractor(options.extract or self.defaults.extract)
        if options.programs:
            self.extract = ProgramAnswer(self.extract, unsafe=options.unsafe_code)
        self.equal = equality_of(self.extract)
        self._check = load_function(options.checker, "--checker") if options.checker else None
        self.items = list(self._items())
        if not self.items:
            raise TilebeamError(f"{options.spec} has no items.")
        silent = [] if self._check else [item.id for item in self.items if item.answer is None]
        self.judged = not silent
        if 0 < len(silent) < len(self.items):
            raise TilebeamError(
                f"{options.spec}: {len(silent)} of {len(self.items)} items have no answer, the first is item "
                f"{silent[0]}. Give all of them one, or a --checker; or none, for a run without a verdict."
            )

    @property
    def digest(self) -> str:
        """SHA-256 over all prompts and answers and the source of what judges them."""
        content = [[i.id, self.messages(i) if self.chat else i.prompt, i.answer] for i in self.items]
        judges = [self._extract_source, source_digest(self._check) if self._check else "", *self._sources()]
        return hashlib.sha256(json.dumps([content, judges]).encode()).hexdigest()

    def messages(self, item: Item, *, words: bool = False) -> list[Message]:
        """Write the item as a conversation: examples are earlier turns. Where it asks for programs, it may explain
        these in words."""
        found: list[Message] = [
            {"role": role, "content": text.strip()}
            for turn in self.shots
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        if self.options.tir:
            *before, question = conversation(item.body, example=found or None, words=words)
            return [*before, *item.before, question]
        return [*found, *item.before, {"role": "user", "content": item.body}]

    def prompt(self, item: Item, lm: LM) -> Prompt:
        """Return what a model reads. Its question is the item's, without examples and template.

        Raises:
            TilebeamError: the task chats, and the model has no chat template.
        """
        if not self.chat:
            return Prompt(item.prompt, question=item.question)
        try:
            words = needs_words(getattr(lm, "chat_template", None))
            return replace(lm.chat_prompt(self.messages(item, words=words)), question=item.question)
        except TilebeamError as error:
            raise TilebeamError(f"{error} Or evaluate it without a chat template: --no-chat.") from None

    def source(self, lm: StepGenerator) -> StepGenerator:
        """Return what samples for the task's prompts are drawn from."""
        return lm

    def judges(self, item: Item) -> list[str]:  # noqa: ARG002
        """Digest the functions of the user's that find and judge an item's answer."""
        return [x for x in (self._extract_source, source_digest(self._check) if self._check else "") if x]

    def verdict(self, item: Item, text: str) -> float:
        """Judge how right a text is, 0 to 1.

        Raises:
            TilebeamError: the checker failed, or returned something else; or the items have no answers.
        """
        if not self.judged:
            raise TilebeamError(f"{self.name}: the items have no answers to judge by. Give them some, or a --checker.")
        try:
            value = float(self._check(item.data, text) if self._check else self._judge(item, text))
        except Exception as error:  # foreign code
            raise TilebeamError(f"The checker failed on item {item.id}: {type(error).__name__}: {error}.") from error
        if not 0 <= value <= 1:
            raise TilebeamError(f"The checker must return 0 to 1, not {value} (item {item.id}).")
        return value

    @abstractmethod
    def _defaults(self) -> Defaults:
        """Return what holds unless the options say otherwise; `self.chat` is known."""

    @abstractmethod
    def _fields(self, line: Mapping[str, Any], asked: str, where: str) -> dict[str, Any]:
        """Read a line's fields for templates and checkers: "question" and "answer" are texts (the answer None where the
        line has none), "id" names the item.

        Args:
            asked: the question.
            where: file and number of the line, for errors.
        """

    def _shots(self) -> list[dict[str, Any]]:
        """Return the fields of the examples."""
        file, wanted = self.options.shots_file, self.options.shots or self.file_shots
        if file is None:
            if self.options.shots or self.options.shot_answer is not None:
                option = "--shots" if self.options.shots else "--shot-answer"
                raise TilebeamError(f"{option}: examples come from a file of their own, --shots-file.")
            return []
        shots = [fields for _, fields, _ in islice(self._lines(Path(file)), wanted)]
        if any(fields["answer"] is None for fields in shots):
            raise TilebeamError(f"{file}: an example needs an answer.")
        if len(shots) < (wanted or 1):
            raise TilebeamError(f"{file} has {len(shots)} examples, not {wanted or 'any'}.")
        return shots

    def _items(self) -> Iterator[Item]:
        shown = {question for question, _ in self.shots}
        seen: set[str] = set()
        for number, (where, fields, before) in enumerate(islice(self._lines(self.path), self.options.items)):
            key = str(fields.get("id", number))
            if key in seen:
                raise TilebeamError(f"{where}: the id {key!r} comes twice.")
            seen.add(key)
            body = _filled("--template", self.template, fields)
            if before and not self.chat:
                raise TilebeamError(f"{where} is a conversation, which needs the chat template: --chat.")
            if body in shown:
                raise TilebeamError(f"{where} is one of the examples: take them from a file that holds no items.")
            prompt = "".join(asked + said for asked, said in self.shots) + body
            yield Item(key, fields["question"], fields["answer"], body, prompt, fields, before)
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

    def _judge(self, item: Item, text: str) -> float | bool:
        """Judge without a checker of the user's."""
        answer = self.extract(text)
        assert item.answer is not None  # `judged`
        # math-verify reads a formula as it stands: in small letters it is another one
        words = getattr(self.extract, "words", self.extract)
        right = item.answer if isinstance(words, MathAnswer) else normalize_answer(item.answer)
        return answer is not None and (answer == item.answer or self.equal(answer, right))

    def _sources(self) -> list[str]:
        return []


def _filled(option: str, template: str, fields: Mapping[str, Any]) -> str:
    """Fill in a template, of the task or of the option."""
    try:
        return template.format_map(fields)
    except (LookupError, ValueError, AttributeError, TypeError) as error:
        known = ", ".join("{" + name + "}" for name in fields)
        raise TilebeamError(f"{option} {template!r} does not fit: {error!r}; its fields are {known}.") from None


def text_of(line: Mapping[str, Any], name: str, where: str) -> str:
    """Read a field that must be a text and not empty.

    Raises:
        TilebeamError: it is not.
    """
    value = line.get(name)
    if not isinstance(value, str) or not value:
        raise TilebeamError(f'{where} has no text under "{name}".')
    return value


def first_line(text: str) -> str | None:
    """Return the first line that is not empty, as it is."""
    return next((line.strip() for line in text.splitlines() if line.strip()), None)


def _extractor(name: str) -> tuple[Extractor, str]:
    """Find the extractor of that name, and the digest of its code if it is the user's."""
    if name == "line":
        return first_line, ""
    if is_function_name(name):
        function = load_function(name, "--extract")
        return function, source_digest(function)
    return extractor(name), ""
