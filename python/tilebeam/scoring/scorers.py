"""What says how good a candidate is."""

from __future__ import annotations

import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tilebeam.checks import checked_integer
from tilebeam.errors import TilebeamError
from tilebeam.outputs import CompletionOutput, RequestOutput, Usage
from tilebeam.prompt import Prompt


@dataclass(frozen=True)
class Rating:
    """Scores, and what they cost.

    Attributes:
        scores: one per candidate of a prompt, or one per step of a solution; higher is better.
        usage: ``scored_tokens`` and ``full_scoring_tokens``, and in ``scoring_seconds`` what the model took; zeros
            where no model runs.
    """

    scores: list[float]
    usage: Usage = field(default_factory=Usage)


class Scorer(ABC):
    """Rates candidates; higher is better. A scorer without costs implements `score`, one that runs a model `rate`, too.

    Searches hand on a `tilebeam.Prompt`; `Prompt.of` makes one of a text.

    Attributes:
        needs_logprobs: candidates must carry ``cumulative_logprob``.
        needs_statistics: candidates must carry ``entropies`` and ``certainties``.
        needs_hidden: candidates must carry ``hidden``, and ``hidden_steps`` if those of the scorer are not "".
        knows: its scores are checks, not guesses: they count more than whether a candidate ended or was cut.
    """

    knows: bool = False
    needs_logprobs: bool = False
    needs_statistics: bool = False
    needs_hidden: bool = False

    @property
    def hidden_steps(self) -> str:
        """Return what ends the steps whose states candidates must carry; "" for none."""
        return ""

    def needs(self) -> dict[str, bool | str]:
        """Return the fields of `SamplingParams` with which candidates must be drawn."""
        wanted: dict[str, bool | str] = {"logprobs": True} if self.needs_logprobs else {}
        wanted |= {"statistics": True} if self.needs_statistics else {}
        return wanted | ({"hidden": True, "hidden_steps": self.hidden_steps} if self.needs_hidden else {})

    @abstractmethod
    def score(self, prompt: str | Prompt, candidates: Sequence[CompletionOutput]) -> list[float]:
        """Return one score per candidate of a prompt, in their order."""

    def rate(self, prompts: Sequence[str | Prompt], groups: Sequence[Sequence[CompletionOutput]]) -> list[Rating]:
        """Rate the candidates of several prompts: one rating per prompt. Scorers that run a model or batch over prompts
        override it."""
        return [Rating(self.score(prompt, group)) for prompt, group in zip(prompts, groups, strict=True)]


class LogProb(Scorer):
    """The model's own log-probability of what it wrote.

    Args:
        per_token: divide by the number of tokens, so that short candidates have no advantage.
    """

    needs_logprobs = True

    def __init__(self, *, per_token: bool = True) -> None:
        self.per_token = per_token

    def score(self, prompt: str | Prompt, candidates: Sequence[CompletionOutput]) -> list[float]:  # noqa: ARG002
        """Return the mean (or sum) of the tokens' natural log-probabilities."""
        return [log_probability(c, per_token=self.per_token) for c in candidates]


class TailEntropy(Scorer):
    """How sure the model was of a text's end, where its answer is: the negative mean entropy of the last tokens.

    Args:
        window: how many tokens; a shorter text counts as a whole.
    """

    needs_statistics = True

    def __init__(self, *, window: int = 64) -> None:
        self.window = checked_integer("window", window)

    def score(self, prompt: str | Prompt, candidates: Sequence[CompletionOutput]) -> list[float]:  # noqa: ARG002
        """Return the negative means, in nats; 0 for a text without tokens.

        Raises:
            TilebeamError: it was sampled without statistics.
        """
        found = []
        for candidate in candidates:
            if candidate.entropies is None:
                raise TilebeamError("A candidate has no statistics: sample with SamplingParams(statistics=True).")
            last = candidate.entropies[-self.window :]
            found.append(-math.fsum(last) / max(1, len(last)))
        return found


