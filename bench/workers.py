"""More workers than this machine has CPUs: decode steps out of traces, played on any number of them.

    python -m bench.workers [-m MODEL.gguf] [-npl 1,4,16] [--workers 1,2,4,8,16,32,64] [--slow 16,0.55] [--json]
        [--quick]

A trace with one worker tells what each op costs and which bytes it reads; one with all CPUs which ops one thread does
alone, and where all meet. Products are cut into items as `npu/ops/mul_mat_plan.cpp` cuts them, and workers take one
after the other; attention has four parts per worker; all else is divided into equal shares of whole runs of 1024
numbers. A phase ends with its last worker, or when memory has delivered its bytes. Assumed: a meeting costs what two
workers were measured to need, times the number of others that each one looks at; what happens between two graphs stays
as it is; caches are no larger.

Rows have tokens per second against one worker where memory grows with the workers, and of a step the shares of
meetings, of waiting for memory, and of what lies between two steps; `this_memory` is the same with memory as fast as
this machine's. Last, the number of workers behind which the next one of the list gives less than 1.5 times the speed.
--slow adds so many workers with this part of the others' speed, as efficiency cores have.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from tilebeam import LM, SamplingParams, load
from tilebeam._ext import ffi
from tilebeam.cli.bench import numbers
from tilebeam.measure.trace import Tracer, spans_of

from bench.lib import limits, models, report
from bench.lib.options import Parser

_LEAST, _RUN = 32 << 10, 12 << 10  # least_bytes of mul_mat_plan.cpp; bytes of a run of two operands and a result
_CODES = {code: name for name, code in ffi.typeof("enum tb_op_code").relements.items()}


class Op(NamedTuple):
    """An op of a step: seconds of all workers together, bytes, and how it is shared."""

    kind: str  # "product", "attention", "shares", or "alone"
    seconds: float
    bytes: int


class Step(NamedTuple):
    """A decode step: its phases, and the seconds of a meeting of two workers and of what lies between two steps."""

    phases: list[list[Op]]
    meeting: float
    between: float


def _spent(records: Any) -> Any:
    return (records["end_ns"] - records["begin_ns"]) * 1e-9


def traced(lm: LM, rows: int, tokens: int) -> tuple[Any, float, float]:
    """Trace a generation of so many samples: records of ops of its fastest step that has all workers, the step's
    seconds on the device, and those until the next one."""
    prompt = np.random.default_rng(1).integers(0, lm.n_vocab, 16).tolist()
    params = SamplingParams(n=rows, max_tokens=tokens, top_k=0, top_p=1.0, seed=1, ignore_eos=True)
    with Tracer(lm) as tracer:
        lm.generate([prompt], params)
    ops, messages = spans_of(tracer.records, "OP"), spans_of(tracer.records, "MESSAGE")
    decoding = set(ops["seq"][ops["rows"] == rows].tolist()) - set(ops["seq"][ops["rows"] > rows].tolist())
    messages = messages[np.isin(messages["seq"], list(decoding))][1:]
    busy = _spent(messages)
    apart = np.diff(messages["begin_ns"].astype(float)) * 1e-9 - busy[:-1]
    parts = [int((ops["seq"] == seq).sum()) for seq in messages["seq"]]
    order = [i for i in np.argsort(busy) if parts[i] > 0.95 * max(parts)]  # not those that other programs cut short
    if not order:
        raise ValueError("The trace has no step of its own kind: ask for more tokens (-n).")
    return ops[ops["seq"] == messages["seq"][order[0]]], float(busy[order[0]]), float(np.median(apart))


def step_of(costs: Any, parts: Any, busy: float, between: float) -> Step:
    """Make a step: what ops cost is told by one worker, who waits for memory least; what they share by several."""
    phases, inside, several = [], 0.0, len(np.unique(parts["lane"])) > 1
    left = {i: sorted(costs[costs["index"] == i], key=lambda r: -int(r["begin_ns"])) for i in np.unique(costs["index"])}
    for phase in np.unique(parts["phase"]):
        of = parts[parts["phase"] == phase]
        inside += max(_spent(of[of["lane"] == lane]).sum() for lane in np.unique(of["lane"]))
        phases.append([_op(of[of["index"] == i], left.get(i, [])) for i in np.unique(of["index"])])
    return Step(phases, max(0.0, busy - float(inside)) / len(phases) if several else 0.0, between)


def _op(parts: Any, costs: list[Any]) -> Op:
    """Take an op's part of a phase; what is prepared for it has its number and its bytes, too, and comes before it."""
    count = int(np.bincount(parts["lane"]).max())
    seconds = sum(float(_spent(costs.pop())) for _ in range(min(count, len(costs))))
    if len(parts) == count:
        return Op("alone", seconds, 0)
    if costs:  # rows of two or more runs
        return Op("shares", seconds, 2 * _RUN * int(parts["rows"][0]))
    name = _CODES[int(parts["code"][0])].removeprefix("TB_OP_")
    kind = "product" if name.startswith("MUL_MAT") else "attention" if name == "FLASH_ATTN" else "shares"
    return Op(kind, seconds, int(parts["bytes"][0]))


