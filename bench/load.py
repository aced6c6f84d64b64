"""Loading: a repacked file, mapped, against the ordinary file, packed at load, and against the stock CPU backend.

    python -m bench.load [-m ORDINARY.gguf] [--json] [--quick]

Each load has a process of its own and is timed from the call until the first token has been decoded, because until then
nothing shows that the weights are there; the files lie in the page cache. "mapped" is a file that was read through
before (tilebeam/model/file_check.py), "verified" one whose digests are compared now. Anonymous memory is what the load
added to the process (and to tilebeam-npud) beyond pages of files: copies of weights, KV cache, compute buffers. Without
-m it writes a random model with the shape of Qwen2.5-1.5B (--quick: of Qwen2.5-0.5B).
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

from tilebeam import gguf as gguf_tools

from bench.lib import limits, models, report

# What one load does; prints seconds until ready and until the first token, and the growth of anonymous memory.
_CHILD = """
import json, sys, time
import llama_cpp, tilebeam, tilebeam.gguf
from tilebeam import SamplingParams
device, path, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
tilebeam.register()
def anonymous(pid):
    lines = open(f"/proc/{pid}/smaps_rollup").read().splitlines()
    return sum(int(x.split()[1]) for x in lines if x.startswith(("Anonymous:", "Pss_Shmem:"))) * 1024
before = anonymous("self")
start = time.perf_counter()
with tilebeam.load(path, device=device, n_ctx=256, n_seq_max=1, threads=threads) as lm:
    ready = time.perf_counter() - start
    lm.generate(["a"], SamplingParams(max_tokens=1, temperature=0))
    first = time.perf_counter() - start
    print(json.dumps({"ready": ready, "first": first, "anonymous": anonymous("self") - before}))
"""


def load_once(device: str, path: Path, threads: int, verify: str = "once") -> dict[str, float]:
    """One load in a process of its own."""
    command = [sys.executable, "-c", _CHILD, device, str(path), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TILEBEAM_VERIFY": verify})
    if done.returncode != 0:
        raise RuntimeError(f"loading {path.name} on {device} failed: {done.stderr.strip().splitlines()[-1:]}")
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def files(model: Path | None, quick: bool) -> tuple[Path, Path]:
    """The ordinary and the repacked file, written on first use."""
    models.CACHE.mkdir(parents=True, exist_ok=True)
    model = model or models.synthetic("bench-0.5b" if quick else "bench-1.4b", tied=False)
    repacked = models.CACHE / f"{model.stem}.tb.gguf"
    if not repacked.is_file() or repacked.stat().st_mtime < model.stat().st_mtime:
        gguf_tools.pack(model, repacked, overwrite=True)
    return model, repacked


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, help="ordinary GGUF file")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer rounds")
    parser.add_argument("-t", "--threads", type=int, default=limits.machine()["cpus"])
    parser.add_argument("-r", "--rounds", type=int)
    args = parser.parse_args()
    rounds = args.rounds or (2 if args.quick else 5)
    ordinary, repacked = files(args.model, args.quick)
    ways = {
        "mapped": ("npu", repacked, "once"),
        "verified": ("npu", repacked, "always"),
        "packed": ("npu", ordinary, "once"),
        "stock": ("cpu", ordinary, "once"),
    }
    load_once(*ways["mapped"][:2], args.threads)  # which reads it through
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (device, path, verify) in ways.items():
            seen[name].append(load_once(device, path, args.threads, verify))
    size = repacked.stat().st_size
    rows: list[dict[str, Any]] = []
    for until in ("ready", "first"):
        others = {
            "packed": "packing at load",
            "stock": "the stock CPU backend",
            "verified": "comparing its digests",
        }
        for other, label in others.items():
            pairs = report.Pairs([r[until] for r in seen["mapped"]], [r[until] for r in seen[other]])
            name = f"load until {'ready' if until == 'ready' else 'the first token'}, against {label}"
            values = report.row(name, pairs, 1.0, "loads/s", seconds=round(median(pairs.ours), 4))
            rows.append(values | {"seconds_baseline": round(median(pairs.baseline), 4)})
    for name in ways:
        used = median(r["anonymous"] for r in seen[name])
        rows.append(
            {
                "name": f"anonymous memory, {name}",
                "baseline": size / 1e6,
                "value": round(used / 1e6, 1),
                "unit": "MB",
                "ratio": round(size / used, 2),
                "ratio_min": round(size / max(r["anonymous"] for r in seen[name]), 2),
                "ratio_max": round(size / min(r["anonymous"] for r in seen[name]), 2),
                "share_of_limit": round(used / size, 4),  # here: of the file
            }
        )
    if args.json:
        report.emit("load", {"file_bytes": size}, rows)
        return
    for row in rows:
        report.show(row)


if __name__ == "__main__":
    main()
