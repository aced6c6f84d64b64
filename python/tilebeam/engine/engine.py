"""The scheduler: many prompts, many samples of each, one batch per step.

A step admits waiting samples to free slots, builds one batch (one token for every sample that decodes, and chunks of
prompts), decodes it, and draws a token for every sample whose logits came out. While samples decode, a batch has at
most `PREFILL_CHUNK` tokens of prompts, however long these are; half of them are of the prompt that came first, the
others of the shortest. While nothing but the next token of each sample changes, the batch is not planned anew.

- A prompt is decoded once. Its first sample leads; samples admitted meanwhile wait for it and fork from its cells, all
  drawing from the same logits. If there are more samples than slots, a holder keeps the prompt (without its last
  token) alive for those that come later; they fork from it and decode that one token themselves.
- A prompt that shares a prefix with tokens already in the cache forks from there; one that shares a prefix with a
  prompt being decoded waits for it.
- While prefixes are kept (`keep`), sequences that are done stay in the cache, the least recently used one going first
  when room is needed: a later request that continues one of them forks it and decodes what is new.
- When cells run out, the sample admitted last gives up its cells and queues again; what it has drawn so far is kept
  and decoded again later. The sample admitted first always goes on, so every request ends.

The order of everything follows from the requests and when they came: the same requests at once give the same batches.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from enum import Enum, auto
from typing import NoReturn

import numpy as np

from tilebeam.engine.detokenizer import TextStream
from tilebeam.engine.drawing import DAMAGED, Drawer, Draws
from tilebeam.engine.kv_cache import KvCache, Sequence, common_prefix
from tilebeam.engine.request import Request, Sample
from tilebeam.engine.sampler import Sampler
from tilebeam.engine.scheduler import PREFILL_CHUNK, Plan, portions
from tilebeam.errors import NpuError, TilebeamError
from tilebeam.native.llama import Context
from tilebeam.outputs import Figures, FinishReason, Progress
from tilebeam.sampling_params import SamplingParams

# Waiting for another prompt's prefix pays off from this many tokens.
_SHARE_AT_LEAST = 32
# Cells to leave free per running sample when another one is admitted.
_HEADROOM = 8


class _Start(Enum):
    """Whether a sample could get its sequence."""

    NOW = auto()
    LATER = auto()  # what it shares with another prompt is being decoded
    NO_ROOM = auto()


class Engine:
    """Runs requests over one context.

    Args:
        context: with a unified KV cache.
        n_slots: samples that decode at the same time.
        n_ids: sequences that the context tells apart, at least n_slots; one more lets a prompt be held for samples
            that find no slot yet.
        on_failure: makes the exception for a failed llama_decode, given its return code.
    """

    def __init__(self, context: Context, n_slots: int, n_ids: int, on_failure: Callable[[int], TilebeamError]) -> None:
        model = context.model
        self.kv = KvCache(context, context.n_ctx, n_ids, model.n_swa, model.whole_forks_only)
        self.context = context
        self.vocab = model.vocab
        self.n_slots = n_slots
        self.broken: TilebeamError | None = None
        self._on_failure = on_failure
        self._queue: deque[Sample] = deque()
        self._running: list[Sample] = []  # in order of admission
        self._holding: list[Request] = []  # whose holder is not complete yet, in order
        self._kept: dict[int, Sequence] = {}  # done, by id; the least recently used first
        self.keeping = False
        self.batches: Counter[int] = Counter()  # steps, by how many samples drew a token
        self._admitted = 0
        self._drawer = Drawer(context)
        self._plan: Plan | None = None  # of the next batch, while nothing changes

    # --- requests ---------------------------------------------------------------------------------------------------

    def check(self, prompt_ids: SequenceOf[int]) -> None:
        """Raise `TilebeamError` if this prompt cannot be run."""
        if not prompt_ids:
            raise TilebeamError("The prompt has no tokens.")
        if len(prompt_ids) >= self.context.n_ctx:
            raise TilebeamError(
                f"The prompt has {len(prompt_ids)} tokens, the context {self.context.n_ctx}: at least one must stay "
                "free; shorten the prompt or load the model with a larger n_ctx."
            )
        low, high = min(prompt_ids), max(prompt_ids)
        if low < 0 or high >= self.vocab.size:
            raise TilebeamError(
                f"Token {low if low < 0 else high} is not in the vocabulary (0 to {self.vocab.size - 1})."
            )

    def request(self, prompt: str, prompt_ids: list[int], params: SamplingParams, progress: Progress) -> Request:
        """Check a prompt and its parameters; any thread may. `progress`: of the call it belongs to.

        Raises:
            TilebeamError: it cannot be run.
        """
        self.check(prompt_ids)
        if params.grammar is not None or params.logit_bias:
            Sampler(params, 0, self.vocab).close()
        params = params.resolved()
        request = Request(prompt, prompt_ids, params, params.seed or 0, progress, unfinished=params.n)
        request.usage.prompt_tokens = len(prompt_ids)
        request.samples = [Sample(request, i, params.sample_seed(i)) for i in range(params.n)]
        progress.total += params.n
        return request

    def submit(self, request: Request) -> None:
        """Queue a request; `step` runs it."""
        self._plan = None
        request.waiting = len(request.samples)
        self._queue.extend(request.samples)

    @property
    def busy(self) -> bool:
        """Whether samples run or wait."""
        return bool(self._queue or self._running)

    def running(self, progress: Progress) -> int:
        """Samples of one call that hold a slot now."""
        return sum(s.request.progress is progress for s in self._running)

    def figures(self) -> Figures:
        """The state by now; any thread may look."""
        used = self.kv.n_cells - self.kv.free
        return Figures(len(self._running), len(self._queue), self.n_slots, self.kv.n_cells, used, dict(self.batches))

    def cancel(self, request: Request) -> None:
        """End what is not finished of a request as "aborted", and free its cells."""
        self._queue = deque(s for s in self._queue if s.request is not request)
        self._running = [s for s in self._running if s.request is not request]
        self._drop_holder(request)
        request.lead, request.followers, request.waiting = None, [], 0
        for sample in request.samples:
            if sample.finish is None:
                if sample.kv is not None:
                    self.kv.close(sample.kv)
                self._end(sample, "aborted")

    def abort(self) -> None:
        """Drop everything that is not finished, as "aborted", and everything that is kept."""
        unfinished = [*self._running, *self._queue]
        self._running.clear()
        self._queue.clear()
        self._holding.clear()
        self._kept.clear()
        self.kv.clear()
        for sample in unfinished:
            request = sample.request
            request.lead, request.followers, request.holder, request.waiting = None, [], None, 0
            self._end(sample, "aborted")

    def _end(self, sample: Sample, reason: FinishReason) -> None:
        """A sample, out of queue and slots already, is complete."""
        self._plan = None
        if sample.stream is not None:
            self._show(sample)
        sample.finish = reason
        sample.kv = None
        if sample.sampler is not None:
            sample.sampler.close()
            sample.sampler = None
        request = sample.request
        request.unfinished -= 1
        request.progress.finished += 1
        if request.on_change is not None:
            request.on_change(sample)

    def fail(self, code: int) -> NoReturn:
        """llama_decode failed for good: raise why, now and on every later use."""
        self.broken = self._on_failure(code)
        raise self.broken

    # --- kept prefixes ----------------------------------------------------------------------------------------------

    def keep(self, on: bool) -> None:
        """Keep the sequences of finished samples from now on, or forget those kept."""
        self.keeping = on
        while not on and self.evict():
            pass

    def retire(self, seq: Sequence) -> None:
        """A sequence is done: keep it for others to fork, or close it."""
        if self.keeping:
            self._kept[seq.id] = seq
        else:
            self.kv.close(seq)

    def evict(self, spare: Sequence | None = None) -> bool:
        """Close the kept sequence that was not used for longest, other than `spare`. False: there is none."""
        for seq in self._kept.values():
            if seq is not spare:
                del self._kept[seq.id]
                self.kv.close(seq)
                return True
        return False

    def best_source(self, target: list[int], limit: int) -> tuple[Sequence | None, int]:
        """The sequence that shares most of `target`, at most `limit` tokens of it, and how many."""
        best: tuple[Sequence | None, int] = (None, 0)
        for seq in self.kv.live:
            shared = self.kv.forkable(len(seq), min(limit, common_prefix(seq.tokens, target)))
            if best[1] < shared <= limit:
                best = (seq, shared)
        return best

    def fork(self, source: Sequence | None, length: int) -> Sequence:
        """A sequence that shares `length` tokens of `source`, which counts as used just now."""
        if source is None or not length:
            return self.kv.open()
        self.touch(source)
        return self.kv.fork(source, length)

    def touch(self, seq: Sequence) -> None:
        """A sequence counts as used just now: kept ones that are not will go before it."""
        if seq.id in self._kept:
            self._kept[seq.id] = self._kept.pop(seq.id)

    # --- one step ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Admit, decode one batch, draw."""
        if self.broken:
            raise self.broken
        plan = self._go_on()
        while True:
            if plan is None:
                self._admit()
                plan = self._build()
                if not plan.n:
                    return
            began = time.perf_counter()
            code = self.context.decode(plan.n)
            seconds = time.perf_counter() - began
            if code == 0:
                break
            for seq, _, _, count in plan.spans:
                self.kv.retract(seq, count)
            # The ledger said there was room. Should llama.cpp disagree, fewer sequences may still fit.
            if code != 1 or not self._give_way():
                self.fail(code)
            plan = None
        self._account(plan, seconds)
        self._complete_holders()
        self._draw(plan)

    def _admit(self) -> None:
        """Fill free slots from the queue. Who waits for a prompt to be decoded may be overtaken; who finds no room may
        not, or a large prompt would wait for ever."""
        waiting: set[Request] = set()
        at = 0
        while at < len(self._queue) and len(self._running) < self.n_slots:
            sample = self._queue[at]
            request = sample.request
            # Followers have no sequence yet, but will.
            while self.kv.free_ids <= sum(s.kv is None for s in self._running):
                if not self.evict():
                    return
            if request.lead is not None:
                # The prompt is being decoded: join. Forking at its end costs no cells.
                request.followers.append(sample)
            else:
                started = _Start.LATER if request in waiting else self._start(sample)
                if started is _Start.NO_ROOM:
                    return
                if started is _Start.LATER:
                    waiting.add(request)
                    at += 1
                    continue
            del self._queue[at]
            request.waiting -= 1
            self._admitted += 1
            sample.age = self._admitted
            self._running.append(sample)
            if sample.sampler is None:
                sample.sampler = Sampler(request.params, sample.seed, self.vocab, request.prompt_ids)
                sample.stream = TextStream(request.params.stop)
                sample.limit = min(request.params.max_tokens or self.context.n_ctx, self._most(request))
            if not request.waiting:
                self._drop_holder(request)

    def _start(self, sample: Sample) -> _Start:
        """Give a sample its sequence, forked from the best source."""
        request = sample.request
        if request in self._holding:
            return _Start.LATER
        target = sample.target()
        limit = len(target) - 1  # the last token is always decoded, for its logits
        source, shared = self.best_source(target, limit)
        coming = self._coming_prefix(target, limit)
        if coming - shared >= _SHARE_AT_LEAST:
            return _Start.LATER
        room = len(target) - shared + self._promised() + _HEADROOM * (len(self._running) + 1)
        while self.kv.free < room and self.evict(spare=source):
            pass
        if (self._running or self._holding) and self.kv.free < room:
            return _Start.NO_ROOM
        first = not sample.tokens and request.decoded < len(request.prompt_ids)
        crowd = request.waiting > self.n_slots - len(self._running) and len(request.prompt_ids) > 1
        promised = 1 + sum(s.kv is None for s in self._running)  # sequences of this sample and of followers
        wants_holder = first and crowd and request.holder is None and self.kv.free_ids > promised
        seq = self.fork(source, shared)
        if first:
            request.usage.cached_tokens += max(0, shared - request.decoded)
            request.decoded = max(request.decoded, shared)
        if wants_holder:
            request.holder = seq
            if len(seq) < limit:
                self._holding.append(request)
                return _Start.LATER
            seq = self.kv.fork(seq, limit)
        sample.kv = seq
        if not sample.tokens:
            request.lead = sample
        return _Start.NOW

    def _promised(self) -> int:
        """Cells that prompts being decoded will take yet."""
        held = sum(len(r.prompt_ids) - 1 - len(r.holder) for r in self._holding if r.holder is not None)
        return held + sum(s.todo() for s in self._running if s.kv is not None and s.todo() > 1)

    def _coming_prefix(self, target: list[int], limit: int) -> int:
        """The longest prefix that some prompt being decoded now will have in the cache."""
        best = 0
        jobs = [r.prompt_ids[:-1] for r in self._holding]
        jobs += [s.request.prompt_ids for s in self._running if s.kv is not None and s.todo() > 1]
        for job in jobs:
            shared = self.kv.forkable(len(job), min(limit, common_prefix(job, target)))
            if shared <= limit:
                best = max(best, shared)
        return best

    def _go_on(self) -> Plan | None:
        """The last plan again, if nothing but the next token of every sample has changed."""
        plan, self._plan = self._plan, None
        if plan is None or self.kv.free < plan.n:
            return None
        assert plan.draws is not None
        n, tokens = plan.n, plan.draws.tokens
        self.context.token[:n] = tokens
        self.context.pos[:n] += 1
        self.kv.extend_each([seq for seq, _, _, _ in plan.spans], tokens.tolist())
        return plan

    def _build(self) -> Plan:
        """Fill the batch arrays."""
        while True:
            decoding = [s for s in self._running if s.kv is not None and s.todo() == 1]
            filling = self._holding or len(decoding) < sum(s.kv is not None for s in self._running)
            if len(decoding) <= self.kv.free and (self.kv.free or not filling):
                break
            if self._give_way():
                continue
            if not decoding:
                raise TilebeamError("The KV cache is full and nothing can give way.")
            for sample in decoding:  # one sample has all cells: the context is full
                self._finish(sample, "length")
        rows: list[tuple[Sample, int]] = []
        spans: list[tuple[Sequence, Request, Sample | None, int]] = []
        token, pos, seq_id, output = self.context.token, self.context.pos, self.context.seq, self.context.output
        n = 0
        for sample in decoding:
            seq = sample.kv
            assert seq is not None
            last = sample.tokens[-1] if sample.tokens else sample.request.prompt_ids[-1]
            token[n], pos[n], seq_id[n], output[n] = last, len(seq), seq.id, 1
            self.kv.extend(seq, [last])
            spans.append((seq, sample.request, sample, 1))
            rows.append((sample, n))
            n += 1
        jobs: list[tuple[Sequence, Request, list[int], Sample | None]] = []
        for request in self._holding:
            assert request.holder is not None
            jobs.append((request.holder, request, request.prompt_ids[:-1], None))
        for sample in self._running:
            if sample.kv is not None and sample.todo() > 1:
                jobs.append((sample.kv, sample.request, sample.target(), sample))
        room = self.context.n_batch - n
        if decoding:
            room = min(room, PREFILL_CHUNK)
        counts = portions([len(target) - len(seq) for seq, _, target, _ in jobs], room, self.kv.free)
        for (seq, request, target, owner), count in zip(jobs, counts, strict=True):
            if count <= 0:
                continue
            start = len(seq)
            tokens = target[start : start + count]
            end = n + count
            token[n:end] = tokens
            pos[n:end] = np.arange(start, start + count)
            seq_id[n:end] = seq.id
            output[n:end] = 0
            self.kv.extend(seq, tokens)
            spans.append((seq, request, owner, count))
            if owner is not None and start + count == len(target):
                output[end - 1] = 1
                rows.append((owner, end - 1))
            n = end
        going = len(rows) == n == len(self._running) and not (self._queue and n < self.n_slots)
        plan = Plan(rows, spans, n, going)
        if going:
            if not any(s.streams or s.request.params.top_logprobs for s in decoding):
                plan.quiet = min(s.limit - len(s.tokens) for s in decoding) - 1
            for sample in decoding:
                request = sample.request
                if plan.shares and plan.shares[-1][0] is request:
                    plan.shares[-1] = request, plan.shares[-1][1] + 1
                else:
                    plan.shares.append((request, 1))
        return plan

    def _account(self, plan: Plan, seconds: float) -> None:
        share = seconds / plan.n
        if plan.going and plan.draws is not None:  # not the first time: all are sampled tokens
            for request, count in plan.shares:
                request.usage.decode_seconds += share * count
            return
        for seq, request, owner, count in plan.spans:
            usage = request.usage
            start, end = len(seq) - count, len(seq)
            prompt = len(request.prompt_ids)
            of_prompt = max(0, min(end, prompt) - start)
            fresh = max(0, min(end, prompt) - max(start, request.decoded))
            request.decoded += fresh
            request.progress.prompt_tokens += fresh
            new = max(0, end - max(start, prompt, owner.reached)) if owner is not None else 0
            usage.recomputed_tokens += count - fresh - new
            usage.prefill_seconds += share * of_prompt
            usage.decode_seconds += share * (count - of_prompt)

    def _complete_holders(self) -> None:
        if self._holding:
            self._holding = [r for r in self._holding if r.holder is not None and len(r.holder) < len(r.prompt_ids) - 1]

    def _draw(self, plan: Plan) -> None:
        """Draw a token for every sample whose logits came out."""
        began = time.perf_counter()
        if plan.draws is None:
            plan.rows = [member for row in plan.rows for member in self._group(*row)]
            plan.draws = Draws([(s.chain, entry, s.request.wants_norm) for s, entry in plan.rows])
        draws = plan.draws
        self._drawer.draw(draws)
        if plan.rows:
            self.batches[len(plan.rows)] += 1
        self._plan = plan if plan.going else None  # whatever ends or changes takes it away again
        tokens = draws.tokens.tolist()
        if not self._take_all(plan, tokens):
            for (sample, entry), token, logit, norm in zip(plan.rows, tokens, draws.logits, draws.norms, strict=True):
                if sample.finish is None:  # another one may have ended the request
                    self._take(sample, entry, token, logit, norm)
        share = (time.perf_counter() - began) / max(1, len(plan.rows))
        if plan.going:
            for request, count in plan.shares:
                request.usage.sampling_seconds += share * count
        else:
            for sample, _ in plan.rows:
                sample.request.usage.sampling_seconds += share

    def _group(self, sample: Sample, entry: int) -> list[tuple[Sample, int]]:
        """All who draw from an entry: with the first sample of a prompt those who wait for it, forked from it now."""
        request = sample.request
        group = [(sample, entry)]
        if request.lead is sample:
            for follower in request.followers:
                assert sample.kv is not None
                follower.kv = self.kv.fork(sample.kv, len(sample.kv))
                group.append((follower, entry))
            request.lead, request.followers = None, []
        return group

    def _take_all(self, plan: Plan, tokens: list[int]) -> bool:
        """`_take` for all rows at once, if that is all there is to do. False: nothing was done."""
        plan.quiet -= 1
        if plan.quiet < 0 or min(tokens) < 0 or not self.vocab.none_ends(tokens):
            return False
        for (sample, _), token in zip(plan.rows, tokens, strict=True):
            sample.tokens.append(token)
        if any(request.wants_norm for request, _ in plan.shares):
            assert plan.draws is not None
            for (sample, _), logit, norm in zip(plan.rows, plan.draws.logits, plan.draws.norms, strict=True):
                if sample.request.wants_norm:
                    sample.logprobs.append(logit - norm)
        for request, count in plan.shares:
            request.usage.completion_tokens += count
            request.progress.tokens += count
        return True

    def _take(self, sample: Sample, entry: int, token: int, logit: float, norm: float) -> None:
        """A sample has drawn a token: see whether it ends."""
        request, params = sample.request, sample.request.params
        if token < 0:
            if token == DAMAGED:
                raise TilebeamError("The model computed logits that are not numbers: its weights are damaged.")
            self._no_token(sample)
            return
        sample.tokens.append(token)
        request.usage.completion_tokens += 1
        request.progress.tokens += 1
        if request.wants_norm:
            if params.logprobs:
                sample.logprobs.append(logit - norm)
            if params.top_logprobs:
                tokens, logits = self._drawer.top(entry, params.top_logprobs)
                sample.top_logprobs.append({t: x - norm for t, x in zip(tokens, logits, strict=True)})
        if (self.vocab.is_end(token) and not params.ignore_eos) or (sample.streams and self._show(sample)):
            self._finish(sample, "stop")
        elif len(sample.tokens) == sample.limit:
            self._finish(sample, "length")
        elif request.on_change is not None:
            request.on_change(sample)

    def _show(self, sample: Sample) -> bool:
        """Turn tokens into text. True: a stop string has appeared."""
        assert sample.stream is not None
        ended = sample.tokens and self.vocab.is_end(sample.tokens[-1]) and not sample.request.params.ignore_eos
        tokens = sample.tokens[sample.shown : len(sample.tokens) - bool(ended)]
        sample.shown += len(tokens)
        return sample.stream.feed(b"".join(map(self.vocab.piece, tokens)))

    def _no_token(self, sample: Sample) -> None:
        """Grammar and logit_bias forbid every token."""
        if sample.request.params.grammar is not None and self.vocab.eos < 0:
            # The text is complete, or will never be; without an end-of-text token that looks alike.
            self._finish(sample, "stop")
            return
        sample.request.error = TilebeamError(
            f"Sample {sample.index}: after {len(sample.tokens)} tokens the grammar and logit_bias allow no token of "
            "this model's vocabulary."
        )
        self.cancel(sample.request)

    def _most(self, request: Request) -> int:
        """Tokens that a sample of this prompt can have before the context is full."""
        return self.context.n_ctx - len(request.prompt_ids)

    def _finish(self, sample: Sample, reason: FinishReason) -> None:
        self._running.remove(sample)
        if sample.kv is not None:
            self.retire(sample.kv)
        self._end(sample, reason)

    # --- room -------------------------------------------------------------------------------------------------------

    def _drop_holder(self, request: Request) -> None:
        if request.holder is not None:
            if request in self._holding:
                self._holding.remove(request)
            self.kv.close(request.holder)
            request.holder = None

    def _give_way(self) -> bool:
        """Free cells: kept sequences first, then holders of requests with nothing running, then the sample admitted
        last, then other holders."""
        if self.evict():
            return True
        active = {id(s.request) for s in self._running}
        holders = [r for r in {id(s.request): s.request for s in self._queue}.values() if r.holder is not None]
        idle = [r for r in holders if id(r) not in active]
        if idle and (self._running or len(idle) > 1):
            self._drop_holder(idle[-1])
            return True
        with_cells = [s for s in self._running if s.kv is not None]
        if len(with_cells) < 2:
            if holders and with_cells:
                self._drop_holder(holders[-1])
                return True
            return False
        last = max(with_cells, key=lambda s: s.age)
        request = last.request
        back = [last]
        if request.lead is last:
            back += request.followers
            request.lead, request.followers = None, []
        for sample in sorted(back, key=lambda s: s.age, reverse=True):
            if sample.kv is not None:
                sample.reached = max(sample.reached, len(sample.kv))
                self.kv.close(sample.kv)
                sample.kv = None
            self._running.remove(sample)
            self._queue.appendleft(sample)
            request.waiting += 1
        return True


def npu_failure(code: int, reason: str) -> NpuError:
    """The exception for a decode that the NPU failed."""
    detail = reason or f"llama_decode returned {code} and the NPU gave no reason"
    return NpuError(f"The NPU failed: {detail}. Load the model again to start a new session.")
