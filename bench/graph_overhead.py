"""What a decode step costs beside its arithmetic: lowering, message, wake-up, barriers.

    python -m bench.graph_overhead [--json] [--quick]

Two ways to see it, hot, at 1 and 16 sequences, with 1 thread and with 2:

* "small layers": a model of as many layers and ops as Qwen2.5-1.5B but 64 wide, so that there is next to nothing to
  compute; the whole step (llama_decode) against the stock CPU backend's, which starts its graph without any message.
* "not in ops": of a step, the time from the graph's arrival until its reply that no op asked for, by the trace; the
  median over steps, so that few that lose their CPU do not count. Against the 100 us that it may cost: the share of the
  limit is what was used of it. For the small layers, and for layers 512 wide, of which no product is so small that one
  thread would do it alone. "parts_us" takes it apart, medians again:
    lowering  a graph seen before is found again;
    send      the message is written, the doorbell rung;
    wake_up   doorbell to the NPU's first look, and the reply's way back: next to nothing where, as here, the thread
              that asks answers itself;
    set_up    the message is copied, checked, patched in, the other threads woken if they sleep, the reply made up;
    barriers  between the first op and the last: for each phase, what it took beyond the work of its busiest worker.
              The stamps' own time is in it, some 40 ns an op;
    idle      not in the sum: what workers wait for the busiest one of a phase, the mean over workers;
    notes     not in the sum: what the NPU side takes to write down the trace.

And "op by op": the step with TILEBEAM_FUSE=0 against that with shared conversions, fused ops and fewer barriers, in
processes of their own that take turns; small layers, and a model of 6 layers with a width of 512.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import tilebeam
from tilebeam import SamplingParams
from tilebeam.cli.bench import numbers
from tilebeam.measure.trace import Records, Tracer, spans_of

from bench.lib import CACHE, models, report, synth
from bench.lib.child import Child, answer
from bench.lib.options import Parser

LIMIT_S = 100e-6

PARTS = ("send", "wake_up", "set_up", "barriers", "idle", "notes")


def serve(path: str, device: Literal["npu", "cpu"], threads: int, n: int) -> None:
    """Decode when told to, in a process; answer with seconds per llama_decode, for "trace" also with what of a graph
    was in no op."""
    params = SamplingParams(n=n, max_tokens=32, temperature=0.7, seed=1)
    with tilebeam.load(path, device, n_ctx=1024, n_seq_max=16, threads=threads, lookup=False) as lm:

        def run(what: str) -> dict[str, Any]:
            times: list[float] = []
            lm._context.on_decode = lambda begin, end: times.append((end - begin) / 1e9)
            lm.generate(["a b c"], params)
            lm._context.on_decode = None
            found: dict[str, Any] = {"step": float(np.median(times[2:]))}
            if what == "trace":
                with Tracer(lm) as trace:
                    lm.generate(["a b c"], params)
                found["outside"], found["parts"] = outside(trace.records, threads)
            return found

        run("step")
        answer(None, run)


def outside(records: Records, threads: int) -> tuple[float, dict[str, float]]:
    """Seconds of a step that no op asked for, and their parts; medians over steps."""
    names = ("SEND", "WAIT", "MESSAGE", "NOTES")
    at = {n: {int(r["seq"]): (int(r["begin_ns"]), int(r["end_ns"])) for r in spans_of(records, n)} for n in names}
    ops = spans_of(records, "OP")
    ops = ops[np.argsort(ops["seq"], kind="stable")]
    rows = []
    for of in np.split(ops, np.flatnonzero(np.diff(ops["seq"])) + 1):  # each graph's, a record for each worker's part
        send, wait, message, notes = (at[name][int(of["seq"][0])] for name in names)
        first, last = int(of["begin_ns"].min()), int(of["end_ns"].max())
        most, work = work_of(of)
        rows.append(
            [
                (send[1] - send[0]) / 1e9,
                (message[0] - wait[0] + wait[1] - notes[1]) / 1e9,
                (first - message[0] + message[1] - last) / 1e9,
                (last - first) / 1e9 - most,
                most - work / threads,
                (notes[1] - notes[0]) / 1e9,
            ]
        )
    steps = np.array(rows)
    lower = spans_of(records, "LOWER")
    lowering = float(np.median(lower["end_ns"] - lower["begin_ns"])) / 1e9
    parts = dict(zip(PARTS, np.median(steps, axis=0).tolist(), strict=True), lowering=lowering)
    return lowering + float(np.median(steps[:, :4].sum(axis=1))), parts


def work_of(ops: Records) -> tuple[float, float]:
    """Return the seconds of each phase's busiest worker, summed, and all workers' seconds, over one graph's ops."""
    phases, phase = np.unique(ops["phase"], return_inverse=True)
    lanes, lane = np.unique(ops["lane"], return_inverse=True)
    work = np.zeros((len(phases), len(lanes)))
    np.add.at(work, (phase, lane), (ops["end_ns"] - ops["begin_ns"]) / 1e9)
    return float(work.max(axis=1).sum()), float(work.sum())


