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

"Threads 1 and 2 in turn": steps of one token and of two in turn, in a context whose n_threads is 1 and whose
n_threads_batch is 2, as `llama_cpp.Llama` has them by default; against the slower of the same with 1 thread and with 2
for both, round by round in one process.

And "op by op": the step with TILEBEAM_FUSE=0 against that with shared conversions, fused ops and fewer barriers, in
processes of their own that take turns; small layers, and a model of 6 layers with a width of 512.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from tilebeam.cli.bench import numbers

from bench.lib import CACHE, models, report, synth
from bench.lib.options import Parser

LIMIT_S = 100e-6

# Decodes when told to; prints seconds per llama_decode, and with "trace" what of the graph was in no op.
_CHILD = """
import json, sys
import numpy as np, tilebeam
from tilebeam import SamplingParams
from bench.lib.traces import graphs_of, work_of
from tilebeam.measure.trace import Tracer, spans_of
path, device, threads, n = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
lm = tilebeam.load(path, device=device, n_ctx=1024, n_seq_max=16, threads=threads, lookup=False)
params = SamplingParams(n=n, max_tokens=32, temperature=0.7, seed=1)
def decode():
    times = []
    lm._context.on_decode = lambda begin, end: times.append((end - begin) / 1e9)
    try:
        lm.generate(["a b c"], params)
    finally:
        lm._context.on_decode = None
    return float(np.median(times[2:]))
def outside(records):
    at, spans = {}, ("SEND", "WAIT", "MESSAGE", "NOTES")
    for name in spans:
        at[name] = {int(r["seq"]): (int(r["begin_ns"]), int(r["end_ns"])) for r in spans_of(records, name)}
    steps = []
    for of in graphs_of(records):
        seq = int(of["seq"][0])
        send, wait, message, notes = (at[name][seq] for name in spans)
        first, last = int(of["begin_ns"].min()), int(of["end_ns"].max())
        _, most, work = work_of(of)
        mean = work / threads
        steps.append([
            (send[1] - send[0]) / 1e9,
            (message[0] - wait[0] + wait[1] - notes[1]) / 1e9,
            (first - message[0] + message[1] - last) / 1e9,
            (last - first) / 1e9 - most,
            most - mean,
            (notes[1] - notes[0]) / 1e9,
        ])
    steps = np.array(steps)
    lower = spans_of(records, "LOWER")
    lowering = float(np.median(lower["end_ns"] - lower["begin_ns"])) / 1e9
    names = ("send", "wake_up", "set_up", "barriers", "idle", "notes")
    parts = dict(zip(names, np.median(steps, axis=0).tolist()), lowering=lowering)
    return lowering + float(np.median(steps[:, :4].sum(axis=1))), parts
decode()
print("ready", flush=True)
for line in sys.stdin:
    result = {"step": decode()}
    if line.strip() == "trace":
        with Tracer(lm) as trace:
            lm.generate(["a b c"], params)
        result["outside"], result["parts"] = outside(trace.records)
    print(json.dumps(result), flush=True)
"""

# Steps of one and of two tokens in turn, in contexts with these n_threads and n_threads_batch; prints seconds per step.
_IN_TURN = """
import ctypes, json, sys, time
import llama_cpp as C
from tilebeam.native import plugin
plugin.register()
path, rounds = sys.argv[1], int(sys.argv[2])
quiet = C.llama_log_callback(lambda *_: None)
C.llama_log_set(quiet, None)
params = C.llama_model_default_params()
params.n_gpu_layers = 999
model = C.llama_model_load_from_file(path.encode(), params)
def context(one, more):
    params = C.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = 256, one, more
    return C.llama_init_from_model(model, params)
def decode(c, n):
    tokens = (C.llama_token * n)(*range(5, 5 + n))
    assert C.llama_decode(c, C.llama_batch_get_one(tokens, n)) == 0
contexts = {key: context(*key) for key in ((1, 1), (2, 2), (1, 2))}
times = {key: [] for key in contexts}
for i in range(rounds):
    order = list(contexts)
    for key in order[i % 3:] + order[:i % 3]:
        c = contexts[key]
        C.llama_memory_clear(C.llama_get_memory(c), False)
        for n in (32, 1, 2):
            decode(c, n)
        start = time.perf_counter()
        for step in range(40):
            decode(c, 1 + step % 2)
        times[key].append((time.perf_counter() - start) / 40)
print(json.dumps([times[1, 1], times[2, 2], times[1, 2]]))
"""


