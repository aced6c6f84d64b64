"""Logits, log-probabilities or hidden states at chosen positions of given texts: what reward models and likelihood
scores are made of.

Texts that begin with tokens already in the prefix cache, or with those of other texts of the same call, fork those
cells, so a text that grew by a step costs the step's tokens only.

Texts are read in turns (turns.py), between which others may use the engine. What was read of a text then lies in the
prefix cache; if it had to give way there, it is read again.

A batch that gives hidden states gives them for all its entries, logits included. So tokens between questions go
through in batches of their own, without outputs, where there are enough of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tilebeam.engine.encoder import Pooling, pooled_positions
from tilebeam.engine.engine import Engine
from tilebeam.engine.kv_cache import Sequence, common_prefix
from tilebeam.engine.request import check_prompt
from tilebeam.engine.turns import Turn, Turns
from tilebeam.errors import TilebeamError
from tilebeam.native.llama import check_tokens

ReadHook = Callable[[int, int], object]
Floats = npt.NDArray[np.float32]

# A text waits for another of the same call if that saves at least this many tokens.
_SHARE_AT_LEAST = 16
# Tokens without a question that are worth a batch without outputs.
_PLAIN_AT_LEAST = 64


@dataclass
class Reading:
    """What was read of one text.

    Attributes:
        logits: float32 [positions, tokens], in the order asked for; no columns if something else was read.
        hidden: float32 [positions, n_embd]; no columns if something else was read.
        decoded_tokens: that went through the model.
        cached_tokens: that were in the cache.
        seconds: inside llama_decode, this text's share.
    """

    logits: Floats
    hidden: Floats
    decoded_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0


@dataclass
class TokenReading(Reading):
    """What was read of the tokens that follow a text's positions.

    Attributes:
        logprobs: float64 [positions], natural log-probabilities of the tokens asked about.
        likeliest: bool [positions], whether no token is likelier; of equals the lower.
        top: for each position the likeliest tokens and their log-probabilities, likeliest first; empty unless asked
            for.
    """

    logprobs: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    likeliest: npt.NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    top: list[dict[int, float]] = field(default_factory=list)


@dataclass(eq=False)
class _Job:
    """One text on its way through the model."""

    target: list[int]
    rows: dict[int, list[int]]  # position -> rows of the result
    out: Reading
    first: int  # position asked for whose answer is still to come
    reached: int = 0  # tokens that were decoded, or in the cache, by now
    seq: Sequence | None = None
    left: Sequence | None = None  # in the cache, at the end of a turn
    done: int = 0  # tokens of it in the batch under way
    flagged: list[tuple[int, int]] = field(default_factory=list)  # (batch entry, position)
    after: tuple[_Job, int] | None = None  # the text whose beginning it waits for, and how many marks that had then

    @property
    def start(self) -> int:
        """The next position to decode."""
        assert self.seq is not None
        return len(self.seq)

    @property
    def stop(self) -> int:
        """Behind the last position asked for."""
        return max(self.rows) + 1

    @property
    def waits(self) -> bool:
        """Return whether the text that it waits for is still on its way there."""
        return self.after is not None and self.after[0].seq is not None and self.after[0].n_marks == self.after[1]

    @property
    def n_marks(self) -> int:
        """Lengths still to come at which others will fork it."""
        return len(self.seq.marks) if self.seq is not None else 0

    def asked(self, stop: int) -> list[int]:
        """Return positions asked for among the next tokens, before `stop`."""
        return sorted(p for p in self.rows if self.first <= p < stop)

    def answered(self) -> None:
        """Record that the answers up to the present end of its sequence are there."""
        self.first = min((p for p in self.rows if p >= self.start), default=self.stop)


@dataclass(frozen=True)
class _Question:
    """What is read at the positions asked for.

    Attributes:
        answer: puts what the last batch gave for an entry into the rows of a job's position.
        hidden: it is hidden states, which a batch gives for all its entries.
    """

    answer: Callable[[int, _Job, int], None]
    hidden: bool = False


def _best(logits: Floats, count: int, log_sum: float) -> dict[int, float]:
    """Return the likeliest tokens, likeliest first, and their log-probabilities."""
    found = np.argpartition(logits, -count)[-count:]
    found = found[np.lexsort((found, -logits[found]))]
    return {int(token): float(logits[token]) - log_sum for token in found}


def log_sum_exp(row: Floats, work: Floats) -> tuple[int, float]:
    """Return (arg max, log of the sum of exponentials) of float32 logits; exponentials in float32, their sum in
    float64.

    Args:
        row: logits, [n_vocab]; work: scratch, [n_vocab].

    Raises:
        TilebeamError: the logits are not numbers.
    """
    top = int(row.argmax())
    highest = float(row[top])
    if not math.isfinite(highest):
        raise TilebeamError("The model's logits are not numbers: the file, or what computes it, is broken.")
    np.subtract(row, row[top], out=work)
    np.exp(work, out=work)
    return top, highest + math.log(float(work.sum(dtype=np.float64)))


class Reader:
    """Reads texts over an engine's context and cells, in turns that each call is given."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._context = engine.context
        self._kv = engine.kv

    def logits(
        self,
        turns: Turns,
        targets: SequenceOf[list[int]],
        positions: SequenceOf[SequenceOf[int]],
        tokens: SequenceOf[int] | None,
        hook: ReadHook | None = None,
    ) -> list[Reading]:
        """See `LM.read`."""
        size = self._context.model.vocab.size
        wanted = None if tokens is None else np.asarray(tokens, np.int64)
        if wanted is not None:
            check_tokens(wanted.tolist(), size)

        def answer(entry: int, job: _Job, position: int) -> None:
            logits = self._context.logits(entry)
            job.out.logits[job.rows[position]] = logits if wanted is None else logits[wanted]

        jobs = self._jobs(targets, positions, size if wanted is None else wanted.size, 0)
        return self._answers(turns, jobs, _Question(answer), hook)

    def hidden(
        self,
        turns: Turns,
        targets: SequenceOf[list[int]],
        positions: SequenceOf[SequenceOf[int]],
        hook: ReadHook | None = None,
    ) -> list[Reading]:
        """See `LM.hidden`."""

        def answer(entry: int, job: _Job, position: int) -> None:
            job.out.hidden[job.rows[position]] = self._context.hidden(entry)

        jobs = self._jobs(targets, positions, 0, self._context.model.n_embd)
        return self._answers(turns, jobs, _Question(answer, hidden=True), hook)

    def pooled(
        self, turns: Turns, targets: SequenceOf[list[int]], pooling: Pooling, hook: ReadHook | None = None
    ) -> list[Reading]:
        """Return one hidden state for each text, float32 [1, n_embd]: see `LM.embed`."""

        def answer(entry: int, job: _Job, _: int) -> None:
            job.out.hidden[0] += self._context.hidden(entry) / len(job.rows)

        jobs = self._jobs(targets, [[0]] * len(targets), 0, self._context.model.n_embd)
        for job in jobs:
            job.out.hidden[:] = 0
            job.rows = {position: [0] for position in pooled_positions(len(job.target), pooling)}
            job.first = min(job.rows)
        return self._answers(turns, jobs, _Question(answer, hidden=True), hook)

    def logprobs(
        self,
        turns: Turns,
        targets: SequenceOf[list[int]],
        positions: SequenceOf[SequenceOf[int]],
        tokens: SequenceOf[SequenceOf[int]],
        hook: ReadHook | None = None,
        top: int = 0,
    ) -> list[TokenReading]:
        """Read as `logits` does, but one token for each position, normalized over the vocabulary.

        Args:
            tokens: for each text and position the token whose probability is asked for.
            top: how many of the likeliest tokens to tell at each position.
        """
        size = self._context.model.vocab.size
        for some in tokens:
            check_tokens(some, size)
        jobs = self._jobs(targets, positions, 0, 0)
        outs = [TokenReading(j.out.logits, j.out.hidden) for j in jobs]
        for job, out, where in zip(jobs, outs, positions, strict=True):
            job.out = out
            out.logprobs, out.likeliest = np.empty(len(where)), np.empty(len(where), np.bool_)
            out.top = [{} for _ in where] if top else []
        wanted, most, work = dict(zip(jobs, tokens, strict=True)), min(top, size), np.empty(size, np.float32)

        def answer(entry: int, job: _Job, position: int) -> None:
            assert isinstance(job.out, TokenReading)
            logits = self._context.logits(entry)
            likeliest, log_sum = log_sum_exp(logits, work)
            for row in job.rows[position]:
                token = wanted[job][row]
                job.out.logprobs[row] = float(logits[token]) - log_sum
                job.out.likeliest[row] = token == likeliest
                if most:
                    job.out.top[row] = _best(logits, most, log_sum)

        self._answers(turns, jobs, _Question(answer), hook)
        return outs

    def _jobs(
        self, targets: SequenceOf[list[int]], positions: SequenceOf[SequenceOf[int]], n_logits: int, n_hidden: int
    ) -> list[_Job]:
        if len(targets) != len(positions):
            raise TilebeamError(f"{len(targets)} texts but {len(positions)} lists of positions.")
        jobs = []
        for target, where in zip(targets, positions, strict=True):
            check_prompt(target, self._context)
            rows: dict[int, list[int]] = {}
            for row, position in enumerate(where):
                at = position + len(target) if position < 0 else position
                if not 0 <= at < len(target):
                    raise TilebeamError(f"Position {position} is not in a text of {len(target)} tokens.")
                rows.setdefault(at, []).append(row)
            logits, hidden = (np.empty((len(where), n), np.float32) for n in (n_logits, n_hidden))
            jobs.append(_Job(target, rows, Reading(logits, hidden), min(rows, default=0)))
        return jobs

    def _answers(self, turns: Turns, jobs: list[_Job], question: _Question, hook: ReadHook | None) -> list[Reading]:
        waiting = [job for job in jobs if job.rows]
        total, begun = sum(len(job.target) for job in waiting), False

        def told() -> None:
            if hook is not None:
                seen = sum(job.out.decoded_tokens + job.out.cached_tokens for job in jobs)
                hook(min(seen, total), total)

        while waiting:
            with turns() as turn:
                if not begun:  # what will be forked stays longer than what will not
                    for job in waiting:
                        source, _ = self._kv.longest_prefix(job.target, job.first)
                        if source is not None:
                            self._kv.touch(source)
                begun = True
                waiting = self._take_turn(turn, waiting, question, told)
        return [job.out for job in jobs]

    def _take_turn(self, turn: Turn, waiting: list[_Job], question: _Question, told: Callable[[], None]) -> list[_Job]:
        """Read as much as a turn allows.

        Returns:
            the texts that are not read to their end.
        """
        running: list[_Job] = []
        try:
            while (waiting or running) and (room := turn.room(self._context.n_batch)):
                waiting = self._start_some(waiting, running)
                if running:  # the first one goes on, whatever has to give way to it
                    self._engine.scheduler.vacate(min(room, running[0].stop - running[0].start), 0)
                turn.decoded(*self._decode(running, question, room))
                waiting = [job for job in running if job.seq is None and job.first < job.stop] + waiting
                running = [job for job in running if job.seq is not None]
                told()
            for job in running:
                self._leave(job)
            return running + waiting
        except Exception:
            # A hook that ends the call, or logits that are no numbers: what others have in the cache is sound.
            for job in running:
                if job.seq is not None:
                    self._kv.close(job.seq)
            raise
        except BaseException:  # at any place, even between the cache and its count
            self._engine.forget()
            raise
        finally:
            if question.hidden:
                self._context.output_hidden(False)

    def _leave(self, job: _Job) -> None:
        """Leave what was read of a text in the cache until the next turn."""
        assert job.seq is not None
        job.left, job.seq = job.seq, None
        if len(job.left):
            self._kv.retire(job.left)
        else:
            self._kv.close(job.left)

    def _start_some(self, waiting: list[_Job], running: list[_Job]) -> list[_Job]:
        """Give texts their sequences, as many as there is room for; the texts that still wait.

        A text with which a running one will have more in common than the cache has waits for that. Where one finds no
        room, no other is tried: looking at thousands of them takes longer than a batch.
        """
        later: list[_Job] = []
        for i, job in enumerate(waiting):
            if len(running) == self._kv.limits.n_ids:
                return later + waiting[i:]
            if job.waits:
                later.append(job)
                continue
            limit = job.first  # from there on every token is needed for its logits, or follows one that is
            source, shared = self._kv.longest_prefix(job.target, limit)
            if (other := self._sharing_more(job, limit, shared, running)) is not None:
                job.after = other, other.n_marks
                later.append(job)
            elif not self._start(job, source, shared, running, waiting):
                return later + waiting[i:]
        return later

    def _sharing_more(self, job: _Job, limit: int, shared: int, running: list[_Job]) -> _Job | None:
        """Find a running text that will leave more than `shared` of a text's first `limit` tokens in the cache."""
        for other in running:
            assert other.seq is not None
            coming = self._kv.will_fork(other.seq, other.stop, min(limit, common_prefix(other.target, job.target)))
            if coming - shared >= _SHARE_AT_LEAST:
                return other
        return None

    def _start(self, job: _Job, source: Sequence | None, shared: int, running: list[_Job], waiting: list[_Job]) -> bool:
        """Give a text its sequence, a fork of `shared` tokens of another. False: there is no room now."""
        kv = self._kv
        goes_on = source is not None and source is job.left and shared == len(source)
        ids, room = int(not goes_on), job.stop - shared + sum(j.stop - j.start for j in running)
        while (kv.free_ids < ids or kv.free < room) and kv.evict(spare=source):
            pass
        if not running:
            self._engine.scheduler.vacate(0, ids, spare=source)
        if kv.free_ids < ids or (running and kv.free < room):
            return False
        if goes_on:
            assert source is not None
            kv.take(source)
            job.seq = source
        else:
            job.seq = kv.open_from(source, shared)
            shared = len(job.seq)
        if not job.out.decoded_tokens:
            job.out.cached_tokens = shared
        job.reached = max(job.reached, shared)
        running.append(job)
        if kv.needs_marks(job.stop):  # others' common beginnings with it
            others = {min(o.first, common_prefix(o.target, job.target)) for o in waiting if o.seq is None}
            kv.mark(job.seq, job.stop - 1, sorted(n for n in others if n - shared >= _SHARE_AT_LEAST))
        return True

    def _decode(self, running: list[_Job], question: _Question, room: int) -> tuple[int, int]:
        """Decode one batch of at most `room` tokens and take the answers in it; texts that are read to their end, and
        those that find no cells, lose their sequence.

        Returns:
            how many tokens it had, and how many that were not decoded before.
        """
        n, seconds = self._decode_what_fits(running, question, room)
        running = [job for job in running if job.seq is not None]
        new = 0
        for job in running:
            job.out.seconds += seconds * job.done / n
            job.out.decoded_tokens += job.done
            new += max(0, job.start - max(job.reached, job.start - job.done))
            job.reached = max(job.reached, job.start)
            for entry, position in job.flagged:
                question.answer(entry, job, position)
            if job.flagged:
                job.answered()
            if job.seq is not None:
                self._kv.reached(job.seq)
            if job.start == job.stop and job.seq is not None:
                self._kv.retire(job.seq)
                job.seq = None
        return n, new

    def _decode_what_fits(self, running: list[_Job], question: _Question, room: int) -> tuple[int, float]:
        """Decode one batch; return its tokens and seconds.

        Windows' own cells may be fewer than those that are counted, and those that texts share are not taken again when
        they have left the window: cached texts, those that started last, and samples give way until llama.cpp finds
        some. The first text goes on.
        """
        fitting, seconds = list(running), 0.0
        while True:
            if question.hidden:
                stops, every = _hidden_stops(fitting)
                self._context.output_hidden(every)
            else:
                stops, every = [job.stop for job in fitting], False
            n = self._fill(fitting, stops, every, room)
            if n == 0:
                raise TilebeamError("The KV cache has no room for this text; load the model with a larger n_ctx.")
            began = time.perf_counter()
            while (code := self._context.decode(n)) == 1 and self._kv.evict():
                pass
            seconds += time.perf_counter() - began
            if code == 0:
                return n, seconds
            if code != 1:
                self._engine.fail(code)
            for job in fitting:
                assert job.seq is not None
                self._kv.retract(job.seq, job.done)
            if len(fitting) > 1:
                last = fitting.pop()
                assert last.seq is not None
                self._kv.close(last.seq)
                last.seq = None
            elif not self._engine.scheduler.vacate(self._kv.free + 1, 0):
                raise TilebeamError("llama.cpp finds no KV cells for this text; load the model with swa_full=True.")

    def _fill(self, running: list[_Job], stops: list[int], every: bool, room: int) -> int:
        """Put the next tokens of the running texts into the batch, with outputs where they are asked for, or for all of
        them; how many."""
        context, kv = self._context, self._kv
        n = outputs = 0
        for job, stop in zip(running, stops, strict=True):
            job.done, job.flagged = 0, []
            assert job.seq is not None
            start = job.start
            stop = min([stop, *job.seq.marks[:1]])
            count = min(stop - start, room - n, kv.free)
            if every:
                count = min(count, context.max_outputs - outputs)
            asked = job.asked(start + count)
            if not every and outputs + len(asked) > context.max_outputs:
                asked = asked[: context.max_outputs - outputs]
                count = asked[-1] + 1 - start if asked else 0
            if count <= 0:
                continue
            end = n + count
            context.token[n:end] = job.target[start : start + count]
            context.pos[n:end] = np.arange(start, start + count)
            context.seq[n:end] = job.seq.id
            context.output[n:end] = every
            for position in asked:
                entry = n + position - start
                context.output[entry] = 1
                job.flagged.append((entry, position))
            kv.extend(job.seq, job.target[start : start + count])
            job.done, outputs, n = count, outputs + (count if every else len(asked)), end
        return n


def _hidden_stops(running: list[_Job]) -> tuple[list[int], bool]:
    """Return how far each text goes in the next batch, and whether that batch gives hidden states: up to the next
    question without, if that is worth a batch; else with, up to where such a batch will be worth it."""
    gaps = [job.asked(job.stop)[0] - job.start for job in running]
    if sum(gaps) >= _PLAIN_AT_LEAST:
        return [job.start + gap for job, gap in zip(running, gaps, strict=True)], False
    stops = []
    for job in running:
        asked = job.asked(job.stop)
        wide = [a for a, b in pairwise(asked) if (b - a - 1) * len(running) >= _PLAIN_AT_LEAST]
        stops.append((wide[0] if wide else asked[-1]) + 1)
    return stops, True
