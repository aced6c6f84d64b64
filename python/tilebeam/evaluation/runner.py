"""Runs an evaluation: units that are not in the log yet, then the timed pass, then figures, report and plots.

OUT/log.jsonl       finished units in the order in which they finished; what a later run goes on from
OUT/latency.jsonl   the timed pass, run by run
OUT/results.jsonl   every item of every unit, in a fixed order, nothing but what the setting determines
OUT/report.json, report.md, accuracy.png/.svg, latency.png/.svg
"""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tilebeam import gguf as gguf_tools
from tilebeam.errors import TilebeamError
from tilebeam.evaluation import plots, results
from tilebeam.evaluation import scorers as scoring
from tilebeam.evaluation.config import GREEDY, Setting, Unit, units
from tilebeam.evaluation.log import Log, Record, timeless
from tilebeam.evaluation.page import evaluation_page
from tilebeam.evaluation.report import Report, markdown
from tilebeam.evaluation.results import PASS
from tilebeam.evaluation.tasks import open_task
from tilebeam.evaluation.tasks.base import Task
from tilebeam.evaluation.worker import Job, Timed, Workbench
from tilebeam.gguf.whole_file import whole_file
from tilebeam.native.executor import usable_memory
from tilebeam.outputs import Progress
from tilebeam.search import algorithms as methods

# Seconds before a timed run: the workers of the model that ran before, and of its reward model, spin for a while.
_PAUSE = 0.02


class Executor(Protocol):
    """Where units are done, if not in this process."""

    def run(self, job: Job, todo: Sequence[Unit]) -> Iterator[tuple[Unit, Record]]:
        """Do units, in any order, and yield each with its record as soon as it is finished."""
        ...


class Watcher:
    """Hears how an evaluation goes. This one ignores it; the command line shows a bar."""

    @contextmanager
    def phase(self, name: str, total: int, done: int) -> Iterator[None]:  # noqa: ARG002
        """While this lasts, something is done piece by piece.

        Args:
            name: "evaluate", whose pieces are items, or "time", whose pieces are runs of the timed pass.
            total: pieces; done: of them before this began.
        """
        yield

    def batch(self, state: Progress) -> None:
        """After every batch."""

    def finished(self, pieces: int, note: str = "") -> None:
        """So many more pieces of the phase are done.

        Args:
            note: what was the last of them.
        """

    def note(self, text: str) -> None:
        """One line worth knowing."""


def check(job: Job, latency_devices: Sequence[str] = ()) -> None:
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
        models = [*setting.models, *([setting.draft] if setting.draft else [])]
        for path in (*(m.path for m in models), *([job.reward.path] if job.reward and job.reward.path else [])):
            _check_ordinary(path)
    parsed = setting.parsed_methods()
    for method in parsed:
        if method.sampled or method.name == GREEDY:
            if method.options or [m.name for m in parsed].count(method.name) > 1:
                raise TilebeamError(
                    f"{method.name} may be given once and takes no options: use the flags for scorers and extraction."
                )
            if method.name == "best-of-n" and not setting.scorers:
                raise TilebeamError("best-of-n needs a scorer: --scorer logprob, verifier, prm ..")
            continue
        algorithm = methods.create(method.name, scorer=scoring.FunctionScorer(lambda *_: 0.0), **method.options)
        if not setting.scorers_of(method):
            raise TilebeamError(
                f"{method.spec} needs a scorer of steps: --prm, --reward-head or --scorer FILE.py:function."
            )
        for budget in setting.budgets:
            width = min(getattr(algorithm, "beam_width", 1), budget)
            if budget % width:
                raise TilebeamError(
                    f"{method.spec} at budget {budget}: the budget must be a multiple of the width ({width}), or less. "
                    f"Choose another --budget, or {method.name}:beam_width=M."
                )


def _check_ordinary(path: str | os.PathLike[str]) -> None:
    try:
        repacked = gguf_tools.is_repacked(path)
    except gguf_tools.GGUFError as error:
        raise TilebeamError(f"{path} cannot be loaded: {error}") from None
    if repacked:
        raise TilebeamError(f"{path} is repacked for the NPU: give the ordinary file, or --device npu.")


