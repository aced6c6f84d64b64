"""Results of searches as pages show them, of any size, with texts that read like a model's."""

from __future__ import annotations

import random
from typing import Any

from tilebeam import CompletionOutput, SearchResult, Trajectory, Usage, VoteResult
from tilebeam.answers.voted_answer import VotedAnswer
from tilebeam.search.adaptive import AdaptiveResult
from tilebeam.search.beam import StepResult
from tilebeam.search.contract import Pruned

QUESTION = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
    "How many clips did Natalia sell altogether in April and May?"
)
_OPENINGS = ("First, ", "So ", "Then ", "We know that ", "Now ", "Because of this, ", "Next, ", "")
_STEPS = (
    "in April she sold {a} clips to her friends.\n",
    "in May she sold half as many, so {a} / 2 = {b} clips.\n",
    "the total is {a} + {b} = {c} clips.\n",
    "we add both months: {a} + {b}, which makes {c}.\n",
    "half of {a} is {b}, because {b} + {b} = {a}.\n",
)
USAGE = Usage(
    prompt_tokens=61,
    cached_tokens=12,
    completion_tokens=4210,
    scored_tokens=5122,
    prefill_seconds=0.31,
    decode_seconds=9.4,
    sampling_seconds=0.6,
    scoring_seconds=3.2,
)


def step(luck: random.Random) -> str:
    """A sentence."""
    a = luck.choice((48, 48, 48, 46, 24))
    said = luck.choice(_STEPS).format(a=a, b=a // 2, c=a + a // 2)
    opening = luck.choice(_OPENINGS)
    return opening + (said if opening else said[0].upper() + said[1:])


def candidate(i: int, text: str, reason: Any = "stop") -> CompletionOutput:
    """One of them."""
    return CompletionOutput(i, text, list(range(max(1, len(text) // 4))), reason, 7 + i)


def vote(n: int, seed: int = 1) -> VoteResult:
    """A vote of so many candidates."""
    luck = random.Random(seed)
    answers = [luck.choice(["72", "72", "72", "96", "24", "60", None]) for _ in range(n)]
    texts = ["".join(step(luck) for _ in range(luck.randrange(2, 6))) + (f"#### {a}" if a else "") for a in answers]
    votes = {a: float(answers.count(a)) for a in answers if a is not None}
    votes = dict(sorted(votes.items(), key=lambda item: -item[1]))
    winner = next(iter(votes), None)
    return VoteResult(
        QUESTION,
        [candidate(i, t, "stop" if answers[i] else "length") for i, t in enumerate(texts)],
        [1.0] * n,
        answers.index(winner),
        USAGE,
        7,
        n,
        [Trajectory((t,)) for t in texts],
        answers,
        votes,
        None if winner is None else VotedAnswer(winner),
    )


def adaptive(n: int, seed: int = 1) -> AdaptiveResult:
    """A vote that was settled when half of its budget was spent."""
    return AdaptiveResult(**vars(vote(n, seed)) | {"budget": 2 * n}, confidence=0.971, settled=True)


def beams(n: int, width: int = 4, rounds: int = 6, seed: int = 1, dvts: bool = False) -> StepResult:
    """A search by steps with a budget of n: it draws n beams a round and keeps n / width."""
    luck = random.Random(seed)
    alive: list[tuple[list[str], list[float], int]] = [([], [], -1)]
    pruned: list[Pruned] = []
    for round in range(1, rounds + 1):
        forks = n // len(alive)
        drawn = []
        for steps, scores, tree in alive:
            for i in range(forks):
                grown = ([*steps, step(luck)], [*scores, round_score(luck)], i // width if round == 1 else tree)
                drawn.append(grown)
        if round == rounds:
            alive = drawn
            break
        alive = []
        groups = sorted({t for _, _, t in drawn}) if dvts else [None]
        for group in groups:
            rivals = sorted((d for d in drawn if group is None or d[2] == group), key=lambda d: -d[1][-1])
            keep = 1 if dvts else max(1, n // width)
            alive += rivals[:keep]
            bar = rivals[keep - 1][1][-1]
            common: dict[str, Any] = {"finished": False, "round": round, "bar": bar}
            common |= {"tokens": 14 * round, "step_tokens": 14}
            pruned += [Pruned(tuple(s), tuple(v), tree=t, score=v[-1], **common) for s, v, t in rivals[keep:]]
    texts = ["".join(steps) for steps, _, _ in alive]
    scores = [v[-1] for _, v, _ in alive]
    return StepResult(
        prompt=QUESTION,
        candidates=[candidate(i, t, "stop" if i % 5 else "length") for i, t in enumerate(texts)],
        scores=scores,
        best_index=max(range(len(scores)), key=lambda i: scores[i]),
        usage=USAGE,
        seed=7,
        budget=n,
        trajectories=[Trajectory(tuple(s), tuple(v), tree=t) for s, v, t in alive],
        pruned=pruned,
        rounds=rounds,
        duplicates=3,
    )


def round_score(luck: random.Random) -> float:
    """Of a step."""
    return round(luck.betavariate(3, 2), 4)


def best_of(n: int, seed: int = 1) -> SearchResult:
    """Candidates with scores and without answers."""
    plain = vote(n, seed)
    luck = random.Random(seed)
    scores = [round(-luck.random() * 2, 4) for _ in range(n)]
    best = max(range(n), key=lambda i: scores[i])
    return SearchResult(QUESTION, plain.candidates, scores, best, USAGE, 7, n, plain.trajectories)
