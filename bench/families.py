"""Every model family of llama.cpp and every type of weights against the stock CPU backend: a prompt, and 1, 4 and 16
sequences that decode together; what `device="auto"` takes, and the worst ratio of it.

    python -m bench.families [--only REGEX] [--rows 1,4,16] [-p 64] [-t 2] [--json] [--quick]
        [--resume FILE --seconds S]

The models are random. Those of families (a name such as qwen3moe-moe) have upstream's own metadata (test-llama-archs),
1024 wide, mixtures 512 with 8 experts of which 2 are used, four layers where the family allows it, quantized to Q4_K_M
by llama.cpp; those of types (a name such as type-iq2_xxs) are Llama models of that type, the output in Q6_K. They are
written on first use to build/bench/families (6 GB), by a program that is compiled from llama.cpp's source. Both sides
run in a process for each model, in turn; models that end theirs, or cannot be loaded, are named below the table.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tilebeam import TilebeamError, load
from tilebeam.cli.bench import numbers
from tilebeam.measure.throughput import Case, Runner
from tilebeam.model import device_choice
from tilebeam.model.file_check import inspect
from tilebeam.model.load_options import LoadOptions

from bench.lib import CACHE, ROOT, child, report, rounds
from bench.lib.options import Parser
from bench.lib.rounds import Rounds

sys.path.insert(0, str(ROOT / "tests" / "kits"))
import upstream

FOLDER = CACHE / "families"
Q4_K_M = "15"  # of llama.cpp's types of files
TYPES = (
    *("f32", "f16", "bf16", "q8_0", "q5_0", "q5_1", "q4_0", "q4_1", "q6_K", "q5_K", "q4_K", "q3_K", "q2_K", "iq4_nl"),
    *("iq4_xs", "iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s", "tq1_0", "tq2_0", "mxfp4", "nvfp4"),
    *("q1_0", "q2_0"),
)
FLOOR = 0.97  # of the ratio to the stock backend, which no model may be below


def program() -> Path:
    """Return the program that writes models, compiled where that has not been done yet."""
    libraries, source = ["llama", "ggml", "ggml-base", "ggml-cpu"], ROOT / "bench/lib/family_models.cpp"
    return upstream.build("test-llama-archs", "archs", libraries, ROOT / "tests/archs/common", source)


def make(family: str, quantization: str = Q4_K_M, folder: Path = FOLDER, width: int = 1024) -> list[Path]:
    """Write the models of a family, its dense one and its mixture.

    Raises:
        RuntimeError: there is none; says why.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [str(folder), f"^{family}$", str(width), str(width // 2), "4", quantization]
    done = subprocess.run(
        [program(), *arguments],
        env={**upstream.environment(), "GGML_NO_BACKTRACE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    made = [Path(line) for line in done.stdout.splitlines() if line.endswith(".gguf")]
    if done.returncode or not made:
        raise RuntimeError(f"no model of {family}: {(done.stdout + done.stderr).strip()[-300:]}")
    return made


def models(pattern: str) -> Iterator[Path]:
    """Yield the models whose families or types match, written if need be."""
    families = subprocess.run([program(), "--list"], capture_output=True, text=True, check=True).stdout.split()
    wanted = [name for name in (*families, *(f"type-{t}" for t in TYPES)) if re.search(pattern, name)]
    for i, name in enumerate(wanted, 1):
        print(f"{name}, {i} of {len(wanted)}", file=sys.stderr, flush=True)
        yield from _files(name)


def _files(name: str) -> list[Path]:
    """Return the models of one name."""
    found = [p for end in ("-dense", "-moe", "") if (p := FOLDER / f"{name}{end}.gguf").is_file()]
    if not found and name.startswith("type-"):
        made = make("llama", name.removeprefix("type-"), FOLDER / "new")
        found = [next(p for p in made if "dense" in p.name).rename(FOLDER / f"{name}.gguf")]
    return found or make(name)


def serve(path: str, threads: int, rows: list[int], n_prompt: int) -> None:
    """Take the side of the process that has a model on both backends."""
    warnings.simplefilter("ignore")
    options = LoadOptions(n_seq_max=max(rows), threads=threads).checked()
    try:
        choice = device_choice.choose(inspect(path, False), options)
        room = max(n_prompt, 8 * max(rows))
        npu, cpu = (Runner(load(path, name, room, max(rows), threads, lookup=False)) for name in ("npu", "cpu"))
    except TilebeamError as error:
        child.answer({"failure": str(error)}, lambda _: None)
        return

    def measure(n: int) -> dict[str, float]:
        case = Case(0, 8, n) if n else Case(n_prompt)
        for runner in (npu, cpu):
            runner.warm_up(case)
        best = [float("inf"), float("inf")]
        began = time.perf_counter()
        while time.perf_counter() - began < 0.25:
            time.sleep(report.PAUSE)
            best = [min(old, r.run(case).seconds) for old, r in zip(best, (npu, cpu), strict=True)]
        return {"ours": best[0], "baseline": best[1]}

    share = npu._lm.info.device_share
    child.answer({"auto": choice.backend, "why": choice.why, "device_share": share}, measure)


def measure(path: Path, cases: dict[str, int], log: Rounds, a: Any) -> dict[str, Any]:
    """Measure the cases of a model until each has as many rounds as wanted; return what its process said of it."""
    rows = [n for n in cases.values() if n]
    with child.Child("bench.families", "serve", str(path), a.threads, rows, a.n_prompt, GGML_NO_BACKTRACE="1") as side:
        if "failure" not in side.ready:
            for name in log.turns(cases, a.rounds):
                log.end(**side.ask(cases[name]))
        return dict(side.ready)


def main() -> None:
    p = Parser(__doc__, "one round, two families and two types")
    p.add_argument("--only", default="", metavar="REGEX", help="families, and types as in type-q4_K (default: all)")
    p.add_argument("--rows", default="1,4,16", help="sequences that decode together")
    p.add_count("-p", "--n-prompt", usual=64, quick=16, what="prompt tokens; 0: none")
    p.add_threads()
    p.add_rounds(3, 1)
    rounds.add_options(p)
    a = p.parse()
    cases = {f"{n} sequences" if n > 1 else "1 sequence": n for n in numbers(a.rows, "--rows")}
    cases |= {f"prompt of {a.n_prompt}": 0} if a.n_prompt else {}
    log = Rounds(a.resume, {"bench": "families", "threads": a.threads, "n_prompt": a.n_prompt}, a.seconds)
    table, failures = report.Rows("families", a.json), []
    found: list[dict[str, Any]] = []
    for path in models(a.only or ("^(llama|lfm2|type-q4_K|type-f16)$" if a.quick else "")):
        own = {f"{path.stem}, {title}": n for title, n in cases.items()}
        try:
            said = measure(path, own, log, a)
        except RuntimeError as error:
            said = {"failure": str(error)}
        if "failure" in said:
            failures.append(f"{path.stem}: {said['failure']}")
            continue
        for name, n in own.items():
            if name in log:
                row = log.row(name, a.n_prompt or 1 if not n else 8 * n, "tokens/s", **said)
                found.append(row | {"auto_ratio": row["ratio"] if said["auto"] == "npu" else 1.0})
    for row in sorted(found, key=lambda r: (r["auto_ratio"], r["ratio"])):
        taken = "Tilebeam" if row["auto"] == "npu" else "the CPU backend"
        table.add(row, *([f"auto takes {taken}: {row['why']}"] if row["ratio"] < FLOOR else []))
    worst = min((r["auto_ratio"] for r in found), default=1.0)
    below = sum(r["auto_ratio"] < FLOOR for r in found)
    table.finish({}, f"worst ratio of auto: {worst:.2f}; {below} of {len(found)} below {FLOOR}", *failures)
    log.warn()


if __name__ == "__main__":
    report.start(main)