def random_model(name: str, **shape: int) -> Path:
    """Make a random model with 28 layers, written on first use."""
    CACHE.mkdir(parents=True, exist_ok=True)
    path = CACHE / f"overhead-{name}.gguf"
    if not path.is_file():
        synth.write_model(path, synth.SynthConfig(arch="qwen2", type="q4_0", n_layer=28, **shape))
    return path


def child(path: Path, device: str, threads: int, n: int, **environment: str) -> Child:
    return Child("bench.graph_overhead", "serve", str(path), device, threads, n, **environment)


def compare(ours: Child, baseline: Child, rounds: int) -> report.Pairs:
    pairs = report.Pairs([], [])
    with ours, baseline:
        for _ in range(rounds):
            pairs.baseline.append(baseline.ask("step")["step"])
            pairs.ours.append(ours.ask("step")["step"])
    return pairs


def not_in_ops(name: str, traced: Child, rounds: int) -> dict[str, Any]:
    with traced:
        results = [traced.ask("trace") for _ in range(rounds)]
    outside = [r["outside"] for r in results]
    parts = {part: round(median(r["parts"][part] for r in results) * 1e6, 2) for part in results[0]["parts"]}
    used = median(outside)
    value, ratios = round(used * 1e6, 1), [LIMIT_S / o for o in outside]
    limit = used / LIMIT_S
    return report.figures(f"not in ops, {name}", LIMIT_S * 1e6, value, "us", ratios, limit, parts_us=parts)


def main() -> None:
    p = Parser(__doc__, "fewer rounds")
    p.add_model("GGUF file instead of all three models", "random models")
    p.add_argument("-t", "--threads", default="1,2")
    p.add_argument("-npl", "--n-parallel", default="1,16", help="sequences")
    p.add_rounds(9, 3)
    args = p.parse()
    if args.model:
        narrow, traced = args.model, {args.model.stem: args.model}
        fused = traced
    else:
        narrow = random_model("small-layers", n_embd=64, n_head=2, n_head_kv=1, head_dim=32, n_ff=128)
        wide = random_model("wide-layers", n_embd=512, n_head=4, n_head_kv=1, head_dim=128, n_ff=2048)
        traced = {"small layers": narrow, "width 512": wide}
        fused = {"small layers": narrow, "width 512": models.synthetic("small")}
    rows = report.Rows("graph_overhead", args.json)
    for threads in numbers(args.threads, "-t"):
        for n in numbers(args.n_parallel, "-npl"):
            label = f"{n} sequence{'s' * (n > 1)}, {threads} thread{'s' * (threads > 1)}"
            pairs = compare(child(narrow, "npu", threads, n), child(narrow, "cpu", threads, n), args.rounds)
            rows.add(report.row(f"{next(iter(traced))}, {label}", pairs, 1.0, "steps/s"))
            for name, path in traced.items():
                row = not_in_ops(f"{name}, {label}", child(path, "npu", threads, n), args.rounds)
                rows.add(row, ", ".join(f"{part} {us:g}" for part, us in row["parts_us"].items()))
            for name, path in fused.items():
                ways = child(path, "npu", threads, n), child(path, "npu", threads, n, TILEBEAM_FUSE="0")
                pairs = compare(*ways, args.rounds)
                rows.add(report.row(f"op by op, {name}, {label}", pairs, 1.0, "steps/s"))
    rows.finish({"overhead_us": LIMIT_S * 1e6})


if __name__ == "__main__":
    report.start(main)
