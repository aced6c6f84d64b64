"""Many prompts into a file: a line each as it completes, and the same command goes on where the last one stopped.

The first line also has the settings, which a later run must share.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tilebeam.cli import console
from tilebeam.errors import TilebeamError
from tilebeam.gguf.help_text import options_given
from tilebeam.gguf.option_groups import option

if TYPE_CHECKING:
    from tilebeam.evaluation.question_files import UserQuestion
    from tilebeam.model.lm import LM
    from tilebeam.outputs import Usage
    from tilebeam.prompt import Prompt
    from tilebeam.sampling_params import SamplingParams

# Options that say where prompts come from and results go, or how the machine runs: they change no result's meaning.
_ASIDE = re.compile(
    "--(model|hf.*|prompt|file|field|out|overwrite|json|html|verbose|display-prompt|"
    "device|n-gpu-layers|flash-attn|threads|parallel|executor|devices|memory-limit|cache-ram|packed-cache|swa-full|"
    "draft|lookup|no-speculation)"
)


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """A file for the results."""

    out: Path | None = option(
        None,
        "-o",
        "--out",
        help="Write a line of JSON for each prompt to this file as it completes; the same command goes on where "
        "an earlier one stopped.",
    )
    overwrite: bool = option(False, "--overwrite", help="Begin the file of -o anew.")

    def check(self, page: bool = False) -> None:
        """Raise `TilebeamError` for what does not go together; `page`: --html was given."""
        if self.overwrite and self.out is None:
            raise TilebeamError("--overwrite is for the file of -o.")
        if self.out is not None and page:
            raise TilebeamError(
                "--html shows all results of a command, -o writes each as it completes: give one of them."
            )


def write(
    batch: BatchOptions,
    lm: LM,
    questions: Sequence[UserQuestion],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    completed: Callable[..., Iterator[tuple[int, Any]]],
) -> None:
    """Answer the questions that the file of -o does not have yet, and write a line for each.

    Args:
        questions, prompts: what was asked, and how the model reads it.
        params: how to sample; without --seed a file that is gone on with has its own seed.
        completed: `LM.completed`, or that of a search.

    Raises:
        TilebeamError: the file was begun with other settings (says which), is another one's, or a prompt is too long.
        OSError: there is no room.
    """
    from tilebeam.cli.search_view import account
    from tilebeam.evaluation.log import GrowingFile

    assert batch.out is not None
    spent: list[Usage] = []
    ends: Counter[str] = Counter()
    with GrowingFile(batch.out, anew=batch.overwrite) as file:
        setting = _setting(lm, params, file)
        params = replace(params, seed=setting["--seed"])
        done = Counter(json.dumps([line.get("id"), line.get("question")]) for line in file.lines)
        todo = []
        for i, question in enumerate(questions):
            done[key := json.dumps([question.id, question.asked])] -= 1
            todo += [i] if done[key] < 0 else []
        before = len(questions) - len(todo)
        if file.lines or file.torn:
            torn = "; its last line was not complete and is dropped" if file.torn else ""
            console.err().print(f"{batch.out} has {before} of {len(questions)} results{torn}.", soft_wrap=True)
        for i in todo:  # before others take hours
            try:
                lm.check(prompts[i].tokens(lm), params)
            except TilebeamError as error:
                raise TilebeamError(f"Prompt {questions[i].id}: {error}") from None
        try:
            with console.bar("prompts") as bar:
                task = bar.add_task("", total=len(questions), completed=before, note="")
                for number, result in completed([prompts[i] for i in todo], sampling=params):
                    question = questions[todo[number]]
                    record = {"id": question.id, "question": question.asked} | result.as_dict() | {"device": lm.device}
                    file.append(record if file.lines or spent else record | {"setting": setting})
                    spent.append(result.usage)
                    ends.update(text["finish_reason"] for text in record.get("candidates") or record["outputs"])
                    bar.advance(task)
        except KeyboardInterrupt:
            kept = f"{before + len(spent)} of {len(questions)} results are in {batch.out}"
            console.err().print(f"Interrupted: {kept}; the same command goes on.", soft_wrap=True)
            raise typer.Exit(130) from None
    if spent:
        account(spent, params.seed)
    if ends["length"]:
        console.err().print(f"{ends['length']} of {ends.total()} texts were cut; a greater -n gives more room")


def _setting(lm: LM, params: SamplingParams, file: Any) -> dict[str, Any]:
    """Describe all that results depend on by the names of options, files by their content; what a file was begun with
    must be the same, but for a seed that was not given."""
    from tilebeam.evaluation.config import differences
    from tilebeam.gguf.fingerprint import fingerprint

    given = {name: v for name, v in options_given().items() if v not in (None, []) and not _ASIDE.fullmatch(name)}
    files: dict[str, Any] = {name: fingerprint(value) for name, value in given.items() if isinstance(value, Path)}
    files["--model"] = fingerprint(lm.info.path)
    if heads := given.get("--reward-head"):
        files["--reward-head"] = [fingerprint(head) for head in heads]
    if lm.info.lora:  # of both options
        files["--lora"] = [(fingerprint(adapter), scale) for adapter, scale in lm.info.lora]
    mine = given | files | {"--seed": params.seed}
    setting: dict[str, Any] = json.loads(json.dumps(mine, default=str))
    if not file.lines:
        return setting
    begun = next((line["setting"] for line in file.lines if "setting" in line), None)
    if begun is None:
        raise TilebeamError(f"{file.path} holds no results of this command: give another file, or --overwrite.")
    if "--seed" not in given:
        setting["--seed"] = begun["--seed"]
    if changed := differences(begun, setting):
        raise TilebeamError(
            f"{file.path} was begun with other settings: {'; '.join(changed)}. Give those, or --overwrite."
        )
    return setting
