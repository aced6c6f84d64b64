"""What happens in a search, told while it runs: `Algorithm.run(..., events=hook)`.

Searches over whole candidates tell "candidate" as each ends, and with a scorer "score" for each once they are rated.
Searches by steps tell "step" for each continuation of a round once the round is decided, and "candidate" for a text
that is complete. Of a vote, "candidate" and "score" tell the votes so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tilebeam.answers.extract import Extractor
from tilebeam.answers.normalize import Equal, merged
from tilebeam.outputs import CompletionOutput

Fate = Literal["kept", "dropped", "ended", "cut", "given up"]
_FATES: dict[str, Fate] = {"stop": "ended", "length": "cut", "aborted": "given up"}


@dataclass(frozen=True, kw_only=True)
class SearchEvent:
    """Something that happened.

    Attributes:
        event: "candidate": a text is complete. "score": a candidate was rated. "step": a continuation was drawn and
            rated.
        prompt: number of the prompt.
        fate: what becomes of it. A step is kept or dropped, or it ends its text; a candidate has ended, was cut by a
            limit or was given up.
        index: of the candidate; None of a step.
        round: of a search by steps, counted from 1; 0 of others.
        text: of a step this step, of a candidate all of it; "" in "score".
        tokens: sampled for it, of a step with all before it; 0 in "score".
        score: what the search chooses by: the candidate's score or weight, a step's aggregate with all before it. None
            before it is rated.
        answer: the candidate's, of a vote.
        votes: total weight per answer so far, heaviest first; None where nothing votes, and while weights are unknown.
    """

    event: Literal["candidate", "score", "step"]
    prompt: int
    fate: Fate
    index: int | None = None
    round: int = 0
    text: str = ""
    tokens: int = 0
    score: float | None = None
    answer: str | None = None
    votes: dict[str, float] | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: what is known."""
        shown = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in shown.items() if value is not None}


# Called in the thread that searches; it must not block.
EventHook = Callable[[SearchEvent], None]


def candidate_event(prompt: int, candidate: CompletionOutput, **more: Any) -> SearchEvent:
    """A candidate that is complete."""
    return SearchEvent(
        event="candidate",
        prompt=prompt,
        fate=_FATES[candidate.finish_reason],
        index=candidate.index,
        text=candidate.text,
        tokens=len(candidate.token_ids),
        **more,
    )


@dataclass
class RunningVote:
    """A vote while its candidates come, in any order.

    Attributes:
        extract, equal: see `SelfConsistency`.
    """

    extract: Extractor
    equal: Equal
    answers: dict[int, str | None] = field(default_factory=dict)
    weights: dict[int, float] = field(default_factory=dict)

    def add(self, candidate: CompletionOutput, weight: float | None) -> tuple[str | None, dict[str, float] | None]:
        """Its answer, and the votes with it; None while its weight is not known."""
        self.answers[candidate.index] = self.extract(candidate.text)
        if weight is not None:
            self.weights[candidate.index] = weight
        return self._state(candidate.index)

    def rate(self, index: int, weight: float) -> tuple[str | None, dict[str, float] | None]:
        """The same for a candidate that was added before and is rated now."""
        self.weights[index] = weight
        return self._state(index)

    def _state(self, index: int) -> tuple[str | None, dict[str, float] | None]:
        return self._merged()[index], self.votes() if index in self.weights else None

    def votes(self) -> dict[str, float]:
        """Total weight per answer of the candidates whose weight is known."""
        answers = {i: answer for i, answer in self._merged().items() if i in self.weights}
        return tally(list(answers.values()), [self.weights[i] for i in answers])

    def _merged(self) -> dict[int, str | None]:
        """The answers in the order of candidates; equal ones have the first one's spelling."""
        order = sorted(self.answers)
        return dict(zip(order, merged([self.answers[i] for i in order], self.equal), strict=True))


def tally(answers: Sequence[str | None], weights: Sequence[float]) -> dict[str, float]:
    """Total weight per answer, heaviest first, of equals the one seen first."""
    totals: dict[str, float] = {}
    for answer, weight in zip(answers, weights, strict=True):
        if answer is not None:
            totals[answer] = totals.get(answer, 0.0) + weight
    return dict(sorted(totals.items(), key=lambda item: -item[1]))  # sorted() is stable
