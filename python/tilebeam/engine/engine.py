"""The step loop: many prompts, many samples of each, one batch per step.

A step admits samples to free slots, decodes the batch that the scheduler plans, draws a token for every sample whose
logits came out, and ends the samples that are complete. While nothing but the next token of each sample changes, the
batch is not planned anew.

With a drafter, a step decodes guesses of the next tokens too. Tokens are then drawn position by position, each sample's
from its own sampler, as long as they are those that were guessed; the cells of the other guesses are given back.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import NoReturn

from tilebeam.engine.detokenizer import Detokenizer
from tilebeam.engine.drafter import Drafter
from tilebeam.engine.forcing import Forcer
from tilebeam.engine.hidden_states import HiddenStates
from tilebeam.engine.kv_cache import Limits, PrefixCache
from tilebeam.engine.matcher import too_complex
from tilebeam.engine.observer import Observer, observed
from tilebeam.engine.request import Request, Sample
from tilebeam.engine.sampler import BAD_LOGITS, TOO_COMPLEX, Banned, BatchSampler, Sampler, SampleRows
from tilebeam.engine.scheduler import BatchPlan, Scheduler
from tilebeam.errors import TilebeamError
from tilebeam.native.llama import Context
from tilebeam.outputs import EngineFigures, FinishReason, Progress


class Engine:
    """Runs requests over one context.

    Args:
        context: with a unified KV cache.
        n_slots: samples that decode at the same time.
        n_ids: sequences that the context tells apart, at least n_slots; one more lets a prompt be pinned for samples
            that find no slot yet.
        on_failure: makes the exception for a failed llama_decode, given its return code.
        threads: that draw tokens.
        snapshot_bytes: that states at earlier tokens may have, of a model that needs them.

    Attributes:
        broken: why decoding failed for good, None if it did not.
        batches: steps, by how many samples drew a token.
        observer: see `observe`.
    """

    def __init__(
        self,
        context: Context,
        n_slots: int,
        n_ids: int,
        on_failure: Callable[[int], TilebeamError],
        threads: int = 1,
        snapshot_bytes: int = 0,
    ) -> None:
        model = context.model
        self.context = context
        self.vocab = model.vocab
        self.kv = PrefixCache(context, Limits.of(context, n_ids, snapshot_bytes))
        self.scheduler = Scheduler(context, self.kv, n_slots)
        self.sampler = BatchSampler(context, threads)
        self.hidden = HiddenStates(context)
        self.broken: TilebeamError | None = None
        self.batches: Counter[int] = Counter()
        self.observer: Observer | None = None
        self._on_failure = on_failure
        self._steady: BatchPlan | None = None  # of the next batch too, while nothing changes
        self._planned = 0.0  # seconds of this step

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request; `step` runs it."""
        self._steady = None
        self.scheduler.submit(request)

    @property
    def busy(self) -> bool:
        """Return whether samples run or wait."""
        return self.scheduler.busy

    def running(self, progress: Progress) -> int:
        """Count the samples of one call that hold a slot now."""
        return sum(s.request.progress is progress for s in self.scheduler.running)

    def figures(self) -> EngineFigures:
        """Return the state by now; any thread may look."""
        scheduler, cells = self.scheduler, self.kv.limits.n_cells
        running, waiting = len(scheduler.running), len(scheduler.queue)
        return EngineFigures(running, waiting, scheduler.n_slots, cells, cells - self.kv.free, dict(self.batches))

    def cancel(self, request: Request) -> None:
        """End what is not finished of a request as "aborted", and free its cells."""
        self.scheduler.remove(request)
        for sample in request.samples:
            if sample.finish is None:
                self._end(sample, "aborted")

    def abort(self) -> None:
        """Drop everything that is not finished, as "aborted", and everything that is cached."""
        for sample in self.scheduler.clear():
            self._end(sample, "aborted")

    def forget(self) -> None:
        """Forget every cell, cached ones too; samples that run are decoded anew."""
        self._steady = None
        self.scheduler.forget()

    def observe(self, observer: Observer | None) -> None:
        """Tell an observer of all phases from now on; None: tell nothing any more. Any thread may."""
        self.observer = self.scheduler.observer = observer
        self.context.on_decode = None if observer is None else partial(observer.phase, "decode")

    def use_drafter(self, drafter: Drafter | None) -> None:
        """Ask a drafter from the next step on; None: no drafts."""
        self._steady = None
        self.scheduler.drafter = drafter

    def lend(self) -> None:
        """Let somebody else use context and cells until the next step."""
        self._steady = None  # the batch arrays are used, too

    def fail(self, code: int) -> NoReturn:
        """Raise why llama_decode failed for good, now and on every later use."""
        self.broken = self._on_failure(code)
        raise self.broken

    # --- one step ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Admit, decode one batch, draw.

        Raises:
            TilebeamError: decoding failed for good, or the model's logits are not numbers.
        """
        if self.broken:
            raise self.broken
        began, self._planned = time.perf_counter(), 0.0
        with observed(self.observer, "step"):
            plan = self._decode()
            if plan is not None:
                with observed(self.observer, "sample"):
                    self._sample(plan)
        if plan is not None and self.scheduler.is_drafted(len(plan.sampling)):
            self._tell_drafter(plan, time.perf_counter() - began - self._planned)

    def _tell_drafter(self, plan: BatchPlan, seconds: float) -> None:
        """Tell the drafter how long a step took, planning left out."""
        if plan.asked and self._planned:
            for sample, _ in plan.sampling:
                sample.request.usage.drafting_seconds += self._planned / len(plan.sampling)
        if plan.only_decodes and self.scheduler.drafter is not None:
            self.scheduler.drafter.stepped(plan.n, seconds, self._planned)

    def _decode(self) -> BatchPlan | None:
        """Decode a batch: the last plan again, or a new one. None: there is nothing to decode."""
        plan, refused = self._repeat(), False
        while True:
            if plan is None:
                with observed(self.observer, "plan"):
                    plan = self._plan(refused)
                if not plan.n:
                    return None
            began = time.perf_counter()
            with self.hidden.taken(plan.n) if plan.hidden else nullcontext():
                code = self.context.decode(plan.n)
            if code == 0:
                self._account(plan, time.perf_counter() - began)
                self.scheduler.decoded(plan)
                return plan
            for span in plan.spans:
                self.kv.retract(span.seq, len(span.tokens))
            # By our count there was room. Should llama.cpp disagree, fewer tokens or sequences may still fit.
            if code != 1 or not (plan.drafts or self.scheduler.preempt()):
                self.fail(code)
            plan, refused = None, True

    def _plan(self, refused: bool) -> BatchPlan:
        """Make a new plan, in the batch arrays; after one that llama.cpp `refused`, a smaller one without drafts."""
        began = time.perf_counter()
        if not refused:  # else what gave way would come back at once
            for sample in self.scheduler.admit():
                self._prepare(sample)
        while full := self.scheduler.make_room():
            for sample in full:
                self._finish(sample, "length")
        plan = self.scheduler.plan(drafts=not refused)
        self.context.fill([(s.seq.id, len(s.seq) - len(s.tokens), s.tokens, s.outputs) for s in plan.spans])
        self._planned += time.perf_counter() - began
        return plan

    def _prepare(self, sample: Sample) -> None:
        """Prepare a sample that got its slot; it may have had one before."""
        request = sample.request
        if sample.sampler is None:
            n_ctx = self.context.n_ctx
            prompt, forcing = request.prompt_ids, request.forcing
            closers = () if forcing is None else forcing.closers
            thinks = forcing is not None and forcing.opened
            sample.sampler = Sampler(request.params, sample.seed, self.vocab, prompt, n_ctx, closers, thinks=thinks)
            sample.detokenizer = Detokenizer(request.params.stop or ())
            sample.place = self.hidden.open() if request.params.hidden else None
            sample.limit = min(request.params.max_tokens or n_ctx, n_ctx - len(prompt))
            if forcing is not None:
                sample.forcer = Forcer(forcing, self.vocab, sample.sampler, prompt, sample.limit)

    def _repeat(self) -> BatchPlan | None:
        """Make the last plan again, in the batch arrays, if nothing but the next token of every sample has changed."""
        plan, self._steady = self._steady, None
        if plan is None or self.kv.free < plan.n:
            return None
        began = time.perf_counter()
        repeats = self.scheduler.repeats(plan)
        self._planned += time.perf_counter() - began
        if not repeats:
            return None
        assert plan.rows is not None
        n, tokens = plan.n, plan.rows.tokens
        self.context.token[:n] = tokens
        self.context.pos[:n] += 1
        for span, token in zip(plan.spans, tokens.tolist(), strict=True):
            self.kv.extend(span.seq, [token])
        return plan

    @staticmethod
    def _account(plan: BatchPlan, seconds: float) -> None:
        """Charge the requests for a decoded batch."""
        share = seconds / plan.n
        if plan.steady and plan.rows is not None:  # not the first time: all are sampled tokens
            for span in plan.spans:
                span.request.usage.decode_seconds += share
            return
        for span in plan.spans:
            request, usage, count = span.request, span.request.usage, len(span.tokens)
            start, end = len(span.seq) - count, len(span.seq)
            prompt = len(request.prompt_ids)
            of_prompt = max(0, min(end, prompt) - start)
            fresh = max(0, min(end, prompt) - max(start, request.decoded))
            request.decoded += fresh
            request.progress.prompt_tokens += fresh
            new = max(0, end - max(start, prompt, span.sample.reached)) if span.sample is not None else 0
            usage.recomputed_tokens += count - fresh - new
            usage.prefill_seconds += share * of_prompt
            usage.decode_seconds += share * (count - of_prompt)

    def _sample(self, plan: BatchPlan) -> None:
        """Draw a token for every sample whose logits came out."""
        began = time.perf_counter()
        if plan.rows is None:
            forked = self.scheduler.fork_waiting
            plan.sampling = [(s, entry) for sample, entry in plan.sampling for s in (sample, *forked(sample))]
            plan.rows = _rows(plan.sampling)
            plan.states = self.hidden.rows(plan.sampling) if plan.hidden else None
        if plan.states is not None:
            self.hidden.add(plan.states)
        self.sampler.sample(plan.rows)
        if plan.sampling:
            self.batches[len(plan.sampling)] += 1
        self._steady = plan if plan.steady else None  # a sample that ends or a new request takes it away again
        self._take_each(plan.sampling, plan.rows)
        if plan.drafts:
            with observed(self.observer, "verify"):
                self._verify(plan, plan.rows)
        share = (time.perf_counter() - began) / max(1, len(plan.sampling))
        for sample, _ in plan.sampling:
            sample.request.usage.sampling_seconds += share

    def _verify(self, plan: BatchPlan, rows: SampleRows) -> None:
        """Draw on where the first tokens are those of the drafts, and give back the other cells."""
        spans = {span.sample: span for span in plan.spans if span.sample is not None and span.outputs > 1}
        drafter, accepted = self.scheduler.drafter, Counter[Sample]()
        sampling, depth = plan.sampling, 0
        while sampling:
            confirmed: list[tuple[Sample, int]] = []
            for (sample, entry), token in zip(sampling, rows.tokens.tolist(), strict=True):
                if sample in spans and spans[sample].draft[depth : depth + 1] == [token]:
                    accepted[sample] += 1
                    sample.request.usage.accepted_tokens += 1
                    if sample.finish is None:
                        confirmed.append((sample, entry + 1))
            sampling, depth = confirmed, depth + 1
            if sampling:
                rows = _rows(sampling)
                if plan.hidden and (states := self.hidden.rows(sampling)) is not None:
                    self.hidden.add(states)
                self.sampler.sample(rows)
                self._take_each(sampling, rows)
        for sample, span in spans.items():
            sample.request.usage.drafted_tokens += span.outputs - 1
            if drafter is not None:
                drafter.verified(sample, accepted[sample])
            if sample.kv is not None:
                self.scheduler.roll_back(sample)

    # --- drawn tokens -----------------------------------------------------------------------------------------------

    def _take_each(self, sampling: list[tuple[Sample, int]], rows: SampleRows) -> None:
        drawn = zip(sampling, rows.tokens.tolist(), rows.logits, rows.norms, strict=True)
        for row, ((sample, entry), token, logit, norm) in enumerate(drawn):
            if sample.finish is None:  # another one may have ended the request
                if sample.request.params.statistics and token >= 0:
                    entropy, certainty = rows.spread(row)
                    sample.entropies.append(entropy)
                    sample.certainties.append(certainty)
                self._take(sample, entry, token, logit, norm)

    def _take(self, sample: Sample, entry: int, token: int, logit: float, norm: float) -> None:
        """Take the token that a sample has drawn: see whether it ends."""
        request, params = sample.request, sample.request.params
        if token < 0:
            if token == BAD_LOGITS:
                raise TilebeamError("The model computed logits that are not numbers: its weights are damaged.")
            self._no_token(sample, token == TOO_COMPLEX)
            return
        sample.tokens.append(token)
        request.usage.completion_tokens += 1
        request.progress.tokens += 1
        if sample.forcer is not None:
            sample.forcer.take(token)
        elif len(sample.tokens) == params.min_tokens and sample.sampler is not None:
            sample.sampler.steer(None, Banned.NOTHING)
        if params.logprobs:
            sample.logprobs.append(logit - norm)
        if sample.place is not None:
            self.hidden.drew(sample.place, logit - norm)
        if params.top_logprobs:
            tokens, logits = self.sampler.top(entry, params.top_logprobs)
            sample.top_logprobs.append({t: x - norm for t, x in zip(tokens, logits, strict=True)})
        self._step_ends(sample)
        if sample.ends_with(token, self.vocab) or (sample.detokenizes and self._detokenize(sample)):
            self._finish(sample, "stop")
        elif len(sample.tokens) == sample.limit:
            self._finish(sample, "length")
        elif request.on_change is not None:
            request.on_change(sample)

    def _step_ends(self, sample: Sample) -> None:
        """Note the hidden states by now if the token just drawn ends a step."""
        if sample.place is None or not sample.request.params.hidden_steps:
            return
        stop = sample.request.params.hidden_steps.encode()
        text = sample.tail + self.vocab.piece(sample.tokens[-1])
        ended = text.rfind(stop)
        if ended >= 0:
            sample.hidden_steps.append(self.hidden.state(sample.place))
            text = text[ended + len(stop) :]
        sample.tail = text[len(text) - min(len(text), len(stop) - 1) :]

    def _detokenize(self, sample: Sample) -> bool:
        """Turn new tokens into text. True: a stop string has appeared."""
        assert sample.detokenizer is not None
        ended = sample.tokens and sample.ends_with(sample.tokens[-1], self.vocab)
        tokens = sample.tokens[sample.detokenized : len(sample.tokens) - bool(ended)]
        sample.detokenized += len(tokens)
        shown, vocab = sample.request.params.shown_tokens, self.vocab
        pieces = (vocab.spelling(t).encode() if t in shown else vocab.piece(t) for t in tokens)
        return sample.detokenizer.feed(b"".join(pieces))

    def _no_token(self, sample: Sample, complex: bool) -> None:
        """Fail a sample: grammar and logit_bias forbid every token, or (`complex`) it takes too many steps to see which
        they allow."""
        where = f"Sample {sample.index}: after {len(sample.tokens)} tokens the"
        if complex:
            sample.request.error = too_complex(f"{where} text")
        elif sample.request.params.grammar is not None and self.vocab.eos < 0:
            # The text is complete, or will never be; without an end-of-text token that looks alike.
            self._finish(sample, "stop", pending=0)
            return
        else:
            why = "grammar and logit_bias allow no token of this model's vocabulary"
            sample.request.error = TilebeamError(f"{where} {why}.")
        self.cancel(sample.request)

    def _finish(self, sample: Sample, reason: FinishReason, pending: int = 1) -> None:
        """Complete a sample; its last `pending` tokens were never decoded."""
        self.scheduler.retire(sample, pending)
        self._end(sample, reason)

    def _end(self, sample: Sample, reason: FinishReason) -> None:
        """Complete a sample that is out of queue and slots already."""
        self._steady = None
        sample.request.unfinished -= 1
        if sample.detokenizer is not None:
            self._detokenize(sample)
        sample.finish = reason
        if self.scheduler.drafter is not None:
            self.scheduler.drafter.finished(sample)
        if sample.sampler is not None:
            sample.sampler.close()
            sample.sampler = sample.forcer = None
        if sample.place is not None:
            complete = reason == "stop" and bool(sample.tokens) and self.vocab.is_end(sample.tokens[-1])
            sample.hidden = self.hidden.state(sample.place, ended=complete)
            self.hidden.close(sample.place)
            sample.place = None
        request = sample.request
        request.progress.finished += 1
        if request.on_change is not None:
            request.on_change(sample)


def _rows(sampling: list[tuple[Sample, int]]) -> SampleRows:
    rows = []
    for sample, entry in sampling:
        assert sample.sampler is not None
        rows.append((sample.sampler, entry, sample.request.wants))
    return SampleRows(rows)
