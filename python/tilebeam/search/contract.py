"""What a search is: the contract of all algorithms, what they ask of a model, and what they return.

    result = algorithm.infer(lm, "Question: ...", budget=16)         # one prompt
    results = algorithm.run(lm, prompts, budget=16)                  # many, which share batches
    for i, result in algorithm.completed(lm, prompts, budget=16):    # each as soon as it is complete

A prompt is a text, the messages of a chat, or a `tilebeam.Prompt`. Algorithms by name, with options checked:
`tilebeam.search.algorithms`.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar, Unpack, cast, overload

from tilebeam.answers.voted_answer import VotedAnswer
from tilebeam.chat.prepared import PreparedChat
from tilebeam.checks import checked_integer
from tilebeam.errors import TilebeamError
from tilebeam.outputs import CompletionOutput, Progress, ProgressHook, RequestOutput, SampleHook, Usage, short
from tilebeam.prompt import Messages, Prompt, is_messages, is_one
from tilebeam.sampling_params import SamplingFields, SamplingParams, one_each, paired, updated
from tilebeam.search.chats import ChatGenerator
from tilebeam.search.events import EventHook
from tilebeam.search.search_defaults import BUDGET


class Generator(Protocol):
    """What a search over whole candidates asks of a model; `tilebeam.LM` is one."""

    def generate(
        self,
        prompts: Sequence[Prompt] | Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        progress: ProgressHook | None = None,
        on_sample: SampleHook | None = None,
    ) -> list[RequestOutput]:
        """Draw samples for each prompt. ``on_sample`` is given by searches that stop early or whose events are wanted;
        a model that cannot stop draws what nobody wants any more."""
        ...


class StepGenerator(Generator, Protocol):
    """What a search by steps asks of a model besides; `tilebeam.LM` is one."""

    @property
    def n_ctx(self) -> int:
        """Return how many tokens prompt and text have at most."""
        ...

    def tokenize(self, text: str) -> list[int]:
        """Return token ids."""
        ...

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        ...

    def keep_prefixes(self) -> AbstractContextManager[None]:
        """Let prompts that continue earlier samples fork them meanwhile."""
        ...


@dataclass(frozen=True)
class Trajectory:
    """How a text came about, step by step.

    Attributes:
        steps: its pieces, in order; a text that was drawn in one go is one step.
        scores: of the steps, under a process reward model; empty where nothing rated steps.
        finished: whether it came to an end by itself: not cut by a limit.
        tree: number of the prompt's tree that it grew in. DVTS grows several; beam search numbers the groups of first
            steps so, but lets all of them compete.
    """

    steps: tuple[str, ...]
    scores: tuple[float, ...] = ()
    finished: bool = True
    tree: int = 0


@dataclass(frozen=True, kw_only=True)
class Pruned(Trajectory):
    """A beginning that made room for better ones.

    Attributes:
        round: after which it was dropped, counted from 1.
        score: its aggregate then.
        bar: the lowest aggregate of those that it competed with and that stayed.
        tokens: sampled for it, its shared beginning included.
        step_tokens: of them, those sampled in the round after which it was dropped, which no other text has.
    """

    round: int
    score: float
    bar: float
    tokens: int
    step_tokens: int


@dataclass
class SearchResult:
    """What a search found for one prompt.

    Attributes:
        prompt: the prompt's text.
        candidates: the texts that were in the running to the end, in the order of their seeds.
        scores: one per candidate: what the search chose by.
        best_index: of the chosen candidate.
        usage: tokens and seconds spent on this prompt, in the model and in the scorer. Tokens are exact; the seconds of
            batches that prompts share are shares.
        seed: what the candidates' seeds derive from.
        budget: candidates that the search was allowed.
        trajectories: one per candidate.
        pruned: beginnings that made room for better ones and are no candidates (searches by steps).
    """

    prompt: str
    candidates: list[CompletionOutput]
    scores: list[float]
    best_index: int
    usage: Usage
    seed: int
    budget: int
    trajectories: list[Trajectory]
    pruned: list[Pruned] = field(default_factory=list, kw_only=True)

    @property
    def best(self) -> CompletionOutput:
        """The chosen candidate."""
        return self.candidates[self.best_index]

    @property
    def text(self) -> str:
        """The chosen candidate's text."""
        return self.best.text

    def __repr__(self) -> str:
        return f"<best of {len(self.candidates)} for {short(self.prompt)}: {self.best!r}>"

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it: all of it but the single tokens' log-probabilities and statistics."""
        by_token: dict[str, Any] = dict.fromkeys(("logprobs", "top_logprobs", "entropies", "certainties"))
        return {
            "prompt": self.prompt,
            "text": self.best.text,
            "best_index": self.best_index,
            "scores": self.scores,
            "candidates": [replace(c, **by_token).as_dict() for c in self.candidates],
            "trajectories": [asdict(t) for t in self.trajectories],
            "pruned": [asdict(t) for t in self.pruned],
            "usage": asdict(self.usage) | {"seconds": self.usage.seconds},
            "seed": self.seed,
            "budget": self.budget,
        }


