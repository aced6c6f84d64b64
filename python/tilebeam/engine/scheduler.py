"""Which samples run, and what the next batch decodes.

Samples wait in a queue for a slot. A batch has one token of every sample that decodes, and chunks of prompts: at most
`PREFILL_CHUNK` tokens of these while samples decode, half of them of the prompt that came first, the others of the
shortest. Where samples want hidden states behind the final norm, of which llama.cpp gives all of a batch or none, their
tokens and chunks of prompts take turns.

- A prompt is decoded once, by its first sample; samples admitted meanwhile wait for it and fork from its cells, all
  drawing from the same logits. If there are more samples than slots, the prompt without its last token is pinned in the
  cache for those that come later; they fork from it and decode that one token themselves.
- A prompt that shares a prefix with tokens already in the cache forks from there; one that shares a prefix with a
  prompt being decoded waits for it.
- Finished sequences in the prefix cache are evicted when room is needed. When cells run out, the sample admitted last
  is preempted: it gives up its cells and queues again; what it has drawn so far is kept and decoded again later. The
  sample admitted first always goes on, so every request ends.

The order of everything follows from the requests and when they came: the same requests at once give the same batches.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice, takewhile

from tilebeam.engine.drafter import Drafter
from tilebeam.engine.hidden_states import StateRows
from tilebeam.engine.kv_cache import PrefixCache, Sequence, common_prefix
from tilebeam.engine.observer import Observer, observed
from tilebeam.engine.portions import portions
from tilebeam.engine.request import Request, Sample
from tilebeam.engine.sampler import SampleRows
from tilebeam.errors import TilebeamError
from tilebeam.native.llama import Context

# Tokens of prompts in one batch while samples decode, which should not have to wait for long.
PREFILL_CHUNK = 128
# Waiting for another prompt's prefix pays off from this many tokens.
_SHARE_AT_LEAST = 32
# Cells to leave free per running sample when another one is admitted.
_HEADROOM = 8


class _Start(Enum):
    """Whether a sample could get its sequence."""

    NOW = auto()
    LATER = auto()  # what it shares with another prompt is being decoded
    NO_ROOM = auto()


@dataclass(eq=False)
class Span:
    """Consecutive tokens of one sequence in a batch.

    Attributes:
        seq: which has cells for them already.
        request: whose they are.
        sample: of it; None: they belong to the request's pinned prefix.
        tokens: what is decoded.
        entry: where the first of them stands in the batch.
        outputs: how many of them, the last ones, give logits: 0 of part of a prompt, 1 where the next token is drawn,
            more where a draft follows the token drawn last.
    """

    seq: Sequence
    request: Request
    sample: Sample | None
    tokens: list[int]
    entry: int
    outputs: int

    @property
    def draft(self) -> list[int]:
        """Tokens that count only if they are drawn."""
        return self.tokens[len(self.tokens) - self.outputs + 1 :] if self.outputs > 1 else []


@dataclass(eq=False)
class BatchPlan:
    """What one llama_decode works on.

    Attributes:
        spans: in the order of the batch.
        n: tokens in all spans.
        steady: all running samples go on by one token each, so that the next batch has the same plan, unless the
            drafter has guesses then.
        sampling: samples that draw a token, and the entries that they draw from.
        rows: the same for the native code; made when the plan is drawn from for the first time.
        asked: whether the drafter was asked; drafts: whether there are spans with drafts.
        hidden: whether hidden states are wanted.
        states: where they go; made when the plan is drawn from for the first time.
        only_decodes: nothing of a prompt is in it.
    """

    spans: list[Span]
    n: int
    steady: bool
    sampling: list[tuple[Sample, int]] = field(default_factory=list)
    rows: SampleRows | None = None
    asked: bool = False
    drafts: bool = False
    only_decodes: bool = False
    hidden: bool = False
    states: StateRows | None = None


@dataclass(frozen=True)
class _Prompt:
    """Tokens of one sequence that are decoded before anything is drawn: of a sample, or (None) of a pinned prompt."""

    seq: Sequence
    request: Request
    sample: Sample | None
    target: list[int]
    draws: bool = False  # once all of it is decoded

    @property
    def todo(self) -> int:
        """Tokens still to decode."""
        return len(self.target) - len(self.seq)


class Scheduler:
    """Owns the queue, the slots and the plan of every batch.

    Args:
        context: its sizes count.
        kv: its cells.
        n_slots: samples that decode at the same time.

    Attributes:
        queue: samples that wait for a slot.
        running: samples that have one, in order of admission.
        drafter: proposes drafts for them, None for plans of one token each.
        resting: of the next plans, how many it is not asked for.
        observer: is told when it is.
    """

    def __init__(self, context: Context, kv: PrefixCache, n_slots: int) -> None:
        self.kv = kv
        self.n_slots = n_slots
        self.queue: deque[Sample] = deque()
        self.running: list[Sample] = []
        self._pinning: list[Request] = []  # whose pinned prefix is not complete yet, in order
        self.drafter: Drafter | None = None
        self.resting = 0
        self.observer: Observer | None = None
        self._context = context
        self._guesses: dict[Sample, list[int]] = {}  # for the next plan
        self._admitted = 0
        self._turns = context.tap is None  # samples that want hidden states and prompts take turns
        self._prompts_next = False  # where they do

    # --- requests ---------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Return whether samples run or wait."""
        return bool(self.queue or self.running)

    @property
    def recovers(self) -> bool:
        """Return whether the sample admitted first still decodes what had cells before, which it gave up. If such steps
        counted as its turn, it might give them up again and again and never draw a token."""
        first = self.running[0] if self.running else None
        return first is not None and first.kv is not None and len(first.kv) < first.reached

    def submit(self, request: Request) -> None:
        """Queue all samples of a request."""
        request.queued, self.resting = len(request.samples), 0
        self.queue.extend(request.samples)

    def remove(self, request: Request) -> None:
        """Take what is not finished of a request out of queue and slots, and free its cells."""
        self.queue = deque(s for s in self.queue if s.request is not request)
        self.running = [s for s in self.running if s.request is not request]
        self._unpin(request)
        request.prefiller, request.forks, request.queued = None, [], 0
        for sample in request.samples:
            if sample.kv is not None:
                self.kv.close(sample.kv)
                sample.kv = None

    def clear(self) -> list[Sample]:
        """Forget all samples and every cell, cached ones too.

        Returns:
            samples that are not finished.
        """
        self.forget()
        unfinished, self.queue = list(self.queue), deque()
        for sample in unfinished:
            sample.request.queued = 0
        return unfinished

    def forget(self) -> None:
        """Forget every cell, cached ones too: samples that run queue again, and are decoded anew. Sound after an
        interruption at any place."""
        self.queue = deque(dict.fromkeys([*self.running, *self.queue]))
        self.running, self._pinning = [], []
        for sample in self.queue:
            sample.request.queued = 0
        for sample in self.queue:
            request = sample.request
            request.prefiller, request.forks, request.pinned = None, [], None
            request.queued += 1
            sample.reached = max(sample.reached, len(sample.kv) if sample.kv is not None else 0)
            sample.kv = None
        self.kv.clear()

    def retire(self, sample: Sample, pending: int = 1) -> None:
        """Retire a finished sample: free its slot, cache or close its sequence. `pending`: as for `_take_back`."""
        self.running.remove(sample)
        if sample.kv is not None:
            if self._take_back(sample, pending):
                self.kv.retire(sample.kv)
            else:
                self.kv.close(sample.kv)
            sample.kv = None

    # --- admission --------------------------------------------------------------------------------------------------

    def admit(self) -> list[Sample]:
        """Fill free slots from the queue.

        A sample that waits for a prompt to be decoded may be overtaken; one that finds no room may not, or a large
        prompt would wait for ever.

        Returns:
            the samples that got a slot.
        """
        admitted: list[Sample] = []
        waiting: set[Request] = set()
        at = 0
        while at < len(self.queue) and len(self.running) < self.n_slots:
            sample = self.queue[at]
            request = sample.request
            # Forks have no sequence yet, but will.
            while self.kv.free_ids <= sum(s.kv is None for s in self.running):
                if not self.kv.evict():
                    return admitted
            if request.prefiller is not None:
                # The prompt is being decoded: join. Forking at its end costs no cells.
                request.forks.append(sample)
            else:
                started = _Start.LATER if request in waiting else self._start(sample)
                if started is _Start.NO_ROOM:
                    return admitted
                if started is _Start.LATER:
                    waiting.add(request)
                    at += 1
                    continue
            del self.queue[at]
            request.queued -= 1
            self._admitted += 1
            sample.age = self._admitted
            self.running.append(sample)
            admitted.append(sample)
            if not request.queued:
                self._unpin(request)
        return admitted

    def _start(self, sample: Sample) -> _Start:
        """Give a sample its sequence, forked from the longest prefix in the cache."""
        request, kv = sample.request, self.kv
        if request in self._pinning:
            return _Start.LATER
        target = sample.target()
        limit = len(target) - 1  # the last token is always decoded, for its logits
        source, shared = kv.longest_prefix(target, limit)
        coming = self._coming_prefix(target, limit)
        if coming - shared >= _SHARE_AT_LEAST:
            return _Start.LATER
        room = len(target) - shared + self._promised() + _HEADROOM * (len(self.running) + 1)
        while kv.free < room and kv.evict(source):
            pass
        if (self.running or self._pinning) and kv.free < room:
            return _Start.NO_ROOM
        first = not sample.tokens and request.decoded < len(request.prompt_ids)
        crowd = request.queued > self.n_slots - len(self.running) and len(request.prompt_ids) > 1
        promised = 1 + sum(s.kv is None for s in self.running)  # sequences of this sample and of forks
        pins = first and crowd and request.pinned is None and kv.free_ids > promised
        seq = kv.open_from(source, shared)
        shared = len(seq)
        kv.mark(seq, len(target), self._wanted_marks(request, target, shared) if kv.needs_marks(len(target)) else ())
        if first:
            request.usage.cached_tokens += max(0, shared - request.decoded)
            request.decoded = max(request.decoded, shared)
        if pins:
            request.pinned = seq
            if len(seq) < limit:
                self._pinning.append(request)
                return _Start.LATER
            seq = kv.fork(seq, limit)
        sample.kv = seq
        if not sample.tokens:
            request.prefiller = sample
        return _Start.NOW

    def _wanted_marks(self, request: Request, target: list[int], shared: int) -> list[int]:
        """Return lengths at which others may want to fork a text: for `PrefixCache.mark`. These are where it
        leaves other texts; the end of the last turn, behind which a template may put what the next prompt does not
        repeat; the prompt without its last token; the end of the first turn, often the system prompt."""
        prompt, is_end = request.prompt_ids, self._context.model.vocab.is_end
        near = {id(s.request): s.request.prompt_ids for s in islice(self.queue, 2 * self.n_slots)}
        near.pop(id(request), None)
        others = [*near.values(), *(seq.tokens for seq in self.kv.live)]
        leaves = sorted({min(len(target) - 1, common_prefix(other, target)) for other in others})
        leaves = [n for n in leaves if n - shared >= _SHARE_AT_LEAST]
        if not self.kv.caching:
            return leaves
        ends = [i for i, token in enumerate(prompt, 1) if is_end(token)]
        return [*leaves, *ends[-1:], len(prompt) - 1, *ends[:1]]

    def _promised(self) -> int:
        """Return cells that prompts being decoded will still take."""
        pinning = self._pinning
        pinned = sum(len(r.prompt_ids) - 1 - len(r.pinned) for r in pinning if r.pinned is not None)
        return pinned + sum(s.todo() for s in self.running if s.kv is not None and s.todo() > 1)

    def _coming_prefix(self, target: list[int], limit: int) -> int:
        """Return the longest prefix that some prompt being decoded now will have in the cache."""
        best = 0
        prompts = [(r.pinned, r.prompt_ids[:-1]) for r in self._pinning if r.pinned is not None]
        prompts += [(s.kv, s.request.prompt_ids) for s in self.running if s.kv is not None and s.todo() > 1]
        for seq, prompt in prompts:
            shared = self.kv.will_fork(seq, len(prompt), min(limit, common_prefix(prompt, target)))
            if shared <= limit:
                best = max(best, shared)
        return best

    # --- plans ------------------------------------------------------------------------------------------------------

    def make_room(self) -> list[Sample]:
        """Preempt until there is a cell for every sample that decodes.

        Returns:
            samples that cannot go on because one alone has all cells: to be finished, then asked again.
        """
        while True:
            decoding = self._decoding()
            filling = self._pinning or len(decoding) < sum(s.kv is not None for s in self.running)
            if len(decoding) <= self.kv.free and (self.kv.free or not filling):
                return []
            if not self.preempt():
                if not decoding:
                    raise TilebeamError("The KV cache is full and no sample can be preempted.")
                return decoding

    def plan(self, *, drafts: bool = True) -> BatchPlan:
        """Plan the next batch, with cells for its tokens; `n` is 0 if nothing is to be decoded.

        Args:
            drafts: whether the drafter is asked.
        """
        decoding = self._decoding()
        prompts = self._prompts()
        room = min(PREFILL_CHUNK, self.kv.free - len(decoding)) if decoding else self._context.n_batch
        if self._turns:
            hidden = any(s.request.params.hidden for s in decoding)
            self._prompts_next = hidden and bool(prompts) and room > 0 and not self._prompts_next
            if self._prompts_next:
                decoding, hidden, self._guesses = [], False, {}
            elif hidden:
                prompts = []
        else:
            hidden = any(s.request.params.hidden for s in self.running)
        drafted, self._guesses = self._guesses, {}
        asked = bool(drafted) or (drafts and self._wants_drafts(len(decoding)))
        if asked and not drafted:
            drafted = self._drafts(decoding, prompts)
        spans: list[Span] = []
        n = 0
        # Guesses may be older than samples and prompts that were admitted since.
        guesses = min(self.kv.free, self._context.n_ubatch, self._context.max_outputs - len(prompts)) - len(decoding)
        for sample in decoding:
            assert sample.kv is not None
            last = sample.tokens[-1] if sample.tokens else sample.request.prompt_ids[-1]
            draft = drafted.get(sample, [])[: max(0, guesses)]
            if draft and not self.kv.hold(sample.kv):
                draft = []
            guesses -= len(draft)
            tokens = [last, *draft]
            self.kv.extend(sample.kv, tokens)
            spans.append(Span(sample.kv, sample.request, sample, tokens, n, len(tokens)))
            n += len(tokens)
        most = self._context.n_ubatch if drafted else self._context.n_batch
        for span in self._prefill(prompts, min(room, most - n)):
            span.entry = n
            spans.append(span)
            n += len(span.tokens)
        sampling = [
            (s.sample, s.entry + len(s.tokens) - s.outputs) for s in spans if s.sample is not None and s.outputs
        ]
        steady = len(sampling) == n == len(self.running) and not (self.queue and n < self.n_slots)
        return BatchPlan(
            spans, n, steady, sampling, asked=asked, drafts=bool(drafted), only_decodes=not prompts, hidden=hidden
        )

    def _decoding(self) -> list[Sample]:
        return [s for s in self.running if s.kv is not None and s.todo() == 1]

    def _prompts(self) -> list[_Prompt]:
        """Return all that is being decoded towards a first token, in order."""
        prompts = []
        for request in self._pinning:
            assert request.pinned is not None
            prompts.append(_Prompt(request.pinned, request, None, request.prompt_ids[:-1]))
        for sample in self.running:
            if sample.kv is not None and sample.todo() > 1:
                target, alone = sample.target(), self._turns and sample.draws_alone()
                prompts.append(_Prompt(sample.kv, sample.request, sample, target[:-1] if alone else target, not alone))
        return prompts

    def _prefill(self, prompts: list[_Prompt], room: int) -> list[Span]:
        """Take the next tokens of the prompts, as many as fit into `room`; entries are set later."""
        spans = []
        for p, count in zip(prompts, portions([p.todo for p in prompts], room, self.kv.free), strict=True):
            if count > 0:
                stop = min([len(p.seq) + count, *p.seq.marks[:1]])
                tokens = p.target[len(p.seq) : stop]
                self.kv.extend(p.seq, tokens)
                outputs = int(p.draws and p.todo == 0)
                spans.append(Span(p.seq, p.request, p.sample, tokens, 0, outputs))
        return spans

    def repeats(self, plan: BatchPlan) -> bool:
        """Return whether a steady plan is decoded again: not if the drafter has guesses now, for the next plan."""
        plan.asked = self._wants_drafts(plan.n)
        if plan.asked:
            self._guesses = self._drafts([span.sample for span in plan.spans if span.sample is not None], [])
        return not self._guesses

    def _wants_drafts(self, samples: int) -> bool:
        """Return whether the drafter is asked for a plan in which so many samples decode."""
        if not self.is_drafted(samples):
            return False
        rests = self.resting > 0
        self.resting -= rests
        return not rests

    def is_drafted(self, samples: int) -> bool:
        """Return whether there is a drafter, and so few samples decode that it is asked."""
        return self.drafter is not None and samples <= self.drafter.most_samples

    def _drafts(self, decoding: list[Sample], prompts: list[_Prompt]) -> dict[Sample, list[int]]:
        """Ask the drafter, and cut drafts so that they take no cells, batch entries or logits that other tokens need,
        and a batch is one graph: only behind such a one windows can be cut. What room there is, samples share evenly.
        """
        assert self.drafter is not None
        context, prefill = self._context, sum(p.todo for p in prompts)
        room = min(
            self.kv.free - len(decoding) - prefill,
            context.n_ubatch - len(decoding) - min(prefill, PREFILL_CHUNK),
            context.max_outputs - len(decoding) - len(prompts),
        )
        # Before its first token a sample may have forks, which take its cells as they are.
        drafting = [s for s in decoding if s.tokens and s.request.params.speculate]
        share = room // max(1, len(drafting))
        # The last token that it may have is drawn, not drafted.
        asked = [(s, most) for s in drafting if (most := min(share, s.limit - len(s.tokens) - 1)) > 0]
        # What is forced need not be guessed.
        drafts = {s: s.forcer.coming[:most] for s, most in asked if s.forcer is not None and s.forcer.coming}
        asked = [(s, most) for s, most in asked if s not in drafts]
        if not asked:
            return drafts
        with observed(self.observer, "draft"):
            proposed = self.drafter.propose(asked, len(decoding))
        self.resting = self.drafter.rest()
        size = context.model.vocab.size
        for (sample, most), draft in zip(asked, proposed, strict=True):
            drafts[sample] = list(takewhile(lambda token: 0 <= token < size, draft[:most]))
        return {s: draft for s, draft in drafts.items() if draft}

    def roll_back(self, sample: Sample) -> None:
        """Give back the cells of a draft behind the tokens that were drawn; more, which are decoded again, where the
        model's memory cannot be cut there."""
        if not self._take_back(sample, 1):
            self._requeue(sample)

    def _take_back(self, sample: Sample, pending: int) -> bool:
        """Give back cells behind the tokens that were drawn, of which the last `pending` have none. False: the sequence
        is of no use any more."""
        assert sample.kv is not None
        length = len(sample.request.prompt_ids) + len(sample.tokens) - pending
        if len(sample.kv) <= length:
            return True
        sample.reached = max(sample.reached, length)
        return self.kv.take_back(sample.kv, length)

    def decoded(self, plan: BatchPlan) -> None:
        """Record that a batch was decoded: prompts may have come to marks, pinned prefixes may be complete."""
        if plan.only_decodes:
            return
        for span in plan.spans:
            self.kv.reached(span.seq)
        pinning = self._pinning
        self._pinning = [r for r in pinning if r.pinned is not None and len(r.pinned) < len(r.prompt_ids) - 1]

    def fork_waiting(self, sample: Sample) -> list[Sample]:
        """Fork the samples that wait for this one's prompt from it now, when its logits are there; return them."""
        request = sample.request
        if request.prefiller is not sample:
            return []
        forks = request.forks
        # Readers that came in between may have taken the sequences that were promised to them.
        while self.kv.free_ids < len(forks) and self.kv.evict():
            pass
        for fork in forks:
            assert sample.kv is not None
            fork.kv = self.kv.fork(sample.kv, len(sample.kv))
        request.prefiller, request.forks = None, []
        return forks

    # --- room -------------------------------------------------------------------------------------------------------

    def preempt(self) -> bool:
        """Free cells: of the prefix cache first, then of samples, of which one keeps its own. False: nothing can be
        freed."""
        return self.kv.evict() or self._give_way(1)

    def vacate(self, cells: int, ids: int, spare: Sequence | None = None) -> bool:
        """Free so many cells and sequence ids for a reader, as `preempt` does, but of all samples if need be. False:
        there are not so many.

        Args:
            spare: is not closed for it.
        """
        while self.kv.free < cells or self.kv.free_ids < ids:
            if not (self.kv.evict(spare) or self._give_way(0, spare)):
                return False
        return True

    def _give_way(self, keep: int, spare: Sequence | None = None) -> bool:
        """Free cells: of pinned prefixes of requests with nothing running, then of the sample admitted last, then of
        other pinned prefixes. False: nothing can be freed.

        Args:
            keep: 1: one holder of cells keeps them, else 0.
        """
        active = {id(s.request) for s in self.running}
        pinned = [r for r in {id(s.request): s.request for s in self.queue}.values() if r.pinned not in (None, spare)]
        idle = [r for r in pinned if id(r) not in active]
        with_cells = [s for s in self.running if s.kv is not None and s.kv is not spare]
        if idle and (self.running or len(idle) > keep):
            self._unpin(idle[-1])
        elif len(with_cells) > keep:
            self._requeue(max(with_cells, key=lambda s: s.age))
        elif pinned and with_cells:
            self._unpin(pinned[-1])
        else:
            return False
        return True

    def _requeue(self, sample: Sample) -> None:
        """Put a sample, and those that wait for its prompt, back to the head of the queue."""
        request = sample.request
        back = [sample]
        if request.prefiller is sample:
            back += request.forks
            request.prefiller, request.forks = None, []
        for s in sorted(back, key=lambda s: s.age, reverse=True):
            if s.kv is not None:
                s.reached = max(s.reached, len(s.kv))
                self.kv.close(s.kv)
                s.kv = None
            self.queue.appendleft(s)
            self.running.remove(s)
            request.queued += 1

    def _unpin(self, request: Request) -> None:
        if request.pinned is not None:
            if request in self._pinning:
                self._pinning.remove(request)
            self.kv.close(request.pinned)
            request.pinned = None
