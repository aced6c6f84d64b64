"""Where units of work are done: models and reward models kept open, one unit after the other from clean caches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from tilebeam.answers.extract import weight_of
from tilebeam.answers.normalize import checked_answer, merged
from tilebeam.errors import TilebeamError
from tilebeam.evaluation import named_scorers as scoring
from tilebeam.evaluation.config import GREEDY, Method, Setting, Unit, item_seed, work_of
from tilebeam.evaluation.log import Record
from tilebeam.evaluation.tasks.task import Item, Task
from tilebeam.gguf.closing import Closing
from tilebeam.gguf.fingerprint import fingerprint
from tilebeam.measure.machine import Stopwatch
from tilebeam.model.loader import load
from tilebeam.outputs import CompletionOutput, ProgressHook, RequestOutput, Usage, check_complete
from tilebeam.prompt import Prompt
from tilebeam.sampling_params import SamplingParams
from tilebeam.scoring.load_reward import RewardSpec
from tilebeam.scoring.scorers import Scorer, log_probability, rate_outputs
from tilebeam.scoring.scoring_defaults import STEP_STOP
from tilebeam.search import algorithms as methods
from tilebeam.search.contract import Algorithm, SearchResult, StepGenerator
from tilebeam.search.events import tally
from tilebeam.search.tool_reasoning import ToolGenerator, confined

if TYPE_CHECKING:
    from tilebeam.model.lm import LM
    from tilebeam.scoring.own_reward import OwnReward
    from tilebeam.scoring.reward_model import RewardModel

_SECONDS = ("prefill_seconds", "decode_seconds", "drafting_seconds", "sampling_seconds", "scoring_seconds")


@dataclass(frozen=True)
class EvalJob:
    """All that a process needs to do an evaluation's units; it can be pickled.

    Attributes:
        setting: of the evaluation.
        reward: the reward model, None for none; its files are named in the setting by their content.
        step_stop: what ends a step for scorers.
    """

    setting: Setting
    reward: RewardSpec | None = None
    step_stop: str = STEP_STOP


@dataclass(frozen=True)
class Timed:
    """A configuration whose latency is measured.

    Attributes:
        series, budget, method, scorer: as of a `Unit`; no method: one sample, or the greedy answer.
        alike: all series that take the same work, this one among them.
    """

    series: str
    budget: int
    method: Method | None
    scorer: str
    alike: tuple[str, ...]

    @property
    def work(self) -> str:
        """Name it, whichever other methods there are."""
        return self.series if self.method is None else work_of(self.method.spec, self.scorer)


class Workbench(Closing):
    """Does units.

    Models are opened when they are first needed. As many stay open as `keep` allows, the latest used.

    Args:
        job: what to do.
        task: of the job.
        keep: models of the setting that stay open.
        notify: told, in one line, which reward model was loaded.

    Raises:
        TilebeamError: the task here is not the setting's.
    """

    def __init__(
        self, job: EvalJob, task: Task, *, keep: int = 1, notify: Callable[[str], None] = lambda _: None
    ) -> None:
        self.setting = job.setting
        self.task = task
        if self.task.digest != self.setting.task_digest:
            raise TilebeamError(
                f"The items of {self.task.name} differ here from those of the evaluation: another version of their "
                "source, of the checker or of the extractor."
            )
        self._job = job
        self._keep = keep
        self.notify = notify
        self._models = {m.name: m for m in self.setting.models}
        self._methods = {m.spec: m for m in self.setting.parsed_methods()}
        self._lms: dict[tuple[str, str], LM] = {}  # the latest used comes last
        self._rewards: dict[str, RewardModel] = {}  # by device
        self._items: dict[str, Item] = {}  # by prompt, for scorers

    # --- units ------------------------------------------------------------------------------------------------------

    def run(self, unit: Unit, progress: ProgressHook | None = None) -> Record:
        """Do a unit.

        Returns:
            Its record for the log. What is under "seconds" differs from run to run, nothing else does.
        """
        began = time.perf_counter()
        lm = self._lm(unit.model, unit.device)
        items = self.task.items[unit.first : unit.last]
        self._clean(lm, unit.device)
        work = self._greedy if unit.method == GREEDY else self._search if unit.method else self._samples
        found = work(unit, lm, items, progress)
        return {"unit": unit.key, "items": found, "seconds": round(time.perf_counter() - began, 6)}

    def _samples(self, unit: Unit, lm: LM, items: Sequence[Item], progress: ProgressHook | None) -> list[Record]:
        """Draw the budget's samples of each item, and score them with every scorer."""
        names = self.setting.scorers
        wanted: dict[str, Any] = scoring.needs(names)
        wanted |= self._reward(unit.model, unit.device).needs() if scoring.OWN in names else {}
        params = [self._sampling(unit.seed, item, n=unit.budget, **wanted) for item in items]
        prompts = [self._prompt(lm, item) for item in items]
        outputs = self._source(lm).generate(prompts, params, progress=progress)
        check_complete(outputs)
        scores = {name: self._scores(name, unit, items, prompts, outputs) for name in names}
        records = []
        for i, (item, output) in enumerate(zip(items, outputs, strict=True)):
            answers = merged([self.task.extract(c.text) for c in output.outputs], self.task.equal)
            worth = [weight_of(self.task.extract, c.text) for c in output.outputs]
            samples = [
                {
                    "text": c.text,
                    "answer": answers[j],
                    "correct": self._correct(item, c.text),
                    "tokens": len(c.token_ids),
                    "finish": c.finish_reason,
                    "scores": {name: scores[name][i][j] for name in names},
                    "weights": {n: worth[j] * _weight(n, c, scores[n][i][j]) for n in names if scoring.is_weight(n)},
                }
                | ({"worth": worth[j]} if worth[j] != 1 else {})
                | _token_stats(c)
                for j, c in enumerate(output.outputs)
            ]
            votes = {} if self.task.judged else {"votes": tally(answers, worth)}
            records.append({"id": item.id, "samples": samples} | votes | _usage(output.usage))
        return records

    def _greedy(self, unit: Unit, lm: LM, items: Sequence[Item], progress: ProgressHook | None) -> list[Record]:
        """Answer each item once, at temperature 0."""
        params = [self._sampling(unit.seed, item, temperature=0.0) for item in items]
        outputs = self._source(lm).generate([self._prompt(lm, item) for item in items], params, progress=progress)
        check_complete(outputs)
        return [
            {"id": item.id}
            | self._judged(item, output.outputs[0].text)
            | {"finish": output.outputs[0].finish_reason}
            | _usage(output.usage)
            for item, output in zip(items, outputs, strict=True)
        ]

    def _scores(
        self, name: str, unit: Unit, items: Sequence[Item], prompts: Sequence[Prompt], outputs: Sequence[RequestOutput]
    ) -> list[list[float]]:
        if name == scoring.VERIFIER:  # by item: prompts may be alike
            return [
                [self.task.verdict(item, c.text) for c in output.outputs]
                for item, output in zip(items, outputs, strict=True)
            ]
        ratings = rate_outputs(self._scorer(name, unit.model, unit.device), prompts, outputs)
        for output, rating in zip(outputs, ratings, strict=True):
            output.usage += rating.usage
        scores = [rating.scores for rating in ratings]
        if not all(math.isfinite(score) for group in scores for score in group):
            raise TilebeamError(f"--scorer {name} returned a score that is not finite.")
        return scores

    def _search(self, unit: Unit, lm: LM, items: Sequence[Item], progress: ProgressHook | None) -> list[Record]:
        """Search, and tell what was chosen for each item."""
        algorithm = self._algorithm(self._methods[unit.method], unit.scorer, unit.model, unit.device)
        params = [self._sampling(unit.seed, item) for item in items]
        prompts = [self._prompt(lm, item) for item in items]
        results = algorithm.run(self._source(lm), prompts, unit.budget, sampling=params, progress=progress)
        return [
            {"id": item.id}
            | self._judged(item, result.best.text)
            | {"score": result.scores[result.best_index], "candidates": len(result.candidates)}
            | _usage(result.usage)
            for item, result in zip(items, results, strict=True)
        ]

    # --- latency ----------------------------------------------------------------------------------------------------

    def latency(self, model: str, device: str, timed: Timed, item: Item) -> Record:
        """Time the real algorithm on one prompt alone, from clean caches.

        Returns:
            "tokens" sampled, "seconds" from prompt to choice, and "cpu_seconds" that this took on all CPUs.
        """
        lm = self._lm(model, device)
        self._clean(lm, device)
        params = self._sampling(self.setting.seeds[0], item, **({"temperature": 0.0} if timed.series == GREEDY else {}))
        prompts, source = [self._prompt(lm, item)], self._source(lm)
        run: Callable[[], Sequence[RequestOutput | SearchResult]] = partial(source.generate, prompts, params)
        if timed.method is not None:
            algorithm = self._algorithm(timed.method, timed.scorer, model, device)
            run = partial(algorithm.run, source, prompts, timed.budget, sampling=params)
        watch = Stopwatch()
        tokens = run()[0].usage.completion_tokens
        cost = watch.cost()
        return {"seconds": round(cost.seconds, 6), "cpu_seconds": round(cost.cpu_seconds, 6), "tokens": tokens}

    # --- parts ------------------------------------------------------------------------------------------------------

    def _sampling(self, seed: int, item: Item, **changes: Any) -> SamplingParams:
        return SamplingParams(**dict(self.setting.sampling) | {"seed": item_seed(seed, item.id)} | changes)

    def _judged(self, item: Item, text: str) -> Record:
        """Judge a text: its answer, and whether it is right."""
        return {
            "text": text,
            "answer": checked_answer(self.task.extract(text)),
            "correct": self._correct(item, text),
        }

    def _correct(self, item: Item, text: str) -> float | None:
        """Judge a text, None where nobody can."""
        return self.task.verdict(item, text) if self.task.judged else None

    def _source(self, lm: LM) -> StepGenerator:
        """Return the generator that samples are drawn from."""
        task = self.setting.task
        return (
            cast(StepGenerator, ToolGenerator(lm, confined(unsafe=task.unsafe_code)))
            if task.tir
            else self.task.source(lm)
        )

    def _prompt(self, lm: LM, item: Item) -> Prompt:
        """Return what a model reads; a reward model without a template of its own reads the question in the task's."""
        prompt = self.task.prompt(item, lm)
        self._items[prompt.text] = item
        reward = self._job.reward
        return replace(prompt, question=item.body) if reward and reward.format.head == "{prompt}" else prompt

    def _algorithm(self, method: Method, scorer: str, model: str, device: str) -> Algorithm[SearchResult]:
        options: dict[str, Any] = dict(method.options)
        known = {o.name for o in methods.options(method.name)}
        if "extract" in known and "extract" not in options:
            options["extract"] = self.task.extract
            if "equal" in known:
                options["equal"] = self.task.equal
        if method.name == "self-consistency" and scorer and "weighting" not in options:
            options["weighting"] = "logprob" if scorer == "logprob" else "reward"
            scorer = scorer if scorer != "logprob" else ""
        return methods.create(method.name, scorer=self._scorer(scorer, model, device) if scorer else None, **options)

    def _scorer(self, name: str, model: str, device: str) -> Scorer:
        if name in scoring.REWARDS:
            return self._reward(model, device)
        return scoring.modelless_scorer(
            name,
            lambda prompt, text: self.task.verdict(self._items[prompt], text),
            self._job.step_stop,
            unsafe_code=self.setting.task.unsafe_code,
        )

    def _reward(self, model: str, device: str) -> RewardModel | OwnReward:
        assert self._job.reward is not None  # `runner.check` asked
        if self._job.reward.own:
            return self._job.reward.open(self._lm(model, device), step_stop=self._job.step_stop)
        if device not in self._rewards:
            self._rewards[device] = scorer = self._job.reward.load(
                step_stop=self._job.step_stop, **self._load_options(device)
            )
            self.notify(f"{scorer.lm.description} on {device}; {scorer.about}")
        return self._rewards[device]

    def _lm(self, name: str, device: str) -> LM:
        key = name, device
        if key not in self._lms:
            while len(self._lms) >= self._keep:
                self._lms.pop(next(iter(self._lms))).close()
            model = self._models[name]
            if fingerprint(model.path) != model.fingerprint:
                raise TilebeamError(f"{model.path} is not the file {model.name} that this evaluation began with.")
            options = self._load_options(device)
            if self._job.reward is not None:
                options["hidden_layer"] = self._job.reward.hidden_layer(model.path)
            self._lms[key] = load(model.path, **options)
        self._lms[key] = self._lms.pop(key)
        return self._lms[key]

    def _load_options(self, device: str) -> dict[str, Any]:
        s = self.setting
        return {
            "device": device,
            "n_ctx": s.n_ctx,
            "n_seq_max": s.n_seq_max,
            "threads": s.threads,
            "executor": s.executor if device == "npu" else None,
            "lookup": False,
            "deterministic": s.deterministic,
        }

    def _clean(self, lm: LM, device: str) -> None:
        """Begin at the first cell: where cells lie decides in what order attention adds up."""
        for one in (lm, *([self._rewards[device].lm] if device in self._rewards else [])):
            with one.raw_decode():
                pass

    def close(self) -> None:
        """Close all models."""
        with ExitStack() as stack:
            for lm in self._lms.values():
                stack.callback(lm.close)
            for reward in self._rewards.values():
                stack.callback(reward.close)
        self._lms.clear()
        self._rewards.clear()


def _weight(name: str, candidate: CompletionOutput, score: float) -> float:
    """Weigh a candidate's vote as `SelfConsistency` does."""
    return math.exp(log_probability(candidate, per_token=True)) if name == "logprob" else score


def _token_stats(candidate: CompletionOutput) -> Record:
    """Return the statistics of a sample's tokens, where it has them."""
    found = {"entropies": candidate.entropies, "certainties": candidate.certainties}
    return {name: [round(v, 3) for v in values] for name, values in found.items() if values is not None}


def _usage(usage: Usage) -> Record:
    """Tell tokens, and seconds apart from them."""
    tokens: Mapping[str, Any] = asdict(usage)
    return {
        "usage": {k: v for k, v in tokens.items() if k not in _SECONDS},
        "seconds": {k.removesuffix("_seconds"): round(tokens[k], 6) for k in _SECONDS},
    }
