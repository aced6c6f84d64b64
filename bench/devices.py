"""What spreading a model costs: one device against two and four, and against an output matrix cut over sessions.

    python -m bench.devices [-m MODEL] [-t THREADS] [-npl 1,8] [--executor process] [--json] [--quick]

Each placement has a process of its own that keeps its model loaded; one run of each follows the other, so that all see
the same machine. What can be lost: messages, copies of a layer's output from one device to the next, and workers that
must wake up in each session. A ratio of 1 means that nothing is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tilebeam import TilebeamError, load
from tilebeam.cli import console
from tilebeam.cli.bench import numbers
from tilebeam.measure.machine import OtherLoad
from tilebeam.measure.throughput import Case, Runner

from bench.lib import ROOT, models, report
from bench.lib.options import Parser


def serve(arguments: dict[str, Any]) -> None:
    """A worker: loads the model, then answers every case on stdin with its seconds on stdout."""
    with load(**arguments) as lm:
        print(json.dumps({"layers": lm.info.layers, "divided": lm.info.divided}), flush=True)
        runner = Runner(lm)
        for line in sys.stdin:
            print(runner.run(Case(**json.loads(line))).seconds, flush=True)


class Worker:
    """A process that has the model loaded in one way."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "bench.devices", "--serve", json.dumps(arguments)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self.placement: dict[str, Any] = json.loads(self._answer())
        except BaseException:
            self.close()
            raise

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise TilebeamError("a worker ended; its error stands above")
        return line

    def run(self, case: dict[str, Any]) -> float:
        """Seconds of one run."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def placements(path: Path, common: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The ways to load it; the last has a limit that makes a few devices share a matrix, if there is one."""
    ways: dict[str, dict[str, Any]] = {"1 device": {}, "2 devices": {"devices": 2}, "4 devices": {"devices": 4}}
    for devices in (2, 3, 4, 5, 6):
        low, high = 1 << 20, 2 * path.stat().st_size + (1 << 30)
        while high - low > low // 64:
            middle = (low + high) // 2
            try:
                with load(path, **common, devices=devices, memory_limit=middle, verify=False) as lm:
                    if lm.info.divided:
                        ways[f"{devices} devices of {middle >> 20} MiB"] = {"devices": devices, "memory_limit": middle}
                        return ways
                high = middle
            except TilebeamError:
                low = middle
    return ways


def measure(o: Any) -> None:
    """Run all placements in turn and print a row for each."""
    path = o.model or models.synthetic("small" if o.quick else "bench-0.5b", types={"token_embd": "q8_0"}, tied=True)
    cases = [Case(0, o.n_gen, n, 0, True) for n in numbers(o.n_parallel, "-npl")]
    common = {
        "n_ctx": max(c.cells for c in cases),
        "n_seq_max": max(c.n_parallel for c in cases),
        "threads": o.threads,
        "n_batch": 64,
        "executor": o.executor,
    }
    ways = placements(path, common)
    rows = report.Rows("devices", o.json)
    with ExitStack() as stack:
        workers = {}
        for name, options in ways.items():
            workers[name] = Worker({"model": os.fspath(path), **common, **options})
            stack.callback(workers[name].close)
        others = stack.enter_context(OtherLoad())
        progress = stack.enter_context(console.bar("devices"))
        task = progress.add_task("", total=len(cases) * len(ways) * (o.rounds + 1), note="")
        for case in cases:
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            for i in range(o.rounds + 1):
                for name, worker in workers.items():
                    spent = worker.run(asdict(case))
                    progress.update(task, advance=1, note=name)
                    if i > 0:  # the first round warms up
                        seconds[name].append(spent)
            for name, worker in workers.items():
                pairs = report.Pairs(seconds[name], seconds["1 device"])
                title = f"{case.name} x {case.n_parallel}, {name}"
                rows.add(report.row(title, pairs, case.tokens, "tokens/s", **worker.placement))
    rows.finish()
    report.warn_if_busy(others.share)


def main() -> None:
    """Measure, or be one of the processes that do."""
    p = Parser(__doc__, "a small model, short runs")
    p.add_model()
    p.add_argument("-npl", "--n-parallel", default="1,8", help="sequences")
    p.add_count("-n", "--n-gen", usual=32, quick=8, what="tokens per sequence and run")
    p.add_threads()
    p.add_rounds(7, 2)
    p.add_argument("--executor", default="thread", choices=("thread", "process"))
    p.add_argument("--serve", help=argparse.SUPPRESS)
    o = p.parse()
    if o.serve:
        serve(json.loads(o.serve))
    else:
        measure(o)


if __name__ == "__main__":
    report.start(main)
