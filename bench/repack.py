"""gguf-repack: rate of lossless packing, unpacking and verifying against copying the same file with `dd conv=fsync`.

    python -m bench.repack [-m ORDINARY.gguf] [--folder DIR] [--json] [--quick]

Both read the file from the page cache and end when the output is synced, in turn, in a folder on disk (build/bench, or
DIR) and in one in memory (/dev/shm, where there is room). "cpu" is processor time per byte of the source: on a busy
machine it says more than the rates. Quantizing is compared with the same copy. Without -m it writes a random model with
the shape of Qwen2.5-1.5B (--quick: of Qwen2.5-0.5B) for each type.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tilebeam import gguf as gguf_tools
from tilebeam.gguf import Policy

from bench.lib import CACHE, models, report
from bench.lib.options import Parser

SHM = Path("/dev/shm")


def copy(source: Path, target: Path) -> None:
    command = ["dd", f"if={source}", f"of={target}", "bs=4M", "conv=fsync", "status=none"]
    subprocess.run(command, check=True)
    target.unlink()


def processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(name: str, source: Path, folder: Path, rounds: int, run: Callable[[Path], object]) -> dict[str, Any]:
    """Make a row: `run` writes the file it is given (or none) from `source`."""
    target, size = folder / f"repack-target-{os.getpid()}.gguf", source.stat().st_size
    pairs, used = report.Pairs([], []), []
    for i in range(rounds + 1):
        begin, cpu = time.perf_counter(), processor_seconds()
        run(target)
        ours, cpu = time.perf_counter() - begin, processor_seconds() - cpu
        target.unlink(missing_ok=True)
        begin = time.perf_counter()
        copy(source, folder / f"repack-copy-{os.getpid()}.gguf")
        if i:  # the first round brings the file into the page cache
            pairs.ours.append(ours)
            pairs.baseline.append(time.perf_counter() - begin)
            used.append(cpu)
    return report.row(name, pairs, size / 1e9, "GB/s", cpu=round(min(used) / (size / 1e9), 2))


def main() -> None:
    p = Parser(__doc__, "a smaller model, two rounds, no search for scales")
    p.add_model("an ordinary GGUF with Q4_0, Q8_0 or IQ4_NL matrices")
    p.add_argument("--folder", type=Path, default=CACHE, help="where outputs go on disk")
    p.add_rounds(5, 2)
    args = p.parse()
    CACHE.mkdir(parents=True, exist_ok=True)
    sources = {args.model.stem: args.model} if args.model else {}
    if not sources:
        shape = "bench-0.5b" if args.quick else "bench-1.4b"
        sources = {kind: models.synthetic(shape, kind) for kind in ("q4_0", "q8_0")}
    rows = report.Rows("repack", args.json)

    def add(row: dict[str, Any]) -> None:
        rows.add(row, f"{row['cpu']:10.4g} s/GB of processor time")

    for label, source in sources.items():
        folders = {"disk": args.folder}
        if SHM.is_dir() and shutil.disk_usage(SHM).free > 4 * source.stat().st_size and os.access(SHM, os.W_OK):
            folders["memory"] = SHM
        for where, folder in folders.items():
            packed = folder / f"repack-packed-{os.getpid()}.gguf"
            gguf_tools.pack(source, packed, overwrite=True)
            try:
                for name, given, run in (
                    ("pack", source, partial(gguf_tools.pack, source, overwrite=True)),
                    ("unpack", packed, partial(gguf_tools.unpack, packed, overwrite=True)),
                    ("verify", packed, lambda _, p=packed: gguf_tools.verify(p)),
                ):
                    add(measure(f"{name} {label}, {where}", given, folder, args.rounds, run))
            finally:
                packed.unlink()
        paper = Policy.make(preset="paper")
        for search in (False,) if args.quick else (False, True):
            name = f"quantize {label} as the paper does{', searched scales' if search else ''}"
            quantize = partial(gguf_tools.pack, source, policy=paper, search=search, overwrite=True)
            add(measure(name, source, args.folder, 1, quantize))
    rows.finish()


if __name__ == "__main__":
    report.start(main)
