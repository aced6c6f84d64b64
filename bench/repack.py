"""gguf-repack: rate of lossless packing, unpacking and verifying against copying the same file with `dd conv=fsync`.

    python -m bench.repack [-m ORDINARY.gguf] [--folder DIR] [--json] [--quick]

Both read the file from the page cache and end when the output is synced, in turn, in a folder on disk (build/bench, or
DIR) and in one in memory (/dev/shm, where there is room). "cpu" is processor time per byte of the source: on a busy
machine it says more than the rates. Quantizing is compared with the same copy. Without -m it writes a random model with
the shape of Qwen2.5-1.5B (--quick: of Qwen2.5-0.5B) for each type.
"""

from __future__ import annotations

import argparse
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

from bench.lib import models, report

SHM = Path("/dev/shm")


def copy(source: Path, target: Path) -> None:
    """What the rates are compared with."""
    command = ["dd", f"if={source}", f"of={target}", "bs=4M", "conv=fsync", "status=none"]
    subprocess.run(command, check=True)
    target.unlink()


def processor_seconds() -> float:
    """Of this process, its threads included."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(name: str, source: Path, folder: Path, rounds: int, run: Callable[[Path], object]) -> dict[str, Any]:
    """A row: `run` writes the file it is given (or none) from `source`."""
    target, size = folder / "repack-target.gguf", source.stat().st_size
    pairs, used = report.Pairs([], []), []
    for i in range(rounds + 1):
        begin, cpu = time.perf_counter(), processor_seconds()
        run(target)
        ours, cpu = time.perf_counter() - begin, processor_seconds() - cpu
        target.unlink(missing_ok=True)
        begin = time.perf_counter()
        copy(source, folder / "repack-copy.gguf")
        if i:  # the first round brings the file into the page cache
            pairs.ours.append(ours)
            pairs.baseline.append(time.perf_counter() - begin)
            used.append(cpu)
    return report.row(name, pairs, size / 1e9, "GB/s", cpu=round(min(used) / (size / 1e9), 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, help="an ordinary GGUF with Q4_0, Q8_0 or IQ4_NL matrices")
    parser.add_argument("--folder", type=Path, default=models.CACHE, help="where outputs go on disk")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="a smaller model, two rounds")
    args = parser.parse_args()
    rounds = 2 if args.quick else args.rounds
    models.CACHE.mkdir(parents=True, exist_ok=True)
    sources = {args.model.stem: args.model} if args.model else {}
    if not sources:
        shape = "bench-0.5b" if args.quick else "bench-1.4b"
        sources = {kind: models.synthetic(shape, kind) for kind in ("q4_0", "q8_0")}
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        if not args.json:
            report.show(row)
            print(f"{'':44} {row['cpu']:10.4g} s/GB of processor time")

    for label, source in sources.items():
        folders = {"disk": args.folder}
        if SHM.is_dir() and shutil.disk_usage(SHM).free > 4 * source.stat().st_size and os.access(SHM, os.W_OK):
            folders["memory"] = SHM
        for where, folder in folders.items():
            packed = folder / "repack-packed.gguf"
            gguf_tools.pack(source, packed, overwrite=True)
            pack = partial(gguf_tools.pack, source, overwrite=True)
            unpack = partial(gguf_tools.unpack, packed, overwrite=True)
            add(measure(f"pack {label}, {where}", source, folder, rounds, pack))
            add(measure(f"unpack {label}, {where}", packed, folder, rounds, unpack))
            add(measure(f"verify {label}, {where}", packed, folder, rounds, lambda _, p=packed: gguf_tools.verify(p)))
            packed.unlink()
        paper = Policy.make(preset="paper")
        for search in (False,) if args.quick else (False, True):
            name = f"quantize {label} as the paper does{', searched scales' if search else ''}"
            quantize = partial(gguf_tools.pack, source, policy=paper, search=search, overwrite=True)
            add(measure(name, source, args.folder, 1, quantize))
    if args.json:
        report.emit("repack", {}, rows)


if __name__ == "__main__":
    main()