def evaluate(
    job: Job,
    out: Path,
    *,
    task: Task | None = None,
    executor: Executor | None = None,
    latency_items: int = 0,
    latency_devices: Sequence[str] = (),
    so_far: bool = False,
    watcher: Watcher | None = None,
    workbench: Callable[[Job, Task, int], Workbench] | None = None,
) -> Report:
    """Run an evaluation, or what is left of it.

    Args:
        job: what to evaluate.
        out: folder for log, results, report and plots.
        task: made from the job's options if not given.
        executor: where units are done; None: here.
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
    task = task or open_task(setting.task)
    watcher = watcher or Watcher()
    make = workbench or (lambda job, task, keep: Workbench(job, task, keep=keep, notify=watcher.note))
    everything = list(units(setting, len(task.items)))
    with Log(out / "log.jsonl", setting) as log:
        todo = [unit for unit in everything if unit.key not in log.records]
        if so_far:
            everything = _done(everything, log.records)
        elif todo:
            total, left = (sum(u.last - u.first for u in some) for some in (everything, todo))
            with watcher.phase("evaluate", total, total - left):
                _work(job, task, todo, executor, make, log, watcher)
        records = {unit.key: log.records[unit.key] for unit in everything}
    _write_results(out / "results.jsonl", everything, records)
    rows, notes = results.accuracy(setting, everything, records)
    timed, runs = timed_configurations(setting), list[Record]()
    if latency_items or (out / "latency.jsonl").exists():
        known = {row.series for row in rows}
        configurations = [c for c in timed if known & set(c.alike)]
        n_timed = min(latency_items, len(task.items))
        devices = tuple(latency_devices) or setting.devices
        runs = _latency_pass(job, task, out, configurations, devices, n_timed, make, watcher)
    report = Report(
        setting,
        task,
        rows,
        results.rankings(setting, everything, records),
        results.comparisons(rows),
        measured := results.latencies(runs, {c.series: c.alike for c in timed}),
        results.points(rows, measured),
        notes,
        [item for i, item in enumerate(task.items) if any(u.first <= i < u.last for u in everything)],
    )
    write_report(report, out)
    return report


def _done(everything: Sequence[Unit], records: Mapping[str, Record]) -> list[Unit]:
    """The units of all items that are done by every model and method that has begun."""

    def run_of(unit: Unit) -> tuple[object, ...]:
        return unit.model, unit.device, unit.series, unit.budget, unit.seed

    done = [unit for unit in everything if unit.key in records]
    begun = {run_of(unit) for unit in done}
    whole = {first for first, n in Counter(unit.first for unit in done).items() if n == len(begun)}
    if not whole:
        raise TilebeamError("No item is done yet by all models and methods that have begun.")
    return [unit for unit in done if unit.first in whole]


def _work(
    job: Job,
    task: Task,
    todo: Sequence[Unit],
    executor: Executor | None,
    make: Callable[[Job, Task, int], Workbench],
    log: Log,
    watcher: Watcher,
) -> None:
    if executor is not None:
        for unit, record in executor.run(job, todo):
            log.add(record)
            watcher.finished(unit.last - unit.first)
        return
    # Models that fit into memory together take turns: a run that is stopped has the same items of all of them.
    together = _fit_together(job.setting, len(job.setting.devices))
    with make(job, task, len(job.setting.models) * len(job.setting.devices) if together else 1) as bench:
        for unit in sorted(todo, key=lambda unit: unit.first) if together else todo:
            log.add(bench.run(unit, watcher.batch))
            watcher.finished(unit.last - unit.first)


def _write_results(path: Path, everything: Sequence[Unit], records: dict[str, Record]) -> None:
    with whole_file(path) as partial, open(partial, "w", encoding="utf-8") as file:
        for unit in everything:
            for item in records[unit.key]["items"]:
                line = {
                    "model": unit.model,
                    "device": unit.device,
                    "series": unit.series,
                    "budget": unit.budget,
                    "seed": unit.seed,
                } | timeless(item)
                file.write(json.dumps(line, ensure_ascii=False) + "\n")


def write_report(report: Report, out: Path) -> None:
    """Write report.json, report.md, report.html and the plots (without matplotlib: a note instead)."""
    try:
        drawn = [] if report.setting.likelihood else plots.draw(report, out)
    except ImportError:
        drawn = []
        report.notes.append("No plots: matplotlib is missing (pip install tilebeam[plot]).")
    texts = {
        "report.json": json.dumps(report.as_dict(), indent=1),
        "report.md": "\n".join(markdown(report, drawn)),
        "report.html": evaluation_page(report),
    }
    for name, text in texts.items():
        with whole_file(out / name) as partial:
            partial.write_text(text + "\n", encoding="utf-8")


# --- the timed pass ---------------------------------------------------------------------------------------------------


# Scorers of whole samples that read what decoding them left behind, by how much they have it leave.
_READERS = ("", "logprob-sum", "logprob", scoring.OWN)


def timed_configurations(setting: Setting) -> list[Timed]:
    """What is timed: greedy, one sample, and every method with every scorer at every budget at which there is a choice.

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
class Turn:
    """One run of the timed pass: a configuration of a model on a device, on one prompt."""

    item: int
    model: str
    device: str
    timed: Timed

    @property
    def key(self) -> str:
        """Unique in the log."""
        return f"latency {self.item}/{self.model}/{self.device}/{self.timed.series}@{self.timed.budget}"