class Verifier(Scorer):
    """A function that knows: a checker of answers, unit tests, a rule.

    Args:
        check: gets the prompt's text and a candidate's; returns a number, or True or False for 1 and 0.
    """

    knows = True

    def __init__(self, check: Callable[[str, str], float | bool]) -> None:
        self.check = check

    def score(self, prompt: str | Prompt, candidates: Sequence[CompletionOutput]) -> list[float]:
        """Ask the function about each text.

        Raises:
            TilebeamError: it returns something that is not a number.
        """
        name = getattr(self.check, "__name__", type(self.check).__name__)
        text = Prompt.of(prompt).text
        return [_number(self.check(text, c.text), f"The verifier {name}") for c in candidates]


# Words; scripts that put no spaces between words, by the character.
_WORD = re.compile(r"[^\W\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+|\w")


class Consensus(Scorer):
    """How much a text has in common with the other candidates: what many of them say is seldom made up, and a text that
    is too short, off the point or loops shares little with them.

    Between 0 and 1: the mean, over all candidates, of Dice's coefficient of the sets of their words. Asks for nothing
    but the texts.
    """

    def score(self, prompt: str | Prompt, candidates: Sequence[CompletionOutput]) -> list[float]:  # noqa: ARG002
        """Compare each text with all, itself included."""
        words = [set(_WORD.findall(c.text.lower())) for c in candidates]
        return [sum(2 * len(a & b) / max(1, len(a) + len(b)) for b in words) / len(words) for a in words]


def log_probability(candidate: CompletionOutput, *, per_token: bool) -> float:
    """Return the log-probability of a candidate, in total or per token.

    Raises:
        TilebeamError: it was sampled without logprobs.
    """
    if candidate.cumulative_logprob is None:
        raise TilebeamError("A candidate has no log-probability: sample with SamplingParams(logprobs=True).")
    if not per_token:
        return candidate.cumulative_logprob
    return candidate.cumulative_logprob / max(1, len(candidate.token_ids))


def rate_outputs(scorer: Scorer, prompts: Sequence[Prompt], outputs: Sequence[RequestOutput]) -> list[Rating]:
    """Rate the candidates of several prompts: one rating per prompt, checked, with its share of the time.

    Raises:
        TilebeamError: as `checked_scores`, or there are more or fewer ratings than prompts.
    """
    began = time.perf_counter()
    try:
        ratings = scorer.rate(prompts, [o.outputs for o in outputs])
    except (TypeError, AttributeError) as error:
        if not re.search(r"\b(CompletionOutput|Prompt)\b", str(error)):
            raise
        raise TilebeamError(
            f"{type(scorer).__name__} takes prompt or candidates for texts ({error}): a scorer reads prompt.text and "
            "candidate.text. A function of the two texts does in its place: BestOfN(lambda prompt, text: ..)."
        ) from error
    if len(ratings) != len(outputs):
        raise TilebeamError(f"{type(scorer).__name__} rated {len(ratings)} of {len(outputs)} prompts.")
    scores = [checked_scores(r.scores, len(o.outputs), scorer) for r, o in zip(ratings, outputs, strict=True)]
    seconds = shares(time.perf_counter() - began, [len(o.outputs) for o in outputs])
    return [
        Rating(own, replace(r.usage, scoring_seconds=s)) for own, r, s in zip(scores, ratings, seconds, strict=True)
    ]


def shares(seconds: float, counts: Sequence[int]) -> list[float]:
    """Share out the seconds that several prompts took together by the number of texts of each."""
    return [seconds * count / max(1, sum(counts)) for count in counts]


def checked_scores(scores: Sequence[float], count: int, scorer: Scorer) -> list[float]:
    """Check scores, and return them as floats.

    Raises:
        TilebeamError: a scorer returned another number of scores than `count`, or something that is not a number.
    """
    name = type(scorer).__name__
    result = [_number(s, name) for s in scores]
    if len(result) != count:
        raise TilebeamError(f"{name} returned {len(result)} scores where {count} were asked for.")
    if any(math.isnan(s) for s in result):
        raise TilebeamError(f"{name} returned a score that is not a number.")
    return result


def _number(score: object, whose: str) -> float:
    try:
        return float(score)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TilebeamError(f"{whose} returned {score!r} as a score: return a number, or True or False.") from None
