"""Tool-integrated reasoning: samples that write programs, which are run, and go on behind the real output.

    lm = ToolGenerator(lm, run)                      # whatever asks a model for samples can ask this one
    ToolReasoning("boxed").infer(lm, prompt, 8)      # the same under a vote

A model that was trained on it (Gou et al., "ToRA"; Qwen2.5-Math) writes a block of Python, then a block that begins
with "```output", and without help invents what stands there. Here a sample stops at that mark, its program runs, the
output is put behind the mark, and the sample goes on. KV cells are kept meanwhile, so that only the output is read;
samples of all prompts go on in the same batches while programs run.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, cast

from tilebeam.answers.code import ends_in_python, python_blocks
from tilebeam.answers.extract import Extractor, marked_number
from tilebeam.answers.normalize import Equal
from tilebeam.checks import checked_integer
from tilebeam.errors import TilebeamError
from tilebeam.outputs import CompletionOutput, FinishReason, Progress, ProgressHook, RequestOutput, SampleHook, Usage
from tilebeam.prompt import Prompt, PromptLike
from tilebeam.sampling_params import SamplingParams, one_each
from tilebeam.scoring.scorers import Scorer
from tilebeam.search.contract import Algorithm, SearchCall, StepGenerator, VoteResult
from tilebeam.search.sampled import SelfConsistency
from tilebeam.search.search_defaults import ROUNDS, Weighting
from tilebeam.search.steps import text_of
from tilebeam.search.tool_forms import MARK

# Runs the last of a sample's programs and returns what it prints, or its error, as text; the others are those before.
Run = Callable[[Sequence[str]], str]

MOST_OUTPUT = 1000  # characters of a program's output that a model reads
_BY_TOKEN = ("token_ids", "logprobs", "top_logprobs", "entropies", "certainties")  # what grows with a sample's tokens
_THREADS = 64  # samples whose programs run or that go on, at most


class ToolModel(StepGenerator, Protocol):
    """What tool-integrated reasoning asks of a model; `tilebeam.LM` is one."""

    def is_control(self, token: int) -> bool:
        """Return whether a token is a control token."""
        ...

    def tokenize(self, text: str, *, add_special: bool = ..., parse_special: bool = ...) -> list[int]:
        """Return token ids."""
        ...


def shown(output: str) -> str:
    """Return a program's output as a model reads it: about `MOST_OUTPUT` characters, nothing that closes the block."""
    text = output.strip("\n").replace("```", "'''")
    if len(text) > MOST_OUTPUT:
        text = text[: MOST_OUTPUT // 2] + "\n.. (cut) ..\n" + text[-MOST_OUTPUT // 2 :]
    return text


@dataclass(eq=False)
class _Draft:
    """A sample on its way: what was written and inserted so far; of it the last text that the model wrote, and where
    its tokens begin."""

    sample: CompletionOutput
    last: str
    written: int  # tokens that the model wrote
    programs: list[str] = field(default_factory=list)
    begin: int = 0

    @classmethod
    def of(cls, first: CompletionOutput) -> _Draft:
        """Begin with what the model wrote up to the first mark."""
        own: dict[str, Any] = {name: list(v) for name in _BY_TOKEN if (v := getattr(first, name)) is not None}
        return cls(replace(first, **own), first.text, len(first.token_ids))

    def add(self, more: CompletionOutput) -> None:
        """Append what the model wrote behind an output."""
        own = self.sample
        self.last, self.begin = more.text, len(own.token_ids)
        self.written += len(more.token_ids)
        own.text += more.text
        own.finish_reason, own.stop_reason = more.finish_reason, more.stop_reason
        for name in _BY_TOKEN:
            if (values := getattr(own, name)) is not None:
                values += getattr(more, name) or []
        if own.hidden is not None and more.hidden is not None:
            own.hidden = own.hidden.then(more.hidden)

    def output(self) -> CompletionOutput:
        """Return the sample, complete."""
        logprobs = self.sample.logprobs
        return replace(self.sample, cumulative_logprob=None if logprobs is None else sum(logprobs))


class ToolGenerator:
    """A model whose samples write programs, which are run; a `StepGenerator` over another one.

    ``max_tokens`` counts what the model writes, not the outputs. Texts, token ids and hidden states hold the outputs;
    log-probabilities are of what the model wrote.

    Args:
        lm: the model.
        run: runs programs; from several threads at once.
        rounds: programs of a sample; one that wants more is cut there.
    """

    def __init__(self, lm: ToolModel, run: Run, *, rounds: int = ROUNDS) -> None:
        self._lm = lm
        self._run = run
        self._rounds = checked_integer("rounds", rounds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lm, name)  # but for `generate` it is the model

    def generate(
        self,
        prompts: Sequence[str | Prompt] | Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        progress: ProgressHook | None = None,
        on_sample: SampleHook | None = None,
    ) -> list[RequestOutput]:
        """Draw samples for each prompt and run their programs; see `tilebeam.LM.generate`.

        ``on_sample`` and ``progress`` are called from several threads, one at a time.

        Raises:
            TilebeamError: as `LM.generate`, or samples are to be held to a grammar.
        """
        params = one_each(sampling, len(prompts))
        if any(p.constrained for p in params):
            raise TilebeamError(
                "Samples whose programs run cannot be held to a grammar, a JSON schema or a regular expression, "
                "because each part of a text would begin it anew."
            )
        told = _JoinedProgress(progress, on_sample, sum(p.n for p in params))
        slots = int(getattr(self._lm, "n_seq_max", 16))
        # Few more samples than slots are under way, so that those that go on need not wait behind the first parts of
        # others, and find their cells still there.
        at_once = max(1, math.ceil(2 * slots / max((p.n for p in params), default=1)))
        with (
            self._lm.keep_prefixes(),
            ThreadPoolExecutor(_THREADS, "tilebeam-programs") as going_on,
            ThreadPoolExecutor(at_once, "tilebeam-prompts") as pool,
        ):
            jobs = [pool.submit(self._one, i, prompts[i], params[i], told, going_on) for i in range(len(prompts))]
            try:
                return [job.result() for job in jobs]
            except BaseException:
                told.cancelled = True
                for job in jobs:
                    job.cancel()
                raise

    def _one(
        self, number: int, prompt: PromptLike, params: SamplingParams, told: _JoinedProgress, pool: ThreadPoolExecutor
    ) -> RequestOutput:
        """Draw all samples of one prompt."""
        under_way: dict[int, Future[tuple[CompletionOutput, Usage]]] = {}
        ids = Prompt.of(prompt).tokens(self._lm) if isinstance(prompt, str | Prompt) else list(prompt)

        def ended(_: int, first: CompletionOutput) -> None:
            if _wants_output(first.finish_reason, first.stop_reason, first.text):
                under_way[first.index] = pool.submit(self._go_on, ids, params, first, told)
            else:
                told.ended(number, first)

        hidden = params.hidden  # those of the first part come with the result of the call
        params = replace(params, stop=(*(params.stop or ()), MARK))
        output = self._lm.generate(
            cast(Sequence[Prompt], [prompt]), [params], progress=told.hook(), on_sample=None if hidden else ended
        )[0]
        for first in output.outputs if hidden else ():
            ended(0, first)
        for index, future in under_way.items():
            output.outputs[index], usage = future.result()
            told.ended(number, output.outputs[index])
            output.usage += usage
        return output

    def _go_on(
        self, ids: list[int], params: SamplingParams, first: CompletionOutput, told: _JoinedProgress
    ) -> tuple[CompletionOutput, Usage]:
        """Run a sample's program and let the model write on, until it ends."""
        draft, usage = _Draft.of(first), Usage()
        own = draft.sample
        while _wants_output(own.finish_reason, own.stop_reason, draft.last):
            left = None if params.max_tokens is None else params.max_tokens - draft.written
            if len(draft.programs) == self._rounds or (left is not None and left < 1) or told.cancelled:
                own.finish_reason, own.stop_reason = "aborted" if told.cancelled else "length", None
                break
            self._insert(draft, params.shown_tokens)
            if len(ids) + len(own.token_ids) >= self._lm.n_ctx:
                own.finish_reason, own.stop_reason = "length", None
                break
            asked = replace(
                params,
                n=1,
                seed=params.sample_seed(first.index),
                max_tokens=left,
                min_tokens=0,
                hidden_prompt=params.hidden,
                continues=params.continues + len(own.token_ids),
            )
            output = self._lm.generate([ids + own.token_ids], [asked], progress=told.hook())[0]
            draft.add(output.outputs[0])
            cost = output.usage
            again = cost.recomputed_tokens + cost.prompt_tokens - cost.cached_tokens
            usage += replace(cost, prompt_tokens=0, cached_tokens=0, recomputed_tokens=again)
        return draft.output(), usage

    def _insert(self, draft: _Draft, seen: Sequence[int]) -> None:
        """Put the output of a draft's last program behind it."""
        own = draft.sample
        program = (python_blocks(own.text) or [""])[-1]
        none = "There is no block of Python above."
        output = shown(self._run([*draft.programs, program]) if program else none)
        draft.programs.append(program)
        # The last tokens may hold more than the mark: they are replaced. A text that ended without one gets it.
        ended, kept = own.stop_reason is None, own.token_ids[draft.begin :]
        stopped = (draft.last.rstrip() + "\n" if ended else draft.last) + MARK
        if ended and kept and self._lm.is_control(kept[-1]):
            kept.pop()
        written = text_of(self._lm, kept, seen)
        while kept and (len(written) > len(stopped) or (ended and not stopped.startswith(written))):
            kept.pop()
            written = text_of(self._lm, kept, seen)
        missing = stopped[len(written) :] if stopped.startswith(written) else ""
        inserted = f"\n{output}\n```\n"
        own.text = own.text.removesuffix(draft.last) + stopped + inserted
        more = self._lm.tokenize(missing + inserted, add_special=False, parse_special=False)
        own.token_ids[draft.begin :] = [*kept, *more]


def _wants_output(finish: FinishReason, reason: str | None, text: str) -> bool:
    """Tell whether a text ended for its program to be run."""
    return finish == "stop" and (reason == MARK or (reason is None and ends_in_python(text)))


class _JoinedProgress:
    """Makes the progress of one call out of that of its parts, and tells hooks, one at a time."""

    def __init__(self, progress: ProgressHook | None, on_sample: SampleHook | None, total: int) -> None:
        self.cancelled = False
        self._progress = progress
        self._on_sample = on_sample
        self._lock = threading.Lock()
        self._parts: list[Progress] = []
        self._finished = 0
        self._total = total

    def hook(self) -> ProgressHook:
        """Return a hook for one call to the model."""
        part = Progress()
        with self._lock:
            at = len(self._parts)
            self._parts.append(part)

        def tell(now: Progress) -> bool:
            with self._lock:
                self._parts[at] = replace(now)
                if self._progress is not None and not self.cancelled:
                    self.cancelled = self._progress(self._sum()) is False
            return not self.cancelled

        return tell

    def ended(self, number: int, sample: CompletionOutput) -> None:
        """Report that a sample is complete."""
        with self._lock:
            self._finished += 1
            if self._on_sample is not None:
                self._on_sample(number, replace(sample, hidden=None, hidden_steps=None))

    def _sum(self) -> Progress:
        parts = self._parts
        return Progress(
            self._finished,
            self._total,
            sum(p.running for p in parts if p.finished < p.total),
            sum(p.tokens for p in parts),
            sum(p.prompt_tokens for p in parts),
            max((p.seconds for p in parts), default=0.0),
        )


class ToolReasoning(Algorithm[VoteResult]):
    """Draw N candidates whose programs are run, and let their answers vote.

    Args:
        extract: from a text to its answer; see `tilebeam.answers.extract`.
        scorer: weighs votes; None: one vote each.
        rounds: programs of a candidate at most.
        equal: see `SelfConsistency`.
        run: runs programs; None: `tilebeam.sandbox` does, confined.
        unsafe_code: let it run them even where they cannot be confined.
    """

    name: ClassVar[str] = "tir"

    def __init__(
        self,
        extract: Extractor | str = marked_number,
        *,
        scorer: Scorer | Callable[[str, str], float | bool] | str | None = None,
        rounds: int = ROUNDS,
        equal: Equal | None = None,
        run: Run | None = None,
        unsafe_code: bool = False,
    ) -> None:
        self.rounds = checked_integer("rounds", rounds)
        self._run = run
        self._unsafe = unsafe_code
        weighting: Weighting = "plain" if scorer is None else "reward"
        self.vote = SelfConsistency(extract, weighting=weighting, scorer=scorer, equal=equal)

    def search(self, lm: ToolModel, call: SearchCall) -> list[VoteResult]:  # type: ignore[override]
        """See `Algorithm.search`."""
        run = self._run or confined(unsafe=self._unsafe)
        return self.vote.search(ToolGenerator(lm, run, rounds=self.rounds), call)


def confined(*, unsafe: bool = False) -> Run:
    """Return what runs programs in `tilebeam.sandbox`: a sample's earlier programs run again before, so that their
    variables are there; what they print is forgotten, and their time comes on top of the new one's.

    Args:
        unsafe: run them even where they cannot be confined.

    Raises:
        TilebeamError: they cannot be confined here, and `unsafe` is false.
    """
    from tilebeam import sandbox

    sandbox.need_confinement(unsafe=unsafe)
    ended: set[str] = set()  # programs that had to be ended, or ended their process: those behind them run without

    def run(programs: Sequence[str]) -> str:
        before = [program for program in programs[:-1] if program not in ended]
        said = sandbox.run(programs[-1], before=before, timeout=sandbox.SECONDS * (1 + len(before)), unsafe=unsafe)
        if said.ended:
            ended.add(programs[-1])
        return said.text

    return run