def _parts(op: Op, workers: int) -> Iterator[float]:
    """Yield the seconds of an op's items in the order in which they are taken."""
    left, least = op.seconds, op.seconds * min(1.0, _LEAST / max(1, op.bytes))
    if op.kind == "attention":
        yield from [op.seconds / (4 * workers)] * (4 * workers)
    while op.kind == "product" and left > 1e-12:
        part = min(left, max(least, left / (2 * workers)))
        left -= part
        yield part


def play(step: Step, speeds: list[float], gbs: float) -> tuple[float, float, float]:
    """Return the seconds of a step, and of them those at meetings and those in which memory is waited for."""
    n, waiting, total = len(speeds), 0.0, step.between
    meetings = step.meeting * (n - 1) * len(step.phases) if n > 1 else 0.0
    for phase in step.phases:
        free = [(0.0, i) for i in range(n)]
        for op in phase:
            if op.kind in ("shares", "alone"):
                runs = 1 if op.kind == "alone" else max(1, op.bytes // _RUN)
                share = op.seconds * -(-runs // n) / runs
                free = [(t + share / speeds[i] if i < runs else t, i) for t, i in sorted(free, key=lambda f: f[1])]
                continue
            heapq.heapify(free)
            for part in _parts(op, n):
                t, i = free[0]
                heapq.heapreplace(free, (t + part / speeds[i], i))
        ends = max(t for t, _ in free)
        memory = sum(op.bytes for op in phase if op.kind in ("product", "attention")) / (gbs * 1e9)
        waiting += max(0.0, memory - ends)
        total += max(ends, memory)
    return total + meetings, meetings, waiting


def main() -> None:
    p = Parser(__doc__, "a small model, few tokens")
    p.add_model()
    p.add_argument("-npl", "--n-parallel", default="1,4,16", help="sequences")
    p.add_argument("--workers", default="1,2,4,8,16,32,64")
    p.add_argument("--slow", default="0,1", metavar="COUNT,SPEED", help="more workers, slower ones")
    p.add_count("-n", "--n-gen", usual=24, quick=6, what="tokens per sequence")
    p.add_threads()
    args = p.parse()
    path = args.model or models.synthetic("tiny" if args.quick else "bench-0.5b")
    several = numbers(args.n_parallel, "-npl")
    most = max(several)
    slow, speed = (float(part) for part in args.slow.split(","))
    gbs = max(limits.read_gbs(args.threads) for _ in range(12))
    rows, notes, peaks, found = report.Rows("workers", args.json), [], {"read, GB/s": gbs}, {}
    for threads in (1, args.threads):
        with load(path, "npu", n_ctx=64 * most + 256, n_seq_max=most, threads=threads, lookup=False) as lm:
            for count in several:
                traced(lm, count, 5)  # what is made once is made
                found[threads, count] = traced(lm, count, args.n_gen)
    for count in several:
        step = step_of(found[1, count][0], *found[args.threads, count])
        peaks |= {f"{count} rows, phases": len(step.phases), f"{count} rows, meeting, us": 1e6 * step.meeting}
        one, former, bend = play(step, [1.0], gbs)[0], (0, 0.0), f"{count} rows do not bend"
        for workers in numbers(args.workers, "--workers"):
            speeds = [1.0] * workers + [speed] * int(slow)
            here = count / play(step, speeds, gbs)[0]
            seconds, meetings, waiting = play(step, speeds, gbs * max(1.0, workers / args.threads))
            parts = {"meetings": meetings / seconds, "memory": waiting / seconds, "between": step.between / seconds}
            more = {name: round(share, 3) for name, share in parts.items()} | {"this_memory": round(here, 2)}
            name, value = f"{count} rows, {workers} workers", round(count / seconds, 3)
            rows.add(
                report.figures(name, round(count / one, 3), value, "tokens/s", [one / seconds], None, **more), str(more)
            )
            if former[0] >= args.threads and count / seconds < 1.5 * former[1] and bend.endswith("not bend"):
                bend = f"{count} rows bend at {former[0]} workers"
            former = workers, count / seconds
        notes.append(bend)
    rows.finish(peaks, *notes, str({name: round(value, 2) for name, value in peaks.items()}))


if __name__ == "__main__":
    report.start(main)
