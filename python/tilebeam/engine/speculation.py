"""Which guesses are worth decoding: drafts by expected gain against the measured cost of a step's rows.

A step of n samples that also decodes k guessed tokens yields n tokens and those that turn out right, and takes as long
as steps of n + k rows have taken here. What makes a guess likely (how long a match, how sure a draft model was) is a
sign; how often tokens with that sign were drawn is counted, for each request and over all. Of all samples' guesses the
likeliest are taken, as many as make tokens per second most. Where guessing has lost more time than it won, it rests,
for longer each time, and then tries again.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median_high

from tilebeam.engine.draft_head import DraftHead
from tilebeam.engine.draft_model import DraftModel, NoCells
from tilebeam.engine.drafter import MOST, Drafter
from tilebeam.engine.lookup import Lookup
from tilebeam.engine.request import Request, Sample

_RECENT = 9  # steps of as many rows, of which the median counts
_ENOUGH = 3  # steps of as many rows, until their median counts
_RECENT_PACES = 5  # steps of any rows, whose median tells a new speed before that of a single number's ratios moves
_ROW_COST = 0.1  # of a step of one row per sample: an unmeasured row's, with room for error
FEW_SAMPLES = 4  # that decode together: up to these a row more costs little enough to look up guesses unasked
MOST_WITH_HEAD = 8  # samples that decode together: for more of them a head guesses nothing
_HEAD_MOST = 4  # guesses of a head in a row: it was trained for three, and more rows would cost more
_FIRST = 0.8  # the chance of a model's first guess, before anything is known
_FORGETTING = 0.003  # of what is known of it, in a step in which it was not asked
_FEW = 8  # rows, up to which a matrix unit has room for more
_CHEAP = 0.01  # of the time of steps: looking for guesses in vain may take that
_LEAST_GAIN = 1.02  # tokens per second against a plain step's
_PROBE = 24  # steps with guesses, none worth it, until one token is decoded to see what became of it
_WINDOW = 24  # steps between two looks at what guessing won
_SHORT_WINDOW = 6  # the same behind a rest that lasts
_LONGEST_REST = 512  # steps
_LASTING_REST = 96  # the shortest of a rest that lasts: behind it the head reads what came meanwhile


class StepCosts:
    """Seconds of steps, by how many tokens they decode.

    A machine's speed changes for all steps at once, but a step of some number of rows may not be measured for long. So
    what is kept of each number is its ratio to the speed at that time, which the last steps of any number tell. Some
    steps take longer for no reason of their own: a number counts as measured after a few, and more rows do not take
    less time, whatever was measured.
    """

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        self._ratios: dict[int, float] = {}
        self._rows: list[int] = []  # that are measured
        self._pace = 1.0
        self._paces = deque([self._pace] * _RECENT_PACES, maxlen=_RECENT_PACES)

    def add(self, rows: int, seconds: float) -> None:
        """Record a measured step."""
        if rows in self._ratios:
            self._paces.append(seconds / self._ratios[rows])
            self._pace = median_high(self._paces)
        recent = self._recent.setdefault(rows, deque(maxlen=_RECENT))
        recent.append(seconds / self._pace)
        if rows in self._ratios or len(recent) == _ENOUGH or not self._rows:
            self._ratios[rows] = median_high(recent)
            self._rows = sorted(self._ratios)

    def doubt(self, rows: int) -> None:
        """Forget what steps of more rows cost, to measure it again."""
        for more in [n for n in self._recent if n > rows]:
            del self._recent[more]
            self._ratios.pop(more, None)
        self._rows = sorted(self._ratios)

    def of(self, rows: int) -> float | None:
        """Return seconds of a step of so many rows, between its measured neighbours; None: nothing was measured."""
        return self._pace * self._ratio(rows) if self._rows else None

    def _ratio(self, rows: int) -> float:
        known = self._rows
        at = bisect_left(known, rows)
        most = min((self._ratios[n] for n in known[at:]), default=math.inf)
        if at == 0 or known[min(at, len(known) - 1)] == rows:
            return most
        low = known[at - 1]
        least = self._ratio(low)
        if at == len(known):
            return least * (1 + (rows - low) * (_ROW_COST if low < _FEW else 0.5 / low))
        return least + (rows - low) / (known[at] - low) * (most - least)


class Chances:
    """How often guessed tokens were drawn, by their signs, for single requests and over all."""

    def __init__(self) -> None:
        self._overall: dict[object, float] = {}
        self._of_request: dict[Request, dict[object, float]] = {}

    def of(self, request: Request, sign: object, first: float) -> float:
        """Return the chance of a token with this sign, if those before it are drawn; `first` while nothing is known."""
        own = self._of_request.get(request)
        if own is not None and sign in own:
            return own[sign]
        return self._overall.get(sign, first)

    def learn(self, request: Request, sign: object, first: float, drawn: bool) -> None:
        """Learn what became of a token whose predecessors were drawn."""
        own = self._of_request.setdefault(request, {})
        was = self.of(request, sign, first)
        own[sign] = was + 0.15 * (drawn - was)
        overall = self._overall.get(sign, first)
        self._overall[sign] = overall + 0.03 * (drawn - overall)

    def forget(self, request: Request) -> None:
        """Forget a request that is complete."""
        self._of_request.pop(request, None)


@dataclass
class Balance:
    """What guessing has won and cost since the last look, and whether it rests."""

    won: float = 0.0  # seconds
    spent: float = 0.0
    asked: int = 0
    stepped: float = 0.0  # seconds of all steps
    rests: int = 0  # steps to go
    rested: int = 0  # steps of the last rest
    lasting: bool = False  # a head's: it is as right in one text as in the next, so rests outlast a text

    def renew(self) -> None:
        """Wake for another text, unless rests last."""
        if not self.lasting:
            self.rests = self.rested = 0

    def look(self) -> None:
        """Look now and then, and rest where it does not pay; sooner where it did not pay before a lasting rest."""
        if self.asked < (_SHORT_WINDOW if self.lasting and self.rested else _WINDOW):
            return
        if self.spent - self.won > _CHEAP * self.stepped:
            least = _LASTING_REST if self.lasting else _WINDOW
            self.rested = self.rests = min(_LONGEST_REST, max(least, 2 * self.rested))
        else:
            self.rested = 0
        self.won = self.spent = self.stepped = 0.0
        self.asked = 0

    def wakes(self) -> bool:
        """Return whether it is to be asked in this step."""
        self.rests -= self.rests > 0
        return self.rests == 0


@dataclass
class _Guesses:
    """Guesses for a sample, and for each token its sign and the first guess at its chance."""

    tokens: list[int] = field(default_factory=list)
    signs: list[object] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)  # chance that the token and all before it are drawn
    taken: int = 0  # tokens that a step decodes

    def add(self, token: int, sign: object, first: float, chance: float) -> None:
        """Add one more token, which is drawn with this chance if those before it are."""
        self.tokens.append(token)
        self.signs.append(sign)
        self.first.append(first)
        self.gains.append(chance * (self.gains[-1] if self.gains else 1.0))


class Speculation(Drafter):
    """Guesses by look-up, by a draft model, or by look-up and a draft head.

    Args:
        model: a draft model or head; None: texts are looked up only.
        most_samples: in steps of more samples nothing is guessed.

    Attributes:
        model: as given.
    """

    def __init__(self, model: DraftModel | DraftHead | None = None, most_samples: int = sys.maxsize) -> None:
        self.most_samples = most_samples
        self.model = model
        self.forget()
        self._costs = StepCosts()
        self._drafts: dict[Sample, _Guesses] = {}  # of which tokens were taken
        self._worth = 0.0  # of a token of them that is drawn, seconds
        self._known: set[Request] = set()
        self._idle = 0  # steps with guesses of which none was worth it
        self._asked = False  # planning this step is paid for

    def forget(self) -> None:
        """Forget all texts and what became of guesses in them, but not what steps cost: as before the first request."""
        self._lookup = Lookup()
        self._chances = Chances()
        self._usual = 1.0  # tokens of a head's guesses that are likely right
        self._first = _FIRST  # the chance of a model's first guess
        self._balance = Balance(lasting=isinstance(self.model, DraftHead))

    # --- proposals --------------------------------------------------------------------------------------------------

    def propose(self, asked: Sequence[tuple[Sample, int]], rows: int) -> list[list[int]]:
        """See `Drafter`."""
        requests = {sample.request for sample, _ in asked}
        if not requests <= self._known:  # another text may repeat itself more
            self._balance.renew()
        self._known |= requests
        candidates = [_Guesses() for _ in asked]
        self._asked = self._balance.wakes()
        if self._asked:
            if self._balance.rested and not self._balance.asked:  # it may rest as something else slowed steps down
                self._costs.doubt(rows)
            bounded = [(s, min(most, MOST)) for s, most in asked]
            with suppress(NoCells):  # then nothing is guessed in this step
                candidates = self._guesses(bounded, rows)
            self._balance.asked += 1
        self._choose(candidates, rows)
        self._drafts = {s: c for (s, _), c in zip(asked, candidates, strict=True) if c.taken}
        self._charge(rows)
        return [c.tokens[: c.taken] for c in candidates]

    def _guesses(self, asked: list[tuple[Sample, int]], rows: int) -> list[_Guesses]:
        if self.model is None:
            return self._look_up(asked)
        if isinstance(self.model, DraftModel):
            return self._ask_model(self.model, asked, rows)
        # A look-up costs next to nothing: the head is asked where texts are not expected to repeat themselves for
        # longer than its guesses are usually right.
        found = self._look_up(asked)
        unlike = [i for i, guesses in enumerate(found) if sum(guesses.gains) <= self._usual]
        few = [(sample, min(most, _HEAD_MOST)) for sample, most in (asked[i] for i in unlike)]
        for i, guesses in zip(unlike, self._ask_model(self.model, few, rows), strict=True):
            if guesses.gains:
                self._usual += 0.05 * (sum(guesses.gains) - self._usual)
            if sum(guesses.gains) >= sum(found[i].gains):
                found[i] = guesses
        return found

    def _look_up(self, asked: list[tuple[Sample, int]]) -> list[_Guesses]:
        candidates = [_Guesses() for _ in asked]
        for (sample, _), candidate, found in zip(asked, candidates, self._lookup.guess(asked), strict=True):
            for token, sign in zip(found.tokens, found.signs, strict=True):
                length, agreed = sign
                first = 0.3 + 0.04 * min(length, 10) * (0.5 + 0.5 * agreed / 2)
                candidate.add(token, sign, first, self._chances.of(sample.request, sign, first))
        return candidates

    def _ask_model(self, model: DraftModel | DraftHead, asked: list[tuple[Sample, int]], rows: int) -> list[_Guesses]:
        """Let the draft model go on, token by token, for the samples where one more is likely to be worth its time."""
        candidates = [_Guesses() for _ in asked]
        plain = self._costs.of(rows)
        if plain is None or not asked:  # nothing was measured yet
            return candidates

        def pays(gain: float, drafted: int, more: int) -> bool:
            now, then = self._costs.of(rows + drafted), self._costs.of(rows + drafted + more)
            assert now is not None
            assert then is not None
            return gain * plain / rows > model.times.of(more) + then - now

        # What is asked after a while reads what came meanwhile, even if it is then asked for nothing.
        if not pays(self._first * len(asked), 0, len(asked)):
            self._first += _FORGETTING * (_FIRST - self._first)
            return candidates
        draft = model.drafting([sample for sample, _ in asked])
        active = [i for i, (_, most) in enumerate(asked) if most and draft.ready(i)]
        drafted = 0
        while active:
            gain = sum(candidates[i].gains[-1] if candidates[i].gains else self._first for i in active)
            if not pays(gain, drafted, len(active)):
                break
            drawn = draft.next(active)
            if len(drawn) < len(active):  # a head that failed
                break
            for i, (token, sign, first) in zip(active, drawn, strict=True):
                candidates[i].add(token, sign, first, self._chances.of(asked[i][0].request, sign, first))
            if not drafted:
                mean = sum(candidates[i].gains[0] for i in active) / len(active)
                self._first += 0.2 * (mean - self._first)
            drafted += len(active)
            active = [i for i in active if len(candidates[i].tokens) < asked[i][1] and candidates[i].gains[-1] > 0.1]
        return candidates

    def _choose(self, candidates: list[_Guesses], rows: int) -> None:
        """Say of each how many tokens are taken."""
        order = sorted(((g, c) for c in candidates for g in c.gains), key=lambda x: -x[0])
        plain = self._costs.of(rows)
        if not order or plain is None:
            return
        best, best_count, gained = _LEAST_GAIN * rows / plain, 0, 0.0
        for count, (gain, _) in enumerate(order, 1):
            gained += gain
            cost = self._costs.of(rows + count)
            assert cost is not None
            if (rows + gained) / cost > best:
                best, best_count = (rows + gained) / cost, count
        if not best_count:
            self._idle += 1
            best_count = int(self._idle % _PROBE == 0)
        for _, candidate in order[:best_count]:
            candidate.taken += 1

    def _charge(self, rows: int) -> None:
        """Charge for the rows of drafts, and remember what a token that is drawn is worth."""
        count = sum(draft.taken for draft in self._drafts.values())
        plain, cost = self._costs.of(rows), self._costs.of(rows + count)
        if not count or plain is None or cost is None:
            return
        self._worth = plain / rows
        self._balance.spent += max(0.0, cost - plain)

    # --- what became of them ----------------------------------------------------------------------------------------

    def verified(self, sample: Sample, accepted: int) -> None:
        """See `Drafter`."""
        draft = self._drafts.pop(sample, None)
        if draft is None or sample.request not in self._known:
            return
        self._balance.won += accepted * self._worth
        for i in range(min(accepted + 1, draft.taken)):
            self._chances.learn(sample.request, draft.signs[i], draft.first[i], i < accepted)

    def stepped(self, rows: int, seconds: float, planning: float) -> None:
        """See `Drafter`."""
        self._costs.add(rows, seconds)
        if self._asked:
            self._balance.spent += planning
            self._asked = False
        self._balance.stepped += seconds
        self._balance.look()

    def finished(self, sample: Sample) -> None:
        """See `Drafter`."""
        if isinstance(self.model, DraftModel):
            self.model.finished(sample)
        else:
            self._lookup.finished(sample)
        if sample.request.unfinished == 0:
            self._chances.forget(sample.request)
            self._known.discard(sample.request)

    def rest(self) -> int:
        """See `Drafter`."""
        steps, self._balance.rests = self._balance.rests, 0
        return steps
