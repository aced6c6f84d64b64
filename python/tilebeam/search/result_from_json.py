"""A search's result from the JSON that `SearchResult.as_dict` made of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tilebeam.answers.voted_answer import VotedAnswer
from tilebeam.errors import TilebeamError
from tilebeam.outputs import CompletionOutput, Usage
from tilebeam.search.adaptive import AdaptiveResult
from tilebeam.search.beam import StepResult
from tilebeam.search.contract import Pruned, SearchResult, Trajectory, VoteResult


def read_report(report: Mapping[str, Any]) -> SearchResult:
    """Make the result, of the class whose fields the report has. "prompt", "usage" and "seed" may be missing, as in an
    answer of the server; a score that is null (JSON has no infinities) becomes nan.

    Raises:
        TilebeamError: it is no report with candidates, or its parts do not fit together.
    """
    try:
        return _result(report)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise TilebeamError(
            f"Invalid report of a search ({type(error).__name__}: {str(error)[:200]}). It needs what --json prints, or "
            'the "search" of an answer to a request with "candidates": true.'
        ) from None


def _result(report: Mapping[str, Any]) -> SearchResult:
    candidates = [_candidate(i, c) for i, c in enumerate(_list(report["candidates"]))]
    pruned = [_pruned(p) for p in _list(report.get("pruned", []))]
    common: dict[str, Any] = {
        "prompt": _text(report.get("prompt", "")),
        "candidates": candidates,
        "scores": [_score(s) for s in _list(report["scores"])],
        "best_index": _integer(report["best_index"]),
        "usage": _usage(report.get("usage", {})),
        "seed": _integer(report.get("seed", 0)),
        "budget": _integer(report["budget"]),
        "trajectories": [Trajectory(**_path(t)) for t in _list(report["trajectories"])],
        "pruned": pruned,
    }
    if not len(candidates) == len(common["scores"]) == len(common["trajectories"]):
        raise ValueError("candidates, scores and trajectories differ in number")
    if not 0 <= common["best_index"] < len(candidates):
        raise ValueError(f"best_index {common['best_index']} of {len(candidates)} candidates")
    if "rounds" in report:
        return StepResult(**common, rounds=_integer(report["rounds"]), duplicates=_integer(report.get("duplicates", 0)))
    if "votes" not in report:
        return SearchResult(**common)
    answers = [None if a is None else _text(a) for a in _list(report["answers"])]
    if len(answers) != len(candidates):
        raise ValueError("candidates and answers differ in number")
    common["answers"] = answers
    common["votes"] = {_text(a): _score(w) for a, w in report["votes"].items()}
    common["answer"] = None if report["answer"] is None else VotedAnswer(_text(report["answer"]))
    if "confidence" not in report:
        return VoteResult(**common)
    return AdaptiveResult(**common, confidence=_score(report["confidence"]), settled=report["settled"] is True)


def _candidate(index: int, given: Mapping[str, Any]) -> CompletionOutput:
    reason = given["finish_reason"]
    if reason not in ("stop", "length"):
        raise ValueError(f"finish_reason {reason!r}")
    tokens = [_integer(t) for t in _list(given["token_ids"])]
    return CompletionOutput(index, _text(given["text"]), tokens, reason, _integer(given.get("seed", 0)))


def _path(given: Mapping[str, Any]) -> dict[str, Any]:
    steps = tuple(_text(s) for s in _list(given["steps"]))
    scores = tuple(_score(s) for s in _list(given["scores"]))
    if scores and len(scores) != len(steps):
        raise ValueError(f"{len(scores)} scores for {len(steps)} steps")
    return {"steps": steps, "scores": scores, "finished": given["finished"] is True, "tree": _integer(given["tree"])}


def _pruned(given: Mapping[str, Any]) -> Pruned:
    path = _path(given)
    path |= {name: _integer(given[name]) for name in ("round", "tokens", "step_tokens")}
    return Pruned(**path, score=_score(given["score"]), bar=_score(given["bar"]))


def _usage(given: Mapping[str, Any]) -> Usage:
    known = {name: _score(given[name]) for name in Usage.__dataclass_fields__ if name in given}
    return Usage(**{name: value if name.endswith("seconds") else int(value) for name, value in known.items()})  # type: ignore[arg-type]


def _list(value: object) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"a list was expected, not {str(value)[:40]!r}")
    return list(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a text was expected, not {str(value)[:40]!r}")
    return value


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"a whole number was expected, not {str(value)[:40]!r}")
    return value


def _score(value: object) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a number was expected, not {str(value)[:40]!r}")
    return float(value)
