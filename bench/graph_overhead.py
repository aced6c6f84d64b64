"""What a decode step costs beside its arithmetic: lowering, message, wake-up, barriers.

    PYTHONPATH=python:. python bench/graph_overhead.py [--json] [--quick]

Two ways to see it, hot, at 1 and 16 sequences, with 1 thread and with 2:

* "small layers": a model of as many layers and ops as Qwen2.5-1.5B but 64 wide, so that there is next to nothing to
  compute; the whole step (llama_decode) against the stock CPU backend's, which starts its graph without any message.
* "not in ops": of a step of such a model, the time from the graph's arrival until its reply that the workers did not
  spend in ops, by the trace; the median over steps, so that few that lose their CPU do not count. Against the 100 us
  that it may cost: the share of the limit is what was used of it. The stamps' own time is in it, some 40 ns an op.

And "op by op": the step with TILEBEAM_FUSE=0 against that with shared conversions, fused ops and fewer barriers, in
processes of their own that take turns; small layers, and a model of 6 layers with a width of 512.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import report

from gguf_tools import synth

CACHE = Path(__file__).resolve().parent.parent / "build" / "bench"
LIMIT_S = 100e-6

# Decodes when told to; prints seconds per llama_decode, and with "trace" what of the graph was in no op.
_CHILD = """
import json, sys, time
import numpy as np, tilebeam
from tilebeam import SamplingParams
from tilebeam import trace as traces
from tilebeam.trace import Tracer
path, device, threads, n = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
lm = tilebeam.load(path, device=device, n_ctx=1024, n_seq_max=16, threads=threads)
params = SamplingParams(n=n, max_tokens=32, temperature=0.7, seed=1)
def decode():
    times, inner = [], lm._context.decode
    def timed(*args):
        start = time.perf_counter()
        status = inner(*args)
        times.append(time.perf_counter() - start)
        return status
    lm._context.decode = timed
    try:
        lm.generate(["a b c"], params)
    finally:
        del lm._context.decode
    return float(np.median(times[2:]))
def outside(records):
    number = traces._SPAN
    kind = {name: records[records["span"] == number["TB_SPAN_" + name]] for name in ("SEND", "WAIT", "OP", "LOWER")}
    ops, times = traces.whole_ops(kind["OP"])
    took = {int(r["seq"]): int(r["end_ns"]) for r in kind["WAIT"]}
    for r in kind["SEND"]:
        took[int(r["seq"])] -= int(r["begin_ns"])
    for seq, ns in zip(ops["seq"].tolist(), times.tolist()):
        took[seq] -= ns
    lowering = np.median(kind["LOWER"]["end_ns"] - kind["LOWER"]["begin_ns"])
    return (float(np.median(list(took.values()))) + float(lowering)) / 1e9
decode()
print("ready", flush=True)
for line in sys.stdin:
    result = {"step": decode()}
    if line.strip() == "trace":
        with Tracer(lm) as trace:
            lm.generate(["a b c"], params)
        result["outside"] = outside(trace.records)
    print(json.dumps(result), flush=True)
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

    def ask(self, what: str = "step") -> dict[str, float]:
        """Decode once: seconds per step."""
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        result: dict[str, float] = json.loads(self._read())
        return result

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def model(name: str, config: synth.SynthConfig) -> Path:
    """A random model, written on first use."""
    CACHE.mkdir(parents=True, exist_ok=True)
    path = CACHE / f"overhead-{name}.gguf"
    if not path.is_file():
        synth.write_model(path, config)
    return path


def compare(ours: Child, baseline: Child, rounds: int) -> tuple[report.Pairs, list[float]]:
    """Take turns; the steps' times, and what of our graphs was in no op."""
    pairs, outside = report.Pairs([], []), []
    for _ in range(rounds):
        pairs.baseline.append(baseline.ask()["step"])
        result = ours.ask("trace")
        pairs.ours.append(result["step"])
        outside.append(result["outside"])
    ours.close()
    baseline.close()
    return pairs, outside


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    args = parser.parse_args()
    rounds = 3 if args.quick else 9
    narrow = model(
        "small-layers",
        synth.SynthConfig(
            arch="qwen2", type="q4_0", n_layer=28, n_embd=64, n_head=2, n_head_kv=1, head_dim=32, n_ff=128
        ),
    )
    small = model("small", synth.preset("small", arch="qwen2", type="q4_0"))
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        if not args.json:
            report.show(row)

    for threads in (1, 2):
        for n in (1, 16):
            label = f"{n} sequence{'s' * (n > 1)}, {threads} thread{'s' * (threads > 1)}"
            pairs, outside = compare(Child(narrow, "npu", threads, n), Child(narrow, "cpu", threads, n), rounds)
            add(report.row(f"small layers, {label}", pairs, 1.0, "steps/s"))
            used = median(outside)
            spread = {"ratio_min": round(LIMIT_S / max(outside), 3), "ratio_max": round(LIMIT_S / min(outside), 3)}
            add(
                {
                    "name": f"not in ops, {label}",
                    "baseline": LIMIT_S * 1e6,
                    "value": round(used * 1e6, 1),
                    "unit": "us",
                    "ratio": round(LIMIT_S / used, 3),
                    **spread,
                    "share_of_limit": round(used / LIMIT_S, 3),
                }
            )
            for name, path in (("small layers", narrow), ("width 512", small)):
                ways = Child(path, "npu", threads, n), Child(path, "npu", threads, n, fuse=False)
                pairs, _ = compare(*ways, rounds)
                add(report.row(f"op by op, {name}, {label}", pairs, 1.0, "steps/s"))
    if args.json:
        report.emit("graph_overhead", {"overhead_us": LIMIT_S * 1e6}, rows)


if __name__ == "__main__":
    main()
