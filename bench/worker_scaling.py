"""How a decode step would scale to more workers than this machine has CPUs: a simulation fed with traces.

    python -m bench.worker_scaling [-m MODEL.gguf] [-npl 1,16] [-w 1,2,4,8,16] [--logprobs] [--json] [--quick]

A trace of decode steps with one worker tells how long each op's kernel takes; one with as many workers as this machine
has CPUs tells how many phases a step has, and what it takes until all workers meet behind one. A step of W workers is

    what the engine does outside llama_decode (planning, drawing tokens): one thread's work
    + what llama.cpp and the plugin do beside the ops: one thread's work, too
    + of each op the longer of two: its time with one worker, divided by W; its bytes at the memory's speed
    + a meeting for each phase, which takes the longer the more workers there are

for memory that is as fast as this machine's whatever W is ("this memory"), and for memory that gets faster with W.
Work is taken to divide evenly. Where this machine has W CPUs, "measured" says what a step took: how far to believe the
rest. A row's value is simulated tokens per second, its baseline what was measured with one worker; "alone_ms" is the
part of a step that no worker shortens: what would not scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import tilebeam
from tilebeam import SamplingParams
from tilebeam.cli import console
from tilebeam.cli.bench import numbers
from tilebeam.measure.machine import OtherLoad
from tilebeam.measure.peaks import read_gbs
from tilebeam.measure.trace import Tracer, spans_of, tracing, whole_ops

from bench.lib import models, report
from bench.lib.options import Parser
from bench.lib.traces import graphs_of, work_of

PROMPT = 64


@dataclass(frozen=True)
class Step:
    """A decode step; seconds, medians over a trace.

    Attributes:
        workers: that it was traced with.
        whole: from its begin to its end, without what the trace itself took.
        outside: of it, outside llama_decode; beside: in llama_decode, before the first op and behind the last.
        ops: of each op, all workers' time together; bytes: of its operands and its result.
        phases: how many; meeting: what each takes beyond the time of its busiest worker.
    """

    workers: int
    whole: float
    outside: float
    beside: float
    ops: npt.NDArray[np.float64]
    bytes: npt.NDArray[np.float64]
    phases: int
    meeting: float

    def with_workers(self, other: Step, workers: int, memory: float) -> tuple[float, float]:
        """A step of so many workers, and of it what no worker shortens.

        Args:
            other: the same with several workers.
            memory: bytes per second that these workers read.
        """
        alone = self.outside + self.beside
        reading = np.minimum(self.ops, self.bytes / memory)  # what lies in a cache takes no longer than it did
        kernels = float(np.maximum(self.ops / workers, reading).sum())
        meetings = other.phases * other.meeting * workers / other.workers if workers > 1 else 0.0
        return alone + kernels + meetings, alone


def traced(path: Path, workers: int, samples: int, count: int, params: SamplingParams) -> Step:
    """Decode some samples with some workers."""
    prompt = np.random.default_rng(2).integers(0, 100, PROMPT).tolist()
    room = PROMPT + samples * (count + 1)
    with tilebeam.load(path, "npu", n_ctx=room, n_seq_max=samples, threads=workers, lookup=False) as lm:
        lm.generate([prompt], params)  # the same shapes: pages are touched
        with tracing(lm) as trace:
            lm.generate([prompt], params)
    return step_of(trace, workers, samples)


def step_of(trace: Tracer, workers: int, samples: int) -> Step:
    """What the steps of a trace are made of; the graphs that read the prompt are left out."""
    graphs = [ops for ops in graphs_of(trace.records) if ops["rows"].max() == samples][1:]
    most = max(len(ops) for ops in graphs)
    graphs = [ops for ops in graphs if len(ops) == most]
    notes = {int(r["seq"]): int(r["end_ns"] - r["begin_ns"]) for r in spans_of(trace.records, "NOTES")}
    decodes, steps = ([c for c in trace.calls if c.name == name] for name in ("llama_decode", "step"))
    outside, beside, whole, times, meetings = [], [], [], [], []
    for ops in graphs:
        first, last = int(ops["begin_ns"].min()), int(ops["end_ns"].max())
        decode = next(c for c in decodes if c.begin_ns <= first and last <= c.end_ns)
        step = next(c for c in steps if c.begin_ns <= decode.begin_ns and decode.end_ns <= c.end_ns)
        inside, noted = decode.end_ns - decode.begin_ns, notes.get(int(ops["seq"][0]), 0)
        outside.append(step.end_ns - step.begin_ns - inside)
        beside.append(inside - noted - (last - first))
        whole.append(step.end_ns - step.begin_ns - noted)
        each, mean = whole_ops(ops)
        times.append(mean * len(np.unique(ops["lane"])))
        phases, busiest, _ = work_of(ops)
        meetings.append((last - first - 1e9 * busiest) / phases)
    seconds = np.median(times, axis=0) / 1e9
    values = (median(part) / 1e9 for part in (whole, outside, beside))
    return Step(workers, *values, seconds, each["bytes"].astype(float), phases, max(0.0, median(meetings)) / 1e9)


def rows_of(path: Path, name: str, samples: int, workers: list[int], o: Any) -> list[dict[str, Any]]:
    """A row for each number of workers and each kind of memory."""
    params = SamplingParams(n=samples, max_tokens=o.n_predict, seed=0, ignore_eos=True, logprobs=o.logprobs)
    cpus = max(2, o.threads)
    one, several = (traced(path, n, samples, o.n_predict, params) for n in (1, cpus))
    speed = {n: 1e9 * max(read_gbs(n) for _ in range(3)) for n in (1, cpus)}
    found = []
    for w in workers:
        taken = {1: one.whole, cpus: several.whole}.get(w)
        for memory, rate in (("this memory", max(speed.values())), ("memory that grows", w * speed[1])):
            step, alone = one.with_workers(several, w, rate if w > 1 else speed[1])
            found.append(
                report.figures(
                    f"{name}, {samples} sequences, {w} workers, {memory}",
                    round(samples / one.whole, 2),
                    round(samples / step, 2),
                    "tokens/s",
                    [one.whole / step],
                    None,
                    step_ms=round(1e3 * step, 3),
                    alone_ms=round(1e3 * alone, 3),
                    alone_share=round(alone / step, 3),
                    measured=None if taken is None else round(samples / taken, 2),
                )
            )
            if w == 1:
                break
    return found


def main() -> None:
    """Trace, simulate and print."""
    p = Parser(__doc__, "a smaller model, fewer tokens")
    p.add_model()
    p.add_argument("-npl", "--n-parallel", default="1,16", help="sequences, comma separated")
    p.add_argument("-w", "--workers", default="1,2,4,8,16", help="numbers of workers to simulate")
    p.add_count("-n", "--n-predict", usual=32, quick=8, what="tokens per sequence")
    p.add_argument("--logprobs", action="store_true", help="with log-probabilities, as reward heads want them")
    p.add_threads()
    o = p.parse()
    path = o.model or models.synthetic("small" if o.quick else "bench-0.5b", "q8_0")
    rows = report.Rows("worker_scaling", o.json)
    counts, workers = numbers(o.n_parallel, "-npl"), numbers(o.workers, "-w")
    with OtherLoad() as others, console.bar("trace") as progress:
        task = progress.add_task("", total=len(counts), note="")
        for samples in counts:
            for row in rows_of(path, path.stem, samples, workers, o):
                rows.add(row, f"{row['alone_ms']} of {row['step_ms']} ms on one thread; measured: {row['measured']}")
            progress.update(task, advance=1)
    rows.finish()
    report.warn_if_busy(others.share)


if __name__ == "__main__":
    report.start(main)
