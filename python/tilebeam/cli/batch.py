"""Many prompts into a file: a line each as it completes, and the same command goes on where the last one stopped.

The first line also has the settings, which a later run must share.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from tilebeam.cli import console
from tilebeam.errors import TilebeamError
from tilebeam.gguf.help_text import options_given
from tilebeam.outputs import Usage

if TYPE_CHECKING:
    from tilebeam.model.lm import LM
    from tilebeam.prompt import Prompt
    from tilebeam.question_files import Question
    from tilebeam.sampling_params import SamplingParams

# Options that say where prompts come from and results go, or how the machine runs: they change no result's meaning.
_ASIDE = re.compile(
    "--(model|hf.*|prompt|file|field|out|overwrite|json|html|verbose|display-prompt|"
    "device|threads|parallel|executor|devices|memory-limit|draft|lookup|no-speculation)"
)


class Finished(Protocol):
    """What a search or `LM.completed` gives for a prompt."""

    usage: Usage

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        ...


class Completed(Protocol):
    """Answers prompts, and yields each one's number and result as it completes."""

    def __call__(self, prompts: Sequence[Prompt], /, *, sampling: SamplingParams) -> Iterator[tuple[int, Finished]]:
        """Answer them."""
        ...


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """A file for the results."""

    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            help="Write a line of JSON for each prompt to this file as it completes; the same command goes on where "
            "an earlier one stopped.",
        ),
    ] = None
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin the file of -o anew.")] = False

    def check(self, page: bool = False) -> None:
        """Raise `TilebeamError` for what does not go together.

        Args:
            page: --html was given.
        """
        if self.overwrite and self.out is None:
            raise TilebeamError("--overwrite is for the file of -o.")
        if self.out is not None and page:
            raise TilebeamError(
                "--html shows all results of a command, -o writes each as it completes: give one of them."
            )


def write(
    batch: BatchOptions,
    lm: LM,
    questions: Sequence[Question],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    completed: Completed,
) -> None:
    """Answer the questions that the file of -o does not have yet, and write a line for each.

    Args:
        questions, prompts: what was asked, and how the model reads it.
        params: how to sample; without --seed a file that is gone on with has its own seed.
        completed: answers them.

    Raises:
        TilebeamError: the file was begun with other settings (says which), is another one's, or a prompt is too long.
        OSError: there is no room.
    """
    from tilebeam.cli.search_view import account
    from tilebeam.growing_file import GrowingFile

    assert batch.out is not None
    spent: list[Usage] = []
    ends: Counter[str] = Counter()
    with GrowingFile(batch.out, afresh=batch.overwrite) as file:
        setting = _setting(lm) | {"--seed": params.seed}
        begun = next((line["setting"] for line in file.lines if "setting" in line), None)
        if begun is not None:
            _check_same(batch.out, begun, setting)
            params = replace(params, seed=begun["--seed"])
        elif file.lines:
            raise TilebeamError(f"{batch.out} holds no results of this command: give another file, or --overwrite.")
        done = Counter(_key(line.get("id"), line.get("question")) for line in file.lines)
        todo = [i for i, question in enumerate(questions) if not _take(done, _key(question.id, question.asked))]
        before = len(questions) - len(todo)
        if file.lines or file.torn:
            torn = "; its last line was not complete and is dropped" if file.torn else ""
            console.err().print(f"{batch.out} has {before} of {len(questions)} results{torn}.", soft_wrap=True)
        for i in todo:
            _check(lm, questions[i], prompts[i], params)
        try:
            with console.bar("prompts") as bar:
                task = bar.add_task("", total=len(questions), completed=before, note="")
                for number, result in completed([prompts[i] for i in todo], sampling=params):
                    question = questions[todo[number]]
                    record = {"id": question.id, "question": question.asked} | result.as_dict() | {"device": lm.device}
                    file.append(record if begun is not None or spent else record | {"setting": setting})
                    spent.append(result.usage)
                    ends.update(text["finish_reason"] for text in record.get("candidates", record.get("outputs")))
                    bar.advance(task)
        except KeyboardInterrupt:
            kept = f"{before + len(spent)} of {len(questions)} results are in {batch.out}"
            console.err().print(f"Interrupted: {kept}; the same command goes on.", soft_wrap=True)
            raise typer.Exit(130) from None
    if spent:
        account(spent, params.seed)
    if ends["length"]:
        console.err().print(f"{ends['length']} of {ends.total()} texts were cut; a greater -n gives them more room")


def _setting(lm: LM) -> dict[str, Any]:
    """Describe all that results depend on, by the names of options; files by their content."""
    from tilebeam.gguf.fingerprint import fingerprint

    given = {name: v for name, v in options_given().items() if v not in (None, []) and not _ASIDE.fullmatch(name)}
    files = {name: fingerprint(value) for name, value in given.items() if isinstance(value, Path)}
    plain: dict[str, Any] = json.loads(json.dumps(given | files | {"--model": fingerprint(lm.info.path)}, default=str))
    return plain


def _check_same(file: Path, begun: Mapping[str, Any], setting: Mapping[str, Any]) -> None:
    from tilebeam.growing_file import differences

    free = {"--seed": begun["--seed"]} if options_given().get("--seed") is None else {}
    if changed := differences(begun, {**setting, **free}):
        raise TilebeamError(
            f"{file} was begun with other settings: {'; '.join(changed)}. Give the old ones, another file, or "
            "--overwrite."
        )


def _key(name: Any, asked: Any) -> str:
    return json.dumps([name, asked])


def _take(done: Counter[str], key: str) -> bool:
    """Take one of what is done."""
    found = done[key] > 0
    done[key] -= found
    return found


def _check(lm: LM, question: Question, prompt: Prompt, params: SamplingParams) -> None:
    """Raise `TilebeamError` for a prompt that the model cannot answer, before others take hours."""
    try:
        lm.check(prompt.tokens(lm), params)
    except TilebeamError as error:
        raise TilebeamError(f"Prompt {question.id}: {error}") from None
