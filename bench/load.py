"""Loading: a repacked file, mapped, against the ordinary file, packed at load, and against the stock CPU backend.

    python -m bench.load [-m ORDINARY.gguf] [--json] [--quick]

Each load has a process of its own and is timed from the call until the first token has been decoded, because until then
nothing shows that the weights are there; the files are in the page cache. "mapped" is a file as it is usually loaded,
"verified" one whose digests are compared, "kept" an ordinary one whose packed file an earlier load has kept. Anonymous
memory is what the load added beyond pages of files: copies of weights, KV cache, compute buffers; of the process, and
in the row "process executor" of tilebeam-npud too. Peak memory is the most that was resident, pages of files included,
which count once for each mapping of them; proportional memory counts each page once, and is the most that was seen
until the first token. Without -m it writes a random model with the shape of Qwen2.5-1.5B (--quick: of Qwen2.5-0.5B).
"""

from __future__ import annotations

import json
import os
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
import json, os, sys, threading, time
import llama_cpp, tilebeam, tilebeam.gguf
from tilebeam import SamplingParams
from tilebeam.native.control import control
device, path, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
tilebeam.register()
def anonymous(*pids):
    sizes = (line.split() for pid in pids for line in open(f"/proc/{pid}/smaps_rollup"))
    return sum(int(x[1]) for x in sizes if x[0] in ("Anonymous:", "Pss_Shmem:")) * 1024
def peak(*pids):
    return sum(int(x.split()[1]) for pid in pids for x in open(f"/proc/{pid}/status") if x[:6] == "VmHWM:") * 1024
most, over = 0, threading.Event()
def watch():
    global most
    while not over.wait(0.02):
        pss = next(int(x.split()[1]) for x in open("/proc/self/smaps_rollup") if x.startswith("Pss:"))
        most = max(most, pss * 1024)
watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
before, peak_before = anonymous(os.getpid()), peak(os.getpid())
start, cpu = time.perf_counter(), time.process_time()
with tilebeam.load(path, device, n_ctx=256, n_seq_max=1, **options) as lm:
    ready, cpu = time.perf_counter() - start, time.process_time() - cpu
    lm.generate(["a"], SamplingParams(max_tokens=1, temperature=0))
    first = time.perf_counter() - start
    over.set()
    watcher.join()
    npu = control().status()["npu_pid"] if device == "npu" else 0
    both = {os.getpid(), npu or os.getpid()}
    grown = {"anonymous": anonymous(*both) - before, "peak": peak(*both) - peak_before}
    print(json.dumps({"ready": ready, "first": first, "cpu": cpu, "proportional": most, **grown}))
"""


@dataclass(frozen=True)
class Way:
    """How a file is loaded."""

    device: str
    path: Path
    verify: bool = False
    executor: str = "thread"
    packed_cache: str | None = None


def load_once(way: Way, threads: int) -> dict[str, float]:
    options = {"threads": threads, "executor": way.executor, "verify": way.verify, "packed_cache": way.packed_cache}
    command = [sys.executable, "-c", _CHILD, way.device, str(way.path), json.dumps(options)]
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
        "kept": Way("npu", ordinary, packed_cache="1000G"),
        "packed": Way("npu", ordinary),
        "stock": Way("cpu", ordinary),
        "mapped, process executor": Way("npu", repacked, executor="process"),
    }
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    os.environ["XDG_CACHE_HOME"] = str(CACHE / "kept")
    load_once(ways["kept"], args.threads)
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
    for name in ("kept", "packed"):
        pairs = report.Pairs([r["cpu"] for r in seen[name]], [r["cpu"] for r in seen["stock"]])
        seconds = {"seconds": median(pairs.ours), "seconds_baseline": median(pairs.baseline)}
        what = f"CPU time of a load, {name}, against the stock CPU backend"
        rows.add(report.row(what, pairs, 1.0, "loads/CPU s", **{k: round(v, 4) for k, v in seconds.items()}))
    memory = (("anonymous", "anonymous memory"), ("peak", "peak memory"), ("proportional", "proportional memory"))
    for kind, what in memory:
        for name in ways:
            rows.add(memory_row(f"{what}, {name}", [r[kind] for r in seen[name]], size))
    rows.finish({"file_bytes": size})


if __name__ == "__main__":
    report.start(main)