@dataclass
class VoteResult(SearchResult):
    """What a vote found; ``scores`` are the candidates' weights.

    Attributes:
        answers: each candidate's answer, None where there was none; of equal answers all have the first one's
            spelling.
        votes: total weight per answer, heaviest first; see `tilebeam.search.limits.voters` for whose answers count.
        answer: the winner, which also equals the number that it spells; None if no candidate has an answer.
    """

    answers: list[str | None]
    votes: dict[str, float]
    answer: VotedAnswer | None

    def __repr__(self) -> str:
        votes = ", ".join(f"{answer} x{weight:.4g}" for answer, weight in self.votes.items())
        return f"<answer {self.answer} ({votes}) to {short(self.prompt)}: {self.best!r}>"

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it; see `SearchResult.as_dict`."""
        return super().as_dict() | {"answer": self.answer, "answers": self.answers, "votes": self.votes}


Result = TypeVar("Result", bound=SearchResult, covariant=True)
# What a search can be asked.
Askable = str | Prompt | Messages | PreparedChat


@dataclass(frozen=True)
class SearchCall:
    """What `Algorithm.run` was asked for, checked.

    Attributes:
        prompts: what to search for.
        budget: candidates per prompt.
        sampling: how to draw for each prompt, with a seed.
        progress, events: see `Algorithm.run`.
    """

    prompts: list[Prompt]
    budget: int
    sampling: list[SamplingParams]
    progress: ProgressHook | None
    events: EventHook | None


class Algorithm(ABC, Generic[Result]):
    """A way to spend more compute on prompts.

    What holds for all of them:

    - `run` takes many prompts and drives them in lock-step, so that they share batches. A prompt's result does not
      depend on the others but for what batches of other shapes change in logits: of a model that was loaded with
      ``deterministic=True`` nothing.
    - The budget is in candidates per prompt: how many texts may be in the running at the same time, for each prompt.
      No call to the model ever asks for more samples of a prompt. What it came to is in `SearchResult.usage`, in
      tokens and seconds.
    - ``sampling`` says how to draw. Its ``n`` is the algorithm's; ``max_tokens`` and ``stop`` bound a whole candidate,
      however many steps it has; ``seed`` decides all: the same seeds and calls give the same results, unless
      tokens are guessed ahead.
    - An instance keeps nothing between calls. Scorers it shares with others may be used by several threads only if
      they say so.

    Attributes:
        name: under which `tilebeam.search.algorithms` knows it.
    """

    name: ClassVar[str]

    @abstractmethod
    def search(self, lm: StepGenerator, call: SearchCall) -> list[Result]:
        """Search for all prompts of a call: one result per prompt, in their order."""

    def run(
        self,
        lm: Generator,
        prompts: Sequence[Askable],
        budget: int = BUDGET,
        *,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: ProgressHook | None = None,
        events: EventHook | None = None,
        **fields: Unpack[SamplingFields],
    ) -> list[Result]:
        """Search for all prompts.

        Args:
            lm: the model.
            prompts: texts, as `LM.generate` takes them, what `LM.chat_prompt` gives, messages, which it is given, or
                what `LM.prepare_chat` gives: candidates then have their calls of functions and thoughts apart.
            budget: candidates per prompt.
            sampling: how to draw; for all prompts, or one per prompt. Chats that are prepared are drawn as they say.
            fields: of `SamplingParams`, by name, in place of those of `sampling`: max_tokens=512.
            progress: called after every batch with the state of the whole search; returning False cancels it.
                ``finished`` of ``total`` are candidates, or in searches by steps continuations.
            events: called when something happens in the search: see `tilebeam.search.events`.

        Returns:
            One result per prompt, in their order.

        Raises:
            SearchCancelled: by the hook.
            TilebeamError: a budget that does not fit, a scorer that misbehaves, or what `LM.generate` raises.
        """
        checked_integer("budget", budget)
        prompts = list(_several(prompts))
        params = [p.resolved() for p in one_each(updated(sampling, fields), len(prompts))]
        chats = {i: chat for i, chat in enumerate(prompts) if isinstance(chat, PreparedChat)}
        for i, chat in chats.items():
            params[i] = cast(SamplingParams, updated(chat.params, fields)).resolved()
        asked = [_prompt_of(lm, prompt) for prompt in prompts]
        if chats:
            known = {id(asked[i]): chat for i, chat in chats.items()}
            lm = ChatGenerator(lm, lambda prompt: known.get(id(prompt)))
        # Searches by steps ask for more; a model that lacks it says so.
        results = self.search(cast(StepGenerator, lm), SearchCall(asked, budget, params, progress, events))
        for i, chat in chats.items():
            results[i].candidates = [chat.read_sample(candidate) for candidate in results[i].candidates]
        return results

    @overload  # a str is a Sequence[str] too: the first signature that fits counts
    def infer(  # type: ignore[overload-overlap]
        self,
        lm: Generator,
        prompt: Askable,
        budget: int = ...,
        *,
        sampling: SamplingParams | None = ...,
        progress: ProgressHook | None = ...,
        events: EventHook | None = ...,
        **fields: Unpack[SamplingFields],
    ) -> Result: ...
    @overload
    def infer(
        self,
        lm: Generator,
        prompt: Sequence[Askable],
        budget: int = ...,
        *,
        sampling: SamplingParams | Sequence[SamplingParams] | None = ...,
        progress: ProgressHook | None = ...,
        events: EventHook | None = ...,
        **fields: Unpack[SamplingFields],
    ) -> list[Result]: ...
    def infer(
        self,
        lm: Generator,
        prompt: Askable | Sequence[Askable],
        budget: int = BUDGET,
        *,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: ProgressHook | None = None,
        events: EventHook | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Result | list[Result]:
        """Search for one prompt or conversation, or for several: one result for one, a list for a list; see `run`."""
        one = is_one(prompt) or isinstance(prompt, PreparedChat)
        prompts = [cast(Askable, prompt)] if one else list(cast(Sequence[Askable], prompt))
        results = self.run(lm, prompts, budget, sampling=sampling, progress=progress, events=events, **fields)
        return results[0] if one else results

    def completed(
        self,
        lm: Generator,
        prompts: Iterable[Askable],
        budget: int = BUDGET,
        *,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        at_once: int = 8,
        **fields: Unpack[SamplingFields],
    ) -> Iterator[tuple[int, Result]]:
        """Search for many prompts and get each one's result as soon as it is complete.

        Each search has a thread of its own, and their calls share batches. Prompts are taken as searches end, so there
        may be any number of them. Leaving the loop cancels what is not finished.

        Args:
            lm, budget, sampling, fields: as for `run`.
            prompts: as for `run`, or an iterator of them.
            at_once: searches under way at most. Slots stay in use where this times the budget is twice their number.
                Functions that score or extract are called from that many threads.

        Returns:
            An iterator of a prompt's number and its result.

        Raises:
            TilebeamError: by the iterator: as `run`; the number of the prompt is in the error's notes.
        """
        checked_integer("at_once", at_once)
        params = updated(sampling, fields)
        return self._completed(lm, paired(_several(prompts), params), budget, at_once)

    def _completed(
        self, lm: Generator, pairs: Iterator[tuple[Askable, SamplingParams]], budget: int, at_once: int
    ) -> Iterator[tuple[int, Result]]:
        cancelled = threading.Event()

        def search(number: int, prompt: Askable, sampling: SamplingParams) -> tuple[int, Result]:
            def go_on(_: Progress) -> bool:
                return not cancelled.is_set()

            try:
                return number, self.run(lm, [prompt], budget, sampling=sampling, progress=go_on)[0]
            except Exception as error:
                error.add_note(f"In the search for prompt {number}.")
                raise

        running: set[Future[tuple[int, Result]]] = set()

        def ended() -> Iterator[tuple[int, Result]]:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            running.difference_update(done)
            for future in sorted(done, key=lambda f: f.exception() is not None):  # an error loses no result
                yield future.result()

        with ThreadPoolExecutor(at_once, thread_name_prefix="tilebeam-search") as pool:
            try:
                for number, pair in enumerate(pairs):
                    running.add(pool.submit(search, number, *pair))
                    if len(running) == at_once:
                        yield from ended()
                while running:
                    yield from ended()
            finally:
                cancelled.set()


# --- for those who write algorithms -----------------------------------------------------------------------------------


def _prompt_of(lm: Generator, asked: Askable) -> Prompt:
    """Make the prompt of a text or a conversation."""
    if isinstance(asked, PreparedChat):
        return replace(asked.prompt)  # an object of its own, which tells chats of the same text apart
    if is_messages(asked) and (chat_prompt := getattr(lm, "chat_prompt", None)) is not None:
        return Prompt.of(chat_prompt(asked))
    return Prompt.of(asked)


def _several(prompts: Iterable[Askable]) -> Iterable[Askable]:
    """Return prompts, which a single one is not."""
    if is_one(prompts):
        raise TilebeamError("This is one prompt where several are expected: put it into a list, or call infer.")
    return prompts


class SearchProgress:
    """Makes the progress of a search out of that of its calls to `generate`.

    Args:
        hook: whom to tell.
        total: what there is to do.
    """

    def __init__(self, hook: ProgressHook | None, total: int) -> None:
        self._hook = hook
        self._began = time.perf_counter()
        self._total = total
        self._finished = 0  # before the present call
        self._before = Progress()  # of earlier calls, added up
        self._last = Progress()  # of the present call

    def call(self, finished: int) -> ProgressHook | None:
        """Return a hook for the next call to `generate`, before which so much was done."""
        self._finished = finished
        self._before.tokens += self._last.tokens
        self._before.prompt_tokens += self._last.prompt_tokens
        self._last = Progress()
        return self._tell if self._hook is not None else None

    def _tell(self, state: Progress) -> bool | None:
        assert self._hook is not None
        self._last = replace(state)
        return self._hook(
            replace(
                state,
                finished=min(self._total, self._finished + state.finished),
                total=self._total,
                tokens=self._before.tokens + state.tokens,
                prompt_tokens=self._before.prompt_tokens + state.prompt_tokens,
                seconds=time.perf_counter() - self._began,
            )
        )
