"""What spreading a model by layers costs: one device against two and four.

    python -m bench.devices [-m MODEL] [-t THREADS] [-npl 1,8] [--executor process] [--json] [--quick]

Each placement has a process of its own that keeps its model loaded; one run of each follows the other, so that all see
the same machine. What can be lost: messages, copies of a layer's output from one device to the next, and workers that
must wake up in each session. A ratio of 1 means that nothing is.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from tilebeam import TilebeamError, load
from tilebeam.cli import console
from tilebeam.cli.bench import numbers
from tilebeam.measure.machine import OtherLoad
from tilebeam.measure.throughput import Case, Runner

from bench.lib import models, report
from bench.lib.child import Child, answer
from bench.lib.options import Parser


def serve(arguments: dict[str, Any]) -> None:
    """Serve as a worker: load the model, then answer every case with its seconds."""
    with load(**arguments) as lm:
        runner = Runner(lm)
        answer({"layers": lm.info.layers}, lambda case: runner.run(Case(**case)).seconds)


def main() -> None:
    """Run all placements in turn and print a row for each."""
    p = Parser(__doc__, "a small model, short runs")
    p.add_model()
    p.add_argument("-npl", "--n-parallel", default="1,8", help="sequences")
    p.add_count("-n", "--n-gen", usual=32, quick=8, what="tokens per sequence and run")
    p.add_threads()
    p.add_rounds(7, 2)
    p.add_argument("--executor", default="thread", choices=("thread", "process"))
    o = p.parse()
    path = o.model or models.synthetic("small" if o.quick else "bench-0.5b", types={"token_embd": "q8_0"}, tied=True)
    if not path.is_file():
        raise TilebeamError(f"{path} does not exist.")
    cases = [Case(0, o.n_gen, n, 0, True) for n in numbers(o.n_parallel, "-npl")]
    common = {
        "n_ctx": max(c.cells for c in cases),
        "n_seq_max": max(c.n_parallel for c in cases),
        "threads": o.threads,
        "n_batch": 64,
        "executor": o.executor,
    }
    ways = {"1 device": {}, "2 devices": {"devices": 2}, "4 devices": {"devices": 4}}
    rows = report.Rows("devices", o.json)
    with ExitStack() as stack:
        workers = {}
        for name, options in ways.items():
            arguments = {"model": os.fspath(path), **common, **options}
            workers[name] = stack.enter_context(Child("bench.devices", "serve", arguments))
        others = stack.enter_context(OtherLoad())
        progress = stack.enter_context(console.bar("devices"))
        task = progress.add_task("", total=len(cases) * len(ways) * (o.rounds + 1), note="")
        for case in cases:
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            for i in range(o.rounds + 1):
                for name, worker in workers.items():
                    spent = worker.ask(asdict(case))
                    progress.update(task, advance=1, note=name)
                    if i > 0:  # the first round warms up
                        seconds[name].append(spent)
            for name, worker in workers.items():
                pairs = report.Pairs(seconds[name], seconds["1 device"])
                title = f"{case.name} x {case.n_parallel}, {name}"
                rows.add(report.row(title, pairs, case.tokens, "tokens/s", **worker.ready))
    rows.finish()
    report.warn_if_busy(others.share)


if __name__ == "__main__":
    report.start(main)
