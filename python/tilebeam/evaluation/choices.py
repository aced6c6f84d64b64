"""Choices scored by their likelihood: the records of an evaluation's units, and what comes of them.

Three figures, each the share of items whose right choice has the greatest value:

    sum             log-probability of the choice
    per character   divided by the characters of the choice, as lm-evaluation-harness's acc_norm
    per token       the mean over its tokens from the first one that tells the choices apart, as llama-perplexity's
                    --multiple-choice
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilebeam.errors import TilebeamError
from tilebeam.evaluation.log import Record
from tilebeam.evaluation.tasks.base import Item
from tilebeam.evaluation.tasks.choice import ChoiceTask
from tilebeam.outputs import Likelihood

if TYPE_CHECKING:
    from tilebeam.model.lm import LM

FIGURES = ("sum", "per character", "per token")
# Items with the longest prompts, by characters, that are tokenized to see whether all fit.
_LONGEST = 16


def score(task: ChoiceTask, lm: LM, items: Sequence[Item]) -> list[Record]:
    """Score the choices of items, in one call.

    Returns:
        For each item its id, the place of the right choice, for each choice its figures, and what they cost.
    """
    ways = [task.ways(item, lm) for item in items]
    alike = [len({prompt for prompt, _ in some}) == 1 for some in ways]
    pairs: list[tuple[str, list[str]]] = []
    for some, one_prompt in zip(ways, alike, strict=True):
        pairs += [(some[0][0], [text for _, text in some])] if one_prompt else [(p, [text]) for p, text in some]
    # Text of a file is not trusted; what a chat template writes around it is.
    results = iter(lm.loglikelihoods(pairs, parse_special=task.chat))
    records = []
    for item, some, one_prompt in zip(items, ways, alike, strict=True):
        found = next(results) if one_prompt else [next(results)[0] for _ in some]
        values = zip(
            (x.logprob for x in found),
            (x.logprob / len(text) for x, text in zip(found, task.scored(item), strict=True)),
            per_token(found) if one_prompt else (x.per_token for x in found),
            strict=True,
        )
        records.append(
            {
                "id": item.id,
                "right": item.data["right"],
                "choices": [
                    dict(zip(FIGURES, v, strict=True)) | {"tokens": len(x.token_ids)}
                    for v, x in zip(values, found, strict=True)
                ],
                "usage": {
                    "decoded_tokens": sum(x.decoded_tokens for x in found),
                    "cached_tokens": sum(x.cached_tokens for x in found),
                },
                "seconds": {"decode": round(sum(x.seconds for x in found), 6)},
            }
        )
    return records


def per_token(found: Sequence[Likelihood]) -> list[float]:
    """Mean log-probabilities of the tokens from the first one in which continuations of one prompt differ."""
    shortest = min(len(x.token_ids) for x in found)
    same = 0
    while same < shortest - 1 and len({x.token_ids[same] for x in found}) == 1:
        same += 1
    return [math.fsum(x.logprobs[same:]) / (len(x.logprobs) - same) for x in found]


def check_room(task: ChoiceTask, lm: LM) -> None:
    """Raise `TilebeamError` if the longest texts do not fit the context: hours later would be too late."""
    most = 0
    for item in sorted(task.items, key=lambda i: len(i.prompt), reverse=True)[:_LONGEST]:
        texts = [prompt + text for prompt, text in task.ways(item, lm)]
        most = max(most, len(lm.tokenize(max(texts, key=len), parse_special=task.chat)))
    if most > lm.n_ctx:
        raise TilebeamError(
            f"The longest items have {most} tokens with their examples, the context {lm.n_ctx}: take -c {most}, or "
            "fewer --shots."
        )


def verdicts(table: Sequence[Sequence[Record]]) -> Iterator[tuple[str, npt.NDArray[np.float64]]]:
    """For each figure whether it finds each item's right choice, [seeds, items]; of equals the first is taken."""
    for figure in FIGURES:
        yield figure, np.array([[float(_best(i, figure) == i["right"]) for i in items] for items in table])


def _best(item: Record, figure: str) -> int:
    values = [choice[figure] for choice in item["choices"]]
    return values.index(max(values))


def by_subject(items: Sequence[Item], values: Mapping[str, npt.NDArray[np.float64]]) -> list[dict[str, Any]]:
    """Accuracy and its standard error, by figure: first of all items, then of each subject.

    Args:
        items: of the task; values: by figure, [seeds, items].
    """
    places: dict[str, list[int]] = defaultdict(list)
    for i, item in enumerate(items):
        if isinstance(subject := item.data.get("subject"), str):
            places[subject].append(i)
    groups = [("all", list(range(len(items)))), *sorted(places.items())]
    return [
        {
            "subject": subject,
            "items": len(at),
            "figures": {
                figure: {"accuracy": float(v[:, at].mean()), "stderr": _stderr(v[:, at].mean(0))}
                for figure, v in values.items()
            },
        }
        for subject, at in groups
    ]


def _stderr(values: npt.NDArray[np.float64]) -> float | None:
    """Standard error of a mean; None for one value."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
