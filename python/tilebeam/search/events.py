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
from tilebeam.answers.normalize import Equal, checked_answer
from tilebeam.outputs import CompletionOutput
from tilebeam.search.limits import leaders, standing, voters

Fate = Literal["kept", "dropped", "ended", "cut"]


@dataclass(frozen=True, kw_only=True)
class SearchEvent:
    """Something that happened.

    Attributes:
        event: "candidate": a text is complete. "score": a candidate was rated. "step": a continuation was drawn and
            rated.
        prompt: number of the prompt.
        fate: what becomes of it. A step is kept or dropped, or it ends its text; a candidate has ended, or was cut by a
            limit.
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
        """Return it as JSON has it: what is known."""
        shown = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in shown.items() if value is not None}


# Called in the thread that searches; it must not block.
EventHook = Callable[[SearchEvent], None]


def candidate_event(prompt: int, candidate: CompletionOutput, **more: Any) -> SearchEvent:
    """Make the event of a candidate that is complete."""
    return SearchEvent(
        event="candidate",
        prompt=prompt,
        fate="ended" if candidate.finish_reason == "stop" else "cut",
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
    # The first candidate of each group of equal answers, and its answer.
    _sides: list[tuple[int, str]] = field(default_factory=list)
    # Of each candidate by its index: its group, how it stands by the way it ended, and its weight if it is known.
    _known: dict[int, tuple[int | None, int, float | None]] = field(default_factory=dict)

    def add(self, candidate: CompletionOutput, weight: float | None) -> tuple[str | None, dict[str, float] | None]:
        """Return its answer, and the votes with it; None while its weight is not known."""
        answer, side = checked_answer(self.extract(candidate.text)), None
        if answer is not None:
            same = (i for i, (_, known) in enumerate(self._sides) if known == answer or self.equal(known, answer))
            side = next(same, len(self._sides))
            self._sides[side : side + 1] = [min([*self._sides[side : side + 1], (candidate.index, answer)])]
        self._known[candidate.index] = side, standing(candidate.finish_reason, candidate.text), weight
        return self.rate(candidate.index, weight)

    def rate(self, index: int, weight: float | None) -> tuple[str | None, dict[str, float] | None]:
        """Rate a candidate that was added before; returns what `add` does."""
        side, end, _ = self._known[index]
        self._known[index] = side, end, weight
        return None if side is None else self._sides[side][1], self.votes() if weight is not None else None

    @property
    def standing(self) -> int:
        """How those stand that vote; see `tilebeam.search.limits.standing`. 0: nobody does."""
        return max((end for side, end, _ in self._known.values() if side is not None), default=0)

    def _voters(self) -> tuple[list[str | None], list[float | None]]:
        """Return the answers that vote, in the order of seeds, and their weights."""
        known = [self._known[i] for i in sorted(self._known)]
        answers = [None if side is None else self._sides[side][1] for side, _, _ in known]
        return voters(answers, [end for _, end, _ in known]), [weight for _, _, weight in known]

    def leaders(self) -> tuple[int, int]:
        """Return how many candidates vote for each of the two leading answers; see `tilebeam.search.limits.leaders`."""
        return leaders(self._voters()[0])

    def votes(self) -> dict[str, float]:
        """Return the total weight per answer of the candidates whose weight is known, as `tally` has them."""
        rated = [(answer, weight) for answer, weight in zip(*self._voters(), strict=True) if weight is not None]
        return tally([answer for answer, _ in rated], [weight for _, weight in rated])


def tally(answers: Sequence[str | None], weights: Sequence[float]) -> dict[str, float]:
    """Return the total weight per answer, heaviest first, of equals the one seen first."""
    totals: dict[str, float] = {}
    for answer, weight in zip(answers, weights, strict=True):
        if answer is not None:
            totals[answer] = totals.get(answer, 0.0) + weight
    return dict(sorted(totals.items(), key=lambda item: -item[1]))  # sorted() is stable