def _latency_pass(
    job: Job,
    task: Task,
    out: Path,
    configurations: list[Timed],
    devices: Sequence[str],
    n_items: int,
    make: Callable[[Job, Task, int], Workbench],
    watcher: Watcher,
) -> list[Record]:
    """Time every configuration on the first items, one prompt at a time.

    Configurations, and models if they fit into memory together, take turns prompt by prompt, in an order drawn anew
    for each: what disturbs the machine, and what one run does to the next, meets all of them. Each series runs once
    untimed before.
    """
    setting = job.setting
    with Log(out / "latency.jsonl", setting) as log:
        pairs = [(m.name, d) for m in setting.models for d in devices]
        turns = [Turn(i, *pair, c) for i in range(n_items) for c in configurations for pair in pairs]
        todo = [turn for turn in turns if turn.key not in log.records]
        if todo:
            together = _fit_together(setting, len(devices))
            _take_turns(job, task, make, pairs, todo, together, log, watcher)
        # A series that was timed for others, too, may be one of those others after methods were added.
        return [record for record in log.records.values() if record["series"] in {c.series for c in configurations}]


def _fit_together(setting: Setting, devices: int) -> bool:
    """Whether all models fit into memory on so many devices, with room for their caches and everything else."""
    sizes = sum(Path(m.path).stat().st_size for m in setting.models) * devices
    return sizes * 1.5 < usable_memory().available / 2


def _take_turns(
    job: Job,
    task: Task,
    make: Callable[[Job, Task, int], Workbench],
    pairs: list[tuple[str, str]],
    todo: Sequence[Turn],
    together: bool,
    log: Log,
    watcher: Watcher,
) -> None:
    groups = [pairs] if together else [[pair] for pair in pairs]
    with make(job, task, len(pairs) if together else 1) as bench, watcher.phase("time", len(todo), 0):
        for group in groups:
            own = [turn for turn in todo if (turn.model, turn.device) in group]
            for turn in {(t.model, t.device, t.timed.series): t for t in reversed(own)}.values():
                bench.latency(turn.model, turn.device, turn.timed, task.items[turn.item])
            for i, turns in itertools.groupby(own, lambda turn: turn.item):
                for turn in random.Random(f"turns {i}").sample(mixed := list(turns), len(mixed)):
                    time.sleep(_PAUSE)
                    run = bench.latency(turn.model, turn.device, turn.timed, task.items[i])
                    record: Record = {"unit": turn.key, "item": task.items[i].id, "model": turn.model}
                    record |= {"device": turn.device, "series": turn.timed.series, "budget": turn.timed.budget}
                    log.add(record | run)
                    watcher.finished(1, f"{turn.model} {turn.timed.series}@{turn.timed.budget}")
