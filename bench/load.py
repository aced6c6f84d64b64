"""Loading: a repacked file, mapped, against the ordinary file, packed at load, and against the stock CPU backend.

    python -m bench.load [-m ORDINARY.gguf] [--json] [--quick]

Each load has a process of its own and is timed from the call until the first token has been decoded, because until then
nothing shows that the weights are there; the files are in the page cache. "mapped" is a file as it is usually loaded,
"verified" one whose digests are compared. Anonymous memory is what the load
added beyond pages of files: copies of weights, KV cache, compute buffers; of the process, and in the row "process
executor" of tilebeam-npud too. Peak memory is the most that was resident, pages of files included, which count once for
each mapping of them. Without -m it writes a random model with the shape of Qwen2.5-1.5B (--quick: of Qwen2.5-0.5B).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tilebeam import gguf as gguf_tools

from bench.lib import CACHE, models, report
from bench.lib.options import Parser

# What one load does; prints seconds until ready and until the first token, and the growth of anonymous memory.
_CHILD = """
import json, os, sys, time
import llama_cpp, tilebeam, tilebeam.gguf
from tilebeam import SamplingParams
from tilebeam.native.control import control
device, path, threads, executor = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
verify = sys.argv[5] == "1"
tilebeam.register()
def anonymous(*pids):
    sizes = (line.split() for pid in pids for line in open(f"/proc/{pid}/smaps_rollup"))
    return sum(int(x[1]) for x in sizes if x[0] in ("Anonymous:", "Pss_Shmem:")) * 1024
def peak(*pids):
    return sum(int(x.split()[1]) for pid in pids for x in open(f"/proc/{pid}/status") if x[:6] == "VmHWM:") * 1024
before, peak_before = anonymous(os.getpid()), peak(os.getpid())
start = time.perf_counter()
options = {"n_ctx": 256, "n_seq_max": 1, "threads": threads, "executor": executor, "verify": verify}
with tilebeam.load(path, device, **options) as lm:
    ready = time.perf_counter() - start
    lm.generate(["a"], SamplingParams(max_tokens=1, temperature=0))
    first = time.perf_counter() - start
    npu = control().status()["npu_pid"] if device == "npu" else 0
    both = {os.getpid(), npu or os.getpid()}
    grown = {"anonymous": anonymous(*both) - before, "peak": peak(*both) - peak_before}
    print(json.dumps({"ready": ready, "first": first, **grown}))
"""


@dataclass(frozen=True)
class Way:
    """How a file is loaded."""

    device: str
    path: Path
    verify: bool = False
    executor: str = "thread"


def load_once(way: Way, threads: int) -> dict[str, float]:
    command = [sys.executable, "-c", _CHILD, way.device, str(way.path), str(threads), way.executor]
    command += [str(int(way.verify))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"loading {way.path.name} on {way.device} failed: {done.stderr.strip().splitlines()[-1:]}")
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def files(model: Path | None, quick: bool) -> tuple[Path, Path]:
    """Return the ordinary and the repacked file, written on first use."""
    CACHE.mkdir(parents=True, exist_ok=True)
    model = model or models.synthetic("bench-0.5b" if quick else "bench-1.4b", tied=False)
    repacked = CACHE / f"{model.stem}.tb.gguf"
    if not repacked.is_file() or repacked.stat().st_mtime < model.stat().st_mtime:
        gguf_tools.pack(model, repacked, overwrite=True)
    return model, repacked


def memory_row(what: str, used: Sequence[float], size: int) -> dict[str, Any]:
    """Make a row on memory, with the file's size in the place of a baseline and of a limit."""
    value = round(median(used) / 1e6, 1)
    ratios = [size / u for u in used]
    return report.figures(what, size / 1e6, value, "MB", ratios, median(used) / size)


def main() -> None:
    p = Parser(__doc__, "a smaller model, fewer rounds")
    p.add_model("ordinary GGUF file")
    p.add_threads()
    p.add_rounds(5, 2)
    args = p.parse()
    ordinary, repacked = files(args.model, args.quick)
    ways = {
        "mapped": Way("npu", repacked),
        "verified": Way("npu", repacked, verify=True),
        "packed": Way("npu", ordinary),
        "stock": Way("cpu", ordinary),
        "mapped, process executor": Way("npu", repacked, executor="process"),
    }
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, way in ways.items():
            seen[name].append(load_once(way, args.threads))
    size = repacked.stat().st_size
    rows = report.Rows("load", args.json)
    others = {"packed": "packing at load", "stock": "the stock CPU backend", "verified": "comparing its digests"}
    for until, label in (("ready", "ready"), ("first", "the first token")):
        for other, against in others.items():
            pairs = report.Pairs([r[until] for r in seen["mapped"]], [r[until] for r in seen[other]])
            seconds = {"seconds": median(pairs.ours), "seconds_baseline": median(pairs.baseline)}
            name = f"load until {label}, against {against}"
            rows.add(report.row(name, pairs, 1.0, "loads/s", **{k: round(v, 4) for k, v in seconds.items()}))
    for kind, what in (("anonymous", "anonymous memory"), ("peak", "peak memory")):
        for name in ways:
            rows.add(memory_row(f"{what}, {name}", [r[kind] for r in seen[name]], size))
    rows.finish({"file_bytes": size})


if __name__ == "__main__":
    report.start(main)
