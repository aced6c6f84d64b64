"""Scorers by name, as options and requests give them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tilebeam.errors import TilebeamError
from tilebeam.scoring.code_consensus import CodeConsensus
from tilebeam.scoring.code_examples import CodeExamples
from tilebeam.scoring.llm_judge import LLMJudge
from tilebeam.scoring.scorers import Consensus, LogProb, Scorer, TailEntropy
from tilebeam.scoring.scoring_defaults import ScorerName

if TYPE_CHECKING:
    from tilebeam.model.lm import LM


def named_scorer(name: str, lm: LM | None = None, *, unsafe_code: bool = False) -> Scorer:
    """Make a scorer by name: "consensus", "logprob", "logprob-sum", "tail-entropy", "examples"
    (`CodeExamples`), "behavior" (`CodeConsensus`), or "judge": a model asked about the candidates.

    Args:
        name: the scorer's.
        lm: the judge.
        unsafe_code: let "examples" and "behavior" run programs even where they cannot be confined.

    Raises:
        TilebeamError: no scorer has that name, or it needs a model.
    """
    known: dict[ScorerName, Callable[[], Scorer]] = {
        "consensus": Consensus,
        "logprob": LogProb,
        "logprob-sum": lambda: LogProb(per_token=False),
        "tail-entropy": TailEntropy,
        "examples": lambda: CodeExamples(unsafe=unsafe_code),
        "behavior": lambda: CodeConsensus(unsafe=unsafe_code),
        "judge": lambda: _judge(lm),
    }
    for choice, make in known.items():
        if name == choice:
            return make()
    raise TilebeamError(f"Unknown scorer {name!r}: choose from {', '.join(known)}.")


def _judge(lm: LM | None) -> LLMJudge:
    if lm is None:
        raise TilebeamError("A judge needs a model: make it with tilebeam.LLMJudge(lm).")
    return LLMJudge(lm)
