"""Runs an evaluation: units that are not in the log yet, then the timed pass, then figures, report and plots.

OUT/log.jsonl       finished units in the order in which they finished; what a later run goes on from
OUT/latency.jsonl   the timed pass, run by run
OUT/results.jsonl   every item of every unit, in a fixed order, nothing but what the setting determines
OUT/report.json, report.md, accuracy.png/.svg, latency.png/.svg
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tilebeam import gguf as gguf_tools
from tilebeam.errors import TilebeamError, gguf_errors
from tilebeam.evaluation import named_scorers as scoring
from tilebeam.evaluation import plots, results
from tilebeam.evaluation.config import GREEDY, SAMPLED, Setting, Unit, units
from tilebeam.evaluation.eval_report import EvalReport, markdown
from tilebeam.evaluation.log import Log, Record, timeless
from tilebeam.evaluation.results import PASS, PLACE
from tilebeam.evaluation.tasks import open_task
from tilebeam.evaluation.tasks.task import Task
from tilebeam.evaluation.worker import EvalJob, Timed, Workbench
from tilebeam.gguf.whole_file import whole_file
from tilebeam.native.executor import usable_memory
from tilebeam.outputs import Progress
from tilebeam.search import algorithms as methods

# Seconds before a timed run: the workers of the model that ran before, and of its reward model, spin for a while.
_PAUSE = 0.02


class Watcher:
    """Hears how an evaluation goes. This one ignores it; the command line shows a bar."""

    @contextmanager
    def phase(self, name: str, total: int, done: int) -> Iterator[None]:  # noqa: ARG002
        """Enclose work that is done piece by piece.

        Args:
            name: "evaluate", whose pieces are items, or "time", whose pieces are runs of the timed pass.
            total: pieces; done: of them before this began.
        """
        yield

    def batch(self, pieces: int, state: Progress) -> None:
        """Hear of a batch that was decoded, and how far the work on so many pieces is."""

    def finished(self, pieces: int, note: str = "") -> None:
        """Hear that so many more pieces of the phase are done.

        Args:
            note: what was the last of them.
        """

    def note(self, text: str) -> None:
        """Hear one line worth knowing."""


def check(job: EvalJob, latency_devices: Sequence[str] = ()) -> None:
    """Raise `TilebeamError` for what cannot work, before anything runs."""
    setting = job.setting
    reward = scoring.reward_name(job.reward)
    if job.reward is not None:
        job.reward.check()
        if job.reward.own and len(setting.models) > len(job.reward.own_heads):
            raise TilebeamError("A reward head without --prm is for one model: give one for each, with --reward-head.")
    for name in setting.scorers:
        scoring.check_scorer(name, reward, unsafe_code=setting.task.unsafe_code)
    if "cpu" in {*setting.devices, *latency_devices}:
        reward_files = [job.reward.path] if job.reward and job.reward.path else []
        for path in (*(m.path for m in setting.models), *reward_files):
            with gguf_errors(f"{path} cannot be loaded"):
                repacked = gguf_tools.is_repacked(path)
            if repacked:
                raise TilebeamError(f"{path} is repacked for the NPU: give the ordinary file, or --device npu.")
    parsed = setting.parsed_methods()
    for method in parsed:
        if method.name == GREEDY or (method.name in SAMPLED and "weighting" not in method.options):
            if method.options or [m.name for m in parsed if not m.options].count(method.name) > 1:
                raise TilebeamError(
                    f"{method.name} may be given once and takes no options (votes take weighting=softmax and "
                    "sharpness): use the flags for scorers and extraction."
                )
            if method.name == "best-of-n" and not setting.scorers:
                raise TilebeamError("best-of-n needs a scorer: --scorer logprob, verifier, prm ..")
            continue
        scorers = setting.scorers_of(method)
        stand_in = None if scorers == [""] else scoring.FunctionScorer(lambda *_: 0.0)
        algorithm = methods.create(method.name, scorer=stand_in, **method.options)
        if not scorers:
            names = ("", "logprob") if method.name in SAMPLED else (" of steps", "FILE.py:function")
            raise TilebeamError(f"{method.spec} needs a scorer{names[0]}: --prm, --reward-head or --scorer {names[1]}.")
        for budget in setting.budgets:
            width = min(getattr(algorithm, "beam_width", 1), budget)
            if budget % width:
                raise TilebeamError(
                    f"{method.spec} at budget {budget}: the budget must be a multiple of the width ({width}), or less. "
                    f"Choose another --budget, or {method.name}:beam_width=M."
                )


def evaluate(
    job: EvalJob,
    out: Path,
    *,
    task: Task | None = None,
    latency_items: int = 0,
    latency_devices: Sequence[str] = (),
    so_far: bool = False,
    watcher: Watcher | None = None,
    workbench: Callable[[EvalJob, Task, int], Workbench] | None = None,
) -> EvalReport:
    """Run an evaluation, or what is left of it.

    Args:
        job: what to evaluate.
        out: folder for log, results, report and plots.
        task: made from the job's options if not given.
        latency_items: prompts of the timed pass, 0 for none.
        latency_devices: where they are timed; none: on the setting's. One that is not the setting's counts with the
            accuracy of the setting's first.
        so_far: run no unit; report on the items that are done in all that was begun, and time if told to.
        watcher: hears how it goes.
        workbench: makes the workbench from job, task and models to keep open (tests put scripted models there).

    Raises:
        TilebeamError: the setting cannot work, the folder holds another evaluation, or `so_far` finds nothing.
        KeyboardInterrupt: what was finished is kept; the same call goes on from there.
    """
    setting = job.setting
    check(job, latency_devices)
    listener = watcher or Watcher()
    make = workbench or (lambda job, task, keep: Workbench(job, task, keep=keep, notify=listener.note))
    run = _Run(job, task or open_task(setting.task), out, listener, make)
    if scoring.VERIFIER in setting.scorers and not run.task.judged:
        raise TilebeamError("--scorer verifier needs items with answers, or a --checker.")
    everything, records = run.evaluated(so_far)
    _write_results(out / "results.jsonl", everything, records)
    rows, notes = results.accuracy(setting, everything, records)
    judged = rows if run.task.judged else []
    if not run.task.judged:
        notes.append("The items have no answers, so there is no verdict; texts and votes are in results.jsonl.")
    timed, runs = timed_configurations(setting), list[Record]()
    if latency_items or (out / "latency.jsonl").exists():
        known = {row.series for row in rows}
        configurations = [c for c in timed if known & set(c.alike)]
        runs = run.timed(configurations, tuple(latency_devices) or setting.devices, latency_items)
    report = EvalReport(
        setting,
        run.task,
        rows,
        results.rankings(setting, everything, records) if judged else [],
        results.comparisons(judged),
        measured := results.latencies(runs, {c.series: c.alike for c in timed}),
        results.points(judged, measured),
        notes,
        [item for i, item in enumerate(run.task.items) if any(u.first <= i < u.last for u in everything)],
    )
    write_report(report, out)
    return report


@dataclass(frozen=True)
class _Run:
    """What the parts of one evaluation share: see `evaluate`."""

    job: EvalJob
    task: Task
    out: Path
    watcher: Watcher
    make: Callable[[EvalJob, Task, int], Workbench]

    def evaluated(self, so_far: bool) -> tuple[list[Unit], dict[str, Record]]:
        """Do the units that are not in the log yet, or none `so_far`; return what there is, with its records."""
        everything = list(units(self.job.setting, len(self.task.items)))
        with Log(self.out / "log.jsonl", self.job.setting) as log:
            todo = [unit for unit in everything if unit.key not in log.records]
            if so_far:
                everything = _done(everything, log.records)
            elif todo:
                total, left = (sum(u.last - u.first for u in some) for some in (everything, todo))
                with self.watcher.phase("evaluate", total, total - left):
                    for unit, record in self._work(todo):
                        log.add(record)
                        self.watcher.finished(unit.last - unit.first)
            return everything, {unit.key: log.records[unit.key] for unit in everything}

    def _work(self, todo: Sequence[Unit]) -> Iterator[tuple[Unit, Record]]:
        """Do units. Models that fit into memory together take turns: a run that is stopped has the same items of
        all of them."""
        setting = self.job.setting
        together = _fit_together(setting, len(setting.devices))
        with self.make(self.job, self.task, len(setting.models) * len(setting.devices) if together else 1) as bench:
            for unit in sorted(todo, key=lambda unit: unit.first) if together else todo:
                yield unit, bench.run(unit, partial(self.watcher.batch, unit.last - unit.first))

    def timed(self, configurations: list[Timed], devices: Sequence[str], n_items: int) -> list[Record]:
        """Time every configuration on the first items, one prompt at a time.

        Configurations, and models if they fit into memory together, take turns prompt by prompt, in an order drawn
        anew for each: what disturbs the machine, and what one run does to the next, meets all of them. Each series
        runs once untimed before.
        """
        pairs = [(m.name, d) for m in self.job.setting.models for d in devices]
        items = range(min(n_items, len(self.task.items)))
        turns = [TimedRun(i, *pair, c) for i in items for c in configurations for pair in pairs]
        with Log(self.out / "latency.jsonl", self.job.setting) as log:
            if todo := [turn for turn in turns if turn.key not in log.records]:
                together = _fit_together(self.job.setting, len(devices))
                groups = [pairs] if together else [[pair] for pair in pairs]
                keep = len(pairs) if together else 1
                with self.make(self.job, self.task, keep) as bench, self.watcher.phase("time", len(todo), 0):
                    for group in groups:
                        self._take_turns(bench, [t for t in todo if (t.model, t.device) in group], log)
            # What was timed for others, too, may be one of those others after methods were added, or have another name.
            series = {f"{c.work}@{c.budget}": c.series for c in configurations}
            found = ((record, record["unit"].split("/", 3)[-1]) for record in log.records.values())
            return [record | {"series": series[work]} for record, work in found if work in series]

    def _take_turns(self, bench: Workbench, todo: Sequence[TimedRun], log: Log) -> None:
        for turn in {(t.model, t.device, t.timed.series): t for t in reversed(todo)}.values():
            bench.latency(turn.model, turn.device, turn.timed, self.task.items[turn.item])
        for i, turns in itertools.groupby(todo, lambda turn: turn.item):
            for turn in random.Random(f"turns {i}").sample(mixed := list(turns), len(mixed)):
                time.sleep(_PAUSE)
                run = bench.latency(turn.model, turn.device, turn.timed, self.task.items[i])
                record: Record = {"unit": turn.key, "item": self.task.items[i].id, "model": turn.model}
                record |= {"device": turn.device, "series": turn.timed.series, "budget": turn.timed.budget}
                log.add(record | run)
                self.watcher.finished(1, f"{turn.model} {turn.timed.series}@{turn.timed.budget}")


def _done(everything: Sequence[Unit], records: Mapping[str, Record]) -> list[Unit]:
    """Pick the units of all items that are done by every model and method that has begun."""

    def run_of(unit: Unit) -> tuple[object, ...]:
        return unit.model, unit.device, unit.series, unit.budget, unit.seed

    done = [unit for unit in everything if unit.key in records]
    begun = {run_of(unit) for unit in done}
    whole = {first for first, n in Counter(unit.first for unit in done).items() if n == len(begun)}
    if not whole:
        raise TilebeamError("No item is done yet by all models and methods that have begun.")
    return [unit for unit in done if unit.first in whole]


def _write_results(path: Path, everything: Sequence[Unit], records: dict[str, Record]) -> None:
    with whole_file(path) as partial, open(partial, "w", encoding="utf-8", errors="backslashreplace") as file:
        for unit in everything:
            for item in records[unit.key]["items"]:
                line = {name: getattr(unit, name) for name in (*PLACE, "seed")} | timeless(item)
                file.write(json.dumps(line, ensure_ascii=False) + "\n")


def write_report(report: EvalReport, out: Path) -> None:
    """Write report.json, report.md and the plots (without matplotlib: a note instead)."""
    try:
        drawn = plots.draw(report, out) if report.task.judged else []
    except ImportError:
        drawn = []
        report.notes.append("No plots: matplotlib is missing (pip install tilebeam[plot]).")
    texts = {
        "report.json": json.dumps(report.as_dict(), indent=1),
        "report.md": "\n".join(markdown(report, drawn)),
    }
    for name, text in texts.items():
        with whole_file(out / name) as partial:
            partial.write_text(text + "\n", encoding="utf-8")


# --- the timed pass ---------------------------------------------------------------------------------------------------


# Scorers of whole samples that read what decoding them left behind, by how much they have it leave.
_READERS = ("", "logprob-sum", "logprob", "tail-entropy", scoring.OWN)


def timed_configurations(setting: Setting) -> list[Timed]:
    """List what is timed: greedy, one sample, and every method and scorer at every budget at which there is a choice.

    Methods that choose among the same samples by what decoding left behind are timed once for all, as votes, which
    compare answers, with the scorer that has decoding leave the most: the others do a part of that.
    """
    parsed = setting.parsed_methods()
    alone = [GREEDY] * any(m.name == GREEDY for m in parsed) + [PASS] * any(m.name != GREEDY for m in parsed)
    found = [Timed(series, 1, None, "", (series,)) for series in alone]
    pairs = [(method, scorer) for method in parsed for scorer in setting.scorers_of(method) if method.name != GREEDY]
    alike = [(method, scorer) for method, scorer in pairs if method.sampled and scorer in _READERS]
    names = tuple(setting.series(method, scorer) for method, scorer in alike)
    longest = max(alike, key=lambda p: (_READERS.index(p[1]), p[0].name == "self-consistency"), default=None)
    for pair in (pair for pair in pairs if pair not in alike or pair == longest):
        method, scorer = pair
        series = setting.series(method, scorer)
        budgets = [k for k in setting.budgets if k > 1 or not method.sampled]
        found += [Timed(series, k, method, scorer, names if pair == longest else (series,)) for k in budgets]
    return found


@dataclass(frozen=True)
class TimedRun:
    """One run of the timed pass: a configuration of a model on a device, on one prompt."""

    item: int
    model: str
    device: str
    timed: Timed

    @property
    def key(self) -> str:
        """Unique in the log."""
        return f"latency {self.item}/{self.model}/{self.device}/{self.timed.work}@{self.timed.budget}"


def _fit_together(setting: Setting, devices: int) -> bool:
    """Tell whether all models fit into memory on so many devices, with room for caches and everything else."""
    sizes = sum(Path(m.path).stat().st_size for m in setting.models) * devices
    return sizes * 1.5 < usable_memory().available / 2