class Child:
    """A loaded model in a process of its own, which decodes when it is asked to."""

    def __init__(self, path: Path, device: str, threads: int, n: int, fuse: bool = True) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(path), device, str(threads), str(n)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TILEBEAM_FUSE": str(int(fuse))},
        )
        self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a child ended with status {self._process.wait()}")
        return line

    def ask(self, what: str = "step") -> dict[str, Any]:
        """Decode once: seconds per step."""
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        result: dict[str, Any] = json.loads(self._read())
        return result

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def random_model(name: str, **shape: int) -> Path:
    """A random model with 28 layers, written on first use."""
    CACHE.mkdir(parents=True, exist_ok=True)
    path = CACHE / f"overhead-{name}.gguf"
    if not path.is_file():
        synth.write_model(path, synth.SynthConfig(arch="qwen2", type="q4_0", n_layer=28, **shape))
    return path


def compare(ours: Child, baseline: Child, rounds: int) -> report.Pairs:
    """Take turns; the steps' times."""
    pairs = report.Pairs([], [])
    for _ in range(rounds):
        pairs.baseline.append(baseline.ask()["step"])
        pairs.ours.append(ours.ask()["step"])
    ours.close()
    baseline.close()
    return pairs


def not_in_ops(name: str, child: Child, rounds: int) -> dict[str, Any]:
    """The row of what a step costs beside its ops."""
    results = [child.ask("trace") for _ in range(rounds)]
    child.close()
    outside = [r["outside"] for r in results]
    parts = {part: round(median(r["parts"][part] for r in results) * 1e6, 2) for part in results[0]["parts"]}
    used = median(outside)
    value, ratios = round(used * 1e6, 1), [LIMIT_S / o for o in outside]
    limit = used / LIMIT_S
    return report.figures(f"not in ops, {name}", LIMIT_S * 1e6, value, "us", ratios, limit, parts_us=parts)


def in_turn(name: str, path: Path, rounds: int) -> dict[str, Any]:
    """The row of a context that goes back and forth between 1 thread and 2."""
    command = [sys.executable, "-c", _IN_TURN, str(path), str(rounds)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    one, two, both = json.loads(done.stdout)
    pairs = report.Pairs(both, [max(pair) for pair in zip(one, two, strict=True)])
    rates = {"one_thread": round(1 / median(one), 1), "two_threads": round(1 / median(two), 1)}
    return report.row(f"{name}, threads 1 and 2 in turn", pairs, 1.0, "steps/s", **rates)


def main() -> None:
    """Measure and print."""
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
            pairs = compare(Child(narrow, "npu", threads, n), Child(narrow, "cpu", threads, n), args.rounds)
            rows.add(report.row(f"{next(iter(traced))}, {label}", pairs, 1.0, "steps/s"))
            for name, path in traced.items():
                row = not_in_ops(f"{name}, {label}", Child(path, "npu", threads, n), args.rounds)
                rows.add(row, ", ".join(f"{part} {us:g}" for part, us in row["parts_us"].items()))
            for name, path in fused.items():
                ways = Child(path, "npu", threads, n), Child(path, "npu", threads, n, fuse=False)
                pairs = compare(*ways, args.rounds)
                rows.add(report.row(f"op by op, {name}, {label}", pairs, 1.0, "steps/s"))
    rows.add(in_turn(*list(traced.items())[-1], 3 * args.rounds))
    rows.finish({"overhead_us": LIMIT_S * 1e6})


if __name__ == "__main__":
    report.start(main)
