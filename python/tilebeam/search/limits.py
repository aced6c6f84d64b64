"""How long candidates may get, and what those that a limit cut are worth: for all searches, their events, the server,
the evaluation and the command line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tilebeam.answers.repetition import repeats_itself
from tilebeam.outputs import CompletionOutput

# A chat's answer ends by itself, so that few candidates at a time are as long as this: the cells need not hold all.
CHAT_TOKENS = 1024
# How a text stands that ended by itself, and does not loop.
ENDED = 3


def share_of_context(n_ctx: int, slots: int, prompts: Sequence[Sequence[int]], budget: int, at_least: int = 1) -> int:
    """Return the most tokens of a candidate where nobody says: as many as there is room for in the cache when all that
    decode at the same time are that long. Without it a model that does not stop would decode for budget times the
    context, and candidates would push each other out.

    Args:
        n_ctx, slots: cells of the cache, and texts that decode at the same time.
        prompts: the tokens of each.
        budget: candidates of each prompt.
        at_least: as many, as far as one candidate alone has room for them.
    """
    room = n_ctx - max(map(len, prompts))
    return max(1, room // min(slots, budget * len(prompts)), min(at_least, room))


def standing(finish_reason: str, text: str) -> int:
    """Return how a candidate stands by the way it ended: 3 by itself, 2 cut by a limit, 1 in a loop.

    Whatever scores say, one that stands higher wins, and an answer of one that stands lower has no vote.
    """
    if repeats_itself(text):
        return 1
    return 2 if finish_reason in ("length", "aborted") else ENDED


def standings(candidates: Sequence[CompletionOutput]) -> list[int]:
    """Return how each candidate stands."""
    return [standing(c.finish_reason, c.text) for c in candidates]


def best_index(first: Sequence[float], then: Sequence[float], among: Iterable[int] | None = None) -> int:
    """Return the candidate that is highest in `first`, of equals in `then`, of equals the earliest: standings come
    first, and then scores, unless scores know better (`Scorer.knows`).

    Args:
        among: numbers of those that can be chosen, rising; None: all.
    """
    return max(range(len(first)) if among is None else among, key=lambda i: (first[i], then[i]))


def voters(answers: Sequence[str | None], standings: Sequence[int]) -> list[str | None]:
    """Return the answers that vote, None for candidates without a vote: of those that have an answer, the ones that
    stand highest vote. So where all were cut, all vote."""
    highest = max((s for a, s in zip(answers, standings, strict=True) if a is not None), default=0)
    return [a if s == highest else None for a, s in zip(answers, standings, strict=True)]


def leaders(answers: Sequence[str | None]) -> tuple[int, int]:
    """Return how many candidates vote for each of the two answers that most vote for, whatever they weigh."""
    counts = Counter(answer for answer in answers if answer is not None)
    first, second = ([n for _, n in counts.most_common(2)] + [0, 0])[:2]
    return first, second
